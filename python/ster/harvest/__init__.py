"""Activations of any number of prompts, in files, with a harvest that can be ended at any moment and gone on with.

    ster.harvest(model, "prompts.jsonl", "out", layers="7,15")      # or `ster harvest`
    harvest = ster.open_harvest("out")
    harvest[0].values                                               # float32 [layers, tokens, hidden]

The folder, in the layout of the platform's own harvests:

    shard_00000.safetensors    prompt_<i> [layers, rows, hidden] and tokens_<i> int32 [rows], for every prompt i of the shard
    stats.safetensors          mean, std float32 [layers, hidden], layer_indices
    manifest.json              written last: what was run, which row is which token, checksums

The name is the function's as well: `ster.harvest(...)` calls `ster.harvest.harvest`.
"""

from __future__ import annotations

import sys
from types import ModuleType

from ster.harvest.directions import Directions as Directions
from ster.harvest.directions import load_directions as load_directions
from ster.harvest.reading import Harvest as Harvest
from ster.harvest.reading import HarvestedPrompt as HarvestedPrompt
from ster.harvest.reading import open_harvest as open_harvest
from ster.harvest.run import harvest as harvest


class _Callable(ModuleType):
    """`import ster.harvest.x` makes `ster.harvest` the module, whoever does it and when: so the module must be the function."""

    __call__ = staticmethod(harvest)


sys.modules[__name__].__class__ = _Callable

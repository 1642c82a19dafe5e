"""Ster reads and steers the residual stream of Llama-family models, exactly.

>>> import ster
>>> model = ster.load("fixtures/toy-llama")
>>> acts = model.activations(["the sea is calm and quiet tonight ."], layers="0,3")
>>> acts.values.shape
(1, 2, 64)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ster._native import Edit as Edit
    from ster._native import __version__ as __version__
    from ster.artifacts import ActivationArtifact as ActivationArtifact
    from ster.artifacts import TokenActivations as TokenActivations
    from ster.errors import SterError as SterError
    from ster.errors import SterWarning as SterWarning
    from ster.generation import Generation as Generation
    from ster.generation import Step as Step
    from ster.harvest import Harvest as Harvest
    from ster.harvest import harvest as harvest
    from ster.harvest import open_harvest as open_harvest
    from ster.model import Model as Model
    from ster.model import load as load
    from ster.pairs import PairSet as PairSet
    from ster.prompts import read_prompts as read_prompts
    from ster.remote import RemoteModel as RemoteModel
    from ster.remote import connect as connect
    from ster.steering import Steering as Steering
    from ster.steering import steer as steer
    from ster.steering_artifact import SteeringArtifact as SteeringArtifact
    from ster.trace import Trace as Trace
    from ster.workflow import EvaluationReport as EvaluationReport
    from ster.workflow import Selection as Selection
    from ster.workflow import evaluate as evaluate
    from ster.workflow import extract as extract
    from ster.workflow import optimize as optimize
    from ster.workflow import train as train

# Name -> module. Loaded on first use: `import ster` costs nothing, and `ster --help` needs no NumPy.
_WHERE = {
    "ActivationArtifact": "ster.artifacts",
    "Edit": "ster._native",
    "EvaluationReport": "ster.evaluation",
    "Generation": "ster.generation",
    "Harvest": "ster.harvest",
    "Model": "ster.model",
    "PairSet": "ster.pairs",
    "RemoteModel": "ster.remote",
    "Selection": "ster.workflow",
    "Steering": "ster.steering",
    "SteeringArtifact": "ster.steering_artifact",
    "Step": "ster.generation",
    "steer": "ster.steering",
    "SterError": "ster.errors",
    "SterWarning": "ster.errors",
    "TokenActivations": "ster.artifacts",
    "Trace": "ster.trace",
    "__version__": "ster._native",
    "connect": "ster.remote",
    "evaluate": "ster.evaluation",
    "extract": "ster.workflow",
    "load": "ster.model",
    "open_harvest": "ster.harvest",
    "optimize": "ster.workflow",
    "read_prompts": "ster.prompts",
    "train": "ster.workflow",
}

__all__ = [
    "ActivationArtifact",
    "Edit",
    "EvaluationReport",
    "Generation",
    "Harvest",
    "Model",
    "PairSet",
    "RemoteModel",
    "Selection",
    "Steering",
    "SteeringArtifact",
    "Step",
    "steer",
    "SterError",
    "SterWarning",
    "TokenActivations",
    "Trace",
    "__version__",
    "connect",
    "evaluate",
    "extract",
    "harvest",
    "load",
    "open_harvest",
    "optimize",
    "read_prompts",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        return _module(name)
    value: object = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def _module(name: str) -> object:
    """Every module is an attribute, whether or not something has imported it: `ster.directions`, `ster.errors`."""
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"ster.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"ster.{name}":
                raise
    raise AttributeError(f"module 'ster' has no attribute {name!r}")


def __dir__() -> list[str]:
    import pkgutil

    modules = {module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")}
    return sorted({*globals(), *_WHERE, *modules})

"""Shards as Parquet: one row a token, `prompt`, `position`, `token`, and for every layer `layer_N`, a list of so many numbers.

`datasets.load_dataset("parquet", data_files="DIR/*.parquet")` reads them, and so does anything that knows Arrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ster.errors import ArtifactError
from ster.harvest.positions import kept_positions
from ster.harvest.sources import need_pyarrow
from ster.harvest.stats import Rows

if TYPE_CHECKING:
    from ster.harvest.shards import Form


def encode(layers: Sequence[int], width: int, first_prompt: int, prompts: Sequence[Rows]) -> Iterable[memoryview]:
    """The file, in memory: a shard is small."""
    arrow, parquet = need_pyarrow()
    counts = [len(rows.positions) for rows in prompts]
    columns: dict[str, Any] = {
        "prompt": arrow.array(np.repeat(np.arange(first_prompt, first_prompt + len(prompts)), counts)),
        "position": arrow.array(np.concatenate([rows.positions for rows in prompts]).astype(np.int32)),
        "token": arrow.array(np.concatenate([rows.token_ids for rows in prompts])),
    }
    for at, layer in enumerate(layers):
        flat = np.concatenate([rows.values[at].reshape(-1) for rows in prompts])
        columns[f"layer_{layer}"] = arrow.FixedSizeListArray.from_arrays(arrow.array(flat), width)
    sink = arrow.BufferOutputStream()
    # Floats do not repeat: dictionaries and statistics would cost time and space. Uncompressed, so that the size is known before.
    parquet.write_table(arrow.table(columns), sink, compression="none", use_dictionary=False, write_statistics=False)
    return [memoryview(sink.getvalue())]


def decode(data: memoryview, form: Form, lengths: Sequence[int]) -> list[Rows]:
    """
    Raises:
        ArtifactError: not what `encode` wrote.
    """
    arrow, parquet = need_pyarrow()
    positions = [kept_positions(form.positions, length) for length in lengths]
    ends = np.cumsum([len(kept) for kept in positions])
    try:
        table = parquet.read_table(arrow.BufferReader(arrow.py_buffer(data)))
        ids = table.column("token").combine_chunks().to_numpy()
        values = [table.column(f"layer_{layer}").combine_chunks().flatten().to_numpy() for layer in form.layers]
        stacked = [each.reshape(ends[-1], form.width) for each in values]
    except (arrow.ArrowException, KeyError, ValueError) as error:
        raise ArtifactError(f"not a shard of this harvest: {error}") from None
    found = []
    for kept, end in zip(positions, ends, strict=True):
        rows = slice(end - len(kept), end)
        found.append(Rows(np.stack([each[rows] for each in stacked]), ids[rows], kept))
    return found

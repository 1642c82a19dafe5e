"""One file of a harvest. In safetensors, for every prompt i: `prompt_i` `[layers, rows, width]` and `tokens_i` int32 `[rows]`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ster._safetensors import safetensors_chunks
from ster.errors import ArtifactError
from ster.harvest.dtypes import SAFETENSORS, Dtype
from ster.harvest.positions import Kept, kept_positions
from ster.harvest.stats import Rows

SUFFIX = {"safetensors": "safetensors", "parquet": "parquet"}
STORED = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}


@dataclass(frozen=True)
class Form:
    """What all shards of a harvest have in common. width: hidden, or the number of directions."""

    format: str
    dtype: Dtype
    layers: Sequence[int]
    width: int
    positions: Kept

    def file(self, index: int) -> str:
        return f"shard_{index:05d}.{SUFFIX[self.format]}"

    def encode(self, first_prompt: int, prompts: Sequence[Rows]) -> Iterable[bytes | memoryview]:
        """The file in pieces; the same rows give the same bytes."""
        if self.format == "parquet":
            from ster.harvest import parquet

            return parquet.encode(self.layers, self.width, first_prompt, prompts)
        # The integers first: whatever the dtype, every tensor is then at a multiple of the size of its numbers.
        tensors: dict[str, NDArray[Any]] = {f"tokens_{first_prompt + i}": rows.token_ids for i, rows in enumerate(prompts)}
        values = {f"prompt_{first_prompt + i}": rows.values for i, rows in enumerate(prompts)}
        metadata = {"product": "ster", "layer_indices": json.dumps(list(self.layers))}
        return safetensors_chunks({**tensors, **values}, metadata, dict.fromkeys(values, SAFETENSORS[self.dtype]))

    def decode(self, data: memoryview, first_prompt: int, lengths: Sequence[int]) -> list[Rows]:
        """The prompts of a file, without a copy of their values in safetensors. lengths: tokens of each, kept or not.

        Raises:
            ArtifactError: not what this harvest would write.
        """
        if self.format == "parquet":
            from ster.harvest import parquet

            return parquet.decode(data, self, lengths)
        try:
            start = 8 + int.from_bytes(data[:8], "little")
            header = json.loads(bytes(data[8:start]))
            found = []
            for i, length in enumerate(lengths):
                positions = kept_positions(self.positions, length)
                shape = [len(self.layers), len(positions), self.width]
                values = self._tensor(data, start, header[f"prompt_{first_prompt + i}"], SAFETENSORS[self.dtype], STORED[self.dtype], shape)
                ids = self._tensor(data, start, header[f"tokens_{first_prompt + i}"], "I32", "<i4", shape[1:2])
                found.append(Rows(values, ids, positions))
            return found
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"not a shard of this harvest: {error}") from None

    @staticmethod
    def _tensor(data: memoryview, start: int, info: dict[str, Any], name: str, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
        if info["dtype"] != name or info["shape"] != list(shape):
            raise ValueError(f"expected {name} {list(shape)}, found {info['dtype']} {info['shape']}")
        first, last = info["data_offsets"]
        return np.frombuffer(data[start + first : start + last], dtype).reshape(shape)

"""A finished harvest, read as it is used: files are mapped into memory, and only what is looked at is read."""

from __future__ import annotations

import importlib
import mmap
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ster._files import is_there
from ster.errors import ArtifactError, FileError, InputError, LayerError
from ster.harvest.disk import JOURNAL, MANIFEST, STATS, Journal, Record, on_disk, whole
from ster.harvest.dtypes import Dtype, widen
from ster.harvest.manifest import form_of, read_manifest
from ster.harvest.positions import count_kept, kept_positions
from ster.harvest.stats import Rows

DAMAGED = "the harvest's own command computes it again; remove one that was downloaded or copied, and fetch it again"
OPEN_SHARDS = 8  # kept open; which those are changes with use


@dataclass(frozen=True, eq=False, repr=False)
class HarvestedPrompt:
    """One prompt of a harvest.

    index: of the prompt, from 0. stored: `[layers, rows, width]` as in the file, not copied; bf16 as its bits, uint16.
    token_ids, positions: `[rows]`, the tokens the rows belong to, and where in the prompt they stand.
    """

    index: int
    stored: NDArray[Any]
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    layers: list[int]
    dtype: Dtype

    def __repr__(self) -> str:
        return f"<ster.HarvestedPrompt {self.index}: {self.dtype} {list(self.stored.shape)}, layers {self.layers}>"

    @property
    def values(self) -> NDArray[np.float32]:
        """float32 `[layers, rows, width]`: f32 as it lies in the file, read-only; bf16 and f16 widened, which is exact."""
        return widen(self.stored, self.dtype)

    def layer(self, layer: int) -> NDArray[np.float32]:
        """float32 `[rows, width]` of one block, by its index.

        Raises:
            LayerError: it was not harvested.
        """
        return widen(self.stored[_at(self.layers, layer)], self.dtype)

    def as_torch(self) -> Any:
        """A torch tensor of the dtype stored, a copy.

        Raises:
            InputError: torch is not installed.
        """
        try:
            torch: Any = importlib.import_module("torch")
        except ImportError:
            raise InputError("`as_torch` needs torch, which is not installed", "`.values` is a NumPy array") from None
        if self.dtype == "bf16":
            return torch.from_numpy(self.stored.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(np.array(self.stored))


class Harvest(Sequence[HarvestedPrompt]):
    """A finished harvest; made by `open_harvest`. `harvest[i]` is prompt i, `for prompt in harvest` all of them.

    manifest: the whole of `manifest.json`.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest
        self._form = form_of(manifest)
        self._shards: list[Mapping[str, Any]] = list(manifest["shards"])
        self._first_prompts = [int(shard["first_prompt"]) for shard in self._shards]
        self._first_rows = [int(shard["first_row"]) for shard in self._shards]
        self._open: OrderedDict[int, list[Rows]] = OrderedDict()

    def __repr__(self) -> str:
        prompts, rows = (
            ("1 prompt" if len(self) == 1 else f"{len(self)} prompts"),
            ("1 row" if self.row_count == 1 else f"{self.row_count} rows"),
        )
        what = f"{prompts}, {rows}, layers {self.layers}, {self.dtype}"
        return f"<ster.Harvest of {self.model}: {self.manifest['contents']}, {what}>"

    @property
    def model(self) -> str:
        return str(self.manifest["model_id"])

    @property
    def layers(self) -> list[int]:
        """Block indices, ascending."""
        return list(self._form.layers)

    @property
    def width(self) -> int:
        """Numbers in a row: the model's hidden size, or the number of directions."""
        return self._form.width

    @property
    def dtype(self) -> Dtype:
        """As stored: f32, bf16 or f16. Whatever reads gives float32."""
        return self._form.dtype

    @property
    def row_count(self) -> int:
        return int(self.manifest["n_rows"])

    def __len__(self) -> int:
        return int(self.manifest["n_prompts"])

    @overload
    def __getitem__(self, index: int) -> HarvestedPrompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[HarvestedPrompt]: ...

    def __getitem__(self, index: int | slice) -> HarvestedPrompt | list[HarvestedPrompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        found = index + len(self) if index < 0 else index
        if not 0 <= found < len(self):
            raise IndexError(f"prompt {index} is outside the harvest's {len(self)}")
        shard = bisect_right(self._first_prompts, found) - 1
        rows = self._rows(shard)[found - self._first_prompts[shard]]
        return HarvestedPrompt(found, rows.values, rows.token_ids, rows.positions, self.layers, self.dtype)

    def __iter__(self) -> Iterator[HarvestedPrompt]:
        return (self[index] for index in range(len(self)))

    def locate(self, row: int) -> tuple[int, int]:
        """(prompt, position of the token in it) of a row, counted over the whole harvest.

        Raises:
            IndexError: fewer rows.
        """
        found = row + self.row_count if row < 0 else row
        if not 0 <= found < self.row_count:
            raise IndexError(f"row {row} is outside the harvest's {self.row_count}")
        shard = bisect_right(self._first_rows, found) - 1
        ends = self._ends(shard)
        within = found - self._first_rows[shard]
        prompt = int(np.searchsorted(ends, within, side="right"))
        before = int(ends[prompt - 1]) if prompt else 0
        positions = kept_positions(self._form.positions, self._shards[shard]["tokens"][prompt])
        return self._first_prompts[shard] + prompt, int(positions[within - before])

    def row_of(self, prompt: int, position: int) -> int:
        """The row of a token: what `locate` undoes.

        Raises:
            IndexError: no such prompt, or the token was not kept.
        """
        if not 0 <= prompt < len(self):
            raise IndexError(f"prompt {prompt} is outside the harvest's {len(self)}")
        shard = bisect_right(self._first_prompts, prompt) - 1
        within = prompt - self._first_prompts[shard]
        kept = kept_positions(self._form.positions, self._shards[shard]["tokens"][within])
        at = int(np.searchsorted(kept, position))
        if at == len(kept) or kept[at] != position:
            raise IndexError(f"token {position} of prompt {prompt} was not kept")
        return self._first_rows[shard] + (int(self._ends(shard)[within - 1]) if within else 0) + at

    def rows(self, layer: int) -> NDArray[np.float32]:
        """float32 `[rows, width]` of one block, of all prompts: what a probe is trained on. The one thing here that takes memory for all.

        Raises:
            LayerError: it was not harvested.
        """
        at = _at(self.layers, layer)
        out = np.empty((self.row_count, self.width), np.float32)
        for shard, first in enumerate(self._first_rows):
            for rows in self._rows(shard):
                last = first + rows.values.shape[1]
                out[first:last] = widen(rows.values[at], self.dtype)
                first = last
        return out

    @cached_property
    def mean(self) -> NDArray[np.float32] | None:
        """float32 `[layers, width]` over rows, the first token of every prompt left out; None where no row is left."""
        return self._stats("mean")

    @cached_property
    def std(self) -> NDArray[np.float32] | None:
        """As `mean`."""
        return self._stats("std")

    def verify(self) -> None:
        """Read every file and compare checksums.

        Raises:
            ArtifactError: a file that is missing or damaged.
        """
        for entry in [*self._shards, self.manifest["stats"]]:
            if whole(self.folder / entry["file"], Record(entry["bytes"], entry["sha256"])) is None:
                raise ArtifactError(f"{self.folder / entry['file']} is missing or damaged", DAMAGED)

    def _ends(self, shard: int) -> NDArray[np.int64]:
        return np.cumsum([count_kept(self._form.positions, tokens) for tokens in self._shards[shard]["tokens"]])

    def _rows(self, shard: int) -> list[Rows]:
        if shard not in self._open:
            entry = self._shards[shard]
            data = _map(self.folder / entry["file"], entry["bytes"])
            try:
                self._open[shard] = self._form.decode(data, entry["first_prompt"], entry["tokens"])
            except ArtifactError as error:
                hint = "`verify` compares the checksums of all files; " + DAMAGED
                raise ArtifactError(f"failed to read {self.folder / entry['file']}: {error}", hint) from None
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(shard)
        return self._open[shard]

    def _stats(self, name: str) -> NDArray[np.float32] | None:
        from safetensors.numpy import load

        data = _map(self.folder / STATS, self.manifest["stats"]["bytes"])
        return load(bytes(data)).get(name)


def open_harvest(folder: str | os.PathLike[str]) -> Harvest:
    """A finished harvest. Nothing but the manifest is read until it is asked for.

    Raises:
        FileError: not there. InputError: not finished, or not a harvest. ArtifactError: the manifest is damaged.
    """
    folder = Path(folder)
    if is_there(folder / JOURNAL):
        begun = Journal(folder).read()
        assert begun is not None
        count = on_disk(len(begun[1]), begun[0].get("n_shards"))
        raise InputError(f"the harvest in {folder} is not finished: {count}", "run its command again: it goes on from there")
    if not is_there(folder / MANIFEST):
        if not folder.is_dir():
            raise FileError(f"failed to read {folder}: no such folder")
        raise InputError(f"{folder} is not a harvest: it has no {MANIFEST}")
    manifest = read_manifest(folder)
    try:
        return Harvest(folder, manifest)
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{folder / MANIFEST} is damaged: {type(error).__name__} {error}") from None


def _map(path: Path, size: int) -> memoryview:
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise ArtifactError(f"{path} is damaged: it has {found} bytes, expected {size}", DAMAGED)
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise FileError(f"failed to read {path}: {error.strerror}") from None


def _at(layers: Sequence[int], layer: int) -> int:
    if layer not in layers:
        raise LayerError(f"layer {layer} is not in this harvest; it has {', '.join(map(str, layers))}")
    return layers.index(layer)

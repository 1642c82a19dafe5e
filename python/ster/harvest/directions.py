"""Projections: of every row only its coordinates along a few directions are kept.

`out[layer, token, n] = sum over hidden of x[layer, token, hidden] * u[n, hidden]`, `u` the direction, divided by its length unless told
otherwise, in float64. Summed in float64 in one fixed order and rounded to float32 once, so that the bits depend on nothing but the row.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ster._files import read_bytes
from ster.errors import ArtifactError, InputError
from ster.interchange import detect
from ster.interchange import load as load_vectors
from ster.steering_artifact import SteeringArtifact

LIMIT = 64
LANES = 16  # partial sums of a dot product, as in the engine
PRODUCTS = 1 << 17  # float64 at a time: 1 MB, which stays in a core's cache
VALUES = 1 << 19  # of rows, widened

TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, eq=False)
class Directions:
    """values: float64 `[directions, hidden]`, finite, as they multiply the rows. names: of each. normalized: whether they were divided by
    their lengths."""

    values: NDArray[np.float64]
    names: list[str]
    normalized: bool

    def __len__(self) -> int:
        return len(self.values)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.values, "<f8").tobytes()).hexdigest()

    def check_width(self, hidden: int) -> None:
        """
        Raises:
            ArtifactError: directions of another model's width.
        """
        if self.values.shape[1] != hidden:
            raise ArtifactError(f"direction width {self.values.shape[1]} does not match activation width {hidden}")

    def project(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32 `[layers, tokens, hidden]` -> float32 `[layers, tokens, directions]`.

        Raises:
            OverflowError: a sum that float32 does not hold; the argument is its flat index.
        """
        layers, tokens, hidden = values.shape
        rows = values.reshape(layers * tokens, hidden)
        padding = -hidden % LANES
        directions = np.pad(self.values, ((0, 0), (0, padding))) if padding else self.values
        out = np.empty((len(rows), len(self)), np.float32)
        step = max(1, min(PRODUCTS // (len(self) * LANES), VALUES // hidden))
        with np.errstate(over="ignore"):
            for start in range(0, len(rows), step):
                block = rows[start : start + step].astype(np.float64)
                if padding:
                    block = np.pad(block, ((0, 0), (0, padding)))
                # Not a matrix product: the order of its sums is the library's, and changes with the shape and the processor.
                sums = np.zeros((len(block), len(self), LANES))
                for at in range(0, hidden, LANES):
                    sums += block[:, None, at : at + LANES] * directions[None, :, at : at + LANES]
                width = LANES
                while width > 1:
                    width //= 2
                    sums = sums[..., :width] + sums[..., width:]
                out[start : start + step] = sums[..., 0]
        beyond = np.isinf(out)
        if beyond.any():
            raise OverflowError(int(np.argmax(beyond)))
        return out.reshape(layers, tokens, len(self))


def load_directions(
    directions: str | os.PathLike[str] | SteeringArtifact | NDArray[Any] | Directions, *, normalize: bool = True
) -> Directions:
    """Directions from an artifact, an array `[hidden]` or `[directions, hidden]`, or a file.

    Of an artifact, every layer's vector is one direction; all directions are applied at all layers. In npz and safetensors every array of
    one dimension is a direction, and every row of one of two dimensions, in the order of the file.

    Args:
        normalize: divide each by its length.

    Raises:
        ArtifactError: none, more than 64, different widths, a value that is not finite, a zero direction to normalise.
        FileError: `failed to read <path>: ...`.
    """
    if isinstance(directions, Directions):
        return directions
    named: list[tuple[str, NDArray[Any]]]
    if isinstance(directions, str | os.PathLike):
        path = Path(directions)
        data = read_bytes(path)
        found = detect(data)
        if found == "npz" or (found == "safetensors" and not _is_artifact(data)):
            try:
                named = _npz(path) if found == "npz" else _safetensors(data)
            except (ValueError, KeyError, TypeError, OSError, AttributeError, AssertionError) as error:
                raise ArtifactError(f"failed to read {path}: {error}") from None
        else:
            named = _of_artifact(load_vectors(path))
    elif isinstance(directions, SteeringArtifact):
        named = _of_artifact(directions)
    else:
        named = [("directions", np.asarray(directions))]
    return _checked(named, normalize)


def _of_artifact(artifact: SteeringArtifact) -> list[tuple[str, NDArray[Any]]]:
    return [(f"layer.{vector.layer}", vector.values) for vector in artifact.vectors]


def _is_artifact(data: bytes) -> bool:
    return b'"ster.artifact"' in data[8 : 8 + int.from_bytes(data[:8], "little")]


def _npz(path: Path) -> list[tuple[str, NDArray[Any]]]:
    with np.load(path, allow_pickle=False) as file:
        return [(name, file[name]) for name in file.files if name != "ster.json"]


def _safetensors(data: bytes) -> list[tuple[str, NDArray[Any]]]:
    start = 8 + int.from_bytes(data[:8], "little")
    header: Mapping[str, Any] = json.loads(data[8:start])
    found: list[tuple[str, NDArray[Any]]] = []
    for name, info in header.items():
        if name == "__metadata__":
            continue
        if info["dtype"] not in TYPES:
            raise ValueError(f"tensor `{name}` must be F64, F32, F16 or BF16, found {info['dtype']}")
        first, last = info["data_offsets"]
        array = np.frombuffer(data[start + first : start + last], TYPES[info["dtype"]]).reshape(info["shape"])
        found.append((name, (array.astype(np.uint32) << 16).view(np.float32) if info["dtype"] == "BF16" else array))
    return found


def _checked(named: list[tuple[str, NDArray[Any]]], normalize: bool) -> Directions:
    rows: list[NDArray[np.float64]] = []
    names: list[str] = []
    for name, array in named:
        if array.dtype.kind not in "fiu" or array.ndim not in (1, 2):
            raise ArtifactError(f"`{name}` must hold numbers, [hidden] or [directions, hidden], found {array.dtype} {list(array.shape)}")
        for index, row in enumerate(np.atleast_2d(array.astype(np.float64))):
            rows.append(row)
            names.append(name if array.ndim == 1 else f"{name}[{index}]")
    if not 1 <= len(rows) <= LIMIT:
        raise ArtifactError(f"between 1 and {LIMIT} directions are expected, found {len(rows)}")
    for name, row in zip(names, rows, strict=True):
        if len(row) != len(rows[0]) or not len(row):
            raise ArtifactError(f"directions must have one width: `{names[0]}` has {len(rows[0])}, `{name}` {len(row)}")
        if not np.isfinite(row).all():
            raise ArtifactError(f"direction `{name}` contains a non-finite value")
        if not row.any():
            raise ArtifactError(f"direction `{name}` is zero")
    values = np.array([row / _length(row) if normalize else row for row in rows])
    if not np.isfinite(values).all():
        raise InputError("a direction is too long or too short to be divided by its length")
    return Directions(values, names, normalize)


def _length(row: NDArray[np.float64]) -> float:
    """Exactly rounded, so that it is the same everywhere."""
    return math.sqrt(math.fsum(float(value) * float(value) for value in row))

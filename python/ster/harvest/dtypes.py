"""In which numbers a harvest is stored: f32 as computed, or rounded to nearest even. NumPy has no bf16: its arrays are the bits, uint16."""

from __future__ import annotations

from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from ster.errors import InputError

Dtype = Literal["f32", "bf16", "f16"]
SAFETENSORS = {"f32": "F32", "bf16": "BF16", "f16": "F16"}
BYTES = {"f32": 4, "bf16": 2, "f16": 2}
LARGEST = {"bf16": "3.39e38", "f16": "65504"}
BLOCK = 1 << 16  # values rounded at a time, so that what is between stays in a core's cache


def choose_dtype(asked: str, precision: str, *, format: str, projecting: bool) -> Dtype:
    """The dtype to store. `auto`: as the checkpoint is stored where that is one of the three; f32 for quantised and mixed weights, for
    projections and in Parquet.

    Raises:
        InputError: an unknown dtype; another than f32 for projections; bf16 in Parquet.
    """
    if asked not in ("auto", *BYTES):
        raise InputError(f'unknown dtype "{asked}"; expected auto, f32, bf16 or f16')
    if projecting and asked not in ("auto", "f32"):
        raise InputError(f"projections are stored as f32, and {asked} was asked for")
    if format == "parquet" and asked == "bf16":
        raise InputError("Parquet has no bf16", "store f32, which holds the same values, or f16")
    if asked != "auto":
        return cast(Dtype, asked)
    return cast(Dtype, precision) if precision in ("bf16", "f16") and format != "parquet" and not projecting else "f32"


def encode(values: NDArray[np.float32], dtype: Dtype) -> NDArray[Any]:
    """float32 values as they are stored.

    Raises:
        OverflowError: a value that is infinite in `dtype`; the argument is its flat index.
    """
    if dtype == "f32":
        return values
    out: NDArray[Any] = np.empty(values.shape, np.float16 if dtype == "f16" else np.uint16)
    flat, into = values.reshape(-1), out.reshape(-1)
    with np.errstate(over="ignore"):
        for start in range(0, len(flat), BLOCK):
            block = flat[start : start + BLOCK]
            target = into[start : start + BLOCK]
            if dtype == "f16":
                target[...] = block
                beyond = np.isinf(target)
            else:
                _round_bf16(block, target)
                beyond = (target & 0x7FFF) == 0x7F80
            if beyond.any():
                raise OverflowError(start + int(np.argmax(beyond)))
    return out


def _round_bf16(values: NDArray[np.float32], out: NDArray[Any]) -> None:
    """Upper halves, plus one where the lower is more than half a unit, or just half of it and the upper odd."""
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    out[...] = rounded


def widen(stored: NDArray[Any], dtype: Dtype) -> NDArray[np.float32]:
    """Stored values as float32, which holds every one of them; f32 is not copied."""
    if dtype == "bf16":
        wide = stored.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return stored.astype(np.float32, copy=False)

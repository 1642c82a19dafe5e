"""A tensor in JSON, in vllm-lens's encoding: base64 of one zstd frame of little-endian numbers in C order.

    {"data", "dtype", "original_dtype", "shape", "compression": "zstd"}

| wire dtype | `dtype` | `original_dtype` |
| --- | --- | --- |
| bfloat16 | `int16`, the bit pattern | `torch.bfloat16` |
| float16 | `float16` | `torch.float16` |
| float32 | `float32` | `torch.float32` |

One codec for both directions. Ster computes in float32, so the other two round on the way out, to nearest, ties to even.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from ster.server.settings import WireDtype

LEVEL = 1  # vllm-lens's; activations are noise to a compressor, and higher levels only take longer
FRAME = b"\x28\xb5\x2f\xfd"
STORED: Mapping[WireDtype, tuple[str, str]] = {
    "bfloat16": ("int16", "torch.bfloat16"),
    "float16": ("float16", "torch.float16"),
    "float32": ("float32", "torch.float32"),
}
"""Wire dtype -> `dtype`, `original_dtype`."""
LARGEST: Mapping[WireDtype, float] = {
    "bfloat16": float(np.uint32(0x7F7F0000).view(np.float32)),
    "float16": float(np.finfo(np.float16).max),
    "float32": float(np.finfo(np.float32).max),
}


class TensorError(ValueError):
    """A tensor that cannot be decoded; the message is the reason, after "activations", without a full stop."""


class TensorOverflowError(ValueError):
    """A number that the wire dtype would make infinite. index: where, in the array; value: the number."""

    def __init__(self, index: tuple[int, ...], value: float, dtype: WireDtype) -> None:
        super().__init__(f"{value:g} at {list(index)} is beyond {dtype}'s {LARGEST[dtype]:g}")
        self.index = index
        self.value = value
        self.dtype = dtype


def encode(values: NDArray[np.float32], dtype: WireDtype) -> dict[str, Any]:
    """Finite float32 of any shape -> the object, its keys in vllm-lens's order.

    Raises:
        TensorOverflowError: a number that `dtype` does not reach.
    """
    raw = _pack(np.ascontiguousarray(values, np.float32), dtype)
    frame = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(raw.data if raw.size else b"")
    stored, original = STORED[dtype]
    data = base64.b64encode(frame).decode("ascii")
    return {"data": data, "dtype": stored, "original_dtype": original, "shape": list(values.shape), "compression": "zstd"}


def decode(data: str, dtype: str, original_dtype: str, shape: Sequence[int], *, max_numbers: int) -> NDArray[np.float32]:
    """The numbers of an object with `compression` "zstd", as float32 of `shape`.

    max_numbers: what is larger is refused by its shape; nothing is decompressed that does not state to have exactly that size.

    Raises:
        TensorError: see the module; and a number that is not finite.
    """
    values = unpack(data, dtype, original_dtype, shape, max_numbers=max_numbers)
    if not np.isfinite(values).all():
        raise TensorError("has a number that is not finite")
    return values


def unpack(data: str, dtype: str, original_dtype: str, shape: Sequence[int], *, max_numbers: int) -> NDArray[np.float32]:
    """`decode` of numbers that may be infinite, or none.

    Raises:
        TensorError: see the module.
    """
    wire = next((name for name, pair in STORED.items() if pair == (dtype, original_dtype)), None)
    if wire is None:
        expected = ", ".join(f"{stored} with {original}" for stored, original in STORED.values())
        raise TensorError(f"must have a dtype and its original_dtype, one of {expected}: found {dtype!r} with {original_dtype!r}")
    count = math.prod(shape)
    if count > max_numbers:
        raise TensorError(f"has a shape of {count:,} numbers: at most {max_numbers:,} are allowed")
    width = 4 if wire == "float32" else 2
    return from_bytes(_decompress(from_base64(data), count * width, list(shape)), wire).reshape(shape)


def round_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of float32 bit patterns, rounded to nearest, ties to even. `values` are finite; the result may be infinite."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # Half of the last place that stays, less one where that place is even, so that ties go to the even side. A carry runs into the
    # exponent, which is the next binade, as it should; from a finite number it never reaches the sign.
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    upper: NDArray[np.uint16] = np.right_shift(rounded, np.uint32(16)).astype(np.uint16)
    return upper


def _pack(values: NDArray[np.float32], dtype: WireDtype) -> NDArray[Any]:
    if dtype == "float32":
        return values.astype("<f4", copy=False)
    packed = np.empty(values.shape, "<u2" if dtype == "bfloat16" else "<f2")
    # Slice by slice, so that what is needed in between stays small beside a capture of 128 MB.
    for first in range(len(values)):
        part = values[first : first + 1]
        if dtype == "bfloat16":
            written: NDArray[Any] = round_to_bfloat16(part)
            infinite = (written & np.uint16(0x7FFF)) == 0x7F80
        else:
            with np.errstate(over="ignore"):
                written = part.astype(np.float16)
            infinite = np.isinf(written)
        packed[first : first + 1] = written
        if infinite.any():
            place = tuple(int(at) for at in np.argwhere(infinite)[0])
            raise TensorOverflowError((first, *place[1:]), float(part[place]), dtype)
    return packed


def from_bytes(raw: bytes, dtype: WireDtype) -> NDArray[np.float32]:
    if dtype == "float32":
        return np.frombuffer(raw, "<f4").astype(np.float32, copy=False)
    if dtype == "float16":
        return np.frombuffer(raw, "<f2").astype(np.float32)
    values: NDArray[np.float32] = np.left_shift(np.frombuffer(raw, "<u2").astype(np.uint32), np.uint32(16)).view(np.float32)
    return values


def from_base64(data: str) -> bytes:
    """Standard base64 with its padding and nothing else, in the one way that the bytes can be written."""
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise TensorError("has data that is not base64") from None
    # b64decode ignores the bits that the last character has to spare.
    if base64.b64encode(base64.b64decode(data[-4:])).decode("ascii") != data[-4:]:
        raise TensorError("has data that is not base64")
    return raw


def _decompress(frame: bytes, size: int, shape: list[int]) -> bytes:
    """The `size` bytes of exactly one frame that states this size. No more memory than that is taken, whatever the frame holds."""
    if frame[:4] != FRAME:
        raise TensorError("has data that is not a zstd frame")
    try:
        stated = zstandard.frame_content_size(frame)
        if stated < 0:
            raise TensorError("has a zstd frame that does not state its size: compress the bytes in one piece, as zstd.compress does")
        if stated != size:
            raise TensorError(f"has {stated:,} bytes of data, and the shape {shape} takes {size:,}")
        raw: bytes = zstandard.ZstdDecompressor().decompress(frame, read_across_frames=False, allow_extra_data=False)
    except zstandard.ZstdError as error:
        if "unused data" in str(error):
            raise TensorError("has data that goes on after one zstd frame") from None
        raise TensorError("has data that is not a whole zstd frame") from None
    if len(raw) != size:
        raise TensorError("has data that is not a whole zstd frame")
    return raw

"""Writing safetensors. The `safetensors` package orders metadata by a random hash; here the same tensors give the same bytes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

_DTYPES = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "uint32": "U32"}


def write_safetensors(file: BinaryIO, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Header, then every tensor in the order of `tensors`; contiguous ones are not copied."""
    for chunk in safetensors_chunks(tensors, metadata):
        file.write(chunk)


def safetensors_chunks(
    tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str], dtypes: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The file in pieces. dtypes: of tensors that NumPy has no type for, as `BF16`, whose arrays are the bits."""
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, array in arrays.items():
        dtype = dtypes[name] if dtypes and name in dtypes else _DTYPES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors start at a multiple of 8
    yield len(text).to_bytes(8, "little")
    yield text
    for array in arrays.values():
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        yield little.reshape(-1).view(np.uint8).data


def safetensors_bytes(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """The whole file in memory."""
    buffer = io.BytesIO()
    write_safetensors(buffer, tensors, metadata)
    return buffer.getvalue()

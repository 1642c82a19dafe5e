"""What a model is, in 64 hex digits: so that an artifact knows its weights again under another name, and refuses others under the same.

The weights' hash is exact, over every value, and depends neither on the names of files, nor on how tensors are spread over them, nor on
whether the values are stored as f32, bf16 or f16: those are widened to float32, which is exact.

    sha256(for every tensor, by name: "<name> F32 <shape, joined by x> <sha256 of its float32 values, little-endian, hex>\\n")

A tensor of another dtype counts with that dtype's name and its bytes as stored.

Of a GGUF file the same is hashed under the names transformers has: what llama.cpp's converter reordered is put back, quantised numbers are
the floats that the format defines, and the gains of Gemma's norms lose the 1 that was added. So a folder and the GGUF made from it have one
hash, as long as the file is not quantised, and no gain of Gemma's lost bits when the 1 was added (those of bf16 near 1 do not).

It reads the whole checkpoint: on two cores 0.5 s for SmolLM2 in bf16 (270 MB; as stored 0.3 s) and 0.5 s for the same in f32
(540 MB), so some 30 s for 16 GB of bf16, and as long as the disk takes when nothing is cached. So it is made when it is first needed
(training; using an artifact that names one), and once for each model. Sampling a part of the values would be cheaper and would miss small
edits of a checkpoint, which may be all that two models of one name differ by.

config.json is not in it: a changed setting, such as a rope scaling, is another model with the same weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ster import _native
from ster._files import parse_json, read_text
from ster.errors import CheckpointError
from ster.progress import Progress, reporter

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHUNK = 1 << 20  # bytes at a time, a whole number of values: widened, they still fit a core's cache
WIDENED = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class _Tensor:
    """size: bytes that are read or widened; pieces: how many of them, and what they count as."""

    name: str
    dtype: str
    shape: Sequence[int]
    size: int
    pieces: Callable[[], Iterator[tuple[int, memoryview]]]


def weights_hash(path: Path, *, progress: Progress = None) -> str:
    """SHA-256 of the weights in a folder or GGUF file, as 64 hex digits; see above.

    progress: called with (done, total) megabytes.

    Raises:
        CheckpointError: a file that is missing or damaged. The engine refuses these first.
    """
    from concurrent.futures import ThreadPoolExecutor

    tensors = sorted(_of_gguf(path) if path.is_file() else _of_folder(path), key=lambda tensor: tensor.name)
    total = sum(tensor.size for tensor in tensors)
    done = 0
    lock, stopped = threading.Lock(), threading.Event()
    with reporter(progress, "hash weights, MB") as report:

        def digest(tensor: _Tensor) -> str:
            nonlocal done
            found = hashlib.sha256()
            for size, piece in tensor.pieces():
                if stopped.is_set():
                    return ""
                found.update(piece)  # leaves the GIL
                with lock:
                    done += size
                    report(done // 1_000_000, total // 1_000_000)
            return found.hexdigest()

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            try:
                digests = list(pool.map(digest, tensors))
            except BaseException:
                stopped.set()
                raise
    whole = hashlib.sha256()
    for tensor, inner in zip(tensors, digests, strict=True):
        whole.update(f"{tensor.name} {tensor.dtype} {'x'.join(map(str, tensor.shape))} {inner}\n".encode())
    return whole.hexdigest()


def _widened(stored: memoryview, dtype: str) -> memoryview:
    """Values as little-endian float32; what is neither bf16 nor f16 as it is. Exact: every bf16 and f16 number is a float32."""
    if dtype == "BF16":  # the upper half of a float32
        upper: NDArray[np.uint32] = np.frombuffer(stored, "<u2").astype("<u4")
        upper <<= np.uint32(16)
        return upper.data
    if dtype == "F16":
        values: NDArray[np.float32] = np.frombuffer(stored, "<f2").astype("<f4")
        return values.data
    return stored


def tokenizer_hash(tokenizer: bytes, chat_template: str | None) -> str:
    """SHA-256 over the SHA-256 of tokenizer.json and the source of the chat template, if there is one; 64 hex digits."""
    found = hashlib.sha256(hashlib.sha256(tokenizer).digest())
    found.update((chat_template or "").encode())
    return found.hexdigest()


def _map(file: Path) -> memoryview:
    with open(file, "rb") as open_file:
        return memoryview(mmap.mmap(open_file.fileno(), 0, access=mmap.ACCESS_READ))


def _files(folder: Path) -> list[Path]:
    """The files the engine reads, by its rules."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if (folder / INDEX).exists():
        try:
            index = parse_json(read_text(folder / INDEX))
            assert isinstance(index, dict)
            return [folder / name for name in sorted(set(index["weight_map"].values()))]
        except (ValueError, KeyError, AssertionError, AttributeError, TypeError):
            raise CheckpointError(f"{folder / INDEX}: not an index of safetensors files") from None
    return sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated") and file.is_file())


def _of_folder(folder: Path) -> Iterator[_Tensor]:
    files = _files(folder)
    if not files:
        raise CheckpointError("model directory contains no safetensors weights", str(folder))
    for file in files:
        try:
            with open(file, "rb") as open_file:
                length = int.from_bytes(open_file.read(8), "little")
                header = json.loads(open_file.read(length))
            view = _map(file)
            for name, info in header.items():
                if name != "__metadata__":
                    start, stop = info["data_offsets"]
                    stored = view[8 + length + start : 8 + length + stop]
                    dtype = "F32" if info["dtype"] in WIDENED else info["dtype"]
                    yield _Tensor(name, dtype, tuple(info["shape"]), len(stored), partial(_stored, stored, info["dtype"]))
        except (OSError, ValueError, KeyError, AttributeError, TypeError, MemoryError, OverflowError) as error:
            raise CheckpointError(f"failed to read {file}: {error}") from None


def _stored(stored: memoryview, dtype: str) -> Iterator[tuple[int, memoryview]]:
    for start in range(0, len(stored), CHUNK):
        piece = stored[start : start + CHUNK]
        yield len(piece), _widened(piece, dtype)


def _of_gguf(path: Path) -> Iterator[_Tensor]:
    tensors = _native.Tensors(str(path))
    for name, shape in tensors.shapes:
        rows, width = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        yield _Tensor(name, "F32", shape, 4 * rows * width, partial(_rows, tensors, name, rows, width))


def _rows(tensors: _native.Tensors, name: str, rows: int, width: int) -> Iterator[tuple[int, memoryview]]:
    step = max(1, CHUNK // (4 * width))
    for start in range(0, rows, step):
        piece = tensors.rows(name, start, min(start + step, rows)).astype("<f4", copy=False)
        yield piece.nbytes, piece.reshape(-1).view(np.uint8).data

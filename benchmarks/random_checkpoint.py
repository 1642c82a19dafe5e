"""A checkpoint of random weights in the shape of a real one: python -m benchmarks.random_checkpoint DIR llama-3.1-8b

Every weight is drawn, none is a copy of another and no page is empty, so files, memory and page cache weigh what the real ones would.
Values come from N(0, 0.02), norms from N(1, 0.1), rounded to bf16: the residual stream stays below a few hundred. The same bytes each time.
It is written a piece at a time into `.DIR.part`, which gets its name when all of it is on the disk.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import NormalDist

import numpy as np
from benchmarks.shapes import BF16, SHAPES, Shape, Shard, is_complete, shards, small_files
from numpy.typing import NDArray

CHUNK = 1 << 22  # values a thread holds at a time
SPARE = 1 << 30  # bytes that stay free on the disk
SEED = 8


def write(folder: Path, shape: Shape) -> None:
    """Write the checkpoint, or leave it alone if it is there.

    Raises:
        SystemExit: the folder holds something else, or the disk is too full.
    """
    if is_complete(folder, shape):
        note(f"{folder} is there already")
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        sys.exit(f"{folder} holds something else than {shape.name}: name another --dir, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.part")
    if part.exists():
        shutil.rmtree(part)  # of a run that was killed
    needed = sum(shard.size for shard in shards(shape))
    free = shutil.disk_usage(folder.parent).free
    note(f"{shape.name} needs {needed / 1e9:.1f} GB of disk in {folder}; {free / 1e9:.1f} GB are free")
    if free < needed + SPARE:
        sys.exit(f"too little disk for {shape.name}: {(needed + SPARE) / 1e9:.1f} GB wanted, {free / 1e9:.1f} GB free; --dir names another")
    try:
        part.mkdir()
        for name, text in small_files(shape).items():
            (part / name).write_text(text)
        for number, shard in enumerate(shards(shape)):
            start = time.perf_counter()
            write_shard(part / shard.name, shard, number)
            seconds = time.perf_counter() - start
            note(f"{shard.name}: {shard.size / 1e9:.2f} GB in {seconds:.0f} s")
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def write_shard(path: Path, shard: Shard, number: int) -> None:
    matrix, norm = quantiles(0.0, 0.02), quantiles(1.0, 0.1)
    with open(path, "wb") as file, ThreadPoolExecutor(os.cpu_count()) as pool:
        descriptor = file.fileno()
        if sys.platform == "linux":
            os.posix_fallocate(descriptor, 0, shard.size)  # a full disk is found out now
        file.write(shard.header)
        file.flush()
        pieces = []
        for index, tensor in enumerate(shard.tensors):
            count = math.prod(tensor.shape)
            table = matrix if len(tensor.shape) == 2 else norm
            for first in range(0, count, CHUNK):
                key, offset = (SEED, number, index, first), tensor.bytes.start + BF16 * first
                pieces.append(pool.submit(fill, descriptor, offset, min(CHUNK, count - first), table, key))
        for piece in pieces:
            piece.result()
        os.fsync(descriptor)


def fill(descriptor: int, offset: int, count: int, table: NDArray[np.uint16], key: tuple[int, ...]) -> None:
    """`count` values of `table`, drawn evenly, written at `offset`."""
    draws = np.random.Generator(np.random.SFC64(key)).integers(0, len(table), count, dtype=np.uint16)
    data = memoryview(table[draws].astype("<u2", copy=False).tobytes())
    while data:  # a write may be cut short
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def quantiles(mean: float, deviation: float) -> NDArray[np.uint16]:
    """65,536 values that are equally likely under the normal distribution, as the bits of the nearest bf16: a random 16-bit number
    picks one in a nanosecond or two."""
    count = 1 << 16
    inverse = NormalDist(mean, deviation).inv_cdf
    bits = np.array([inverse((index + 0.5) / count) for index in range(count)], np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[2] not in SHAPES:
        sys.exit(__doc__)
    write(Path(sys.argv[1]).absolute(), SHAPES[sys.argv[2]])

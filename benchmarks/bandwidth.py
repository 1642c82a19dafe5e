"""How fast this machine reads: python -m benchmarks.bandwidth MODEL_DIR THREADS

Prints JSON, in bytes a second: `memory`, a large array; `weights`, all of the checkpoint through maps, the second time around.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PIECE = 1 << 20  # 8 MB of numbers
ARRAY = 1 << 27  # 1 GiB
PASSES = 3


def rate(arrays: Sequence[NDArray[np.uint64]], threads: int) -> float:
    """Bytes a second of the fastest pass but the first."""
    pieces = [array[start : start + PIECE] for array in arrays for start in range(0, len(array), PIECE)]
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(1 + PASSES):
            start = time.perf_counter()
            list(pool.map(np.bitwise_xor.reduce, pieces))
            seconds.append(time.perf_counter() - start)
    return sum(array.nbytes for array in arrays) / min(seconds[1:])


def main() -> None:
    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    maps = [np.memmap(path, np.uint8, "r") for path in sorted(folder.glob("*.safetensors"))]
    weights = rate([each[: len(each) // 8 * 8].view(np.uint64) for each in maps], threads)
    del maps
    array = np.zeros(ARRAY, np.uint64)
    array += 1  # real pages, not the one of zeros
    json.dump({"memory": rate([array], threads), "weights": weights}, sys.stdout)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main()

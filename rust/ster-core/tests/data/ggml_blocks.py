"""Write `ggml_blocks.bin`: blocks of GGUF's formats and the f32 numbers that gguf-py makes of them.

    python ggml_blocks.py                # needs gguf and NumPy; made with gguf 0.19.0

For each format, little-endian: ggml's type id and the number of blocks (u32), the blocks, the numbers (f32).
"""

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

# Where a block's f16 numbers stand.
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
}
# Usual numbers, the largest, subnormal ones, both zeros.
SCALES = np.array([0x2C5A, 0xA8F1, 0x7BFF, 0x0001, 0x83FF, 0x8000, 0x0000], np.uint16)


def blocks(name: str, rng: np.random.Generator) -> np.ndarray:
    """`[blocks, bytes]`: random bits, and every scale with another minimum."""
    size = GGML_QUANT_SIZES[GGMLQuantizationType[name]][1]
    data = rng.integers(0, 256, (len(SCALES), size), np.uint8)
    for shift, at in enumerate(HALVES[name]):
        data[:, at : at + 2] = np.roll(SCALES, 3 * shift).reshape(-1, 1).view(np.uint8)
    return data


if __name__ == "__main__":
    rng = np.random.default_rng(1)
    with Path(__file__).with_suffix(".bin").open("wb") as file:
        for name in HALVES:
            kind = GGMLQuantizationType[name]
            data = blocks(name, rng)
            file.write(np.array([kind.value, len(data)], "<u4").tobytes())
            file.write(data.tobytes())
            file.write(dequantize(data, kind).astype("<f4").tobytes())

"""The tensor codec, against the decoders and encoders of the documentation, bit by bit."""

from __future__ import annotations

import base64
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from ster.server.settings import WireDtype
from ster.server.tensors import LARGEST, STORED, TensorError, TensorOverflowError, decode, encode, round_to_bfloat16

DTYPES: tuple[WireDtype, ...] = ("bfloat16", "float16", "float32")
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
SHAPES = arrays.array_shapes(min_dims=2, max_dims=3, max_side=5)


def documented_decode(tensor: dict[str, Any]) -> NDArray[Any]:
    """The helper that every program of the guides copies."""
    raw = zstandard.ZstdDecompressor().decompress(base64.b64decode(tensor["data"]))
    array = np.frombuffer(raw, dtype=tensor["dtype"]).reshape(tensor["shape"])
    if tensor["original_dtype"] == "torch.bfloat16":
        array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array


def read(tensor: dict[str, Any], **changes: Any) -> NDArray[np.float32]:
    changed = {**tensor, **changes}
    return decode(changed["data"], changed["dtype"], changed["original_dtype"], changed["shape"], max_numbers=1 << 20)


def written(frame: bytes) -> str:
    return base64.b64encode(frame).decode()


@settings(deadline=None)
@given(arrays.arrays(np.float32, SHAPES, elements=FINITE))
def test_float32_comes_back_bit_for_bit(values: NDArray[np.float32]) -> None:
    tensor = encode(values, "float32")
    for back in (read(tensor), documented_decode(tensor)):
        assert back.dtype == np.float32
        assert back.tobytes() == values.tobytes()


@settings(deadline=None)
@given(arrays.arrays(np.uint16, SHAPES).map(lambda bits: bits & np.uint16(0xBFFF)))  # the highest exponent, of infinity and NaN, left out
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_that_the_dtype_has_come_back_bit_for_bit(dtype: WireDtype, bits: NDArray[np.uint16]) -> None:
    values = (bits.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else bits.view(np.float16).astype(np.float32)
    tensor = encode(values, dtype)
    assert read(tensor).tobytes() == values.tobytes()
    assert documented_decode(tensor).astype(np.float32).tobytes() == values.tobytes()


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_bfloat16_is_the_nearest_one_and_the_even_one_of_two(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    for value, found in zip(values, round_to_bfloat16(values), strict=True):
        below = int(value.view(np.uint32)) >> 16
        # Distances between float32 neighbours are exact in float64. Beyond the largest, the next one up would be 2^128.
        low, high = (_as_float64(below), _as_float64(below + 1))
        down, up = abs(float(value) - low), abs(high - float(value))
        expected = below if down < up else below + 1 if up < down else below + below % 2
        assert int(found) == expected


def _as_float64(upper: int) -> float:
    if upper & 0x7FFF == 0x7F80:
        return 2.0**128 if upper < 0x8000 else -(2.0**128)
    return float(np.array([upper << 16], np.uint32).view(np.float32)[0])


def test_the_object_has_vllm_lens_keys_in_their_order() -> None:
    tensor = encode(np.ones((2, 5, 4096), np.float32), "bfloat16")
    assert list(tensor) == ["data", "dtype", "original_dtype", "shape", "compression"]
    assert {key: tensor[key] for key in list(tensor)[1:]} == {
        "dtype": "int16",
        "original_dtype": "torch.bfloat16",
        "shape": [2, 5, 4096],
        "compression": "zstd",
    }
    assert zstandard.frame_content_size(base64.b64decode(tensor["data"])) == 2 * 5 * 4096 * 2
    assert base64.b64decode(tensor["data"]).startswith(b"\x28\xb5\x2f\xfd")


def test_an_array_that_is_not_contiguous_is_written_in_c_order() -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)
    for dtype in DTYPES:
        assert np.array_equal(read(encode(values, dtype)), values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_largest_number_is_sent_and_one_that_rounds_beyond_it_is_an_error(dtype: WireDtype) -> None:
    values = np.zeros((2, 3, 4), np.float32)
    half = {"float16": 16.0, "bfloat16": 2.0**119}[dtype]  # half the distance of the two largest; a tie goes up, to infinity
    values[1, 2, 3] = np.nextafter(np.float32(LARGEST[dtype] + half), np.float32(0))
    assert read(encode(values, dtype))[1, 2, 3] == LARGEST[dtype]
    values[1, 2, 3] = -np.float32(LARGEST[dtype] + half)
    with pytest.raises(TensorOverflowError) as caught:
        encode(values, dtype)
    assert caught.value.index == (1, 2, 3)
    assert caught.value.value == float(values[1, 2, 3])


ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
TENSOR = encode(ROWS, "float32")
FRAME = base64.b64decode(TENSOR["data"])
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"


def _streamed() -> bytes:
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(ROWS.tobytes()) + compressor.flush()


def _checked() -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(ROWS.tobytes())


@pytest.mark.parametrize("level", [-5, 1, 3, 19])
def test_every_level_is_read(level: int) -> None:
    frame = zstandard.ZstdCompressor(level=level).compress(ROWS.tobytes())
    assert np.array_equal(read(TENSOR, data=written(frame)), ROWS)


def test_a_checksum_is_checked() -> None:
    assert np.array_equal(read(TENSOR, data=written(_checked())), ROWS)
    wrong = bytearray(_checked())
    wrong[-1] ^= 1
    with pytest.raises(TensorError, match="not a whole zstd frame"):
        read(TENSOR, data=written(bytes(wrong)))


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "not a zstd frame"),
        (ROWS.tobytes(), "not a zstd frame"),
        (SKIPPABLE + FRAME, "not a zstd frame"),
        (FRAME[:4], "not a whole zstd frame"),
        (FRAME[:-1], "not a whole zstd frame"),
        (FRAME + b"\0", "goes on after one zstd frame"),
        (FRAME + FRAME, "goes on after one zstd frame"),
        (FRAME + SKIPPABLE, "goes on after one zstd frame"),
        (_streamed(), "does not state its size"),
        (zstandard.ZstdCompressor().compress(ROWS.tobytes() + b"\0"), "49 bytes of data, and the shape .3, 4. takes 48"),
        (zstandard.ZstdCompressor().compress(ROWS.tobytes()[:-1]), "47 bytes of data, and the shape .3, 4. takes 48"),
    ],
)
def test_what_is_not_exactly_one_frame_of_that_size_is_refused(frame: bytes, reason: str) -> None:
    with pytest.raises(TensorError, match=reason):
        read(TENSOR, data=written(frame))


@pytest.mark.parametrize(
    "data", ["QQ", "QQ=", "QR==", "QUJ=", "Q Q=", "QQ==\n", "QQ==QQ==", "====", "é", "_-8=", TENSOR["data"][:-1], "\ud800"]
)
def test_what_is_not_base64_is_refused(data: str) -> None:
    with pytest.raises(TensorError, match="not base64"):
        read(TENSOR, data=data)


@pytest.mark.parametrize(
    ("dtype", "original"),
    [
        ("float32", "torch.bfloat16"),
        ("int16", "torch.float32"),
        ("int16", "torch.float16"),
        ("float64", "torch.float64"),
        ("uint8", "torch.uint8"),
    ],
)
def test_a_dtype_goes_with_its_original_alone(dtype: str, original: str) -> None:
    with pytest.raises(TensorError, match="float32 with torch.float32"):
        read(TENSOR, dtype=dtype, original_dtype=original)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0])
def test_numbers_that_are_not_finite_are_refused(dtype: WireDtype, bits: int) -> None:
    value = np.array([bits << 16], np.uint32).view(np.float32)
    raw = struct.pack("<H", bits) if dtype == "bfloat16" else value.astype(STORED[dtype][0]).tobytes()
    stored, original = STORED[dtype]
    with pytest.raises(TensorError, match="not finite"):
        decode(written(zstandard.ZstdCompressor().compress(raw)), stored, original, [1, 1], max_numbers=1)


def test_a_frame_takes_no_more_memory_than_the_shape_whatever_it_states() -> None:
    bomb = bytearray(zstandard.ZstdCompressor().compress(bytes(1 << 28)))
    assert struct.unpack_from("<I", bomb, 6)[0] == 1 << 28  # behind magic number, flags and window
    tracemalloc.start()
    with pytest.raises(TensorError, match="268,435,456 bytes of data"):
        read(TENSOR, data=written(bytes(bomb)))
    struct.pack_into("<I", bomb, 6, ROWS.nbytes)
    with pytest.raises(TensorError, match="not a whole zstd frame"):
        read(TENSOR, data=written(bytes(bomb)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 22


def test_a_shape_over_the_cap_is_refused_before_the_data_is_looked_at() -> None:
    with pytest.raises(TensorError, match="shape of 2,000,000,000,000 numbers: at most 1,048,576"):
        read(TENSOR, data="no base64", shape=[10**6, 2 * 10**6])

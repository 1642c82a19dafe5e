"""Positions, dtypes, directions and statistics: each against the obvious way to do it."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import ster
from ster._safetensors import safetensors_bytes
from ster.errors import ArtifactError, InputError
from ster.harvest.directions import load_directions
from ster.harvest.dtypes import choose_dtype, encode, widen
from ster.harvest.positions import count_kept, kept_positions, parse_positions
from ster.harvest.stats import Moments, Rows, moments, no_rows
from ster.steering_artifact import LayerVector


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ("all", "all"),
        (" last ", "last"),
        ("-1", "last"),
        (-1, "last"),
        ("5, 0,-2,5", (-2, 0, 5)),
        ([0], (0,)),
        (np.array([1, 0]), (0, 1)),
        (range(2), (0, 1)),
    ],
)
def test_positions(asked: object, kept: object) -> None:
    assert parse_positions(asked) == kept  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", ["", "x", "0,", "1..3", "1.0", True, [1.5], None])
def test_positions_that_are_none(asked: object) -> None:
    with pytest.raises(InputError, match="invalid position"):
        parse_positions(asked)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="at least one position is required"):
        parse_positions([])


@settings(deadline=None)
@given(st.lists(st.integers(-6, 5), min_size=1), st.integers(1, 6))
def test_kept_positions_are_the_tokens_named_each_once(asked: list[int], tokens: int) -> None:
    kept = parse_positions(asked)
    if any(not -tokens <= position < tokens for position in asked):
        with pytest.raises(IndexError):
            kept_positions(kept, tokens)
        return
    expected = sorted({range(tokens)[position] for position in asked})
    assert kept_positions(kept, tokens).tolist() == expected and count_kept(kept, tokens) == len(expected)


floats = npst.arrays(
    np.float32,
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 5)),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@settings(deadline=None)
@given(floats)
def test_rounding_is_that_of_ml_dtypes_and_numpy(values: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        for dtype, expected in (("bf16", values.astype(ml_dtypes.bfloat16)), ("f16", values.astype(np.float16))):
            wide = expected.astype(np.float32)
            if np.isinf(wide).any():
                with pytest.raises(OverflowError) as caught:
                    encode(values, dtype)  # type: ignore[arg-type]
                assert caught.value.args[0] == np.argmax(np.isinf(wide))
            else:
                stored = encode(values, dtype)  # type: ignore[arg-type]
                assert stored.tobytes() == expected.tobytes()
                assert widen(stored, dtype).tobytes() == wide.tobytes()  # type: ignore[arg-type]
    assert encode(values, "f32") is values


def test_rounding_goes_to_even_at_every_half_and_in_every_block() -> None:
    halves = (np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    halves = halves[np.isfinite(halves) & (np.abs(halves) < 3e38)]
    assert encode(np.tile(halves, 3), "bf16").tobytes() == np.tile(halves, 3).astype(ml_dtypes.bfloat16).tobytes()


def test_the_dtype_is_the_checkpoints_where_it_is_one() -> None:
    for precision, dtype in [("bf16", "bf16"), ("f16", "f16"), ("f32", "f32"), ("f32+q4_k", "f32"), ("bf16+f32", "f32"), ("q8_0", "f32")]:
        assert choose_dtype("auto", precision, format="safetensors", projecting=False) == dtype
        assert choose_dtype("auto", precision, format="safetensors", projecting=True) == "f32"
        assert choose_dtype("auto", precision, format="parquet", projecting=False) == "f32"
    assert choose_dtype("f16", "bf16", format="parquet", projecting=False) == "f16"
    for asked, format, projecting, sentence in [
        ("f64", "safetensors", False, 'unknown dtype "f64"; expected auto, f32, bf16 or f16'),
        ("bf16", "safetensors", True, "projections are stored as f32, and bf16 was asked for"),
        ("bf16", "parquet", False, "Parquet has no bf16"),
    ]:
        with pytest.raises(InputError) as caught:
            choose_dtype(asked, "f32", format=format, projecting=projecting)
        assert str(caught.value) == sentence


def test_projections_are_the_dot_products_in_float64() -> None:
    rng = np.random.default_rng(0)
    for hidden in (1, 15, 16, 17, 576):
        values = rng.normal(size=(2, 5, hidden)).astype(np.float32)
        raw = rng.normal(size=(7, hidden)).astype(np.float32)
        unit = raw.astype(np.float64) / np.linalg.norm(raw.astype(np.float64), axis=1, keepdims=True)
        for normalize, rows in ((True, unit), (False, raw.astype(np.float64))):
            found = load_directions(raw, normalize=normalize).project(values)
            assert found.dtype == np.float32 and found.shape == (2, 5, 7)
            exact = values.astype(np.float64) @ rows.T
            # One rounding to float32, and the two float64 sums, each wrong by at most hidden roundings of the sum of magnitudes.
            bound = np.spacing(np.abs(exact).astype(np.float32)) / 2 + 2 * (hidden + 2) * 2**-53 * (
                np.abs(values.astype(np.float64)) @ np.abs(rows).T
            )
            assert (np.abs(found - exact) <= bound).all()


def test_a_projection_depends_on_nothing_but_its_row() -> None:
    rng = np.random.default_rng(1)
    values, directions = rng.normal(size=(3, 600, 64)).astype(np.float32), load_directions(rng.normal(size=(64, 64)))
    whole = directions.project(values)
    for layer, row in [(0, 0), (1, 127), (1, 128), (2, 599)]:
        assert directions.project(values[layer : layer + 1, row : row + 1].copy()).tobytes() == whole[layer, row].tobytes()


def test_directions_come_from_artifacts_arrays_and_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    raw = rng.normal(size=(2, 64)).astype(np.float32)
    artifact = ster.SteeringArtifact("toy-llama", "caa", 64, (LayerVector(1, raw[0]), LayerVector(2, raw[1])))
    expected = load_directions(raw)
    artifact.save(tmp_path / "a.json")
    ster.interchange.save(artifact, tmp_path / "a.gguf")
    ster.interchange.save(artifact, tmp_path / "a.npz")
    ster.interchange.save(artifact, tmp_path / "a.safetensors")
    np.savez(tmp_path / "b.npz", one=raw[0], two=raw[1:])
    (tmp_path / "c.safetensors").write_bytes(safetensors_bytes({"zeta": raw[0], "alpha": raw[1:]}, {}))
    for given_ in (artifact, *(tmp_path / name for name in ("a.json", "a.gguf", "a.npz", "a.safetensors", "b.npz", "c.safetensors"))):
        found = load_directions(given_)
        assert found.values.tobytes() == expected.values.tobytes() and found.sha256 == expected.sha256, given_
    assert load_directions(tmp_path / "c.safetensors").names == ["zeta", "alpha[0]"]
    assert load_directions(artifact).names == ["layer.1", "layer.2"]


def test_directions_that_cannot_be(tmp_path: Path) -> None:
    for array, sentence in [
        (np.zeros((2, 4)), "direction `directions[0]` is zero"),
        (np.ones((65, 4)), "between 1 and 64 directions are expected, found 65"),
        (np.ones((0, 4)), "between 1 and 64 directions are expected, found 0"),
        (np.array([1.0, np.nan]), "direction `directions` contains a non-finite value"),
        (np.ones((1, 2, 3)), "`directions` must hold numbers, [hidden] or [directions, hidden], found float64 [1, 2, 3]"),
        (np.array(["a"]), "`directions` must hold numbers, [hidden] or [directions, hidden], found <U1 [1]"),
    ]:
        with pytest.raises(ArtifactError) as caught:
            load_directions(array)
        assert str(caught.value) == sentence
    with pytest.raises(ArtifactError, match="direction width 4 does not match activation width 64"):
        load_directions(np.ones(4)).check_width(64)
    np.savez(tmp_path / "a.npz", a=np.ones(3), b=np.ones(4))
    with pytest.raises(ArtifactError, match="directions must have one width: `a` has 3, `b` 4"):
        load_directions(tmp_path / "a.npz")
    (tmp_path / "pickle").write_bytes(b"\x80\x04.")
    with pytest.raises(ArtifactError, match="pickle"):
        load_directions(tmp_path / "pickle")
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes({"a": np.ones(3, np.int32)}, {}))
    with pytest.raises(ArtifactError, match=r"failed to read .*: tensor `a` must be F64, F32, F16 or BF16, found I32"):
        load_directions(tmp_path / "x.safetensors")


def rows(values: np.ndarray, first: int = 0) -> Rows:
    count = values.shape[1]
    return Rows(values, np.zeros(count, np.int32), np.arange(first, first + count))


def test_statistics_are_numpys_on_all_rows_but_the_first_of_every_prompt() -> None:
    rng = np.random.default_rng(3)
    # A mean of 1e4 beside a deviation of 1e-2, where a difference of plain sums of squares would lose eleven digits.
    prompts = [(1e4 + rng.normal(size=(2, int(n), 9)) * 1e-2).astype(np.float32) for n in rng.integers(1, 700, 40)]
    found = no_rows(2, 9)
    for start in range(0, 40, 7):
        found = found.merge(moments([rows(each) for each in prompts[start : start + 7]], "f32", 2, 9))
    counted = np.concatenate([each[:, 1:] for each in prompts], axis=1).astype(np.float64)
    assert found.count == counted.shape[1]
    # float64 throughout; the mean of values near 1e4 has a spacing of 2e-12, of which each of the sums may lose some.
    assert np.abs(found.mean - counted.mean(axis=1)).max() < 1e-9
    assert np.abs(found.std / counted.std(axis=1) - 1).max() < 1e-8
    assert np.abs(found.length / found.count / np.linalg.norm(counted, axis=2).mean(axis=1) - 1).max() < 1e-12


def test_statistics_of_a_shard_do_not_depend_on_how_its_prompts_are_passed_on() -> None:
    rng = np.random.default_rng(4)
    prompts = [rows(rng.normal(size=(1, n, 3)).astype(np.float32)) for n in (1, 2, 300, 5)]

    def same(a: Moments, b: Moments) -> bool:
        return a.count == b.count and a.mean.tobytes() == b.mean.tobytes() and a.square.tobytes() == b.square.tobytes()

    assert same(moments(prompts, "f32", 1, 3), moments(iter(prompts), "f32", 1, 3))
    copies = [Rows(np.asfortranarray(p.values), p.token_ids, p.positions) for p in prompts]
    assert same(moments(prompts, "f32", 1, 3), moments(copies, "f32", 1, 3))


def test_rows_that_do_not_begin_a_prompt_all_count_and_none_may_be_left() -> None:
    values = np.array([[[1.0], [3.0]]], np.float32)
    assert moments([rows(values, first=4)], "f32", 1, 1).mean.tolist() == [[2.0]]
    assert moments([rows(values[:, :1])], "f32", 1, 1).count == 0
    assert no_rows(1, 1).merge(no_rows(1, 1)).count == 0

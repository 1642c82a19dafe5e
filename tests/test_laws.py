"""The laws of the engine through Python, bit for bit, on the toy model and two reference checkpoints.

They are those of rust/ster-core/tests/laws.rs, which has more of them, on stranger models.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import ster
from ster import _native
from ster.errors import CacheError, LayerError, NonFiniteError, SteeringError
from ster.toy import WORDS

Array = NDArray[np.float32]
LAYERS = [0, 1, 2, 3]  # of the toy model and of both references

# 64 is the size of a block of keys.
lengths = st.one_of(st.integers(1, 24), st.sampled_from([1, 2, 17, 63, 64, 65, 130]))
texts = st.tuples(lengths, st.integers(0, 2**32)).map(lambda draw: prompt_of(*draw))
quick = settings(deadline=None, max_examples=25, derandomize=True)


def prompt_of(length: int, seed: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, length))


def ids_of(length: int, seed: int = 0) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 67, length).astype(np.uint32)


ids = st.tuples(lengths, st.integers(0, 2**32)).map(lambda draw: ids_of(*draw))


def vector(seed: int = 0, width: int = 64) -> Array:
    return np.random.default_rng(seed).normal(0, 1, (1, width)).astype(np.float32)


def assert_same_bits(found: Any, expected: Any) -> None:
    """Equal bits, -0.0 and 0.0 apart; names the first place that differs."""
    assert found.dtype == expected.dtype == np.float32
    assert found.shape == expected.shape
    differ = np.argwhere(found.view(np.uint32) != expected.view(np.uint32))
    if len(differ):
        place = tuple(differ[0])
        raise AssertionError(f"{len(differ)} of {found.size} differ, first {place}: {found[place]!r} for {expected[place]!r}")


def run(engine: _native.Engine, tokens: NDArray[np.uint32], **options: Any) -> tuple[Array, Array]:
    """Residual stream of all layers and rows, and all logits."""
    options = {"layers": LAYERS, "rows": "all", "logits": "all"} | options
    [output] = engine.forward([_native.Sequence(tokens, **options)])
    assert output.residual is not None and output.logits is not None
    return output.residual, output.logits


@pytest.fixture(scope="session", params=["toy", "llama3-rope-bf16", "bias-f16"])
def folder(request: pytest.FixtureRequest, toy_dir: Path) -> Path:
    if request.param == "toy":
        return toy_dir
    references: Path = request.getfixturevalue("references")
    return references / "golden" / request.param


@pytest.fixture(scope="session")
def toy_engine(toy_dir: Path) -> _native.Engine:
    return _native.Engine(str(toy_dir))


@pytest.fixture(scope="session")
def engines(folder: Path) -> dict[int, _native.Engine]:
    """By number of threads."""
    return {threads: _native.Engine(str(folder), threads=threads) for threads in (1, 2, 5)}


# Companions, pieces, threads, instruction sets


@quick
@given(st.data())
def test_activations_of_a_prompt_are_the_same_alone_and_in_any_batch(toy_model: ster.Model, data: st.DataObject) -> None:
    prompts = data.draw(st.lists(texts, min_size=1, max_size=6))
    prompts += data.draw(st.lists(st.sampled_from(prompts), max_size=3))
    prompts = data.draw(st.permutations(prompts))
    together = toy_model.activations(prompts).values
    for row, prompt in enumerate(prompts):
        assert_same_bits(together[row], toy_model.activations([prompt]).values[0])
        assert_same_bits(together[row], toy_model.trace(prompt).residual[:, -1])


def test_activations_do_not_depend_on_the_size_of_the_batch(toy_model: ster.Model) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate([1, 2, 17, 200] * 16)]
    alone = [toy_model.activations([prompt]).values[0] for prompt in prompts]
    for size in (1, 2, 3, 7, 64):
        for start in range(0, 64, size):
            batch = prompts[start : start + size]
            for row, found in enumerate(toy_model.activations(batch).values):
                assert_same_bits(found, alone[start + row])
    reverse = toy_model.activations(prompts[::-1]).values
    for found, expected in zip(reverse, alone[::-1], strict=True):
        assert_same_bits(found, expected)


@quick
@given(st.data())
def test_a_sequence_gives_the_same_alone_and_in_any_batch(engines: dict[int, _native.Engine], data: st.DataObject) -> None:
    batch = data.draw(st.lists(ids, min_size=1, max_size=6))
    threads = data.draw(st.sampled_from([1, 2, 5]))
    outputs = engines[threads].forward([_native.Sequence(t, layers=LAYERS, rows="all", logits="all") for t in batch])
    for tokens, output in zip(batch, outputs, strict=True):
        residual, logits = run(engines[1], tokens)
        assert_same_bits(output.residual, residual)
        assert_same_bits(output.logits, logits)


@quick
@given(st.data())
def test_a_sequence_gives_the_same_whole_token_by_token_and_in_any_pieces(engines: dict[int, _native.Engine], data: st.DataObject) -> None:
    tokens = data.draw(ids)
    count = len(tokens)
    ends = data.draw(st.one_of(st.just(set(range(1, count + 1))), st.sets(st.integers(1, count))))
    layer, scale = data.draw(st.sampled_from(LAYERS)), data.draw(st.floats(-3, 3, width=32))
    edits = [_native.Edit(layer, vector(), scale=scale), _native.Edit(layer, vector(1), positions=[0, 5, 70])]
    for steering in ([], edits):
        residual, logits = run(engines[1], tokens, steering=steering, point="post_steer")
        cache = engines[1].cache()
        start = 0
        for end in sorted(ends | {count}):
            piece = run(engines[1], tokens[start:end], cache=cache, steering=steering, point="post_steer")
            assert_same_bits(piece[0], residual[:, start:end])
            assert_same_bits(piece[1], logits[start:end])
            start = end
        assert cache.length == count


@quick
@given(st.data())
def test_a_forked_cache_is_a_recomputed_one(engines: dict[int, _native.Engine], data: st.DataObject) -> None:
    stem, one, other = data.draw(ids)[:100], data.draw(ids)[:60], data.draw(ids)[:60]
    kept = data.draw(st.integers(0, len(stem)))
    engine = engines[2]
    trunk = engine.cache()
    run(engine, stem, cache=trunk)
    fork = trunk.fork(kept)
    assert (trunk.length, fork.length, trunk.fork().length) == (len(stem), kept, len(stem))
    # In turns, so that each could spoil the other.
    on_fork = run(engine, other, cache=fork)
    on_trunk = run(engine, one, cache=trunk)
    for found, tokens, start in ((on_trunk, [*stem, *one], len(stem)), (on_fork, [*stem[:kept], *other], kept)):
        residual, logits = run(engine, np.array(tokens, np.uint32))
        assert_same_bits(found[0], residual[:, start:])
        assert_same_bits(found[1], logits[start:])


PROBE = """
import hashlib, sys
import numpy as np
from ster import _native
folder, threads = sys.argv[1], int(sys.argv[2])
engine = _native.Engine(folder, threads=threads)
rng = np.random.default_rng(3)
digest = hashlib.sha256()
batch = [rng.integers(0, 67, length).astype(np.uint32) for length in (1, 2, 17, 63, 64, 65, 130, 40)]
edit = _native.Edit(1, rng.normal(0, 1, (1, 64)).astype(np.float32), scale=2.5, norm_match=True)
for steering in ([], [edit]):
    for output in engine.forward([_native.Sequence(t, layers=[0, 1, 2, 3], rows="all", logits="all", steering=steering) for t in batch]):
        digest.update(output.residual.tobytes() + output.logits.tobytes())
cache = engine.cache()
for token in batch[-1]:
    [output] = engine.forward([_native.Sequence(np.array([token], np.uint32), cache=cache, logits="last")])
    digest.update(output.logits.tobytes())
print(engine.kernels, engine.threads, digest.hexdigest())
"""


def probe(folder: Path, kernels: str | None, threads: int) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "STER_KERNELS"}
    if kernels:
        environment["STER_KERNELS"] = kernels
    line = [sys.executable, "-c", PROBE, str(folder), str(threads)]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="session")
def portable_digest(folder: Path) -> str:
    return probe(folder, "portable", 1).stdout.split()[2]


@pytest.mark.parametrize("kernels", ["avx512", "avx2", "neon", "portable", None])
def test_every_instruction_set_gives_the_bits_of_portable_code(folder: Path, portable_digest: str, kernels: str | None) -> None:
    result = probe(folder, kernels, 2)
    if "is not an instruction set of this processor" in result.stderr:
        pytest.skip(f"this processor has no {kernels}")
    assert result.returncode == 0, result.stderr
    name, threads, digest = result.stdout.split()
    assert name == (kernels or name) and threads == "2"
    assert digest == portable_digest


def test_an_unknown_instruction_set_is_refused(toy_dir: Path) -> None:
    result = probe(toy_dir, "mmx", 1)
    assert result.returncode != 0
    assert "`STER_KERNELS=mmx` is unknown; expected avx512, avx2, neon or portable" in result.stderr


# What is kept


@quick
@given(st.data())
def test_asking_for_less_changes_nothing_that_is_given(engines: dict[int, _native.Engine], data: st.DataObject) -> None:
    tokens = data.draw(ids)
    layers = sorted(data.draw(st.sets(st.sampled_from(LAYERS), min_size=1)))
    residual, logits = run(engines[1], tokens)
    for rows, kept in (("last", slice(-1, None)), ("all", slice(None))):
        for wanted, expected in (("none", None), ("last", logits[-1:]), ("all", logits)):
            [output] = engines[1].forward([_native.Sequence(tokens, layers=layers, rows=rows, logits=wanted)])
            assert_same_bits(output.residual, residual[layers, kept])
            if expected is None:
                assert output.logits is None
            else:
                assert_same_bits(output.logits, expected)
    [output] = engines[1].forward([_native.Sequence(tokens, logits="all")])
    assert output.residual is None
    assert_same_bits(output.logits, logits)


def test_the_last_block_is_the_raw_stream(folder: Path) -> None:
    """Norm and head in float64 on what is read after the last block give the engine's logits, and the head alone does not."""
    weights = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_widened(path).items()}
    config = json.loads((folder / "config.json").read_text())
    residual, logits = run(_native.Engine(str(folder)), ids_of(40))
    x = residual[-1].astype(np.float64)
    gain, head = weights["model.norm.weight"], weights["lm_head.weight"]
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * gain
    # In f32: three roundings of 2^-24 in the norm; in the head a lane of 4, a tree of 4, so 11 in all, of the absolute sum.
    bound = 11.1 * 2.0**-24 * (np.abs(normed) @ np.abs(head).T)
    assert (np.abs(logits - normed @ head.T) <= bound).all()
    assert np.abs(logits - x @ head.T).max() > 1e-2 * np.abs(logits).max()


def load_widened(path: Path) -> dict[str, NDArray[np.float64]]:
    import safetensors

    kinds = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
    tensors = {}
    for name, tensor in safetensors.deserialize(path.read_bytes()):
        values = np.frombuffer(bytes(tensor["data"]), kinds[tensor["dtype"]])
        if tensor["dtype"] == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        tensors[name] = values.reshape(tensor["shape"]).astype(np.float64)
    return tensors


def test_a_random_final_norm_is_not_part_of_the_last_block(toy_copy: Path) -> None:
    before = ster.load(toy_copy).trace("the sea is calm .", logits=True)
    weights = load_file(toy_copy / "model.safetensors")
    weights["model.norm.weight"] = np.random.default_rng(0).normal(1, 0.5, 64).astype(np.float32)
    save_file(weights, toy_copy / "model.safetensors")
    after = ster.load(toy_copy).trace("the sea is calm .", logits=True)
    assert_same_bits(after.residual, before.residual)
    assert not np.array_equal(after.logits, before.logits)


@pytest.mark.parametrize("layer", [4, 99, -5])
def test_one_layer_too_many_is_refused_with_the_range(toy_model: ster.Model, toy_engine: _native.Engine, layer: int) -> None:
    with pytest.raises(LayerError, match=rf"layer {layer} is outside the model's 0\.\.3 range"):
        toy_model.activations(["the sea"], layers=[layer])
    if layer >= 0:
        with pytest.raises(LayerError, match=rf"layer {layer} is outside the model's 0\.\.3 range"):
            toy_engine.forward([_native.Sequence(ids_of(2), layers=[layer])])
        with pytest.raises(LayerError, match=rf"layer {layer} is outside the model's 0\.\.3 range"):
            toy_model.trace("the sea", steering=_native.Edit(layer, vector()))


def test_a_trace_has_a_row_for_every_token_and_says_which(toy_model: ster.Model, toy_engine: _native.Engine) -> None:
    prompt = "the sea is calm and quiet tonight . waves"
    trace = toy_model.trace(prompt, logits=True)
    assert trace.token_ids == toy_model.encode(prompt) and trace.tokens == prompt.split()
    assert trace.residual.shape == (4, 9, 64) and trace.logits is not None and trace.logits.shape == (9, 67)
    assert trace.residual.dtype == np.float32 and trace.residual.flags.c_contiguous
    # Nine tokens and four more, one at a time, are the thirteen rows of one trace over all of them.
    more = toy_model.encode("crash loud against rocks")
    whole = toy_model.trace([*trace.token_ids, *more])
    cache = toy_engine.cache()
    rows = [run(toy_engine, np.array(trace.token_ids, np.uint32), cache=cache)[0]]
    rows += [run(toy_engine, np.array([token], np.uint32), cache=cache)[0] for token in more]
    assert whole.residual.shape[1] == 13
    assert_same_bits(np.concatenate(rows, axis=1), whole.residual)
    assert toy_model.trace("sea").residual.shape == (4, 1, 64)


@pytest.mark.parametrize("edits", [[], [_native.Edit(1, vector(), scale=3.0)], [_native.Edit(2, vector(), positions=[8, 11, 30])]])
def test_decoding_through_the_cache_is_one_pass_over_prompt_and_answer(toy_model: ster.Model, edits: list[_native.Edit]) -> None:
    prompt = toy_model.encode("the sea is calm and quiet tonight . waves")
    generated = toy_model.generate(prompt, edits, max_new_tokens=40, ignore_eos=True, layers="all")
    whole = toy_model.trace([*prompt, *generated.token_ids], steering=edits, point="post_steer", logits=True)
    assert whole.logits is not None and generated.trace is not None
    assert whole.logits[8:-1].argmax(-1).tolist() == generated.token_ids
    # The last token is not run: 9 + 40 - 1 rows.
    assert generated.trace.residual.shape == (4, 48, 64)
    assert generated.trace.token_ids == [*prompt, *generated.token_ids[:-1]]
    assert_same_bits(generated.trace.residual, whole.residual[:, :-1])
    one = toy_model.generate(prompt, max_new_tokens=1, ignore_eos=True, layers="all").trace
    assert one is not None and one.residual.shape == (4, 9, 64)


# Steering


@quick
@given(st.data())
def test_a_vector_moves_its_layer_by_scale_times_itself_and_nothing_before_it(
    engines: dict[int, _native.Engine], data: st.DataObject
) -> None:
    tokens = data.draw(ids)
    layer = data.draw(st.sampled_from(LAYERS))
    scale = data.draw(st.floats(-100, 100, width=32).filter(lambda scale: abs(scale) > 1e-3))
    positions = data.draw(st.none() | st.sets(st.integers(0, len(tokens) - 1), min_size=1).map(sorted))
    v = vector(layer)
    edit = _native.Edit(layer, v, scale=scale, positions=positions)
    plain, plain_logits = run(engines[1], tokens)
    pre, _ = run(engines[1], tokens, steering=[edit], point="pre_steer")
    post, logits = run(engines[1], tokens, steering=[edit], point="post_steer")

    assert_same_bits(pre[: layer + 1], plain[: layer + 1])
    assert_same_bits(post[:layer], plain[:layer])
    rows = slice(None) if positions is None else positions
    expected = plain[layer].copy()
    expected[rows] += np.float32(scale) * v
    assert_same_bits(post[layer], expected)
    first = 0 if positions is None else positions[0]
    assert_same_bits(post[:, :first], plain[:, :first])
    assert_same_bits(logits[:first], plain_logits[:first])
    assert not np.array_equal(logits[first:], plain_logits[first:])


@quick
@given(tokens=ids, layer=st.sampled_from(LAYERS), scale=st.sampled_from([0.0, -0.0]), norm_match=st.booleans())
def test_a_scale_of_zero_is_no_steering(
    engines: dict[int, _native.Engine], tokens: NDArray[np.uint32], layer: int, scale: float, norm_match: bool
) -> None:
    edit = _native.Edit(layer, vector(), scale=scale, norm_match=norm_match)
    for found, expected in zip(run(engines[1], tokens, steering=[edit], point="post_steer"), run(engines[1], tokens), strict=True):
        assert_same_bits(found, expected)


def test_steering_at_layer_one_moves_later_layers_and_what_is_read_says_when(toy_model: ster.Model) -> None:
    prompt = "the sea is calm and quiet tonight ."
    edit = _native.Edit(1, vector(), scale=3.0)
    plain = toy_model.trace(prompt).residual
    pre = toy_model.trace(prompt, steering=edit).residual
    post = toy_model.trace(prompt, steering=edit, point="post_steer").residual
    assert_same_bits(pre[:2], plain[:2])
    assert_same_bits(post[0], plain[0])
    assert_same_bits(post[1], plain[1] + np.float32(3) * vector())
    assert_same_bits(pre[2:], post[2:])
    assert np.abs(post[2] - plain[2]).min(axis=1).max() > 0
    assert (post[2:] != plain[2:]).any(axis=(1, 2)).all()


def test_the_same_edit_twice_is_added_twice(toy_model: ster.Model) -> None:
    prompt = "storm waves crash loud"
    edit = _native.Edit(2, vector(), scale=0.7)
    plain = toy_model.trace(prompt).residual[2]
    once = plain + np.float32(0.7) * vector()
    twice = once + np.float32(0.7) * vector()
    assert_same_bits(toy_model.trace(prompt, steering=[edit, edit], point="post_steer").residual[2], twice)
    assert toy_model.trace(prompt, steering=[edit, edit]).steered == [[0, 1, 2, 3]] * 2


def test_a_plan_is_not_used_up(toy_model: ster.Model) -> None:
    prompt = "wind howls over dark hills"
    plan = [_native.Edit(1, vector(), scale=2.0), _native.Edit(3, vector(1), positions=[2])]
    first = toy_model.trace(prompt, steering=plan, logits=True)
    second = toy_model.trace(prompt, steering=plan, logits=True)
    assert_same_bits(second.residual, first.residual)
    assert_same_bits(second.logits, first.logits)
    assert second.steered == first.steered == [[0, 1, 2, 3, 4], [2]]


def test_nothing_of_a_steered_or_failed_pass_is_left_behind(toy_model: ster.Model) -> None:
    prompt = "the harbor lies still"
    before = toy_model.trace(prompt, logits=True)
    toy_model.trace(prompt, steering=_native.Edit(0, vector(), scale=5.0))
    huge = _native.Edit(2, np.full((1, 64), 1e30, np.float32), scale=1e30, positions=[1])
    with pytest.raises(NonFiniteError, match=r"layer 2 .*token 1 "):
        toy_model.trace(prompt, steering=huge)
    with pytest.raises(SteeringError):
        toy_model.trace(prompt, steering=_native.Edit(0, vector(width=63)))
    after = toy_model.trace(prompt, logits=True)
    assert_same_bits(after.residual, before.residual)
    assert_same_bits(after.logits, before.logits)


def test_an_edit_keeps_its_own_copy_of_the_vector(toy_model: ster.Model) -> None:
    v = vector()
    edit = _native.Edit(1, v, scale=2.0)
    expected = toy_model.trace("calm water", steering=edit, point="post_steer").residual
    v[:] = np.nan
    assert_same_bits(toy_model.trace("calm water", steering=edit, point="post_steer").residual, expected)
    edit.vectors[:] = 0
    assert_same_bits(toy_model.trace("calm water", steering=edit, point="post_steer").residual, expected)


@pytest.mark.parametrize("size", [7.0, 1e-42, 1e30])
def test_norm_matching_adds_a_share_of_the_length_of_the_row(toy_model: ster.Model, size: float) -> None:
    """`0.5 ||h|| e0`, whatever the length of the vector along e0. In f32 ulps of the sum: the product is rounded once, at most twice."""
    v = np.zeros((1, 64), np.float32)
    v[0, 0] = size
    prompt = "soft rain falls on the lake"
    plain = toy_model.trace(prompt).residual[1].astype(np.float64)
    found = toy_model.trace(prompt, steering=_native.Edit(1, v, scale=0.5, norm_match=True), point="post_steer").residual[1]
    expected = plain.copy()
    expected[:, 0] += 0.5 * np.linalg.norm(plain, axis=1)
    assert (np.abs(found - expected) <= 2.0**-24 * 4 * np.abs(expected)).all()
    assert np.array_equal(found[:, 1:], plain[:, 1:])


def test_norm_matching_looks_at_the_row_before_any_vector_of_its_layer(toy_model: ster.Model) -> None:
    prompt = "soft rain falls on the lake"
    plain = toy_model.trace(prompt).residual[1].astype(np.float64)
    other = _native.Edit(1, 30 * vector(1))
    matched = _native.Edit(1, vector(2), scale=0.5, norm_match=True)
    direction = vector(2).astype(np.float64) / np.linalg.norm(vector(2).astype(np.float64))
    expected = plain + 30 * vector(1) + 0.5 * np.linalg.norm(plain, axis=1, keepdims=True) * direction
    for plan in ([other, matched], [matched, other]):
        found = toy_model.trace(prompt, steering=plan, point="post_steer").residual[1]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)  # values to 100: an ulp is 8e-6


def test_a_vector_from_half_precision_is_matched_without_overflow(toy_model: ster.Model) -> None:
    v = np.full((1, 64), 300, np.float16)
    v[0, ::2] = -300
    with np.errstate(over="ignore"):
        assert np.isinf((v * v).sum(dtype=np.float16))
    found = toy_model.trace("calm", steering=_native.Edit(0, v.astype(np.float32), scale=1.0, norm_match=True), point="post_steer")
    plain = toy_model.trace("calm").residual[0, 0].astype(np.float64)
    expected = plain + np.linalg.norm(plain) / 8 * np.sign(v[0].astype(np.float64))
    assert (np.abs(found.residual[0, 0] - expected) <= 2.0**-24 * 4 * (np.abs(plain) + np.linalg.norm(plain) / 8)).all()


def test_a_zero_vector_is_a_no_op_and_is_not_norm_matched(toy_model: ster.Model) -> None:
    zero = np.zeros((1, 64), np.float32)
    plain = toy_model.trace("calm").residual
    assert np.array_equal(toy_model.trace("calm", steering=_native.Edit(0, zero), point="post_steer").residual, plain)
    with pytest.raises(SteeringError, match="cannot norm-match a zero vector"):
        _native.Edit(0, zero, norm_match=True)


@pytest.mark.parametrize(
    ("vectors", "options", "sentence"),
    [
        (np.full((1, 64), np.nan, np.float32), {}, "steering at layer 1 contains a non-finite value"),
        (vector(), {"scale": float("inf")}, "steering at layer 1 contains a non-finite value"),
        (vector(), {"positions": [3, 3]}, "steering at layer 1 names position 3 twice"),
        (vector(), {"positions": []}, "steering at layer 1 names no position"),
        (np.zeros((2, 64), np.float32), {}, "steering at layer 1 has 2 vectors without positions; give one, or a position for each"),
        (np.zeros((2, 64), np.float32), {"positions": [1]}, "steering at layer 1 has 2 vectors for 1 positions"),
        (np.zeros((0, 64), np.float32), {}, "steering at layer 1 has 0 vectors without positions; give one, or a position for each"),
    ],
)
def test_an_edit_that_cannot_be_applied_is_refused_when_it_is_made(vectors: Array, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SteeringError) as refusal:
        _native.Edit(1, vectors, **options)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize("norm_match", [False, True])
def test_a_vector_of_no_width_is_refused(toy_model: ster.Model, norm_match: bool) -> None:
    with pytest.raises(SteeringError):
        toy_model.trace("calm", steering=_native.Edit(0, np.zeros((1, 0), np.float32), norm_match=norm_match))


# Caches


def test_a_cache_stands_once_in_a_batch(toy_engine: _native.Engine) -> None:
    cache = toy_engine.cache()
    run(toy_engine, ids_of(5), cache=cache)
    with pytest.raises(CacheError, match="twice in one batch"):
        toy_engine.forward([_native.Sequence(ids_of(2), cache=cache, logits="last") for _ in range(2)])
    assert cache.length == 5
    whole = run(toy_engine, np.concatenate([ids_of(5), ids_of(3, 1)]))
    assert_same_bits(run(toy_engine, ids_of(3, 1), cache=cache)[1], whole[1][5:])


def test_a_cache_of_another_engine_is_refused(toy_engine: _native.Engine, toy_dir: Path) -> None:
    cache = _native.Engine(str(toy_dir)).cache()
    with pytest.raises(CacheError, match="the cache belongs to another engine"):
        run(toy_engine, ids_of(2), cache=cache)
    assert cache.length == 0


def test_a_refused_batch_leaves_all_its_caches(toy_engine: _native.Engine) -> None:
    caches = [toy_engine.cache() for _ in range(2)]
    for cache in caches:
        run(toy_engine, ids_of(64), cache=cache)
    huge = _native.Edit(3, np.full((1, 64), 1e30, np.float32), scale=1e30)
    for bad in (
        _native.Sequence(ids_of(9), cache=caches[1], logits="last", steering=[huge]),
        _native.Sequence(np.array([67], np.uint32), cache=caches[1], logits="last"),
        _native.Sequence(ids_of(192), cache=caches[1], logits="last"),
    ):
        with pytest.raises(ster.errors.SterError):
            toy_engine.forward([_native.Sequence(ids_of(7), cache=caches[0], logits="last"), bad])
        assert [cache.length for cache in caches] == [64, 64]
    whole = run(toy_engine, np.concatenate([ids_of(64), ids_of(3, 1)]))
    for cache in caches:
        assert_same_bits(run(toy_engine, ids_of(3, 1), cache=cache)[0], whole[0][:, 64:])


def test_a_cache_is_not_forked_past_its_end(toy_engine: _native.Engine) -> None:
    cache = toy_engine.cache()
    with pytest.raises(CacheError, match="holds 0 tokens, cannot keep 1"):
        cache.fork(1)


# Damaged weights


def spoil(folder: Path, tensor: str, index: tuple[int, ...], value: float) -> _native.Engine:
    weights = load_file(folder / "model.safetensors")
    weights[tensor][index] = value
    save_file(weights, folder / "model.safetensors")
    return _native.Engine(str(folder))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_in_a_weight_is_named_by_layer_token_and_prompt(toy_copy: Path, value: float) -> None:
    spoil(toy_copy, "model.embed_tokens.weight", (WORDS.index("sea") + 3, 9), value)
    model = ster.load(toy_copy)
    with pytest.raises(NonFiniteError, match=r"layer 0 .*token 1 \(id 4\) of prompts\[1\]"):
        model.activations(["calm water", "the sea is calm"])
    assert np.isfinite(model.activations(["calm water"]).values).all()


def test_nan_in_the_head_spoils_logits_only(toy_copy: Path) -> None:
    engine = spoil(toy_copy, "lm_head.weight", (5, 5), np.nan)
    with pytest.raises(NonFiniteError, match=r"logits contain a non-finite value at token 0"):
        run(engine, ids_of(3))
    [output] = engine.forward([_native.Sequence(ids_of(3), layers=LAYERS)])
    assert output.residual is not None and np.isfinite(output.residual).all()


FORK = """
import gc, os, sys
import numpy as np
from ster import _native
engine = _native.Engine(sys.argv[1], threads=2)
logits = lambda: engine.forward([_native.Sequence(np.arange(9, dtype=np.uint32), logits="last")])[0].logits
expected = logits()
child = os.fork()
if child == 0:
    same = sys.argv[2] == "drop" or np.array_equal(logits(), expected)
    del logits, engine
    gc.collect()
    os._exit(0 if same else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), np.array_equal(logits(), expected))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("use", ["run", "drop"])
def test_a_forked_process_uses_and_drops_an_engine_it_was_born_with(toy_dir: Path, use: str) -> None:
    """Threads do not survive a fork: the child starts its own, and does not wait for its parent's."""
    line = [sys.executable, "-W", "ignore", "-c", FORK, str(toy_dir), use]  # Python 3.12 warns of threads and fork
    result = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("0 True\n", "")


def test_a_fresh_process_gives_the_same_bits(folder: Path) -> None:
    """Nothing is timed, seeded or addressed: two processes agree."""
    assert probe(folder, None, 2).stdout == probe(folder, None, 2).stdout

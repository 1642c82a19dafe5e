"""Steering as a value: what it adds, where, and what is refused."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ster
from ster.errors import ArtifactError, InputError, LayerError, SteeringError
from ster.steering_artifact import LayerVector

PROMPT = "the boat rests at anchor on still water ."
ROW = np.random.default_rng(0).normal(size=64).astype(np.float32)
OTHER = np.random.default_rng(1).normal(size=64).astype(np.float32)


@pytest.fixture(scope="module")
def artifact() -> ster.SteeringArtifact:
    metadata = {"residual_norm.1": "4", "residual_norm.3": "0.5"}
    return ster.SteeringArtifact("toy-llama", "caa", 64, (LayerVector(1, ROW), LayerVector(3, OTHER)), metadata=metadata)


def added(model: ster.Model, steering: object, layer: int) -> np.ndarray:
    """What steering moved at `layer`, `[tokens, hidden]`: exact where nothing before the layer was steered."""
    before = model.trace(PROMPT, layer, steering=steering, point="pre_steer")  # type: ignore[arg-type]
    after = model.trace(PROMPT, layer, steering=steering, point="post_steer")  # type: ignore[arg-type]
    return np.asarray(after.residual[0].astype(np.float64) - before.residual[0])


@settings(max_examples=25, deadline=None)
@given(strength=st.floats(-100, 100, width=32), layer=st.integers(0, 3))
def test_a_vector_moves_its_layer_by_strength_times_itself_and_nothing_before(toy_model: ster.Model, strength: float, layer: int) -> None:
    plain = toy_model.trace(PROMPT, logits=True)
    steered = toy_model.trace(PROMPT, steering=ster.steer(ROW, layer, strength=strength), point="post_steer", logits=True)
    assert steered.residual[:layer].tobytes() == plain.residual[:layer].tobytes()
    # One fused multiply and add: rounded once.
    exact = plain.residual[layer].astype(np.float64) + np.float64(np.float32(strength)) * ROW.astype(np.float64)
    assert np.array_equal(steered.residual[layer], exact.astype(np.float32)) or np.allclose(
        steered.residual[layer], exact, rtol=2**-23, atol=2**-23 * float(np.abs(exact).max())
    )
    assert steered.steered == [list(range(len(plain.token_ids)))]
    assert plain.logits is not None and steered.logits is not None
    if strength == 0.0 or abs(strength) > 0.01:
        assert (steered.logits.tobytes() == plain.logits.tobytes()) == (strength == 0.0)


def test_strength_zero_is_the_unsteered_run(toy_model: ster.Model, artifact: ster.SteeringArtifact) -> None:
    plain = toy_model.trace(PROMPT, logits=True)
    for nothing in (artifact.at(strength=0.0), 0 * artifact.at(), artifact.at() * 0.0, None, [], ster.steer(ROW, 2, strength=0)):
        steered = toy_model.trace(PROMPT, steering=nothing, point="post_steer", logits=True)
        assert steered.logits is not None and plain.logits is not None
        assert steered.residual.tobytes() == plain.residual.tobytes() and steered.logits.tobytes() == plain.logits.tobytes()


def test_composition_is_arithmetic(toy_model: ster.Model, artifact: ster.SteeringArtifact) -> None:
    a, b = ster.steer(ROW, 1), ster.steer(OTHER, 2, strength=3.0)
    assert [(term.layer, term.strength) for term in (a + b).terms] == [(1, 1.0), (2, 3.0)]
    assert [(term.layer, term.strength) for term in (2 * a - b).terms] == [(1, 2.0), (2, -3.0)]
    assert [(term.layer, term.strength) for term in (-(a + b) * 0.5).terms] == [(1, -0.5), (2, -1.5)]
    assert (a + b).layers == [1, 2] and artifact.at(3, strength=2.0).layers == [3] and artifact.at().layers == [1, 3]
    assert repr(2 * a + b) == "<ster.Steering 2 at layer 1; 3 at layer 2>"
    assert repr(a * 0 - a) == "<ster.Steering 0 at layer 1; -1 at layer 1>"
    assert a.terms[0].strength == 1.0  # untouched
    one = toy_model.trace(PROMPT, steering=a + b, point="post_steer").residual
    assert one.tobytes() == toy_model.trace(PROMPT, steering=[a, b], point="post_steer").residual.tobytes()
    assert one.tobytes() == toy_model.trace(PROMPT, steering=[*a.edits(), *b.edits()], point="post_steer").residual.tobytes()
    with pytest.raises(TypeError):
        a + 1  # type: ignore[operator]
    with pytest.raises(TypeError):
        a * "2"  # type: ignore[operator]


def test_twice_listed_is_added_twice(toy_model: ster.Model) -> None:
    a = ster.steer(ROW, 1)
    twice, doubled = added(toy_model, a + a, 1), added(toy_model, 2 * a, 1)
    assert np.allclose(twice, doubled, atol=1e-5) and np.allclose(twice, 2.0 * ROW, atol=1e-5)


def test_a_sum_and_its_opposite_cancel_up_to_rounding(toy_model: ster.Model) -> None:
    a = ster.steer(ROW, 1)
    assert np.abs(added(toy_model, a - a, 1)).max() < 1e-6


def test_positions_and_spans(toy_model: ster.Model) -> None:
    span = ster.steer(ROW, 1, positions=[0, (3, 5), 8])
    moved = added(toy_model, span, 1)
    assert [n for n, row in enumerate(moved) if np.abs(row).max() > 0] == [0, 3, 4, 8]
    assert toy_model.trace(PROMPT, steering=span).steered == [[0, 3, 4, 8]]
    each = ster.steer(np.stack([ROW, OTHER]), 1, positions=[2, 5], strength=2.0)
    moved = added(toy_model, each, 1)
    assert np.allclose(moved[2], 2.0 * ROW, atol=1e-5) and np.allclose(moved[5], 2.0 * OTHER, atol=1e-5)
    assert toy_model.trace(PROMPT, steering=span + each).steered == [[0, 3, 4, 8], [2, 5]]


def test_norm_match_adds_a_share_of_the_row(toy_model: ster.Model) -> None:
    e0 = np.zeros(64, np.float32)
    e0[0] = 7.0
    rows = toy_model.trace(PROMPT, 2).residual[0].astype(np.float64)
    moved = added(toy_model, ster.steer(e0, 2, strength=0.5, norm_match=True), 2)
    assert np.allclose(moved[:, 0], 0.5 * np.sqrt((rows * rows).sum(axis=1)), rtol=1e-6)
    assert np.abs(moved[:, 1:]).max() == 0.0
    huge = added(toy_model, ster.steer(np.full(64, 1e30, np.float32), 2, strength=0.5, norm_match=True), 2)
    assert np.isfinite(huge).all()


def test_an_array_may_change_after_it_was_given(toy_model: ster.Model) -> None:
    row = ROW.copy()
    steering = ster.steer(row, 1)
    row[:] = 0
    assert np.abs(added(toy_model, steering, 1)).max() > 0


def test_lists_and_other_floats_are_rounded_to_float32() -> None:
    assert ster.steer([0.1] * 64, 1).terms[0].vectors.dtype == np.float32
    assert ster.steer(np.full(64, 0.1, np.float64), 1).terms[0].vectors[0, 0] == np.float32(0.1)
    assert ster.steer(np.full(64, 2, np.float16), 1).terms[0].vectors.shape == (1, 64)


def test_units_of_the_residual_norm(toy_model: ster.Model, artifact: ster.SteeringArtifact) -> None:
    steering = artifact.at(strength=0.5, units="norm")
    lengths = [float(np.linalg.norm(term.strength * term.vectors)) for term in steering.terms]
    assert np.allclose(lengths, [0.5 * 4, 0.5 * 0.5])
    assert artifact.at(3, strength=-2.0, units="norm").layers == [3]
    bare = ster.SteeringArtifact("toy-llama", "caa", 64, (LayerVector(1, ROW),))
    with pytest.raises(SteeringError, match="^the artifact does not record the residual norm of layer 1$"):
        bare.at(units="norm")
    assert np.isclose(np.linalg.norm(bare.at(units="norm", norms={1: 3.0}).terms[0].strength * ROW), 3.0)
    zero = ster.SteeringArtifact("", "caa", 64, (LayerVector(1, np.zeros(64, np.float32)),))
    with pytest.raises(SteeringError, match="^the vector of layer 1 is zero and has no direction$"):
        zero.at(units="norm", norms={1: 3.0})
    with pytest.raises(InputError, match='^unknown units "sigma"; expected absolute or norm$'):
        artifact.at(units="sigma")  # type: ignore[arg-type]


def test_some_layers_of_an_artifact(artifact: ster.SteeringArtifact) -> None:
    assert artifact.only([3]).layers == [3] and artifact.only([3, 1]).layers == [1, 3]
    with pytest.raises(LayerError, match="^the artifact has no vector for layer 2$"):
        artifact.only([2])
    with pytest.raises(LayerError, match="^the artifact has no vector for layer 0$"):
        artifact.at(0)


def test_what_no_model_could_apply_is_refused_where_it_is_made(artifact: ster.SteeringArtifact) -> None:
    for call, error, sentence in [
        (lambda: ster.steer(ROW), InputError, "a vector needs a layer"),
        (lambda: ster.steer(ROW, -1), LayerError, "layer -1 is negative"),
        (lambda: ster.steer(ROW, True), InputError, "layer must be an integer"),
        (lambda: ster.steer(np.zeros((2, 2, 2)), 1), InputError, r"found shape \[2, 2, 2\]"),
        (lambda: ster.steer([], 1), InputError, r"found shape \[0\]"),
        (lambda: ster.steer(np.array([1.0, math.nan]), 1), SteeringError, "steering at layer 1 contains a non-finite value"),
        (lambda: ster.steer([1e39, 1.0], 1), SteeringError, "non-finite"),
        (lambda: ster.steer(ROW, 1, strength=math.inf), SteeringError, "strength inf is not a finite float32"),
        (lambda: ster.steer(ROW, 1, strength=1e39), SteeringError, "not a finite float32"),
        (lambda: ster.steer(ROW, 1, positions=[-1]), SteeringError, "positions count from 0 at the first token, found -1"),
        (lambda: ster.steer(ROW, 1, positions=[(4, 4)]), SteeringError, "a span must be"),
        (lambda: ster.steer(ROW, 1, positions=[1, (0, 3)]), SteeringError, "names position 1 twice"),
        (lambda: ster.steer(ROW, 1, positions=[]), SteeringError, "names no position"),
        (lambda: ster.steer(np.stack([ROW, ROW]), 1), SteeringError, "has 2 vectors without positions"),
        (lambda: ster.steer(np.stack([ROW, ROW]), 1, positions=[1, 2, 3]), SteeringError, "has 2 vectors for 3 positions"),
        (lambda: ster.steer(0 * ROW, 1, norm_match=True), SteeringError, "cannot norm-match a zero vector"),
    ]:
        with pytest.raises(error, match=sentence):
            call()


def test_a_position_past_the_prompt_is_refused_in_a_trace(toy_model: ster.Model) -> None:
    with pytest.raises(
        SteeringError, match="^steering names position 9, but this run reaches position 8 at most: the prompt has 9 tokens$"
    ):
        toy_model.trace(PROMPT, steering=ster.steer(ROW, 1, positions=[9]))


def test_an_artifact_is_checked_against_the_model(toy_model: ster.Model, toy_copy: Path, calm_pairs: Path) -> None:
    trained = ster.train(toy_model, ster.PairSet.load(calm_pairs), "1..3")
    copy = ster.load(toy_copy)
    copy.check_artifact(trained)  # the same weights under another name: accepted, without a word
    renamed = toy_copy.parent / "toy-llama"
    toy_copy.rename(renamed)
    weights = renamed / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ArtifactError, match='^artifact was trained for model "toy-llama", current model is "toy-llama"$') as refusal:
        ster.load(renamed).check_artifact(trained)
    assert refusal.value.hint == "the weights differ"


def test_another_template_or_precision_warns(toy_model: ster.Model, artifact: ster.SteeringArtifact) -> None:
    from dataclasses import replace

    with pytest.warns(ster.SterWarning, match="^the artifact was trained with chat template applied, the model runs with absent$"):
        toy_model.check_artifact(replace(artifact, chat_template="applied"))
    with pytest.warns(ster.SterWarning, match="^the artifact was trained at precision bf16, the model runs at f32$"):
        toy_model.check_artifact(replace(artifact, precision="bf16"))
    with pytest.warns(ster.SterWarning, match="does not say which model"):
        toy_model.check_artifact(replace(artifact, model=""))
    with pytest.raises(ArtifactError, match='^artifact was trained for model "other", current model is "toy-llama"$'):
        toy_model.check_artifact(replace(artifact, model="other"))
    narrow = ster.SteeringArtifact("toy-llama", "caa", 3, (LayerVector(1, np.ones(3, np.float32)),))
    with pytest.raises(ArtifactError, match="^artifact width 3 does not match model width 64$"):
        toy_model.check_artifact(narrow)
    with pytest.raises(LayerError, match=r"^layer 4 is outside the model's 0..3 range$"):
        toy_model.check_artifact(replace(artifact, vectors=(LayerVector(4, ROW),)))

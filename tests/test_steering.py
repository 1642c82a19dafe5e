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
    assert str(refusal.value.hint).startswith("the weights differ; `ster vector convert FILE OUT --any-model`")


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


def other_weights(toy_copy: Path) -> ster.Model:
    weights = toy_copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    return ster.load(toy_copy)


def test_a_run_refuses_vectors_of_another_model(toy_model: ster.Model, toy_copy: Path, calm_pairs: Path) -> None:
    trained = ster.train(toy_model, ster.PairSet.load(calm_pairs), "1..3")
    other = other_weights(toy_copy)
    plans: list[object] = [
        trained,
        trained.at(),
        ster.steer(trained, 2, positions=[0]),
        trained.at(strength=0.1, units="norm"),
        -2 * trained.at(1) + ster.steer(ROW, 1),
        ster.steer(ROW, 1) - trained.at(1),
        [ster.steer(ROW, 1), (trained.at(),)],
        {trained.at()},
    ]
    for plan in plans:
        for call in (other.generate, other.stream, lambda prompt, plan: other.trace(prompt, steering=plan)):
            with pytest.raises(ArtifactError, match='^artifact was trained for model "toy-llama", current model is "copy"$') as refusal:
                call(PROMPT, plan)  # type: ignore[arg-type]
            assert str(refusal.value.hint).startswith("the weights differ; `ster vector convert FILE OUT --any-model`")
        toy_model.trace(PROMPT, steering=plan)  # type: ignore[arg-type]
    other.trace(PROMPT, steering=ster.steer(trained.vector(1), 1))  # an array belongs to nobody


def test_an_unbound_copy_goes_with_any_model_of_its_width(toy_model: ster.Model, toy_copy: Path, calm_pairs: Path) -> None:
    trained = ster.train(toy_model, ster.PairSet.load(calm_pairs), "1..3")
    other = other_weights(toy_copy)
    with pytest.warns(ster.SterWarning, match="^the artifact does not say which model it was trained for$"):
        found = other.trace(PROMPT, steering=trained.unbound())
    steering = [ster.steer(trained.vector(layer), layer) for layer in (1, 2)]
    assert found.residual.tobytes() == other.trace(PROMPT, steering=steering).residual.tobytes()
    assert trained.unbound().metadata["pairs_hash"] == trained.metadata["pairs_hash"] and "weights_hash" not in trained.unbound().metadata


def test_norms_kept_in_f32_are_no_other_precision(toy_model: ster.Model, calm_pairs: Path) -> None:
    from dataclasses import replace

    trained = ster.train(toy_model, ster.PairSet.load(calm_pairs), "1..3")
    check = lambda artifact, precision: artifact.check_model(  # noqa: E731
        "toy", 64, 4, weights_hash=toy_model.weights_hash, precision=precision
    )
    assert check(replace(trained, precision="bf16"), "bf16+f32") == check(replace(trained, precision="f32+q4_k"), "q4_k") == []
    assert check(replace(trained, precision="bf16"), "f32") == ["the artifact was trained at precision bf16, the model runs at f32"]


def test_sums_and_multiples_keep_their_artifacts(artifact: ster.SteeringArtifact) -> None:
    assert (2 * artifact.at() - ster.steer(ROW, 2) + artifact.at(1)).artifacts == [artifact]
    assert ster.steer(ROW, 2).artifacts == []


def test_a_run_warns_once_of_another_template(
    toy_dir: Path, artifact: ster.SteeringArtifact, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    import warnings
    from dataclasses import replace

    warnings.simplefilter("always")
    model = ster.load(toy_dir)
    monkeypatch.setattr(ster.Model, "hash_weights", None)  # an artifact that names no weights costs no hash
    templated = replace(artifact, chat_template="applied")
    model.generate(PROMPT, templated, max_new_tokens=1)
    model.generate(PROMPT, 2 * templated.at(1), max_new_tokens=1)
    model.trace(PROMPT, steering=templated.only([3]))
    sentence = "the artifact was trained with chat template applied, the model runs with absent"
    assert [(str(each.message), each.filename) for each in recwarn] == [(sentence, __file__)]
    model.trace(PROMPT, steering=replace(templated, trait_name="another"))
    assert [each.filename for each in recwarn] == [__file__] * 2
    checked = ster.load(toy_dir)
    checked.check_artifact(templated)
    checked.trace(PROMPT, steering=templated)
    assert len(recwarn) == 3


def test_the_same_values_in_another_precision_are_the_same_model(toy_dir: Path, tmp_path: Path, calm_pairs: Path) -> None:
    import json
    import shutil

    from ster.toy import tensors

    narrow, wide = (Path(shutil.copytree(toy_dir, tmp_path / name)) for name in ("narrow", "wide"))
    for folder, dtype in ((narrow, "BF16"), (wide, "F32")):
        header, data = {}, b""
        for name, array in tensors().items():
            high = np.ascontiguousarray(array, "<f4").view("<u4") >> 16
            part = high.astype("<u2").tobytes() if dtype == "BF16" else (high << 16).tobytes()
            header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(part)]}
            data += part
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    trained = ster.train(ster.load(narrow), ster.PairSet.load(calm_pairs), 1)
    with pytest.warns(ster.SterWarning, match="^the artifact was trained at precision bf16, the model runs at f32$"):
        ster.load(wide).generate(PROMPT, trained, max_new_tokens=1)


def test_an_artifact_itself_steers_as_all_its_layers(toy_model: ster.Model, artifact: ster.SteeringArtifact) -> None:
    bare, spelled = (toy_model.trace(PROMPT, steering=plan, point="post_steer") for plan in (artifact, artifact.at()))
    assert bare.residual.tobytes() == spelled.residual.tobytes() and len(bare.steered) == 2
    assert toy_model.generate(PROMPT, [artifact, ster.steer(ROW, 0)], max_new_tokens=2).steered == [list(range(10))] * 3


def test_spans_without_an_end_and_words(toy_model: ster.Model) -> None:
    tokens = len(toy_model.prompt_tokens(PROMPT))
    assert tokens == 9
    for positions, traced, generated in [
        ([(7, None)], [7, 8], [7, 8, 9, 10]),
        ([0, (2, 4), (8, None)], [0, 2, 3, 8], [0, 2, 3, 8, 9, 10]),
        ([(9, None)], None, [9, 10]),
        ("prompt", list(range(9)), list(range(9))),
        ("answer", [8], [8, 9, 10]),
        ("generated", None, [9, 10]),
    ]:
        plan = ster.steer(ROW, 1, positions=positions)  # type: ignore[arg-type]
        found = toy_model.generate(PROMPT, plan, max_new_tokens=3, layers=1)
        assert found.steered == [generated]
        before = toy_model.generate(PROMPT, plan, max_new_tokens=3, layers=1, point="pre_steer").trace
        assert found.trace is not None and before is not None
        moved = np.abs(found.trace.residual[0] - before.residual[0]).max(axis=1)
        assert np.flatnonzero(moved).tolist() == generated
        assert [step.steered for step in toy_model.stream(PROMPT, plan, max_new_tokens=3)] == [
            [[at for at in generated if at < 9]],
            [[at for at in generated if at == 9]],
            [[at for at in generated if at == 10]],
        ]
        if traced is not None:
            assert toy_model.trace(PROMPT, steering=plan).steered == [traced]
        else:
            with pytest.raises(SteeringError, match="^steering names position 9, but this run reaches position 8 at most"):
                toy_model.trace(PROMPT, steering=plan)
            with pytest.raises(SteeringError, match="^steering names position 9, but this run reaches position 8 at most"):
                toy_model.generate(PROMPT, plan, max_new_tokens=1)


def test_open_positions_need_the_run(artifact: ster.SteeringArtifact) -> None:
    plan = ster.steer(ROW, 1, positions=[2, (5, None)])
    assert plan.edits(rows=8)[0].positions == [2, 5, 6, 7]
    with pytest.raises(SteeringError, match=r"^the span \(5, None\) depends on how far the run goes$"):
        plan.edits()
    with pytest.raises(SteeringError, match='^positions "answer" depend on how far the run goes$'):
        artifact.at(positions="answer").edits()
    assert artifact.at(1, positions="answer").edits(rows=8, prompt=6)[0].positions == [5, 6, 7]
    assert repr(plan) == "<ster.Steering 1 at layer 1 at 1 positions and from 5 on>"
    assert repr(artifact.at(1, positions="generated")) == "<ster.Steering 1 at layer 1 at generated>"
    for call, sentence in [
        (lambda: ster.steer(ROW, 1, positions=[7, (5, None)]), "names position 7 twice"),
        (lambda: ster.steer(ROW, 1, positions=[(3, None), (5, None)]), "names position 5 twice"),
        (lambda: ster.steer(ROW, 1, positions=[(0, None), 16_000_000]), "names position 16000000 twice"),
        (lambda: ster.steer(ROW, 1, positions=[(-1, None)]), "positions count from 0"),
        (lambda: ster.steer(ROW, 1, positions="all"), '^unknown positions "all"; expected prompt, answer or generated$'),  # type: ignore[arg-type]
        (lambda: ster.steer(np.stack([ROW, ROW]), 1, positions="prompt"), "^2 vectors need as many positions"),
        (lambda: ster.steer(np.stack([ROW, ROW]), 1, positions=[0, (1, None)]), "^2 vectors need as many positions"),
    ]:
        with pytest.raises(SteeringError, match=sentence):
            call()


def test_at_takes_layers_positions_and_norm_matching(artifact: ster.SteeringArtifact) -> None:
    assert artifact.at([3, 1]).layers == artifact.at("1,3").layers == artifact.at("all").layers == [1, 3]
    assert artifact.at("1..2").layers == artifact.at(np.int64(1)).layers == ster.steer(artifact, [1]).layers == [1]
    term = artifact.at(3, strength=2.0, positions=[0, (4, 6)], norm_match=True).terms[0]
    assert (term.strength, term.positions, term.norm_match) == (2.0, (0, 4, 5), True)
    assert artifact.at([1], units="norm", positions=[4]).terms[0].positions == (4,)
    wide = ster.SteeringArtifact("m", "caa", 64, tuple(LayerVector(n, ROW) for n in range(30)))
    for layers, error, sentence, hint in [
        ("1..4", LayerError, "^the artifact has no vector for layer 2$", "it has 1, 3"),
        ([1, 2], LayerError, "^the artifact has no vector for layer 2$", "it has 1, 3"),
        ("0..999999999", LayerError, "^the artifact has no vector for layer 0$", "it has 1, 3"),
        (-1, LayerError, '^layers "-1" count from the end', "name the block itself: it has 1, 3"),
        ("1..-1", LayerError, '^layers "1..-1" count from the end', "name the block itself: it has 1, 3"),
        ([], LayerError, "^at least one layer is required$", None),
        ("x", InputError, '^invalid layer "x"$', None),
    ]:
        with pytest.raises(error, match=sentence) as refusal:
            artifact.at(layers)  # type: ignore[arg-type]
        assert hint is None or refusal.value.hint == hint
    with pytest.raises(LayerError, match="^the artifact has no vector for layer 30$") as refusal:
        wide.at(30)
    assert refusal.value.hint == "it has 0 to 29"
    with pytest.raises(InputError, match="^norm_match and units norm are two measures of strength$"):
        artifact.at(units="norm", norm_match=True)

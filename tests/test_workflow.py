"""The calls behind the commands, on the toy model: the published numbers, provenance, refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ster
from ster import evaluation, workflow
from ster.directions import caa
from ster.errors import ArtifactError, ContextError, InputError, LayerError
from ster.pairs import Pair

PROMPT = "describe the evening lake ."
NEUTRAL = ["the boat rests at anchor .", "the lake surface is like a mirror ."]


@pytest.fixture(scope="module")
def pairs(calm_pairs: Path) -> ster.PairSet:
    return ster.PairSet.load(calm_pairs)


@pytest.fixture(scope="module")
def trained(toy_model: ster.Model, pairs: ster.PairSet) -> ster.SteeringArtifact:
    return ster.train(toy_model, pairs, "1..3")


def test_the_published_numbers(trained: ster.SteeringArtifact, toy_model: ster.Model) -> None:
    assert [v.layer for v in trained.vectors] == [1, 2]
    assert [v.train_accuracy for v in trained.vectors] == [0.875, 0.875]
    assert [v.train_margin for v in trained.vectors] == pytest.approx([0.55983764, 0.76135504], abs=1e-6)
    plain = toy_model.generate(PROMPT, max_new_tokens=12)
    assert plain.text == "loud sea hard hard , white , white , white loud loud"
    steered = toy_model.generate(PROMPT, trained.at(), max_new_tokens=12)
    assert steered.text == "white white white howls howls howls drifts , white white white white"


def test_an_artifact_says_where_it_comes_from(trained: ster.SteeringArtifact, toy_model: ster.Model, pairs: ster.PairSet) -> None:
    assert (trained.model, trained.model_revision, trained.trait_name, trained.method) == ("toy-llama", None, "calm", "caa")
    assert (trained.precision, trained.chat_template, trained.hidden_size) == ("f32", "absent", 64)
    assert trained.metadata["weights_hash"] == toy_model.weights_hash
    assert trained.metadata["tokenizer_hash"] == toy_model.tokenizer_hash
    assert trained.metadata["pairs_hash"] == pairs.content_hash
    assert trained.metadata["ster_version"] == ster.__version__
    assert trained.metadata["token_rule"] == "last token of the side as the model runs it; before steering"
    sides = [side for pair in pairs for side in (pair.positive, pair.negative)]
    rows = toy_model.activations(sides, 1).values[:, 0].astype(np.float64)  # type: ignore[arg-type]
    assert trained.residual_norm(1) == pytest.approx(np.linalg.norm(rows, axis=1).mean(), rel=1e-5)


def test_the_file_is_the_artifact(trained: ster.SteeringArtifact, tmp_path: Path) -> None:
    path = trained.save(tmp_path / "calm.json")
    loaded = ster.SteeringArtifact.load(path)
    assert loaded.to_json() == trained.to_json() == path.read_bytes()


def test_vectors_are_the_estimators_on_the_last_tokens(trained: ster.SteeringArtifact, toy_model: ster.Model, pairs: ster.PairSet) -> None:
    positive = toy_model.activations([str(pair.positive) for pair in pairs], [1, 2]).values
    negative = toy_model.activations([str(pair.negative) for pair in pairs], [1, 2]).values
    for i, vector in enumerate(trained.vectors):
        assert vector.values.tobytes() == caa(positive[:, i], negative[:, i]).direction.tobytes()


def test_tuples_are_pairs(toy_model: ster.Model, pairs: ster.PairSet, trained: ster.SteeringArtifact) -> None:
    found = ster.train(toy_model, [(pair.positive, pair.negative) for pair in pairs], [1, 2])
    assert found.vector(2).tobytes() == trained.vector(2).tobytes() and found.trait_name is None


@pytest.mark.parametrize(
    ("name", "method"), [("mean-difference", "caa"), ("probe", "logistic"), ("lda", "lda"), ("pca-centered", "pca-centered")]
)
@pytest.mark.filterwarnings("ignore:logistic. not converged")
def test_methods_and_their_aliases(toy_model: ster.Model, pairs: ster.PairSet, name: str, method: str) -> None:
    found = ster.train(toy_model, pairs, 2, method=name)
    assert found.method == method and np.linalg.norm(found.vector(2)) == pytest.approx(1.0)
    assert ster.train(toy_model, pairs, 2, method=name).to_json() == found.to_json()


def test_the_trait_reversed_is_the_vector_reversed(toy_model: ster.Model, pairs: ster.PairSet, trained: ster.SteeringArtifact) -> None:
    swapped = ster.train(toy_model, [(pair.negative, pair.positive) for pair in pairs], "1..3")
    assert swapped.vector(1).tobytes() == (-trained.vector(1)).tobytes()


def test_notes_of_many_layers_are_one_warning(toy_model: ster.Model, pairs: ster.PairSet) -> None:
    with pytest.warns(ster.SterWarning) as caught:
        ster.train(toy_model, pairs, method="logistic")
    assert [str(warning.message) for warning in caught] == ["logistic: not converged after 300 steps (layers 0 to 3)"]
    with pytest.warns(ster.SterWarning, match=r"^pca: one pair has no principal component; the mean difference was used, at layer 2$"):
        ster.train(toy_model, pairs.pairs and [(pairs.pairs[0].positive, pairs.pairs[0].negative)], 2, method="pca")


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"method": "magic"}, InputError, 'unknown training method "magic"; expected caa, pca, or logistic'),
        ({"layers": "4"}, LayerError, r"layer 4 is outside the model's 0..3 range"),
        ({"layers": []}, LayerError, "at least one layer is required"),
        ({"layers": "2..1"}, InputError, 'layer range "2..1" must have start < end'),
        ({"layers": "x"}, InputError, 'invalid layer "x"'),
    ],
)
def test_refusals_before_the_first_pass(
    toy_model: ster.Model, pairs: ster.PairSet, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type, sentence: str
) -> None:
    monkeypatch.setattr(ster.Model, "forward", None)
    with pytest.raises(error, match=f"^{sentence}$"):
        ster.train(toy_model, pairs, **options)


def test_a_side_that_cannot_run_is_named_before_the_first_pass(
    toy_model: ster.Model, pairs: ster.PairSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ster.Model, "forward", None)
    long = "the " * 300
    with pytest.raises(ContextError, match="^prompt contains 300 tokens, model context allows fewer than 256: pair 8, negative side$"):
        ster.train(toy_model, ster.PairSet((*pairs.pairs, Pair("the sea", long))))
    messages = [{"role": "user", "content": "the sea"}]
    with pytest.raises(InputError, match="^chat messages need a chat template, which is not in this checkpoint: pair 0, positive side$"):
        ster.train(toy_model, [(messages, "the sea")])
    with pytest.raises(InputError, match="pair set contains an empty positive or negative prompt"):
        ster.train(toy_model, [("the sea", " ")])
    with pytest.raises(InputError, match="pair set contains no pairs"):
        ster.train(toy_model, [])


def test_sides_that_do_not_differ_are_refused_with_the_layer(toy_model: ster.Model) -> None:
    with pytest.raises(InputError, match="^training produced a zero or non-finite direction at layer 1$"):
        ster.train(toy_model, [("the sea", "the sea"), ("calm", "calm")], "1..3")


def test_messages_are_rendered_as_they_stand(toy_copy: Path) -> None:
    turn = "{{ {'user': 'question', 'assistant': 'answer'}[m.role] }} : {{ m.content }} . "
    opening = "{% if add_generation_prompt %}answer :{% endif %}"
    (toy_copy / "chat_template.jinja").write_text("{% for m in messages %}" + turn + "{% endfor %}" + opening)
    model = ster.load(toy_copy)
    user = {"role": "user", "content": "describe the sea"}
    sides: list[Any] = [[user, {"role": "assistant", "content": "calm"}], [user], "describe the sea"]
    ids = model.side_tokens(sides, ["a", "b", "c"])
    assert [model.decode(each) for each in ids] == [
        "question : describe the sea . answer : calm .",
        "question : describe the sea .",
        "question : describe the sea . answer :",
    ]
    storm: list[Any] = [user, {"role": "assistant", "content": "storm"}]
    artifact = ster.train(model, [(sides[0], storm), (sides[2], "describe the storm")], 2)
    assert artifact.chat_template == "applied"
    rows = model.last_rows(model.side_tokens([sides[0], storm, sides[2], "describe the storm"], ["x"] * 4), [2], ["x"] * 4)[:, 0]
    assert artifact.vector(2).tobytes() == caa(rows[::2], rows[1::2]).direction.tobytes()


# optimize


def test_optimize_picks_the_published_winner(toy_model: ster.Model, pairs: ster.PairSet) -> None:
    found = ster.optimize(toy_model, pairs)
    assert (found.artifact.method, found.artifact.layers) == ("caa", [3])
    assert found.artifact.vectors[0].train_margin == pytest.approx(0.92032135, abs=1e-6)
    assert found.artifact.vectors[0].train_accuracy == 0.875
    assert [(c.layer, c.method) for c in found.candidates] == [(layer, m) for layer in range(4) for m in ("caa", "pca", "logistic")]
    assert [c.selected for c in found.candidates].count(True) == 1
    document = json.loads(json.dumps(found.to_dict()))
    assert list(document["selection"]["candidates"][0]) == ["layer", "method", "holdout_accuracy", "holdout_margin", "selected"]
    assert document["selection"]["holdout_pairs"] == 2 and document["selection"]["train_pairs"] == 6
    assert document["method"] == "caa" and document["vectors"][0]["layer"] == 3
    assert document["metadata"]["holdout_accuracy"] == "1.0" and document["metadata"]["selected_from"] == "12 candidates"
    assert found.ranking.notes[0].startswith("4 layers reach the winner's accuracy and the largest margin decided")
    assert found.ranking.notes[1:] == ("logistic: not converged after 300 steps",)


def test_optimize_is_the_same_every_time_and_the_artifact_is_train_s(toy_model: ster.Model, pairs: ster.PairSet) -> None:
    found = ster.optimize(toy_model, pairs, methods=["caa"], folds=4)
    again = ster.optimize(toy_model, pairs, methods=["mean-difference"], folds=4)
    assert found.to_dict() == again.to_dict()
    layer = found.artifact.layers[0]
    assert found.artifact.vector(layer).tobytes() == ster.train(toy_model, pairs, layer).vector(layer).tobytes()
    assert found.to_dict()["selection"]["folds"] == 4


def test_one_capture_serves_every_candidate(toy_model: ster.Model, pairs: ster.PairSet, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    forward = ster.Model.forward
    monkeypatch.setattr(ster.Model, "forward", lambda self, batch, names: calls.append(len(batch)) or forward(self, batch, names))
    ster.optimize(toy_model, pairs)
    assert sum(calls) <= 17


def test_optimize_refuses(toy_model: ster.Model, pairs: ster.PairSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ster.Model, "forward", None)
    few = ster.PairSet(pairs.pairs[:3])
    with pytest.raises(InputError, match="^optimization requires at least four contrastive pairs$"):
        ster.optimize(toy_model, few)
    with pytest.raises(InputError, match="^holdout must be more than 0 and less than 1, found 1$"):
        ster.optimize(toy_model, pairs, holdout=1.0)
    with pytest.raises(InputError, match="^unknown training method"):
        ster.optimize(toy_model, pairs, methods=["caa", "x"])
    with pytest.raises(InputError, match="^the split leaves no pair to train on$"):
        ster.optimize(toy_model, ster.PairSet((pairs.pairs[0],) * 5))


# evaluate


def test_evaluate_scores_every_layer(toy_model: ster.Model, pairs: ster.PairSet, trained: ster.SteeringArtifact) -> None:
    report = ster.evaluate(toy_model, pairs, trained)
    assert [layer.layer for layer in report.layers] == [1, 2]
    assert [layer.score.accuracy for layer in report.layers] == [0.875, 0.875]
    assert [layer.score.margin for layer in report.layers] == pytest.approx([0.55983764, 0.76135504], abs=1e-6)
    assert [layer.train_margin for layer in report.layers] == [layer.score.margin for layer in report.layers]
    assert report.strengths == () and report.picked is None and report.neutral is None
    assert report.notes == ("these are the pairs the artifact was trained on: its figures here are training figures",)
    document = json.loads(json.dumps(report.to_dict()))
    assert list(document["layers"][0])[:4] == ["layer", "pairs", "independent", "right"]
    others = ster.evaluate(toy_model, ster.PairSet(pairs.pairs[:4]), trained, layers="2")
    assert [layer.layer for layer in others.layers] == [2] and others.notes == ()


def test_evaluate_steers_at_every_strength(toy_model: ster.Model, pairs: ster.PairSet, trained: ster.SteeringArtifact) -> None:
    report = ster.evaluate(toy_model, pairs, trained, [-2.0, 0.0, 1.0], neutral=NEUTRAL)
    assert [row.strength for row in report.strengths] == [-2.0, 0.0, 1.0]
    down, nothing, up = report.strengths
    assert (nothing.share, nothing.mean_shift, nothing.mean_kl) == (0.5, 0.0, pytest.approx(0.0, abs=1e-12))
    assert nothing.perplexity_ratio == pytest.approx(1.0)
    assert up.multipliers == {1: 1.0, 2: 1.0} and down.mean_kl > 0
    assert report.neutral is not None and (report.neutral.source, report.neutral.texts, report.neutral.tokens) == ("given", 2, 14)
    best = max(report.strengths, key=lambda row: (row.share, row.mean_shift))
    assert report.picked == best.strength and best.picked
    # By hand, for one pair.
    tokens = [toy_model.prompt_tokens(str(side)) for side in (pairs.pairs[0].positive, pairs.pairs[0].negative)]
    assert tokens[0][0] == tokens[1][0] and tokens[0][1] != tokens[1][1]  # "the" is shared
    gains = []
    for ids in tokens:
        sums = []
        for steering in (None, trained.at(strength=1.0)):
            logits = toy_model.trace(ids, None, steering=steering, logits=True).logits
            assert logits is not None
            wide = logits.astype(np.float64)
            log_p = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
            sums.append(log_p[np.arange(len(ids) - 1), ids[1:]].sum())
        gains.append(sums[1] - sums[0])
    one = ster.evaluate(toy_model, ster.PairSet(pairs.pairs[:1]), trained, [1.0], neutral=NEUTRAL)
    assert one.strengths[0].mean_shift == pytest.approx(gains[0] - gains[1], abs=1e-9)
    assert one.strengths[0].mean_shift_per_token == pytest.approx(gains[0] / 7 - gains[1] / 8, abs=1e-9)
    assert one.strengths[0].mean_shift_interval is None


def test_strengths_in_residual_norms(toy_model: ster.Model, pairs: ster.PairSet, trained: ster.SteeringArtifact) -> None:
    in_norms = ster.evaluate(toy_model, pairs, trained, [0.5], neutral=NEUTRAL, units="norm", layers=2)
    factor = 0.5 * (trained.residual_norm(2) or 0)
    assert in_norms.strengths[0].multipliers == pytest.approx({2: factor}, rel=1e-6)
    absolute = ster.evaluate(toy_model, pairs, trained, [in_norms.strengths[0].multipliers[2]], neutral=NEUTRAL, layers=2)
    assert absolute.strengths[0].mean_shift == pytest.approx(in_norms.strengths[0].mean_shift, rel=1e-6)


def test_steering_is_added_up_over_layers(toy_model: ster.Model, pairs: ster.PairSet, trained: ster.SteeringArtifact) -> None:
    norms = [trained.residual_norm(layer) or 0.0 for layer in (1, 2)]
    assert evaluation.residual_sum(trained, -0.2, "norm") == pytest.approx(0.4)
    assert evaluation.residual_sum(trained, -2.0) == pytest.approx(2 / norms[0] + 2 / norms[1])
    bare = trained.with_metadata(**{f"residual_norm.{layer}": "" for layer in (1, 2)})
    assert evaluation.residual_sum(bare, 2.0) is None
    assert evaluation.residual_sum(bare, 2.0, norms={1: 4.0, 2: 8.0}) == pytest.approx(0.75)
    report = ster.evaluate(toy_model, pairs, trained, [-0.4, 0.2, 0.5], neutral=NEUTRAL, units="norm")
    assert any(note.startswith("strength -0.4, 0.5: over 2 layers that adds up to more than 0.6 residual norms") for note in report.notes)
    alone = ster.evaluate(toy_model, pairs, trained, [0.2, 0.3], neutral=NEUTRAL, units="norm")
    assert not any("residual norms" in note for note in alone.notes)


def test_a_vector_of_another_tool_is_measured_on_these_pairs(
    toy_model: ster.Model, pairs: ster.PairSet, trained: ster.SteeringArtifact
) -> None:
    from ster.steering_artifact import LayerVector

    bare = ster.SteeringArtifact("toy-llama", "", 64, (LayerVector(2, 5 * trained.vector(2)),))
    report = ster.evaluate(toy_model, pairs, bare, [0.5], neutral=NEUTRAL, units="norm")
    assert 5 * report.strengths[0].multipliers[2] == pytest.approx(0.5 * report.layers[0].residual_norm)
    assert "the artifact does not record residual norms: the unit is the mean norm of these pairs" in report.notes


def test_the_damage_limits_the_pick(toy_model: ster.Model, pairs: ster.PairSet, trained: ster.SteeringArtifact) -> None:
    report = ster.evaluate(toy_model, pairs, trained, [-8.0, 4.0], neutral=NEUTRAL, max_kl=1e-9)
    assert report.picked is None and not any(row.within_max_kl for row in report.strengths)
    assert any(note.startswith("no strength keeps the damage within 1e-09 nats; the smallest is") for note in report.notes)


def test_the_bundled_texts_are_plain_and_unknown_words_are_told(
    toy_model: ster.Model, pairs: ster.PairSet, trained: ster.SteeringArtifact
) -> None:
    texts = evaluation.bundled_neutral()
    assert len(texts) == 20 == len(set(texts)) and all(text.isascii() and text.endswith(".") for text in texts)
    report = ster.evaluate(toy_model, pairs, trained, [1.0])
    assert report.neutral is not None and (report.neutral.source, report.neutral.texts) == ("bundled", 20)
    assert any("tokens of the neutral texts are unknown to the tokenizer" in note for note in report.notes)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"strengths": []}, InputError, "at least one strength is required"),
        ({"strengths": [1.0, float("nan")]}, InputError, "strength must be finite, found nan"),
        ({"strengths": [1.0, 1.0]}, InputError, "strength 1 is given twice"),
        ({"max_kl": 0.0}, InputError, "max_kl must be more than 0, found 0"),
        ({"units": "sd"}, InputError, 'unknown units "sd"; expected absolute or norm'),
        ({"layers": "3"}, LayerError, "the artifact has no vector for layer 3"),
        ({"layers": "9"}, LayerError, r"layer 9 is outside the model's 0..3 range"),
        ({"strengths": [1.0], "neutral": []}, InputError, "prompt set contains no prompts"),
        ({"strengths": [1.0], "neutral": [""]}, InputError, r"prompt must not be empty: prompts\[0\]"),
    ],
)
def test_evaluate_refuses_before_the_first_pass(
    toy_model: ster.Model,
    pairs: ster.PairSet,
    trained: ster.SteeringArtifact,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    error: type,
    sentence: str,
) -> None:
    monkeypatch.setattr(ster.Model, "forward", None)
    with pytest.raises(error, match=f"^{sentence}$"):
        ster.evaluate(toy_model, pairs, trained, **options)


def test_evaluate_refuses_another_model_s_artifact(toy_model: ster.Model, pairs: ster.PairSet, trained: ster.SteeringArtifact) -> None:
    with pytest.raises(ArtifactError, match='^artifact was trained for model "toy-llama", current model is "toy-llama"$'):
        ster.evaluate(toy_model, pairs, trained.with_metadata(weights_hash="0" * 64))


def test_progress_of_all_three(toy_model: ster.Model, pairs: ster.PairSet, trained: ster.SteeringArtifact) -> None:
    for call in (
        lambda progress: ster.train(toy_model, pairs, progress=progress),
        lambda progress: ster.optimize(toy_model, pairs, methods=["caa"], progress=progress),
        lambda progress: ster.evaluate(toy_model, pairs, trained, [1.0], neutral=NEUTRAL, progress=progress),
    ):
        seen: list[tuple[int, int]] = []
        call(lambda done, total, seen=seen: seen.append((done, total)))
        assert (16, 16) in seen and seen[-1][0] == seen[-1][1]


def test_layers_in_words() -> None:
    assert workflow.spans([0, 1, 2, 5, 7, 8, 9, 10]) == "0, 1, 2, 5, 7 to 10"


def test_swapped_arguments_and_what_is_no_pair_are_told(toy_model: ster.Model, calm_pairs: Path) -> None:
    from ster.steering_artifact import LayerVector

    pairs = ster.PairSet.load(calm_pairs)
    artifact = ster.SteeringArtifact("toy-llama", "caa", 64, (LayerVector(1, np.ones(64, np.float32)),))
    calls: list[tuple[tuple[Any, Any], str]] = [
        ((artifact, pairs), "^evaluate takes a model, pairs and a SteeringArtifact, found the pairs and the artifact, swapped$"),
        ((pairs, "calm.json"), "^evaluate takes a model, pairs and a SteeringArtifact, found str$"),
        (("calm.json", artifact), r"^pairs must be a PairSet or a list of \(positive, negative\) tuples, found str$"),
        ((3, artifact), r"^pairs must be a PairSet or a list of \(positive, negative\) tuples, found int$"),
        ((["calm", "loud"], artifact), r"^a pair must be a Pair or a \(positive, negative\) tuple, found str \(pair 0\)$"),
        (([("a", "b"), ("a", "b", "c")], artifact), r"tuple, found 3 values \(pair 1\)$"),
    ]
    for arguments, sentence in calls:
        with pytest.raises(InputError, match=sentence):
            ster.evaluate(toy_model, *arguments)


def test_a_pair_set_takes_tuples() -> None:
    made = ster.PairSet([("calm sea", "storm"), ["a", "b"]])  # type: ignore[arg-type,list-item]
    assert [(pair.positive, pair.negative) for pair in made] == [("calm sea", "storm"), ("a", "b")]
    assert made == ster.PairSet(tuple(made)) and ster.PairSet(made) == made  # type: ignore[arg-type]


def test_every_module_is_an_attribute() -> None:
    import subprocess
    import sys

    folder = Path(ster.__file__).parent
    names = sorted(path.stem for path in folder.glob("[a-z]*") if path.suffix == ".py" or (path / "__init__.py").exists())
    assert "directions" in names and "cli" in names and set(names) <= set(dir(ster))
    code = f"import ster\nfor name in {names!r}: assert getattr(ster, name).__name__ == 'ster.' + name\nassert not hasattr(ster, 'no')"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_is_picked_where_nothing_moves(toy_model: ster.Model, pairs: ster.PairSet, trained: ster.SteeringArtifact) -> None:
    report = ster.evaluate(toy_model, pairs, trained, [0.0], neutral=NEUTRAL)
    assert not any(row.picked for row in report.strengths)
    assert report.strengths[0].share_interval[0] < 0.5 < report.strengths[0].share_interval[1]
    assert any("moves these pairs at all" in note for note in report.notes)


def test_neutral_texts_must_have_something_to_predict(toy_model: ster.Model, pairs: ster.PairSet, trained: ster.SteeringArtifact) -> None:
    with pytest.raises(InputError, match="two tokens or more"):
        ster.evaluate(toy_model, pairs, trained, [1.0], neutral=["sea"])

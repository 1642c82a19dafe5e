"""Over `ster serve`, with float32 on the wire, nothing tells a model behind a server from one that is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harvesting import PROMPTS, contents
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Client, continued, running, until

import ster
from ster.errors import InputError, RemoteError
from ster.server.settings import Settings

POINTS = ["pre_steer", "post_steer"]


@pytest.fixture(scope="module")
def remote(served: Client) -> Iterator[ster.RemoteModel]:
    """The model behind `ster serve`, for all tests of this file."""
    with ster.connect(served.url) as model:
        yield model


@pytest.mark.parametrize("position", ["last", "mean", "all"])
def test_activations_have_the_same_bits(remote: ster.RemoteModel, toy_model: ster.Model, position: Any) -> None:
    found, own = (ster.extract(model, PROMPTS, "0,2,-1", position=position) for model in (remote, toy_model))
    assert (found.layers, found.prompts, found.source) == (own.layers, own.prompts, own.source)
    for a, b in zip(found.values, own.values, strict=True):
        assert a.dtype == np.float32 and a.shape == b.shape and a.tobytes() == b.tobytes()
    if position == "all":
        assert found.token_ids == own.token_ids


@pytest.mark.parametrize("concurrency", [1, 3, 32])
def test_how_many_requests_run_at_once_changes_nothing(served: Client, toy_model: ster.Model, words: Any, concurrency: int) -> None:
    prompts = [words(count % 23 + 1, seed=count) for count in range(60)]
    with ster.connect(served.url, concurrency=concurrency) as model:
        assert model.activations(prompts).values.tobytes() == toy_model.activations(prompts).values.tobytes()


def test_trained_artifacts_are_the_same_to_the_byte(remote: ster.RemoteModel, toy_model: ster.Model, calm_pairs: Path) -> None:
    pairs = ster.PairSet.load(calm_pairs)
    for work in (ster.train, lambda model, pairs: ster.optimize(model, pairs).artifact):
        assert work(remote, pairs).to_json() == work(toy_model, pairs).to_json()


def test_ignore_eos_is_refused_by_its_name(remote: ster.RemoteModel) -> None:
    with pytest.raises(InputError, match="ignore_eos cannot be used"):
        remote.generate("the sea", max_new_tokens=2, ignore_eos=True)
    with pytest.raises(InputError, match="ignore_eos cannot be used"):
        list(remote.stream("the sea", max_new_tokens=2, ignore_eos=True))


def test_an_evaluation_differs_in_the_kl_alone(remote: ster.RemoteModel, toy_model: ster.Model, calm_pairs: Path) -> None:
    pairs = ster.PairSet.load(calm_pairs)
    artifact = ster.train(toy_model, pairs, [1, 2])
    neutral = ["the sea is calm .", "storm waves", "the harbor"]
    for units in ("absolute", "norm"):
        found, own = (
            ster.evaluate(model, pairs, artifact, [0.5, -2.0], neutral=neutral, units=units).to_dict() for model in (remote, toy_model)
        )
        for a, b in zip(found.pop("strengths"), own.pop("strengths"), strict=True):
            for name in ("mean_kl", "within_max_kl", "picked"):
                assert not a.pop(name) and b.pop(name) is not None
            for key, value in b.items():
                # Both sum float64 logarithms of the same logits, in another order.
                assert a[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key
        assert found.pop("picked") is None and own.pop("picked") is not None
        assert found["neutral"].pop("perplexity") == pytest.approx(own["neutral"].pop("perplexity"), rel=1e-12)
        notes = found.pop("notes")
        assert [note for note in notes if note not in own["notes"]] == [
            "the KL is left out and no strength is picked: a server does not tell whole distributions; judge by the perplexity"
        ]
        own.pop("notes")
        assert found == own
    assert ster.evaluate(remote, pairs, artifact).to_dict() == ster.evaluate(toy_model, pairs, artifact).to_dict()


def test_harvests_are_the_same_to_the_byte(remote: ster.RemoteModel, toy_model: ster.Model, tmp_path: Path) -> None:
    for name, options in {
        "all": {},
        "some": {"positions": [0, -1], "layers": "0,3", "dtype": "bf16"},
        "last": {"positions": "last"},
    }.items():
        for place, model in (("here", toy_model), ("there", remote)):
            ster.harvest(model, PROMPTS, tmp_path / place / name, shard_size=3, **options)  # type: ignore[arg-type]
        assert contents(tmp_path / "here" / name) == contents(tmp_path / "there" / name)


def test_a_template_that_is_not_there_cannot_be_switched_off(toy_model: ster.Model) -> None:
    with running({"toy-llama": lambda: toy_model}) as server, ster.connect(server.url, chat_template="off") as there:
        assert there.chat_template == "absent"


def test_a_checkpoint_in_bf16_with_a_template(chatting: Path, toy_dir: Path, calm_pairs: Path, tmp_path: Path) -> None:
    model = ster.load(chatting, precision="bf16")
    sides = [[{"role": "user", "content": "the sea"}, {"role": "assistant", "content": word}] for word in ("calm", "storm")]
    with running({"chat": lambda: model}) as server, ster.connect(server.url) as there:
        assert (there.chat_template, there.precision, there.name) == ("applied", "bf16", "copy")
        assert there.prompt_tokens("the sea") == model.prompt_tokens("the sea")
        pairs = [(sides[0], sides[1]), ("calm", "storm")]
        assert ster.train(there, pairs).to_json() == ster.train(model, pairs).to_json()
        for place, each in (("here", model), ("there", there)):
            ster.harvest(each, PROMPTS, tmp_path / place)
        assert contents(tmp_path / "here") == contents(tmp_path / "there")
        messages = [{"role": "user", "content": "the sea"}]
        assert there.generate(messages, max_new_tokens=4).token_ids == model.generate(messages, max_new_tokens=4).token_ids
        with ster.connect(server.url, tokenizer=chatting) as own:
            assert own.prompt_tokens("the sea") == model.prompt_tokens("the sea")
            assert own.chat_tokens(messages, add_generation_prompt=False) == model.chat_tokens(messages, add_generation_prompt=False)
        with ster.connect(server.url, chat_template="off") as raw:
            assert raw.chat_template == "off" and raw.prompt_tokens("the sea") == model.encode("the sea")
            with pytest.raises(InputError, match=r"^chat messages need a chat template, which is switched off$"):
                raw.generate(messages)
        with pytest.raises(InputError, match="makes other tokens than the server's"):
            ster.connect(server.url, tokenizer=toy_dir)


positions = st.one_of(
    st.none(),
    st.sampled_from(["prompt", "answer", "generated"]),
    st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True),
    st.just([(2, None)]),
)
terms = st.tuples(st.integers(0, 3), st.sampled_from([0.0, -0.0, 0.3, -2.0, 7.25]), positions, st.booleans(), st.integers(0, 9))


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=st.lists(terms, min_size=1, max_size=6), point=st.sampled_from(POINTS), layers=st.sampled_from(["all", "1,3", "0"]))
def test_steered_texts_and_reads_are_the_same(
    remote: ster.RemoteModel, toy_model: ster.Model, chosen: list[Any], point: Any, layers: str
) -> None:
    plan = ster.Steering(())
    for layer, strength, places, norm_match, seed in chosen:
        vector = np.random.default_rng(seed).standard_normal(64)
        plan = plan + ster.steer(vector, layer, strength=strength, positions=places, norm_match=norm_match)
    prompt = "the sea is calm"
    found, own = (
        model.generate(prompt, plan, max_new_tokens=5, layers=layers, point=point, temperature=0.7, seed=3) for model in (remote, toy_model)
    )
    assert found.token_ids == own.token_ids and found.finish_reason == own.finish_reason and found.seed == own.seed
    assert found.steered == own.steered and found.trace is not None and own.trace is not None
    assert (found.trace.token_ids, found.trace.tokens, found.trace.steered) == (own.trace.token_ids, own.trace.tokens, own.trace.steered)
    assert found.trace.residual.tobytes() == own.trace.residual.tobytes()
    rows = len(own.trace.token_ids)
    if all(place < rows for edit in plan.edits(rows=rows) for place in edit.positions or ()):  # all are the prompt's now
        traces = [model.trace(own.trace.token_ids, layers, steering=plan, point=point) for model in (remote, toy_model)]
        assert traces[0].residual.tobytes() == traces[1].residual.tobytes() and traces[0].steered == traces[1].steered


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5, "top_k": 9, "min_p": 0.01}, {"stop": "question"}])
def test_texts_go_on_from_their_prompt(remote: ster.RemoteModel, toy_model: ster.Model, options: dict[str, Any]) -> None:
    prompt = "a gentle breeze over the lake ."
    found, own = (model.generate(prompt, max_new_tokens=12, **options) for model in (remote, toy_model))
    assert (found.token_ids, found.finish_reason) == (own.token_ids, own.finish_reason)
    assert found.text == continued(toy_model, own)
    steps = list(remote.stream(prompt, max_new_tokens=12, **options))
    assert "".join(step.text for step in steps) == found.text
    assert [step.token_id for step in steps] == own.token_ids and steps[-1].finish_reason == own.finish_reason
    assert {step.finish_reason for step in steps[:-1]} <= {None}


def test_streams_tell_where_they_were_steered(remote: ster.RemoteModel, toy_model: ster.Model) -> None:
    plan = ster.steer(np.ones(64), 2, positions="answer") + ster.steer(np.ones(64), 1)
    found, own = (
        [step.steered for step in model.stream("the sea is calm", plan, max_new_tokens=4, ignore_eos=False)]
        for model in (remote, toy_model)
    )
    assert found == own


def test_a_cap_splits_reads_and_changes_no_bit(toy_model: ster.Model, tmp_path: Path) -> None:
    plan = ster.steer(np.ones(64), 1, strength=2.0)
    with running({"toy": lambda: toy_model}, Settings(max_capture_numbers=64 * 10 * 2)) as server, ster.connect(server.url) as model:
        prompts = [prompt for prompt in PROMPTS if len(prompt.split()) < 9]
        assert model.activations(prompts).values.tobytes() == toy_model.activations(prompts).values.tobytes()
        for point in POINTS:
            found, own = (each.generate("the sea", plan, max_new_tokens=6, layers="all", point=point) for each in (model, toy_model))  # type: ignore[arg-type]
            assert found.trace and own.trace and found.trace.residual.tobytes() == own.trace.residual.tobytes()
        with pytest.raises(InputError, match=r"^31 tokens of one layer are more than an answer may have, 1,280 numbers: prompts\[1\]$"):
            model.activations(["calm", "calm " * 30])


def test_what_the_wire_costs_is_said(served: Client, toy_model: ster.Model, calm_pairs: Path, tmp_path: Path) -> None:
    from lens_stub import rounded

    with ster.connect(served.url, wire_dtype="bfloat16") as model:
        whole, own = (each.activations(PROMPTS, position="all") for each in (model, toy_model))
        for a, b in zip(whole.values, own.values, strict=True):
            assert a.tobytes() == rounded(b).tobytes()
        said = {"wire_dtype": "bfloat16", "wire_rounding": "2^-8 relative"}
        assert whole.source.wire == said and own.source.wire == {}
        found = model.activations(PROMPTS)
        for suffix in ("npz", "safetensors"):
            assert ster.ActivationArtifact.load(found.save(tmp_path / f"a.{suffix}")).source == found.source
        artifact = ster.train(model, ster.PairSet.load(calm_pairs))
        assert said.items() <= artifact.metadata.items()
        assert said.items() <= ster.harvest(model, PROMPTS, tmp_path / "h").manifest.items()
    with pytest.raises(InputError, match="was begun with wire dtype bfloat16, now none"):
        ster.harvest(toy_model, PROMPTS, tmp_path / "h")


def test_an_artifact_knows_its_model_through_a_server(remote: ster.RemoteModel, toy_model: ster.Model, calm_pairs: Path) -> None:
    artifact = ster.train(toy_model, ster.PairSet.load(calm_pairs), [1])
    remote.check_artifact(artifact)
    with pytest.raises(ster.SterError, match='artifact was trained for model "toy-llama", current model is "toy-llama"'):
        remote.generate("the sea", artifact.with_metadata(weights_hash="0" * 64), max_new_tokens=1)


def test_refusals_are_those_of_a_model_here(remote: ster.RemoteModel, toy_model: ster.Model) -> None:
    cases: list[Callable[[Any], object]] = [
        lambda model: model.activations([]),
        lambda model: model.activations(["the", ""]),
        lambda model: model.activations(["the"], "7"),
        lambda model: model.activations(["the", "calm " * 300]),
        lambda model: model.generate("the", max_new_tokens=0),
        lambda model: model.generate([1, 67]),
        lambda model: model.generate("the", ster.steer(np.ones(63), 1)),
        lambda model: model.generate("the", ster.steer(np.ones(64), 4)),
        lambda model: model.generate("the", ster.steer(np.ones(64), 1, positions=9), max_new_tokens=2),
        lambda model: model.generate("the", point="between"),
        lambda model: model.trace("the", steering=ster.steer(np.ones(63), 1)),
        lambda model: model.generate([{"role": "user", "content": "the"}]),
    ]
    for case in cases:
        with pytest.raises(ster.SterError) as own:
            case(toy_model)
        with pytest.raises(type(own.value)) as found:
            case(remote)
        assert "chat" in str(own.value) or str(found.value).partition(" (id")[0] == str(own.value).partition(" (id")[0]


def test_what_a_server_cannot_do_is_refused(remote: ster.RemoteModel) -> None:
    for work, message in [
        (lambda: remote.trace("the", logits=True), "a server does not tell logits"),
        (lambda: remote.stream("the", layers="all"), "a server sends activations when the text has ended"),
        (lambda: remote.generate("the", seed=2**63), "a server takes seeds up to"),
        (lambda: remote.generate("the", _many(9)), "takes 9 vectors of a request, and the server allows 8"),
        (lambda: remote.generate("the", ster.steer(np.full(64, 1e30), 1, strength=1e30)), "times 1e\\+30 is larger than float32"),
    ]:
        with pytest.raises(InputError, match=message):
            work()


def _many(count: int) -> ster.Steering:
    """As many norm-matched terms that cannot share a vector."""
    plan = ster.Steering(())
    for index in range(count):
        plan = plan + ster.steer(np.ones(64), 1, strength=1.0 + index, norm_match=True)
    return plan


def test_a_model_of_several_by_its_id_or_its_checkpoint(toy_model: ster.Model, chatting: Path) -> None:
    with running({"a": lambda: toy_model, "b/c": chatting}) as server:
        found = [ster.connect(server.url, name) for name in (None, "b/c", "copy")]
        assert [model.server.id for model in found] == ["a", "b/c", "b/c"]
        assert found[1].hash_weights() == toy_model.weights_hash and found[1].chat_template == "applied"
        assert "RemoteModel copy at http://127.0.0.1:" in repr(found[1])
        for model in found:
            model.close()


def test_a_model_that_is_loading_is_waited_for(toy_dir: Path) -> None:
    servers: list[Client] = []

    def load() -> ster.Model:
        until(lambda: servers and servers[0].models[0].waiting)
        return ster.load(toy_dir)

    with running({"toy": load}, wait=False) as server:
        servers.append(server)
        with ster.connect(server.url) as model:
            assert model.layer_count == 4


def test_a_model_that_failed_to_load_is_told_of(tmp_path: Path) -> None:
    with running({"toy": tmp_path / "nowhere"}) as server, pytest.raises(RemoteError, match="the model toy failed to load"):
        ster.connect(server.url)

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ster
from ster._safetensors import safetensors_bytes
from ster.errors import CheckpointError, ContextError, InputError, LayerError, NonFiniteError
from ster.toy import WORDS, tensors

PROMPT = "the sea is calm and quiet tonight ."
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=30).map(" ".join)


@settings(max_examples=25, deadline=None)
@given(prompts=st.lists(texts, min_size=1, max_size=60))
def test_a_prompt_alone_equals_the_prompt_in_any_list(toy_model: ster.Model, prompts: list[str]) -> None:
    acts = toy_model.activations(prompts)
    assert acts.prompts == prompts
    assert acts.values.shape == (len(prompts), 4, 64)
    assert acts.values.dtype == np.float32 and acts.values.flags.c_contiguous
    for index in {0, len(prompts) // 2, len(prompts) - 1}:
        assert toy_model.activations([prompts[index]]).values[0].tobytes() == acts.values[index].tobytes()


@settings(max_examples=25, deadline=None)
@given(prompt=texts)
def test_last_mean_and_all_are_readings_of_one_trace(toy_model: ster.Model, prompt: str) -> None:
    trace = toy_model.trace(prompt)
    assert trace.token_ids == toy_model.prompt_tokens(prompt)
    assert trace.residual.shape == (4, len(trace.token_ids), 64)
    assert trace.logits is None
    every = toy_model.activations([prompt], position="all")
    assert every.values[0].tobytes() == trace.residual.tobytes()
    assert every.token_ids == [trace.token_ids]
    assert toy_model.activations([prompt]).values[0].tobytes() == np.ascontiguousarray(trace.residual[:, -1]).tobytes()
    mean = trace.residual.astype(np.float64).mean(axis=1)
    assert np.abs(toy_model.activations([prompt], position="mean").values[0] - mean).max() <= 2**-24 * np.abs(mean).max()


def test_layers_are_the_same_values_whatever_else_is_asked_for(toy_model: ster.Model) -> None:
    every = toy_model.activations([PROMPT]).values
    for layers in ("0", "3", "1..3", [0, 2], -1):
        acts = toy_model.activations([PROMPT], layers)
        assert acts.values.tobytes() == np.ascontiguousarray(every[:, acts.layers]).tobytes()


def test_the_attributes(toy_model: ster.Model, toy_dir: Path) -> None:
    assert (toy_model.layer_count, toy_model.hidden_size, toy_model.vocab_size, toy_model.context_length) == (4, 64, 67, 256)
    assert (toy_model.name, toy_model.revision, toy_model.chat_template, toy_model.precision) == ("toy-llama", None, "absent", "f32")
    assert toy_model.path == toy_dir
    assert repr(toy_model) == "<ster.Model toy-llama: 4 layers, hidden 64, f32 weights>"
    assert toy_model.decode(toy_model.encode("<s> the sea")) == "the sea"
    source = toy_model.activations([PROMPT]).source
    assert (source.model, source.chat_template, source.precision) == ("toy-llama", "absent", "f32")


def test_progress_counts_prompts_up_to_all_of_them(toy_model: ster.Model, words: Callable[..., str]) -> None:
    prompts = [words(100 + index, index) for index in range(25)] + [PROMPT] * 5
    calls: list[tuple[int, int]] = []
    toy_model.activations(prompts, progress=lambda done, total: calls.append((done, total)))
    assert calls[0] == (0, 30) and calls[-1] == (30, 30) and len(calls) > 2
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_nothing_runs_when_one_prompt_cannot(toy_model: ster.Model, words: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("the engine ran")

    monkeypatch.setattr(toy_model, "forward", never)
    bad: list[tuple[list[Any], str]] = [
        (["the", ""], "prompt must not be empty: prompts[1]"),
        (["the", 3], "prompts[1] must be a string, found a number"),
        (["the", " "], "tokenizer produced no tokens: prompts[1]"),
        (["the", words(256)], "prompt contains 256 tokens, model context allows fewer than 256: prompts[1]"),
    ]
    for prompts, sentence in bad:
        with pytest.raises(InputError) as caught:
            toy_model.activations(prompts)
        assert str(caught.value) == sentence
    with pytest.raises(LayerError, match=r"layer 4 is outside the model's 0\.\.3 range"):
        toy_model.activations(["the"], 4)
    with pytest.raises(LayerError, match="at least one layer is required"):
        toy_model.activations(["the"], [])
    with pytest.raises(InputError, match='unknown position "first"; expected last, mean or all'):
        toy_model.activations(["the"], position="first")  # type: ignore[call-overload]


def test_the_longest_prompt_the_context_allows_runs(toy_model: ster.Model, words: Callable[..., str]) -> None:
    assert toy_model.activations([words(255)]).values.shape == (1, 4, 64)
    with pytest.raises(ContextError) as caught:
        toy_model.trace(words(256))
    assert str(caught.value) == "prompt contains 256 tokens, model context allows fewer than 256"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_no_number_is_named_by_layer_token_and_prompt(toy_copy: Path, value: float) -> None:
    weights = tensors()
    weights["model.layers.2.mlp.down_proj.weight"][5, 7] = value
    (toy_copy / "model.safetensors").write_bytes(safetensors_bytes(weights, {"format": "pt"}))
    model = ster.load(toy_copy)
    with pytest.raises(NonFiniteError, match=r"layer 2 .*token 0 .*prompts\[[01]\]"):
        model.activations(["the sea", "storm waves crash"])
    assert np.isfinite(model.activations(["the sea"], "0..2").values).all()  # a weight that is not used does no harm
    weights = tensors()
    weights["model.embed_tokens.weight"][3] = value  # `the`
    (toy_copy / "model.safetensors").write_bytes(safetensors_bytes(weights, {"format": "pt"}))
    model = ster.load(toy_copy)
    with pytest.raises(NonFiniteError, match=r"layer 0 .*token 1 \(id 3\) of prompts\[2\]"):
        model.activations(["sea", "storm waves crash loud", "in the"])
    with pytest.raises(NonFiniteError, match="of the prompt"):
        model.trace("the")


def test_an_unknown_precision_is_refused(toy_dir: Path) -> None:
    assert ster.load(toy_dir, precision="f32").precision == ster.load(toy_dir).precision == "f32"
    with pytest.raises(InputError, match='unknown precision "f64"; expected auto, f32, bf16 or f16'):
        ster.load(toy_dir, precision="f64")  # type: ignore[arg-type]


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_precision_rounds_every_weight_as_if_it_had_been_stored_so(
    toy_copy: Path, change: Callable[..., None], precision: Any, dtype: Any, family: str
) -> None:
    """NumPy and ml_dtypes round to the nearest, ties to even, as torch does."""
    weights = tensors()
    if family == "gemma2":
        change(toy_copy / "config.json", model_type=family, head_dim=16, sliding_window=16, query_pre_attn_scalar=16)
        for layer in range(4):
            for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                weights[f"model.layers.{layer}.{norm}.weight"] = np.random.default_rng(layer).normal(0, 0.1, 64).astype(np.float32)
    weights["model.layers.0.mlp.up_proj.weight"][0, :4] = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 2**-30]  # ties, and what vanishes in f16
    half = {name: array.astype(dtype) for name, array in weights.items()}
    (toy_copy / "model.safetensors").write_bytes(safetensors_bytes(weights, {"format": "pt"}))
    rounded = ster.load(toy_copy, precision=precision)
    found = rounded.trace("the sea is calm and quiet tonight .", logits=True)
    assert rounded.precision == precision
    exact = ster.load(toy_copy).trace("the sea is calm and quiet tonight .").residual
    wide = {name: array.astype(np.float32) for name, array in half.items()}
    (toy_copy / "model.safetensors").write_bytes(safetensors_bytes(wide, {"format": "pt"}))
    stored = ster.load(toy_copy).trace("the sea is calm and quiet tonight .", logits=True)
    assert found.residual.tobytes() == stored.residual.tobytes() != exact.tobytes()
    assert found.logits is not None and stored.logits is not None and found.logits.tobytes() == stored.logits.tobytes()


def test_rounding_says_how_far_it_is_and_can_be_ended(toy_dir: Path) -> None:
    seen: list[tuple[int, int]] = []
    ster.load(toy_dir, precision="bf16", progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == 2 + 4 * 7 and seen == sorted(seen) and len({total for _, total in seen}) == 1
    assert 0.98 * seen[-1][1] < seen[-1][0] <= seen[-1][1]  # norms are not counted

    def stop(done: int, total: int) -> None:
        seen.append((done, total))
        raise KeyboardInterrupt

    seen.clear()
    with pytest.raises(KeyboardInterrupt):
        ster.load(toy_dir, precision="bf16", progress=stop)
    assert len(seen) == 1


def test_a_weight_too_large_for_f16_is_refused_by_name(toy_copy: Path) -> None:
    for name, place in (("model.layers.1.mlp.up_proj.weight", (0, 1)), ("model.norm.weight", (5,))):
        weights = tensors()
        weights[name][place] = 70000.0
        (toy_copy / "model.safetensors").write_bytes(safetensors_bytes(weights, {"format": "pt"}))
        ster.load(toy_copy, precision="bf16")
        with pytest.raises(CheckpointError, match=f"tensor `{name}` holds 70000, which is too large for F16"):
            ster.load(toy_copy, precision="f16")


def test_weights_stored_in_half_run_as_they_are(toy_copy: Path, change: Callable[..., None]) -> None:
    weights = {name: array.astype(np.float16) for name, array in tensors().items()}
    (toy_copy / "model.safetensors").write_bytes(safetensors_bytes(weights, {"format": "pt"}))
    half = ster.load(toy_copy, precision="f16")
    assert half.precision == "f16"
    values = half.activations([PROMPT]).values
    wide = {name: array.astype(np.float32) for name, array in weights.items()}
    (toy_copy / "model.safetensors").write_bytes(safetensors_bytes(wide, {"format": "pt"}))
    assert ster.load(toy_copy).activations([PROMPT]).values.tobytes() == values.tobytes()


def test_options_that_make_no_sense(toy_dir: Path) -> None:
    for threads in (0, -1, True, 1.5, "2", 1025, 2**70):
        with pytest.raises(InputError) as caught:
            ster.load(toy_dir, threads=threads)  # type: ignore[arg-type]
        assert str(caught.value) == f"threads must be between 1 and 1024, found {threads!r}"
    assert ster.load(toy_dir, threads=np.int64(2)).engine.threads == 2  # type: ignore[arg-type]
    from ster.model import MAX_THREADS

    with pytest.raises(InputError, match=f"threads must be between 1 and {MAX_THREADS}, found"):
        ster._native.Engine(str(toy_dir), threads=MAX_THREADS + 1)  # the engine agrees
    with pytest.raises(InputError, match='unknown chat template mode "on"; expected auto or off'):
        ster.load(toy_dir, chat_template="on")  # type: ignore[arg-type]


def test_a_trace_takes_ids_and_gives_logits(toy_model: ster.Model) -> None:
    ids = toy_model.encode(PROMPT)
    by_text, by_ids = toy_model.trace(PROMPT, logits=True), toy_model.trace(np.array(ids), layers=None, logits=True)  # type: ignore[arg-type]
    assert by_text.token_ids == by_ids.token_ids == ids
    assert by_text.tokens == PROMPT.split()
    assert by_text.logits is not None and by_ids.logits is not None
    assert by_text.logits.shape == (len(ids), 67)
    assert by_text.logits.tobytes() == by_ids.logits.tobytes()
    assert by_ids.residual.shape == (0, len(ids), 64)
    for wrong in ([1.5], ["the"], [True]):
        with pytest.raises(InputError, match="token ids must be integers"):
            toy_model.trace(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="tokenizer produced no tokens"):
        toy_model.trace([])


class Pair:
    """Steering in two parts, as a composable object would be."""

    def __init__(self, *edits: ster.Edit) -> None:
        self.parts = edits

    def edits(self) -> list[ster.Edit]:
        return list(self.parts)


def test_a_trace_reads_before_or_after_its_steering(toy_model: ster.Model) -> None:
    vector = np.linspace(-1, 1, 64, dtype=np.float32)
    edit = ster.Edit(1, vector[None], scale=3.0)
    plain = toy_model.trace(PROMPT)
    before = toy_model.trace(PROMPT, steering=edit)
    after = toy_model.trace(PROMPT, steering=[edit], point="post_steer")
    assert before.steered == after.steered == [list(range(8))]
    assert before.residual[:2].tobytes() == plain.residual[:2].tobytes()
    assert after.residual[0].tobytes() == plain.residual[0].tobytes()
    assert after.residual[1].tobytes() == (plain.residual[1] + np.float32(3.0) * vector).tobytes()
    assert before.residual[2:].tobytes() == after.residual[2:].tobytes() != plain.residual[2:].tobytes()
    twice = toy_model.trace(PROMPT, steering=Pair(edit, edit), point="post_steer")
    assert twice.steered == [list(range(8))] * 2
    assert toy_model.trace(PROMPT, steering=[Pair(edit), edit], point="post_steer").residual.tobytes() == twice.residual.tobytes()
    with pytest.raises(InputError, match="steering must be a Steering, an artifact, an Edit or a list of them, found ndarray"):
        toy_model.trace(PROMPT, steering=vector)
    with pytest.raises(InputError, match='unknown point "after"; expected pre_steer or post_steer'):
        toy_model.trace(PROMPT, point="after")  # type: ignore[arg-type]


def test_extract_is_the_models_own_call(toy_model: ster.Model) -> None:
    for position in ("last", "mean"):
        one = ster.extract(toy_model, [PROMPT], "1", position=position)
        two = toy_model.activations([PROMPT], "1", position=position)
        assert one.values.tobytes() == two.values.tobytes() and one.layers == [1]


def test_things_that_are_no_prompt(toy_model: ster.Model) -> None:
    for wrong, word in ((123, "a number"), (None, "null"), (b"ab", "bytes")):
        with pytest.raises(InputError) as caught:
            toy_model.trace(wrong)  # type: ignore[arg-type]
        assert str(caught.value) == f"the prompt must be text, messages or token ids, found {word}"
    for wrong in (np.array([[1, 2]]), [1.0], ["a"], [True]):
        with pytest.raises(InputError, match="token ids must be integers, found"):
            toy_model.trace(wrong)  # type: ignore[arg-type]
    ids = np.array(toy_model.encode(PROMPT))
    assert toy_model.trace(ids).residual.tobytes() == toy_model.trace(PROMPT).residual.tobytes()  # type: ignore[arg-type]


def test_equal_prompts_have_arrays_of_their_own(toy_model: ster.Model) -> None:
    acts = toy_model.activations(["the sea", "storm", "the sea", "the  sea"], position="all")
    kept = acts.values[0].copy()
    acts.values[2][:] = 0
    acts.token_ids[2].clear()
    for index in (0, 3):  # other spaces, the same tokens
        assert acts.values[index].tobytes() == kept.tobytes()
        assert len(acts.token_ids[index]) == 2

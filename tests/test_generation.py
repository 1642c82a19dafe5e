"""Text out of the model: cached decoding is the whole text run again, and what streams is what is returned."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ster
from ster.errors import ContextError, InputError, LayerError, NonFiniteError, SteeringError
from ster.generation import Settings, TextWriter
from ster.toy import WORDS

PROMPT = "describe the evening lake ."
GREEDY = "loud sea hard hard , white , white , white loud loud"
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=20).map(" ".join)

Script = Callable[[Sequence[int]], None]


@pytest.fixture
def vector() -> ster.Steering:
    row = np.random.default_rng(3).normal(size=64).astype(np.float32)
    return ster.steer(row, 1, strength=0.7) + ster.steer(row[::-1].copy(), 2, strength=0.3)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Let these tokens be chosen, whatever the logits."""

    def write(ids: Sequence[int]) -> None:
        def choose(self: Settings, logits: Any, text: Any, allowed: int, seed: int, step: int) -> int:
            return ids[step] if len(logits) > 1 else 0

        monkeypatch.setattr(Settings, "choose", choose)

    return write


def test_greedy_text_is_the_published_one(toy_model: ster.Model) -> None:
    found = toy_model.generate(PROMPT, max_new_tokens=12)
    assert (found.text, found.finish_reason, len(found.token_ids)) == (GREEDY, "length", 12)
    assert found.prompt_token_ids == toy_model.prompt_tokens(PROMPT)
    assert found.trace is None and found.steered == []


@settings(max_examples=30, deadline=None)
@given(
    prompt=texts,
    new=st.integers(1, 30),
    strength=st.sampled_from([0.0, -2.0, 1.0, 40.0]),
    where=st.sampled_from([None, "prompt", "answer", "one"]),
    norm_match=st.booleans(),
)
def test_cached_decoding_is_the_whole_text_run_again(
    toy_model: ster.Model, prompt: str, new: int, strength: float, where: str | None, norm_match: bool
) -> None:
    ids = toy_model.prompt_tokens(prompt)
    row = np.random.default_rng(new).normal(size=64).astype(np.float32)
    spans = {"prompt": (0, len(ids)), "answer": (len(ids), len(ids) + new - 1), "one": (len(ids) - 1, len(ids))}
    span = spans.get(where or "")
    places = [span] if span and span[0] < span[1] else None  # one new token: no row of the answer runs
    steering = ster.steer(row, 2, strength=strength, positions=places, norm_match=norm_match)
    found = toy_model.generate(prompt, steering, max_new_tokens=new, layers="all", ignore_eos=True)
    whole = [*ids, *found.token_ids]
    trace = toy_model.trace(whole[:-1], steering=steering, point="post_steer", logits=True)
    assert trace.logits is not None and found.trace is not None
    assert [int(row.argmax()) for row in trace.logits[len(ids) - 1 :]] == found.token_ids
    assert found.trace.residual.tobytes() == trace.residual.tobytes()
    assert found.steered == trace.steered


def test_captures_have_a_row_for_every_token_that_ran(toy_model: ster.Model) -> None:
    found = toy_model.generate("the sea is calm and quiet tonight . the", max_new_tokens=5, layers="0,3")
    assert found.trace is not None
    assert found.trace.residual.shape == (2, 9 + 5 - 1, 64)
    assert found.trace.token_ids == [*found.prompt_token_ids, *found.token_ids[:-1]]
    assert found.trace.tokens[:3] == ["the", "sea", "is"] and len(found.trace.tokens) == 13
    assert found.trace.layers == [0, 3] and found.trace.point == "post_steer"
    one = toy_model.generate("the sea is calm and quiet tonight . the", max_new_tokens=1, layers=0)
    assert one.trace is not None and one.trace.residual.shape == (1, 9, 64)


def test_captures_before_and_after_the_vector(toy_model: ster.Model, vector: ster.Steering) -> None:
    before = toy_model.generate(PROMPT, vector, max_new_tokens=6, layers="all", point="pre_steer").trace
    after = toy_model.generate(PROMPT, vector, max_new_tokens=6, layers="all").trace
    assert before is not None and after is not None
    for layer in (0, 3):
        assert before.residual[layer].tobytes() == after.residual[layer].tobytes()
    for term in vector.terms:
        moved = before.residual[term.layer] + np.float32(term.strength) * term.vectors[0]
        assert moved.tobytes() == after.residual[term.layer].tobytes()


@settings(max_examples=30, deadline=None)
@given(
    prompt=texts, seed=st.integers(0, 2**64 - 1), temperature=st.sampled_from([0.0, 0.7, 5.0]), stop=st.sampled_from([None, "white", "d w"])
)
def test_the_steps_joined_are_the_text(toy_model: ster.Model, prompt: str, seed: int, temperature: float, stop: str | None) -> None:
    options: dict[str, Any] = {"max_new_tokens": 16, "temperature": temperature, "seed": seed, "stop": stop}
    found = toy_model.generate(prompt, **options)
    steps = list(toy_model.stream(prompt, **options))
    assert "".join(step.text for step in steps) == found.text
    assert [step.token_id for step in steps] == found.token_ids
    assert [step.finish_reason for step in steps] == [None] * (len(steps) - 1) + [found.finish_reason]
    if stop is not None:
        assert stop not in found.text


def test_a_seed_is_a_text(toy_model: ster.Model) -> None:
    def run(seed: int | None) -> ster.Generation:
        return toy_model.generate(PROMPT, max_new_tokens=30, temperature=2.0, seed=seed)

    assert run(11).token_ids == run(11).token_ids != run(12).token_ids
    free = run(None)
    assert run(free.seed).token_ids == free.token_ids
    assert run(None).seed != free.seed


def test_a_stop_string_that_spans_tokens_is_cut_off_and_never_shown(toy_model: ster.Model) -> None:
    steps = list(toy_model.stream(PROMPT, max_new_tokens=12, stop=["a hard , w", "hard , wh"]))
    assert "".join(step.text for step in steps) == "loud sea hard "
    assert steps[-1].finish_reason == "stop"
    shown = [step.text for step in steps]
    assert not any("," in text for text in shown)
    found = toy_model.generate(PROMPT, max_new_tokens=12, stop="hard , wh")
    assert found.text == "loud sea hard " and len(found.token_ids) == 6


def test_a_stop_string_that_only_begins_is_shown_in_the_end(toy_model: ster.Model) -> None:
    assert toy_model.generate(PROMPT, max_new_tokens=12, stop="loud loud loud").text == GREEDY


def test_a_character_of_several_tokens_is_never_broken(byte_model: Callable[..., Path], script: Script) -> None:
    model = ster.load(byte_model(bos=False))
    text = "a👨‍👩‍👧é नि!"
    ids = model.encode(text)
    assert len(ids) == len(text.encode())
    script(ids)
    steps = list(model.stream("x", max_new_tokens=len(ids), ignore_eos=True))
    assert "".join(step.text for step in steps) == text
    assert all("\ufffd" not in step.text for step in steps)
    assert [step.text for step in steps[:5]] == ["a", "", "", "", "👨"]
    # Cut in the middle of a character: what is left shows as it decodes, and only at the end.
    script(ids)
    cut = list(model.stream("x", max_new_tokens=3, ignore_eos=True))
    assert [step.text for step in cut] == ["a", "", model.decode(ids[:3])[1:]]
    assert model.generate("x", max_new_tokens=3, ignore_eos=True).text == model.decode(ids[:3])


def test_a_stop_string_inside_bytes(byte_model: Callable[..., Path], script: Script) -> None:
    model = ster.load(byte_model(bos=False))
    script(model.encode("so é🌊 end"))
    found = model.generate("x", max_new_tokens=20, stop=["🌊 e"], ignore_eos=True)
    assert (found.text, found.finish_reason) == ("so é", "stop")


def test_bytes_that_are_no_text_come_through(byte_model: Callable[..., Path]) -> None:
    model = ster.load(byte_model(bos=False))
    steps = list(model.stream("x", max_new_tokens=60, temperature=3.0, seed=5, ignore_eos=True))
    assert "".join(step.text for step in steps) == model.generate("x", max_new_tokens=60, temperature=3.0, seed=5, ignore_eos=True).text


@pytest.mark.parametrize("ends", [64, [2, 64]])
def test_any_end_token_ends(toy_copy: Path, change: Callable[..., None], ends: object) -> None:
    change(toy_copy / "config.json", eos_token_id=ends)
    model = ster.load(toy_copy)
    found = model.generate(PROMPT, max_new_tokens=12)
    assert found.token_ids == toy_model_ids(model, 12)[:5] and found.token_ids[-1] == 64
    assert (found.text, found.finish_reason) == ("loud sea hard hard ,", "stop")
    assert model.generate(PROMPT, max_new_tokens=12, ignore_eos=True).text == GREEDY


def toy_model_ids(model: ster.Model, new: int) -> list[int]:
    return model.generate(PROMPT, max_new_tokens=new, ignore_eos=True).token_ids


def test_generation_config_adds_its_end_tokens(toy_copy: Path, change: Callable[..., None]) -> None:
    change(toy_copy / "generation_config.json", eos_token_id=[4])
    model = ster.load(toy_copy)
    assert model.generate(PROMPT, max_new_tokens=12).token_ids == [13, 4]


def test_the_end_of_the_context_ends(toy_copy: Path, change: Callable[..., None]) -> None:
    change(toy_copy / "config.json", max_position_embeddings=8)
    model = ster.load(toy_copy)
    found = model.generate(PROMPT, max_new_tokens=100)
    assert (len(found.token_ids), found.finish_reason) == (3, "length")
    with pytest.raises(ContextError, match="^prompt contains 8 tokens, model context allows fewer than 8$"):
        model.generate("the sea is calm and quiet tonight .")


def test_token_ids_run_as_they_are(toy_model: ster.Model) -> None:
    ids = toy_model.prompt_tokens(PROMPT)
    assert toy_model.generate(ids, max_new_tokens=12).text == GREEDY
    assert toy_model.generate(np.array(ids), max_new_tokens=12).text == GREEDY  # type: ignore[arg-type]


def test_messages_go_through_the_template(toy_copy: Path) -> None:
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}answer :{% endif %}"
    (toy_copy / "chat_template.jinja").write_text(template)
    model = ster.load(toy_copy)
    found = model.generate([{"role": "user", "content": "the sea"}], max_new_tokens=3)
    assert model.decode(found.prompt_token_ids) == "the sea answer :"
    assert found.prompt_token_ids == model.generate("the sea", max_new_tokens=3).prompt_token_ids
    with pytest.raises(InputError, match="chat messages need a chat template, which is switched off"):
        ster.load(toy_copy, chat_template="off").generate([{"role": "user", "content": "the sea"}])


def test_the_same_plan_steers_every_time(toy_model: ster.Model, vector: ster.Steering) -> None:
    plain = toy_model.generate(PROMPT, max_new_tokens=12, layers="all")
    first = toy_model.generate(PROMPT, vector, max_new_tokens=12, layers="all")
    second = toy_model.generate(PROMPT, vector, max_new_tokens=12, layers="all")
    again = toy_model.generate(PROMPT, max_new_tokens=12, layers="all")
    assert first.trace is not None and second.trace is not None and plain.trace is not None and again.trace is not None
    assert first.trace.residual.tobytes() == second.trace.residual.tobytes()
    assert plain.trace.residual.tobytes() == again.trace.residual.tobytes() != first.trace.residual.tobytes()


def test_a_raised_exception_leaves_nothing_behind(toy_model: ster.Model, vector: ster.Steering) -> None:
    plain = toy_model.generate(PROMPT, max_new_tokens=12, layers="all").trace
    assert plain is not None

    def fail(steps: Iterator[ster.Step]) -> None:
        for number, _ in enumerate(steps):
            if number == 3:
                raise RuntimeError

    with pytest.raises(RuntimeError):
        fail(toy_model.stream(PROMPT, vector, max_new_tokens=12))
    with pytest.raises(NonFiniteError):
        toy_model.generate(PROMPT, ster.steer(np.full(64, 3e38, np.float32), 1, strength=3.0), max_new_tokens=12)
    after = toy_model.generate(PROMPT, max_new_tokens=12, layers="all").trace
    assert after is not None and after.residual.tobytes() == plain.residual.tobytes()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be greater than zero"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer, found True"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0}, "top_k must be at least 1, found 0"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": -1}, "seed must be between 0 and 2\\^64 - 1, found -1"),
        ({"stop": ""}, "a stop string must not be empty"),
        ({"stop": ["a", ""]}, "a stop string must not be empty"),
        ({"layers": "4"}, "layer 4 is outside the model's 0..3 range"),
        ({"layers": []}, "at least one layer is required"),
        ({"point": "between"}, 'unknown point "between"; expected pre_steer or post_steer'),
    ],
)
def test_settings_out_of_range_are_refused_by_the_call(toy_model: ster.Model, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        toy_model.generate(PROMPT, **options)
    with pytest.raises(InputError, match=sentence):
        toy_model.stream(PROMPT, **options)  # not on the first step: the call itself


@pytest.mark.parametrize("prompt", ["", [], "\ud800"])
def test_prompts_that_are_none(toy_model: ster.Model, prompt: Any) -> None:
    with pytest.raises(InputError, match="prompt must not be empty|tokenizer produced no tokens|surrogate"):
        toy_model.stream(prompt)


def test_a_vector_that_no_row_would_meet_is_refused(toy_model: ster.Model) -> None:
    row = np.ones(64, np.float32)
    reached = toy_model.generate(PROMPT, ster.steer(row, 1, positions=[8]), max_new_tokens=5)
    assert reached.steered == [[8]]
    sentence = (
        "^steering names position 9, but this run reaches position 8 at most: the prompt has 5 tokens, 5 are generated,"
        " and the last generated token never runs through the model$"
    )
    with pytest.raises(SteeringError, match=sentence):
        toy_model.stream(PROMPT, ster.steer(row, 1, positions=[9]), max_new_tokens=5)
    with pytest.raises(LayerError, match="^layer 4 is outside the model's 0..3 range$"):
        toy_model.stream(PROMPT, ster.steer(row, 4))
    with pytest.raises(SteeringError, match="^steering at layer 1 has vector width 3, expected 64$"):
        toy_model.stream(PROMPT, ster.steer([1.0, 2.0, 3.0], 1))
    with pytest.raises(InputError, match="^steering must be a Steering, an artifact, an Edit or a list of them, found int$"):
        toy_model.stream(PROMPT, 3)  # type: ignore[arg-type]


def test_sampling_follows_the_distribution(toy_model: ster.Model) -> None:
    """First tokens of 2,000 seeds against softmax(logits / 2): the chi-square of 10 bins stays under its 99.99 % point."""
    trace = toy_model.trace(PROMPT, None, logits=True)
    assert trace.logits is not None
    logits = trace.logits[-1].astype(np.float64) / 2.0
    share = np.exp(logits - logits.max())
    share /= share.sum()
    settings_ = Settings(temperature=2.0)
    drawn = np.bincount([settings_.choose(trace.logits[-1], [], 67, seed, 0) for seed in range(2000)], minlength=67)
    order = np.argsort(share)
    bins = np.array_split(order, 10)
    expected = np.array([2000 * share[b].sum() for b in bins])
    found = np.array([drawn[b].sum() for b in bins])
    assert ((found - expected) ** 2 / expected).sum() < 33.7  # 9 degrees of freedom


def test_the_writer_holds_back_no_more_than_it_must(toy_model: ster.Model) -> None:
    writer = TextWriter(toy_model.tokenizer, ["sea is"])
    sea, calm = toy_model.encode("sea"), toy_model.encode("calm")
    assert writer.add(calm[0], last=False) == ("calm", False)
    assert writer.add(sea[0], last=False) == (" ", False)  # `sea` may begin the stop string
    assert writer.add(calm[0], last=False) == ("sea calm", False)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        *[({"max_new_tokens": value}, f"max_new_tokens must be an integer, found {value!r}") for value in (5.0, True, None, "5", 1j)],
        ({"max_new_tokens": -(10**5000)}, "max_new_tokens must be greater than zero"),
        *[({"seed": value}, f"seed must be an integer, found {value!r}") for value in (1.5, "3", True, b"3", [3])],
        ({"seed": 2**64}, "seed must be between 0 and 2^64 - 1, found 18446744073709551616"),
        ({"seed": 10**5000}, "seed must be between 0 and 2^64 - 1, found a number of thousands of digits"),
        *[({"top_k": value}, f"top_k must be an integer, found {value!r}") for value in (1.5, "a", True)],
        ({"top_k": -(2**70)}, f"top_k must be at least 1, found {-(2**70)}"),
        *[({"temperature": value}, f"temperature must be a number, found {value!r}") for value in (None, "a", True, 1j, [1.0])],
        ({"temperature": 10**400}, "temperature must be zero or more, found inf"),
        ({"temperature": -(10**400)}, "temperature must be zero or more, found -inf"),
        ({"top_p": "x"}, "top_p must be a number, found 'x'"),
        ({"min_p": None}, "min_p must be a number, found None"),
        ({"repetition_penalty": "a"}, "repetition_penalty must be a number, found 'a'"),
        ({"stop": 3}, "stop must be a string or a list of strings, found 3"),
        ({"stop": b"a"}, "stop must be a string or a list of strings, found b'a'"),
        ({"stop": ("a", 3)}, "stop must be a string or a list of strings, found ('a', 3)"),
        ({"stop": ("a", "")}, "a stop string must not be empty"),
    ],
)
def test_settings_of_the_wrong_kind_are_refused_by_name(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        Settings(**options)
    assert str(caught.value) == sentence


def test_numbers_of_numpy_are_numbers(toy_model: ster.Model) -> None:
    plain = Settings(5, 1.0, 0.5, 3, 0.25, 2.0, 7, ("a", "b"))
    row: list[Any] = [np.int64(5), np.float32(1), np.float16(0.5), np.uint8(3), np.float64(0.25), np.int32(2), np.uint64(7), ["a", "b"]]
    numpy = Settings(*row)
    assert numpy == plain and repr(numpy) == repr(plain)
    assert Settings(stop="ab") == Settings(stop=("ab",)) and Settings(stop=None) == Settings()  # type: ignore[arg-type]
    options: dict[str, Any] = {"max_new_tokens": np.int64(5), "temperature": np.float32(2), "seed": np.uint64(7)}
    assert toy_model.generate(PROMPT, **options).text == toy_model.generate(PROMPT, max_new_tokens=5, temperature=2.0, seed=7).text


def test_a_top_k_beyond_the_vocabulary_keeps_all_of_it(toy_model: ster.Model) -> None:
    every = toy_model.generate(PROMPT, max_new_tokens=20, temperature=2.0, seed=7).token_ids
    for top_k in (67, 68, 2**64, 2**70, 10**5000):
        assert toy_model.generate(PROMPT, max_new_tokens=20, temperature=2.0, seed=7, top_k=top_k).token_ids == every


def test_a_text_that_goes_on_keeps_the_space_its_first_word_begins_with(toy_model: ster.Model) -> None:
    sea, calm, end = (toy_model.tokenizer.id_of(word) for word in ("sea", "calm", "</s>"))
    assert sea is not None and calm is not None and end is not None
    for before, tokens, expected in [((), [calm], "calm"), ((sea,), [calm], " calm"), ((sea,), [end, calm], " calm")]:
        writer = TextWriter(toy_model.tokenizer, (), before)
        assert "".join(writer.add(token, last=False)[0] for token in tokens) == expected
    writer = TextWriter(toy_model.tokenizer, ())
    assert "".join(writer.add(token, last=False)[0] for token in [sea, end, calm]) == "sea calm"

"""Where a text can be cut wrongly: characters of several tokens, stop texts over several chunks, texts that are not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from serving import Client, error_of, running

import ster
from ster import _native
from ster.server import running as running_module
from ster.tokenizer import Tokenizer

Script = Callable[[Client, str], list[int]]
EMOJI = "a 🌊 b"
FAMILY = "👨‍👩‍👧"


@pytest.fixture
def bytes_(byte_model: Callable[..., Any]) -> Iterator[Client]:
    """A model whose tokens are bytes: an emoji has four."""
    with running({"toy": byte_model(bos=True)}) as client:
        yield client


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Let the model write this text, whatever its logits."""

    def write(client: Client, text: str) -> list[int]:
        tokenizer: Tokenizer = client.models[0].loaded.model.tokenizer
        chosen: Sequence[int] = tokenizer.encode(text, special_tokens=False)
        sample = lambda logits, before, *, step, **_: chosen[step]  # noqa: E731
        monkeypatch.setattr(running_module, "_native", SimpleNamespace(sample=sample, Sequence=_native.Sequence))
        return list(chosen)

    return write


def chunks(client: Client, **fields: Any) -> list[str]:
    events = client.events("a", **fields)
    assert events.pop() == "data: [DONE]"
    assert all(isinstance(event, dict) for event in events), events
    return [event["choices"][0]["text"] for event in events]


@pytest.mark.parametrize("text", [EMOJI, FAMILY, "é", "日本"])
def test_a_character_of_several_tokens_comes_when_it_is_whole(bytes_: Client, script: Script, text: str) -> None:
    ids = script(bytes_, text)
    assert len(ids) == len(text.encode()) > len(text)
    for count in range(1, len(ids) + 1):  # max_tokens may end in the middle of it
        parts = chunks(bytes_, max_tokens=count)
        whole = bytes_.answer("a", max_tokens=count)["choices"][0]
        assert "".join(parts) == whole["text"] == text.encode()[:count].decode(errors="replace")
        assert "\ufffd" not in "".join(parts[:-1]) and whole["finish_reason"] == "length"
        assert len(parts) == count  # a chunk for every token, some without text


def test_a_character_that_never_ends_is_told_at_the_end(bytes_: Client, script: Script) -> None:
    """The text ends with an end-of-text token, in the middle of an emoji."""
    ids = script(bytes_, EMOJI)[:4]
    eos = bytes_.models[0].loaded.model.eos_token_ids
    chosen = [*ids, min(eos)]
    running_module._native.sample = lambda logits, before, *, step, **_: chosen[step]  # type: ignore[assignment]
    assert chunks(bytes_, max_tokens=9) == ["a", " ", "", "", "\ufffd"]


@pytest.mark.parametrize(("stop", "left"), [("m q", "cal"), ("🌊", "calm quiet "), ("quiet 🌊", "calm "), ([" qx", "iet"], "calm qu")])
def test_a_stop_text_over_several_chunks_never_shows(bytes_: Client, script: Script, stop: str | list[str], left: str) -> None:
    text = "calm quiet 🌊 sea"
    script(bytes_, text)
    size = len(text.encode())
    parts = chunks(bytes_, max_tokens=size, stop=stop)
    whole = bytes_.answer("a", max_tokens=size, stop=stop)["choices"][0]
    assert "".join(parts) == whole["text"] == left
    assert whole["finish_reason"] == "stop" and whole["stop_reason"] in stop
    # What began like it and went on otherwise is told after all.
    assert "".join(chunks(bytes_, max_tokens=size, stop=["quiet x", "sea!"])) == text


def test_what_began_like_a_stop_text_is_told_at_the_end(bytes_: Client, script: Script) -> None:
    script(bytes_, "calm sea")
    parts = chunks(bytes_, max_tokens=8, stop="sea is")
    assert "".join(parts) == "calm sea" and parts[-1] == "sea"


def test_a_prompt_alone_is_scored_as_the_model_says(toy: Client, toy_model: ster.Model) -> None:
    """max_tokens 0 with echo, as lm-evaluation-harness asks: the same numbers as of one pass without a server, streamed or not."""
    ids = [3, 4, 5, 6, 7, 8]
    whole = toy.answer(ids, max_tokens=0, echo=True, logprobs=1)["choices"][0]
    trace = toy_model.trace(ids, logits=True)
    assert trace.logits is not None
    logits = trace.logits.astype("float64")
    for place, token in enumerate(ids[1:]):
        row = logits[place] - logits[place].max()
        expected = row[token] - np.log(np.exp(row).sum())
        assert abs(whole["logprobs"]["token_logprobs"][place + 1] - expected) < 1e-12  # sums of 67 in float64
    streamed = toy.events(ids, max_tokens=0, echo=True, logprobs=1)
    assert streamed[0]["choices"][0]["logprobs"] == whole["logprobs"] and streamed[-1] == "data: [DONE]"


def test_an_empty_prompt_is_its_bos_or_nothing(bytes_: Client, byte_model: Callable[..., Any]) -> None:
    answer = bytes_.answer("", max_tokens=2, temperature=0, return_token_ids=True, stream=False)
    assert answer["choices"][0]["prompt_token_ids"] == [1] and answer["usage"]["completion_tokens"] == 2
    with running({"toy": byte_model(bos=False)}) as client:
        for empty in ("", [""], ["a", ""]):
            assert error_of(client.complete(empty, max_tokens=1)) == (400, "invalid_request", "prompt")
        assert error_of(client.complete([], max_tokens=1)) == (400, "invalid_request", "prompt")

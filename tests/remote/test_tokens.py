"""Texts and conversations become ids on the server, with its template or with none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lens_stub import Stub, stubbed

import ster
from ster.errors import InputError


def test_a_template_is_found_and_used(chatting: Path) -> None:
    model = ster.load(chatting)
    with stubbed(model) as stub, ster.connect(stub.url) as remote:
        assert remote.chat_template == "applied"
        assert remote.prompt_tokens("the sea") == model.prompt_tokens("the sea")


def test_half_a_character_in_a_message_is_refused_before_it_is_sent(chatting: Path) -> None:
    with stubbed(ster.load(chatting)) as stub, ster.connect(stub.url) as remote:
        stub.requests.clear()
        with pytest.raises(InputError, match="half a surrogate pair"):
            remote.chat_tokens([{"role": "user", "content": "a\ud800"}])
        assert not stub.requests


def test_a_template_that_the_server_does_not_use_is_named(stub: Stub, chatting: Path) -> None:
    with pytest.raises(InputError, match="the tokenizer's folder has a chat template, and the server has none") as refused:
        ster.connect(stub.url, tokenizer=chatting)
    assert refused.value.hint and "--chat-template off" in refused.value.hint
    ster.connect(stub.url, tokenizer=chatting, chat_template="off").close()


def test_prompts_are_asked_for_a_few_ahead(stub: Stub) -> None:
    taken = 0

    def prompts() -> Iterator[tuple[str, str]]:
        nonlocal taken
        for index in range(1000):
            taken += 1
            yield "the sea", f"prompts[{index}]"

    with ster.connect(stub.url, concurrency=4) as model:
        tokens = model.tokenise(prompts())
        for count in range(1, 20):
            next(tokens)
            assert taken <= count + 4
        tokens.close()  # type: ignore[attr-defined]
        assert taken < 30

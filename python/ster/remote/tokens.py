"""Texts and conversations as the token ids that run: made by the server's `/tokenize`, or here, by a tokenizer that is the model's.

With a tokenizer here a corpus is tokenised as fast as by a local model; the server is asked once whether it has the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ster.chat import ChatTemplate, Message, find_chat_template
from ster.checkpoint import Checkpoint
from ster.errors import InputError, RemoteError
from ster.prompts import at
from ster.remote.answers import Answer
from ster.remote.server import Server, token_ids
from ster.remote.transport import SMALL_BYTES, Call, Transport
from ster.tokenizer import Tokenizer

Asked = tuple[str | Sequence[Message], bool, str | None]
"""A raw text, or messages; whether the assistant's turn is opened; a name for refusals."""
CHARACTER_BYTES = 64  # of an answer, for each character: more than its bytes' ids


class ServerTokens:
    """Asks the server."""

    def __init__(self, transport: Transport, server: Server) -> None:
        self._transport, self._server = transport, server
        self._pieces: dict[int, str] = {}

    def ids(self, asked: Iterable[Asked]) -> Iterator[list[int]]:
        """In order; several requests are under way at a time.

        Raises:
            InputError: what the server refuses, by its name. RemoteError: no such answer.
        """
        names: deque[str | None] = deque()

        def calls() -> Iterator[Call]:
            for content, opened, name in asked:
                names.append(name)
                body = self._body(content, opened)
                yield Call("/tokenize", body, SMALL_BYTES + len(str(content)) * CHARACTER_BYTES, name)

        for answer in self._transport.ask_all(calls()):
            yield _ids_of(answer, names.popleft())

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each id by itself."""
        new = [id for id in dict.fromkeys(ids) if id not in self._pieces]
        calls = (Call("/detokenize", {"model": self._server.id, "tokens": [id]}) for id in new)
        for id, answer in zip(new, self._transport.ask_all(calls), strict=True):
            text = answer.document().get("prompt")
            if not isinstance(text, str):
                raise RemoteError(f"the server's text of token {id} is no text")
            self._pieces[id] = text
        return [self._pieces[id] for id in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens shown: a server does not leave them out."""
        text = self._transport.ask(Call("/detokenize", {"model": self._server.id, "tokens": list(ids)})).document().get("prompt")
        if not isinstance(text, str):
            raise RemoteError("the server's text of tokens is no text")
        return text

    @property
    def unknown_id(self) -> int | None:
        return self._server.unknown_id

    def _body(self, content: str | Sequence[Message], opened: bool) -> dict[str, Any]:
        if isinstance(content, str):
            return {"model": self._server.id, "prompt": content, "add_special_tokens": True}
        messages = [dict(message) for message in content]
        return {"model": self._server.id, "messages": messages, "add_generation_prompt": opened, "add_special_tokens": False}


class OwnTokens:
    """Asks a tokenizer of this process, with the checkpoint's chat template."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tokenizer = Tokenizer.load(checkpoint)
        self._template: ChatTemplate | None = find_chat_template(checkpoint)

    @property
    def chats(self) -> bool:
        return self._template is not None

    @property
    def unknown_id(self) -> int | None:
        return self._tokenizer.unknown_id

    def ids(self, asked: Iterable[Asked]) -> Iterator[list[int]]:
        """
        Raises:
            InputError: messages without a template, or a template or tokenizer that refused.
        """
        for content, opened, name in asked:
            if isinstance(content, str):
                yield self._tokenizer.encode(content, name=name)
            elif self._template is None:
                raise InputError(f"chat messages need a chat template, which the tokenizer's folder does not have{at(name)}")
            else:
                text = self._template.render(content, add_generation_prompt=opened)
                yield self._tokenizer.encode(text, special_tokens=False, name=name)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.piece(id) for id in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


def _ids_of(answer: Answer, name: str | None) -> list[int]:
    if answer.status == 400:
        try:
            answer.document()
        except RemoteError as error:
            raise InputError(error.message) from None
    return token_ids(answer.document(), name or "the prompt")

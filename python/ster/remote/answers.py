"""An answer of the server, and what it says when it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from ster.errors import RemoteError
from ster.prompts import at

SECRET = 8  # characters of a key, from which on it is not repeated
SHOWN = 200  # characters of a page that is no JSON


@dataclass(frozen=True)
class Answer:
    """headers: by lower-case name. name: of the prompt, for refusals. key: the API key that was sent, which no refusal shows."""

    root: str
    path: str
    status: int
    headers: Mapping[str, str]
    body: bytes
    name: str | None = None
    key: str | None = None

    def document(self) -> dict[str, Any]:
        """The JSON object of a good answer; spaces before it are no matter.

        Raises:
            RemoteError: another status than 200, an `error` in it, or no JSON object.
        """
        if self.status != 200:
            raise refusal(self)
        found = self.json()
        if not isinstance(found, dict):
            raise RemoteError(f"{self.root}{self.path} answers with something that is not a JSON object: {self.shown()}{at(self.name)}")
        if found.get("error") is not None or found.get("object") == "error":
            raise refusal(self)
        return found

    def json(self) -> Any:
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None

    def shown(self) -> str:
        text = self.told(self.body[: 8 * SHOWN].decode(errors="replace"))
        return f"`{text[:SHOWN]}`" if text else "nothing"

    def told(self, text: str) -> str:
        """What the server says, as it can be repeated: a proxy's page may have the headers of the request in it, key and all. A key that
        is no longer than a word is left: it may be one of the server's own."""
        return printable(text.replace(self.key, "***") if self.key and len(self.key) >= SECRET else text)


def printable(text: str) -> str:
    """On one line, and without what moves the cursor of a terminal.

    >>> printable("no\\n such \\x1b[2Jmodel")
    'no such \ufffd[2Jmodel'
    """
    return "".join(character if character.isprintable() else "\ufffd" for character in " ".join(text.split()))


def refusal(answer: Answer) -> RemoteError:
    """What an answer that is none says of itself."""
    message = message_of(answer.json())
    status = f" ({answer.status})" if answer.status != 200 else ""
    hint = None
    if answer.status == 404 and answer.path == "/v1/models":
        hint = "an address ends in /v1, as in http://localhost:8000/v1"
    if message is None:
        kind = answer.told(answer.headers.get("content-type", "no content type").partition(";")[0])
        return RemoteError(
            f"{answer.root}{answer.path} answers {answer.status}, {kind}: {answer.shown()}{at(answer.name)}", hint, status=answer.status
        )
    if answer.status in (401, 403):
        hint = "`--api-key` or STER_API_KEY (in Python api_key=) is the key that is sent"
    message = answer.told(message)[: 5 * SHOWN]
    message = message.removesuffix(".") if at(answer.name) else message
    return RemoteError(f"the server refuses{status}: {message}{at(answer.name)}", hint, status=answer.status)


def message_of(document: Any) -> str | None:
    """The message in `{"error": {"message"}}`, `{"error": "..."}`, `{"object": "error", "message"}` or `{"detail"}`."""
    if not isinstance(document, dict):
        return None
    error = document.get("error")
    for found in (error.get("message") if isinstance(error, dict) else error, document.get("message"), document.get("detail")):
        if found:
            return found if isinstance(found, str) else orjson.dumps(found).decode()
    return None

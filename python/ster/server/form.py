"""How an endpoint writes what the engine has answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ster.server.choices import Choice, Choices
    from ster.server.work import Token

Json = dict[str, Any]


@dataclass(frozen=True)
class Head:
    """What an answer and every chunk of it begin with. model: the checkpoint's name."""

    id: str
    created: int
    model: str

    def of(self, object: str) -> Json:
        return {"id": self.id, "object": object, "created": self.created, "model": self.model}


class Form(Protocol):
    """The objects of an answer or of a stream. One serves one request: it knows how far each choice is."""

    object: str
    chunk_object: str
    prefix: str  # of ids

    def choice(self, choices: Choices, choice: Choice) -> Json:
        """A choice of the whole answer."""

    def extra(self, choices: Choices) -> Json:
        """Members of the whole answer beside `choices`."""

    @property
    def needs_scores(self) -> bool:
        """Nothing of a choice can be written before its prompt's scores are there."""

    def opening(self, choices: Choices, choice: Choice) -> Json | None:
        """The chunk of a choice that comes before its tokens, without its head; None: there is none."""

    def delta(self, choice: Choice, token: Token) -> Json:
        """The choice in the chunk of one token."""

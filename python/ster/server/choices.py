"""What the engine has answered so far, choice by choice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ster.errors import NonFiniteError, SterError
from ster.server.capture import encode_activations, verify_shape
from ster.server.errors import ApiError, internal_error, invalid, queue_full, shutting_down
from ster.server.plan import Plan, sentence
from ster.server.requests import log_crash
from ster.server.schema import STEERING
from ster.server.work import Failed, Finished, Overloaded, PromptScored, ShuttingDown, Token

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ster.server.form import Json
    from ster.server.logprobs import TokenScore
    from ster.server.work import Event


@dataclass
class Choice:
    """One choice. prompt_scores: of its prompt's tokens; only the first choice of a prompt is given them by the engine."""

    index: int
    tokens: list[Token] = field(default_factory=list)
    prompt_scores: list[TokenScore | None] | None = None
    residual: NDArray[np.float32] | None = None
    finished: bool = False

    def add(self, event: Event) -> None:
        if isinstance(event, Token):
            self.tokens.append(event)
        elif isinstance(event, PromptScored):
            self.prompt_scores = event.entries
        elif isinstance(event, Finished):
            self.finished = True
            self.residual = event.residual

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def scores(self) -> list[TokenScore | None]:
        return [token.score for token in self.tokens]

    @property
    def finish_reason(self) -> str:
        """A choice without tokens has as many as it may."""
        return (self.tokens[-1].finish_reason if self.tokens else None) or "length"

    @property
    def stop_reason(self) -> str | int | None:
        return self.tokens[-1].stop_reason if self.tokens else None


class Choices(list[Choice]):
    """All choices of a plan, in order: by prompt, then by draw."""

    def __init__(self, plan: Plan, request_id: str) -> None:
        super().__init__(Choice(index) for index in range(len(plan.works)))
        self.plan = plan
        self._request_id = request_id

    def add(self, events: Iterable[tuple[int, Event]]) -> None:
        """
        Raises:
            ApiError: one of them failed, and so has the request.
        """
        for index, event in events:
            if isinstance(event, Failed):
                raise self._failure(index, event.error)
            self[index].add(event)

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self)

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self)

    def usage(self) -> dict[str, int]:
        prompt, completion = self.plan.prompt_tokens, self.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def prompt_scores(self, choice: Choice) -> list[TokenScore | None] | None:
        return self[choice.index - choice.index % self.plan.n].prompt_scores

    def activations(self) -> Json:
        """The tensor, verified; to be called off the event loop.

        Raises:
            ApiError: it does not fit the request, or not its dtype.
        """
        plan, choice = self.plan, self[0]
        facts = plan.loaded.facts
        verify_shape(choice.residual, plan.layers, len(plan.prompts[0].tokens), len(choice.tokens), facts.hidden)
        assert choice.residual is not None
        return {"residual_stream": encode_activations(choice.residual, plan.dtype, plan.layers)}

    def _failure(self, index: int, error: BaseException) -> ApiError:
        if isinstance(error, ShuttingDown):
            return shutting_down()
        if isinstance(error, Overloaded):
            return queue_full()
        if isinstance(error, NonFiniteError) and not self.plan.works[index].edits:
            return ApiError(500, sentence(error), code="non_finite")  # the checkpoint's fault
        if isinstance(error, SterError):
            return invalid(sentence(error), STEERING if self.plan.works[index].edits else None)
        log_crash(self._request_id, error)
        return internal_error()

"""One Job on the engine."""

from __future__ import annotations

from queue import SimpleQueue
from typing import TYPE_CHECKING

from ster.errors import SterError
from ster.server.choices import Choices
from ster.server.completions import CompletionForm
from ster.server.errors import invalid, shutting_down
from ster.server.form import Head
from ster.server.plan import Plan, sentence
from ster.server.respond import whole
from ster.server.work import ShuttingDown
from ster.state.amounts import Amount

if TYPE_CHECKING:
    from ster.server.running import Ticket
    from ster.server.work import Event


class EndedError(Exception):
    """It is no longer wanted."""


class Execution:
    """id, created: of the Job, from which those of its Completion follow: whoever runs it writes the same bytes."""

    def __init__(self, plan: Plan, id: str, created: int) -> None:
        self._plan = plan
        self._id = id
        self._created = created
        self._events: SimpleQueue[tuple[int, Event] | None] = SimpleQueue()
        self._ticket: Ticket | None = None

    def run(self) -> tuple[bytes, Amount]:
        """The Completion as JSON, and what it has used.

        Raises:
            EndedError: after `end`. ApiError: it failed; or 503, the server is shutting down.
        """
        plan = self._plan
        choices = Choices(plan, self._id)
        try:
            self._ticket = plan.loaded.scheduler.submit(plan.works, self._listen, background=True)
        except ShuttingDown:
            raise shutting_down() from None
        except SterError as error:
            raise invalid(sentence(error), None) from None
        try:
            while not choices.finished:
                event = self._events.get()
                if event is None:
                    raise EndedError
                choices.add([event])
        finally:
            if not choices.finished:
                plan.loaded.scheduler.cancel(self._ticket)
        head = Head("cmpl-" + self._id.rpartition("-")[2], self._created, plan.loaded.facts.name)
        used = Amount(plan.prompt_tokens, choices.completion_tokens, int(plan.layers is not None))
        return whole(choices, CompletionForm(plan), head), used

    def end(self) -> None:
        """From any thread; what it runs leaves before the next pass."""
        if self._ticket is not None:
            self._plan.loaded.scheduler.cancel(self._ticket)
        self._events.put(None)

    def _listen(self, index: int, event: Event) -> None:
        self._events.put((index, event))

"""A plan that the engine works on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ster.errors import SterError
from ster.server.choices import Choices
from ster.server.errors import ApiError, invalid, queue_full, shutting_down
from ster.server.feed import Feed
from ster.server.form import Json
from ster.server.plan import Plan, sentence
from ster.server.requests import ClientGoneError, Record
from ster.server.work import QueueFull, ShuttingDown
from ster.state.amounts import Amount

if TYPE_CHECKING:
    from starlette.types import Receive

    from ster.server.accounts import Bill
    from ster.server.lease import Lease
    from ster.server.running import Ticket
    from ster.server.settings import Settings
    from ster.server.work import Event


class Ongoing:
    """A plan that the engine works on. Closing it gives back its place, whatever state it is in, ends the use of its model, and pays what
    `owe` said last.

    Its time, `request_seconds`, begins now.
    """

    def __init__(self, plan: Plan, bill: Bill, lease: Lease, receive: Receive, record: Record, settings: Settings, *, eager: bool) -> None:
        self.plan = plan
        self.bill = bill
        self._lease = lease
        self.choices = Choices(plan, record.id)
        self.record = record
        self.settings = settings
        self.deadline = time.monotonic() + settings.request_seconds
        self._feed = Feed(len(plan.works), receive, eager=eager)
        self._ticket: Ticket | None = None
        record.prompt_tokens = plan.prompt_tokens

    def submit(self) -> None:
        """Queue the works. To be called off the event loop: vectors are hashed.

        Raises:
            ApiError: 429, 503; or 400, the scheduler says why.
        """
        try:
            self._ticket = self.plan.loaded.scheduler.submit(self.plan.works, self._feed.listener)
        except QueueFull:
            raise queue_full() from None
        except ShuttingDown:
            raise shutting_down() from None
        except SterError as error:
            raise invalid(sentence(error), None) from None

    async def next(self, seconds: float | None = None) -> list[tuple[int, Event]]:
        """New events, which the choices have taken in.

        Raises:
            ClientGoneError. ApiError: the request failed, or its time is over.
        """
        left = self.deadline - time.monotonic()
        events = await self._feed.next(left if seconds is None else min(seconds, left))
        self.choices.add(events)
        self.record.completion_tokens = self.choices.completion_tokens
        if time.monotonic() >= self.deadline and not self.choices.finished:
            raise timed_out(self.settings)
        return events

    def owe(self, tokens: int, *, activations: bool) -> None:
        """So many new tokens, or the activations, are given: they and the prompt are to be paid, whatever comes."""
        self.bill.owe(Amount(self.plan.prompt_tokens, tokens, int(activations)))

    def check_client(self) -> None:
        """
        Raises:
            ClientGoneError
        """
        if self._feed.gone:
            raise ClientGoneError

    def close(self) -> None:
        self.bill.close()
        self._feed.close()
        if self._ticket is not None and not self.choices.finished:
            self.plan.loaded.scheduler.cancel(self._ticket)
        self._lease.close()

    def activations(self) -> Json:
        """See `Choices.activations`."""
        return self.choices.activations()


def timed_out(settings: Settings) -> ApiError:
    message = f"The request took longer than {settings.request_seconds:g} seconds: ask for fewer tokens, or for less at a time."
    return ApiError(504, message, code="timeout")

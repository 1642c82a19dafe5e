"""Requests that wait for something to happen: each holds a connection, so few may."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from starlette.requests import Request

from ster.server.callers import caller_of
from ster.server.errors import invalid
from ster.server.requests import ClientGoneError

MAX_WAIT = 60  # seconds
PER_CALLER, IN_ALL = 4, 8
LOOK_SECONDS = 0.2  # other servers may be who it happens on
DECLINED = {"X-Acs-Longpoll": "declined", "Retry-After": "5"}

T = TypeVar("T")


class LongPolls:
    """Those that wait now."""

    def __init__(self) -> None:
        self._waiting: Counter[str] = Counter()

    @contextlib.contextmanager
    def place(self, caller: str) -> Iterator[bool]:
        """Whether there is a place to wait."""
        free = self._waiting[caller] < PER_CALLER and self._waiting.total() < IN_ALL
        self._waiting[caller] += free
        try:
            yield free
        finally:
            self._waiting[caller] -= free


def seconds_of(request: Request) -> int:
    """`?wait=`.

    Raises:
        ApiError: 400.
    """
    text = request.query_params.get("wait", "0")
    if not (text.isascii() and text.isdecimal()) or len(text) > 2 or int(text) > MAX_WAIT:
        raise invalid(f"wait must be a whole number of seconds, 0 to {MAX_WAIT}.", "wait")
    return int(text)


async def poll(request: Request, look: Callable[[], Awaitable[T]], ended: Callable[[T], bool]) -> tuple[T, dict[str, str]]:
    """What `look` finds, as soon as it has `ended`, or when `?wait=` is over; and headers of the answer. It may be that nobody may wait.

    Raises:
        ApiError: 400; whatever `look` raises. ClientGoneError.
    """
    seconds = seconds_of(request)
    found = await look()
    if ended(found) or not seconds:
        return found, {}
    polls: LongPolls = request.app.state.longpolls
    with polls.place(caller_of(request).id) as free:
        if not free:
            return found, DECLINED
        end = time.monotonic() + seconds
        leaving = asyncio.ensure_future(_disconnect(request))
        try:
            while not ended(found) and (left := end - time.monotonic()) > 0 and not request.app.state.draining:
                await asyncio.wait({leaving}, timeout=min(LOOK_SECONDS, left))
                if leaving.done():
                    raise ClientGoneError
                found = await look()
        finally:
            leaving.cancel()
    return found, {}


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

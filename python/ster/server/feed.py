"""Events on their way from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

from ster.server.requests import ClientGoneError
from ster.server.work import Failed, Finished

if TYPE_CHECKING:
    from starlette.types import Receive

    from ster.server.work import Event


class Feed:
    """The events of one ticket, in order, for one reader, who is told when the client has left.

    works: how many of them will end. eager: wake the reader for every event; otherwise once, when all have ended or one has failed.
    """

    def __init__(self, works: int, receive: Receive, *, eager: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[int, Event]] = deque()
        self._running = works
        self._eager = eager
        self._waking = False
        self._woken = asyncio.Event()
        self._gone = False
        self._watch = asyncio.ensure_future(self._disconnect(receive))

    def listener(self, index: int, event: Event) -> None:
        """Called on the engine's thread. One wake-up is on its way at most, however many events it will find."""
        self._events.append((index, event))
        self._running -= isinstance(event, Finished | Failed)
        if (self._eager or self._running == 0 or isinstance(event, Failed)) and not self._waking:
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self._loop.call_soon_threadsafe(self._wake)

    @property
    def gone(self) -> bool:
        """The client has left."""
        return self._gone

    async def next(self, seconds: float | None = None) -> list[tuple[int, Event]]:
        """What has happened since the last call; waits for something, but not longer than `seconds`.

        A failure comes by itself, after all that came before it: how fast the reader is does not show in an answer.

        Raises:
            ClientGoneError
        """
        end = None if seconds is None else self._loop.time() + seconds
        while True:
            left = None if end is None else end - self._loop.time()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._woken.wait(), left)
            self._woken.clear()
            if self._gone:
                raise ClientGoneError
            events = self._take()
            # A wake-up may come for events that were taken before it: then there is more to wait for.
            if events or (end is not None and self._loop.time() >= end):
                return events

    def _take(self) -> list[tuple[int, Event]]:
        events: list[tuple[int, Event]] = []
        while self._events:  # the other thread may add one meanwhile; nobody else takes
            if events and isinstance(self._events[0][1], Failed):
                self._woken.set()
                break
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        self._watch.cancel()

    def _wake(self) -> None:
        self._waking = False  # first: an event that comes now needs a wake-up of its own
        self._woken.set()

    async def _disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._woken.set()

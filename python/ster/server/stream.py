"""An answer as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from ster.server.form import Form, Head, Json
from ster.server.ongoing import Ongoing, timed_out
from ster.server.requests import late
from ster.server.work import Token

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from ster.server.work import Event

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"
STREAM_HEADERS = {"Cache-Control": "no-store"}
END_SECONDS = 5.0  # for a reader who does not read, to be told that its time is over


class EventStream(Response):
    """A chunk for each token, then usage and activations where they were asked for, then `[DONE]`.

    An error is the last event, and nothing comes after it. While there is nothing to send, comments keep the connection alive.
    """

    media_type = "text/event-stream"

    def __init__(self, ongoing: Ongoing, form: Form, head: Head, first: list[tuple[int, Event]]) -> None:
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._ongoing = ongoing
        self._choices = ongoing.choices
        self._form = form
        self._head = head.of(form.chunk_object)
        self._first = first
        self._opened: set[int] = set()
        self._tokens = 0  # of those that are written, or about to be
        self._pending: dict[int, list[Token]] = {choice.index: [] for choice in self._choices}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        except BaseException:
            self._ongoing.close()
            raise
        await self.run(send)

    async def run(self, send: Send) -> None:
        """All of it that comes after the status and the headers."""
        record, error = self._ongoing.record, None
        try:
            # A second more than the request has: then it is the reader who is slow.
            await asyncio.wait_for(self._write(send), self._ongoing.deadline - time.monotonic() + 1.0)
        except asyncio.TimeoutError:
            error = late(timed_out(self._ongoing.settings), record)
        except Exception as failure:
            error = late(failure, record)
            if error is None:
                return
        finally:
            self._ongoing.close()
        await self._ongoing.bill.settled()
        last = DONE if error is None else event(error.body(record.id))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(send({"type": "http.response.body", "body": last, "more_body": False}), END_SECONDS)

    async def _write(self, send: Send) -> None:
        async def write(data: bytes, *, activations: bool = False) -> None:
            """What begins to be sent is owed: a reader who leaves before its end has had all but that."""
            ongoing.check_client()
            if activations or self._tokens or (self._opened and self._form.needs_scores) or self._choices.finished:
                ongoing.owe(self._tokens, activations=activations)
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                ongoing.check_client()

        ongoing, events = self._ongoing, self._first
        while True:
            self._take(events)
            if self._form.needs_scores:  # a prompt's scores may be many
                await write(await run_in_threadpool(self._news))
            else:
                await write(self._news())
            if self._choices.finished:
                break
            events = await ongoing.next(ongoing.settings.keepalive_seconds)
            if not events:
                await write(KEEPALIVE)
        if ongoing.plan.usage:
            await write(self._chunk({"choices": [], "usage": self._choices.usage()}))
        if ongoing.plan.layers is not None:
            activations = await run_in_threadpool(lambda: self._chunk({"choices": [], "activations": ongoing.activations()}))
            await write(activations, activations=True)

    def _take(self, events: list[tuple[int, Event]]) -> None:
        for index, told in events:
            if isinstance(told, Token):
                self._pending[index].append(told)

    def _news(self) -> bytes:
        return b"".join(map(self._chunk, self._chunks()))

    def _chunks(self) -> Iterator[Json]:
        """What can be written now and has not been."""
        for choice in self._choices:
            if self._form.needs_scores and self._choices.prompt_scores(choice) is None:
                continue
            tokens = self._pending[choice.index]
            if choice.index not in self._opened and (tokens or choice.finished or self._form.needs_scores):
                self._opened.add(choice.index)
                opening = self._form.opening(self._choices, choice)
                if opening is not None:
                    yield opening
            self._tokens += len(tokens)
            for token in tokens:
                yield {"choices": [self._form.delta(choice, token)]}
            tokens.clear()

    def _chunk(self, body: Json) -> bytes:
        return event(self._head | body)


def event(document: Json) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"

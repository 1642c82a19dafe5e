"""Answers that take long: after `keepalive_seconds` one begins with 200, and until it is there, bytes that mean nothing keep it alive.

Spaces before JSON, comments in a stream. What goes wrong after that is told in the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from ster.server.errors import queue_full
from ster.server.lease import Lease
from ster.server.models import Models
from ster.server.requests import ClientGoneError, Record, late, record_of
from ster.server.settings import Settings
from ster.server.stream import KEEPALIVE, STREAM_HEADERS, EventStream, event

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from ster.server.loaded import Loaded

SPACE = b" "


def claim(request: Request, name: str | None) -> Lease:
    """A use of the model that a request names.

    Raises:
        ApiError: 400, there is none; 429, as many wait for it as may; 503, it failed to load, or the server is shutting down.
    """
    settings: Settings = request.app.state.settings
    models: Models = request.app.state.models
    served = models.named(name)
    record_of(request).model = served.name
    if served.waiting >= settings.queue + settings.max_running:
        raise queue_full()
    return served.claim()


async def model_of(request: Request, lease: Lease) -> Loaded:
    """The model of `lease`, when it is there.

    Raises:
        ClientGoneError. ApiError: 503, it failed to load, took too long, or the server is shutting down.
    """
    if not lease.waits:
        return lease.result()
    settings: Settings = request.app.state.settings
    arriving = asyncio.ensure_future(lease.arrival(settings.load_seconds))
    leaving = asyncio.ensure_future(_disconnect(request.receive))
    waited: set[asyncio.Future[Any]] = {arriving, leaving}
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if arriving.done():
            return arriving.result()
        raise ClientGoneError
    finally:
        leaving.cancel()
        arriving.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def held(request: Request, making: Coroutine[Any, Any, Response], *, stream: bool = False) -> Response:
    """What `making` makes, if that is there soon; otherwise an answer that begins now and waits for it.

    stream: it makes an `EventStream`.

    Raises:
        Whatever `making` raises soon.
    """
    settings: Settings = request.app.state.settings
    task = asyncio.ensure_future(making)
    try:
        await asyncio.wait({task}, timeout=settings.keepalive_seconds)
        if task.done():
            return task.result()
    except BaseException:
        task.cancel()
        raise
    return Waiting(task, record_of(request), settings.keepalive_seconds, stream=stream)


class Waiting(Response):
    """An answer that begins before `making` has made it. seconds: between two signs of life."""

    def __init__(self, making: asyncio.Task[Response], record: Record, seconds: float, *, stream: bool) -> None:
        if stream:
            super().__init__(media_type=EventStream.media_type, headers=STREAM_HEADERS)
        else:
            super().__init__(media_type="application/json")
        del self.headers["content-length"]
        self._making = making
        self._record = record
        self._seconds = seconds
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sign = KEEPALIVE if self._stream else SPACE
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not self._making.done():
                await send({"type": "http.response.body", "body": sign, "more_body": True})
                await asyncio.wait({self._making}, timeout=self._seconds)
        except BaseException:
            self._making.cancel()
            raise
        try:
            answer = self._making.result()
        except Exception as failure:
            error = late(failure, self._record)
            if error is None:
                return
            document = error.body(self._record.id)
            body = event(document) if self._stream else orjson.dumps(document)
        else:
            if isinstance(answer, EventStream):
                await answer.run(send)
                return
            body = bytes(answer.body)
        await send({"type": "http.response.body", "body": body, "more_body": False})

"""The body of a request: refused by its type and size before it is read, not waited for without end, and read and parsed in its turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from ster.server.errors import ApiError, busy_reading, request_too_large, unsupported_media_type
from ster.server.requests import ClientGoneError
from ster.server.settings import Settings

JSON = "application/json"
SMALL = 64 << 10  # bytes, as many as a connection holds anyway: these never wait for a turn
LARGE = 1 << 20  # bytes: such bodies are parsed one at a time

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")


class Bodies:
    """The memory for bodies over all requests, handed out in the order of asking."""

    def __init__(self, settings: Settings) -> None:
        self.free = settings.bodies_bytes
        self.parsing = asyncio.Lock()  # of a large one
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int, seconds: float) -> None:
        """
        Raises:
            ApiError: 503, there was no room for so long.
        """
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self._grant()
        try:
            await asyncio.wait([turn], timeout=seconds)
        except BaseException:
            if turn.done():
                self.give(size)
            turn.cancel()
            raise
        if not turn.done():
            turn.cancel()
            self._grant()
            raise busy_reading()

    def give(self, size: int) -> None:
        self.free += size
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.cancelled():
                if size > self.free:
                    return
                self.free -= size
                turn.set_result(None)
            self._waiting.popleft()


class Body(Generic[T]):
    """What was read in a body. It has its share of the memory for bodies until `close`.

    content: what `parse` made of it; must not be looked at afterwards.
    """

    content: T

    def __init__(self, bodies: Bodies, held: int, size: int) -> None:
        self._bodies = bodies
        self._held = held
        self._large = size > LARGE

    async def in_turn(self, work: Callable[[U], V], argument: U) -> V:
        """`work(argument)`, in a thread; for large bodies, one at a time."""
        if not self._large:
            return await run_in_threadpool(work, argument)
        async with self._bodies.parsing:
            return await run_in_threadpool(work, argument)

    def close(self) -> None:
        """More than once does no harm."""
        self.__dict__.pop("content", None)
        self._bodies.give(self._held)
        self._held = 0


async def with_body(request: Request, work: Callable[[bytes], T]) -> T:
    """`work`, in a thread, of the body of `request`: it can hold two million numbers.

    Raises:
        ApiError, ClientGoneError: see `read_body`.
    """
    body = await read_body(request, work)
    try:
        return body.content
    finally:
        body.close()


async def read_body(request: Request, parse: Callable[[bytes], T]) -> Body[T]:
    """`parse`, in a thread, of the body of `request`. Nothing but its outcome stays of the body.

    Raises:
        ApiError: 415, a type other than JSON; 413, more bytes than the cap; 408, they took too long; 503, too many others are being read.
        ClientGoneError: the client left.
    """
    settings: Settings = request.app.state.settings
    bodies: Bodies = request.app.state.bodies
    _check_type(request)
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() else settings.max_body_bytes
    if size > settings.max_body_bytes:
        raise request_too_large(settings.max_body_bytes)
    body, held = bytearray(), 0
    found: Body[T] | None = None
    try:
        if not await _within(settings.body_seconds, _read(request, body, settings.max_body_bytes, SMALL)):
            await bodies.take(size, settings.body_seconds)
            held = size
            await _within(settings.body_seconds, _read(request, body, settings.max_body_bytes))
        raw = bytes(body)
        del body
        found = Body(bodies, held, len(raw))
        held = 0
        found.content = await found.in_turn(parse, raw)
        return found
    except BaseException:
        if found is not None:
            found.close()
        bodies.give(held)
        raise


def _check_type(request: Request) -> None:
    """A web page can post plain text and forms to any server without asking it, and a body without a type; JSON it cannot."""
    types = request.headers.getlist("content-type")
    if not types and "origin" in request.headers:
        raise unsupported_media_type("no content type")
    for found in types:
        if found.partition(";")[0].strip().lower() != JSON:
            raise unsupported_media_type(found[:100])
    for encoding in request.headers.getlist("content-encoding"):
        if encoding.strip().lower() != "identity":
            raise unsupported_media_type(f"content encoding {encoding[:100]}")


async def _within(seconds: float, reading: Coroutine[Any, Any, T]) -> T:
    try:
        return await asyncio.wait_for(reading, seconds)
    except asyncio.TimeoutError:
        message = f"The body did not arrive within {seconds:g} seconds."
        raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from None


async def _read(request: Request, body: bytearray, limit: int, pause: int | None = None) -> bool:
    """Read on into `body`. False: there is more, and it has more than `pause` bytes."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > limit:
            raise request_too_large(limit)
        if not message.get("more_body", False):
            return True
        if pause is not None and len(body) > pause:
            return False

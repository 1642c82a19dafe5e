"""Answers that come before the request's body was read, such as 401 and 413.

A connection that is closed while the client still sends is reset, and the client never sees the answer. So the answer goes out at once,
and what still comes is dropped, unread, for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

SECONDS = 10.0
MAX_BYTES = 1 << 30


def linger(scope: Scope, receive: Receive, send: Send) -> tuple[Receive, Send]:
    """`receive` and `send`, where the last message of an answer waits until the body has come in."""
    headers = {name for name, _ in scope["headers"]}
    # Without these there is no body; a client that waits for `100 Continue` will not send it now.
    unread = bool(headers & {b"content-length", b"transfer-encoding"}) and b"expect" not in headers

    async def reading() -> Message:
        nonlocal unread
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            unread = False
        return message

    async def sending(message: Message) -> None:
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not (last and unread):
            await send(message)
            return
        await send({**message, "more_body": True})
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(drop(), SECONDS)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def drop() -> None:
        dropped = 0
        while unread and dropped < MAX_BYTES:
            dropped += len((await reading()).get("body", b""))

    return reading, sending

"""The body of a request: refused by its type and size before it is read, and not waited for without end."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from ster.server.errors import ApiError, request_too_large, unsupported_media_type
from ster.server.requests import ClientGoneError
from ster.server.settings import Settings

JSON = "application/json"


async def read_body(request: Request, settings: Settings) -> bytes:
    """
    Raises:
        ApiError: 415, a type other than JSON; 413, more bytes than the cap; 408, they took too long.
        ClientGoneError: the client left.
    """
    _check_type(request)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > settings.max_body_bytes:
        raise request_too_large(settings.max_body_bytes)
    try:
        return await asyncio.wait_for(_read(request, settings.max_body_bytes), settings.body_seconds)
    except asyncio.TimeoutError:
        message = f"The body did not arrive within {settings.body_seconds:g} seconds."
        raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from None


def _check_type(request: Request) -> None:
    """A web page can post plain text and forms to any server without asking it, and a body without a type; JSON it cannot."""
    found = request.headers.get("content-type")
    if found is None:
        if "origin" in request.headers:
            raise unsupported_media_type("no content type")
    elif found.partition(";")[0].strip().lower() != JSON:
        raise unsupported_media_type(found[:100])
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise unsupported_media_type(f"content encoding {encoding[:100]}")


async def _read(request: Request, limit: int) -> bytes:
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > limit:
            raise request_too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)

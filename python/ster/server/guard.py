"""Who may ask: API keys, and names of this machine that web pages cannot make up."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from ster.server.callers import CALLER, NOBODY, Caller, of_plain_key
from ster.server.errors import ApiError, invalid_api_key

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health", "/ready", "/openapi.json"})


class Guard:
    """Refuses requests without a key, where there are keys, and requests to a host that this server is not.

    hosts: names that the Host header may have; None: any. A server on the loopback address without keys is safe from web pages only if
    it insists on them: a page of evil.example whose name resolves to 127.0.0.1 is of the same origin as the server, but says its own name.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], hosts: Collection[str] | None) -> None:
        self.app = app
        self.keys = [key.encode() for key in keys]
        self.hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            self._check_host(headers.get("host", ""))
            scope[CALLER] = NOBODY
            if self.keys and scope["path"] not in OPEN_PATHS:
                scope[CALLER] = self._caller(headers.get("authorization", ""))
        await self.app(scope, receive, send)

    def _check_host(self, host: str) -> None:
        if self.hosts is not None and host_name(host) not in self.hosts:
            message = "This server answers to its loopback address alone: the Host header has another name."
            raise ApiError(403, message, code="host_not_allowed")

    def _caller(self, authorization: str) -> Caller:
        scheme, _, key = authorization.partition(" ")
        given = key.strip().encode()
        # Every key is compared, whichever fits, so that time tells nothing.
        matches = [hmac.compare_digest(given, known) for known in self.keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise invalid_api_key()
        return of_plain_key(given)


def host_name(host: str) -> str:
    """`localhost:8000` -> `localhost`; `[::1]:8000` -> `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()

"""Who asks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from starlette.requests import Request

CALLER = "ster.caller"  # of a request's scope; `ster.server.guard` sets it


@dataclass(frozen=True)
class Caller:
    """id: what Jobs and harvests are owned by. key: the id of a key of the state, whose budgets hold; None: nothing is counted."""

    id: str
    key: str | None = None


NOBODY = Caller("local")
"""Whoever asks a server that has no keys."""


def of_plain_key(key: bytes) -> Caller:
    """A key that was given to `ster serve` as it is."""
    return Caller("plain_" + hashlib.sha256(key).hexdigest()[:32])


def caller_of(request: Request) -> Caller:
    found: Caller = request.scope[CALLER]
    return found

"""When to ask again, and after how long."""

from __future__ import annotations

import email.utils
import math
import time
from collections.abc import Mapping

import orjson

AGAIN = frozenset({429, 502, 503, 504})
"""Statuses of a server that is busy, or not there behind its proxy."""
ONCE_AGAIN = 500
CODES = {
    **dict.fromkeys(("queue_full", "concurrency_exceeded", "rate_limited"), 429),
    "upstream_server_error": 502,
    **dict.fromkeys(
        ("state_unavailable", "too_many_bodies", "model_loading", "model_failed", "model_load_timeout", "shutting_down"),
        503,
    ),
    "internal_error": 500,
}
"""Code of an error of `ster serve` -> the status that it has, unless a 200 was already sent to keep the client waiting."""
FIRST, LONGEST = 0.5, 30.0  # seconds of waits that double, where the server does not say how long
CONNECTIONS = 4  # attempts to connect: a server that is gone should be told of soon


def wait_of(attempt: int) -> float:
    """Seconds before attempt number `attempt` + 1, counted from 0.

    >>> [wait_of(attempt) for attempt in (0, 1, 2, 9)]
    [0.5, 1.0, 2.0, 30.0]
    """
    return float(min(LONGEST, FIRST * 2.0 ** min(attempt, 16)))


class Patience:
    """How long one request is asked again: `seconds` in all, by the waits and by the clock since the first of them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waited = 0.0
        self._attempts = self._connections = 0
        self._since: float | None = None

    def after(self, status: int, headers: Mapping[str, str]) -> float | None:
        """Seconds to wait after that answer, never fewer than those that double; None: it is final."""
        if status not in AGAIN and not (status == ONCE_AGAIN and not self._attempts):
            return None
        wait = max(retry_after(headers) or 0.0, wait_of(self._attempts))
        self._attempts += 1
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if max(self._waited, now - self._since) + wait > self._seconds:
            return None
        self._waited += wait
        return wait

    def after_break(self) -> float | None:
        """Seconds to wait after a connection that failed; None: that was the last attempt."""
        self._connections += 1
        if self._connections >= CONNECTIONS:
            return None
        wait = wait_of(self._connections - 1)
        self._waited += wait
        return wait


def status_of(status: int, body: bytes) -> int:
    """The status that an answer has: of a 200 which holds an error of `ster serve`, that error's.

    >>> status_of(200, b'  {"error": {"message": "Full.", "code": "queue_full"}}'), status_of(200, b'{"choices": []}')
    (429, 200)
    """
    text = body.lstrip() if status == 200 else b""
    if not text.startswith(b'{"error"'):
        return status
    try:
        error = orjson.loads(text)["error"]
        return CODES.get(error["code"], status)
    except (ValueError, TypeError, KeyError):
        return status


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds that `Retry-After` asks for, as a number or as a date; None where it says nothing of use.

    now: seconds since 1970; None: the clock's.

    >>> retry_after({"retry-after": "5"}), retry_after({"retry-after": "Thu, 01 Jan 1970 00:01:00 GMT"}, now=50.0)
    (5.0, 10.0)
    """
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.replace(".", "", 1).isdigit():
        seconds = float(text)
        return seconds if math.isfinite(seconds) else None
    try:
        date = email.utils.parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    if date.tzinfo is None:  # "-0000", which means UTC
        import datetime

        date = date.replace(tzinfo=datetime.timezone.utc)
    return max(0.0, date.timestamp() - (time.time() if now is None else now))

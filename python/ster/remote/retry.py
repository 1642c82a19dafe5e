"""When to ask again, and after how long."""

from __future__ import annotations

import email.utils
import math
import time
from collections.abc import Mapping

AGAIN = frozenset({429, 502, 503, 504})
"""Statuses of a server that is busy, or not there behind its proxy."""
ONCE_AGAIN = 500
FIRST, LONGEST = 0.5, 30.0  # seconds of waits that double, where the server does not say how long
CONNECTIONS = 4  # attempts to connect: a server that is gone should be told of soon


def wait_of(attempt: int) -> float:
    """Seconds before attempt number `attempt` + 1, counted from 0.

    >>> [wait_of(attempt) for attempt in (0, 1, 2, 9)]
    [0.5, 1.0, 2.0, 30.0]
    """
    return float(min(LONGEST, FIRST * 2.0 ** min(attempt, 16)))


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

"""What budgets count, and what is left of them: values, of which no database knows."""

from __future__ import annotations

import calendar
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Literal

from ster.errors import SterError


@dataclass(frozen=True)
class Amount:
    """What a Hold holds, or a request has used. activations: requests with a capture."""

    input_tokens: int = 0
    output_tokens: int = 0
    activations: int = 0
    harvest_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Amount) -> Amount:
        return Amount(*(a + b for a, b in zip(self.each(), other.each(), strict=True)))

    def least(self, other: Amount) -> Amount:
        """The smaller of each."""
        return Amount(*(min(a, b) for a, b in zip(self.each(), other.each(), strict=True)))

    def each(self) -> tuple[int, ...]:
        return (self.input_tokens, self.output_tokens, self.activations, self.harvest_tokens)


NOTHING = Amount()

Period = Literal["month", "day"]
BUDGETS: Mapping[str, tuple[Period, str]] = {
    "monthly_tokens": ("month", "tokens"),
    "daily_tokens": ("day", "tokens"),
    "monthly_input_tokens": ("month", "input_tokens"),
    "monthly_output_tokens": ("month", "output_tokens"),
    "monthly_activations": ("month", "activations"),
    "monthly_harvest_tokens": ("month", "harvest_tokens"),
}
"""Each limit that is a budget: of which period, and of which member of `Amount`."""


class OverBudget(SterError):  # noqa: N818
    """There is no room for a Hold now.

    dimension: the limit's name, of `LIMITS`. left: of it, never below 0. asked: what did not fit. held: by what runs or waits, and may come
    back. renews_at: when its period is over, in seconds since 1970; None: it has none.
    """

    def __init__(self, dimension: str, limit: int, left: int, asked: int, held: int, renews_at: float | None) -> None:
        super().__init__(f"{dimension} is {limit}, of which {left} is left: {asked} does not fit")
        self.dimension = dimension
        self.limit = limit
        self.left = left
        self.asked = asked
        self.held = held
        self.renews_at = renews_at


class KeyInactiveError(SterError):
    """The key was paused or revoked. state: which."""

    def __init__(self, state: str) -> None:
        super().__init__(f"the key is {state}")
        self.state = state


@dataclass(frozen=True)
class Hold:
    """A Hold that was taken. amount: may be less than was asked for, where that was allowed."""

    id: str
    key_id: str
    amount: Amount


@dataclass(frozen=True)
class Balance:
    """Of one period, `2026-11` or `2026-11-30`. requests: those that were paid."""

    period: str
    renews_at: float
    spent: Amount
    held: Amount
    requests: int


@dataclass(frozen=True)
class Usage:
    """limits: those that hold. running: requests that hold something now."""

    limits: Mapping[str, int]
    month: Balance
    day: Balance
    running: int

    def used(self, limit: str) -> tuple[int, int]:
        """(spent, held) of a budget's dimension."""
        period, member = BUDGETS[limit]
        balance: Balance = getattr(self, period)
        return getattr(balance.spent, member), getattr(balance.held, member)

    def left(self, limit: str) -> int | None:
        """Of a budget; None where there is no such limit. Below 0 after the limit was lowered."""
        return None if limit not in self.limits else self.limits[limit] - sum(self.used(limit))

    def renews_at(self, limit: str) -> float:
        balance: Balance = getattr(self, BUDGETS[limit][0])
        return balance.renews_at


def periods(now: float) -> tuple[str, str]:
    """The month and the day, in UTC: `2026-11`, `2026-11-30`."""
    day = datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m-%d")
    return day[:7], day


def end_of(period: str) -> float:
    """When a month or a day is over, in seconds since 1970."""
    year, month, *days = map(int, period.split("-"))
    day = days[0] if days else calendar.monthrange(year, month)[1]
    return (datetime(year, month, day, tzinfo=timezone.utc) + timedelta(days=1)).timestamp()


def most_output(found: Usage, input_tokens: int) -> int:
    """Output tokens that fit beside so many of input."""
    room = [left for limit in ("monthly_tokens", "daily_tokens") if (left := found.left(limit)) is not None]
    room = [left - input_tokens for left in room]
    output = found.left("monthly_output_tokens")
    return min([*room, *([] if output is None else [output])], default=2**62)


def fitting(used: Amount, found: Usage) -> Amount:
    """As much of `used` as the budgets have left: input first."""
    room = {limit: max(left, 0) for limit in BUDGETS if (left := found.left(limit)) is not None}
    most = 2**62
    tokens = min(room.get("monthly_tokens", most), room.get("daily_tokens", most))
    paid = min(used.input_tokens, tokens, room.get("monthly_input_tokens", most))
    return Amount(
        paid,
        min(used.output_tokens, tokens - paid, room.get("monthly_output_tokens", most)),
        min(used.activations, room.get("monthly_activations", most)),
        min(used.harvest_tokens, room.get("monthly_harvest_tokens", most)),
    )

"""What budgets must do, in plain Python: a key's limits, Holds and spending, without a database and one thing at a time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from ster.state.amounts import BUDGETS, NOTHING, Amount, periods
from ster.state.budget import KEPT_MINUTES


@dataclass
class ModelHold:
    month: str
    day: str
    amount: Amount
    server: str | None
    freed: bool = False


@dataclass
class ModelKey:
    limits: dict[str, int]
    state: str = "active"
    holds: dict[str, ModelHold] = field(default_factory=dict)
    spent: dict[str, Amount] = field(default_factory=lambda: defaultdict(lambda: NOTHING))
    requests: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    starts: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def held(self, period: str) -> Amount:
        found = NOTHING
        for hold in self.holds.values():
            if not hold.freed and period in (hold.month, hold.day):
                found += hold.amount
        return found

    def running(self) -> int:
        return sum(hold.server is not None and not hold.freed for hold in self.holds.values())

    def left(self, limit: str, month: str, day: str) -> int | None:
        if limit not in self.limits:
            return None
        period = month if BUDGETS[limit][0] == "month" else day
        return self.limits[limit] - sum(getattr(each, BUDGETS[limit][1]) for each in (self.spent[period], self.held(period)))

    def refusal(self, amount: Amount, server: str | None, now: float) -> str | None:
        """The limit that leaves no room, or what the key is."""
        if self.state != "active":
            return self.state
        if self.starts[int(now // 60)] >= self.limits.get("requests_per_minute", 10**9):
            return "requests_per_minute"
        if server is not None and self.running() >= self.limits.get("concurrency", 10**9):
            return "concurrency"
        for limit, (_, member) in BUDGETS.items():
            left = self.left(limit, *periods(now))
            if left is not None and getattr(amount, member) > max(left, 0):
                return limit
        return None

    def clamped(self, amount: Amount, least: int, now: float) -> Amount:
        """As `amount`, with as much output as fits, tried one by one."""
        for output in range(amount.output_tokens, least, -1):
            tried = replace(amount, output_tokens=output)
            fits = True
            for limit in ("monthly_tokens", "daily_tokens", "monthly_output_tokens"):
                left = self.left(limit, *periods(now))
                fits = fits and (left is None or getattr(tried, BUDGETS[limit][1]) <= left)
            if fits:
                return tried
        return replace(amount, output_tokens=min(least, amount.output_tokens) if amount.output_tokens < least else least)

    def take(self, id: str, amount: Amount, server: str | None, now: float) -> None:
        self.holds[id] = ModelHold(*periods(now), amount, server)
        if "requests_per_minute" in self.limits:
            minute = int(now // 60)
            if not self.starts[minute]:
                self.starts = defaultdict(int, {each: count for each, count in self.starts.items() if each >= minute - KEPT_MINUTES})
            self.starts[minute] += 1

    def settle(self, id: str, used: Amount) -> Amount:
        hold = self.holds.pop(id, None)
        if hold is None:
            return NOTHING
        used = used.least(hold.amount)
        if hold.freed:
            used = self._fitting(used, hold)
        if used != NOTHING:
            for period in (hold.month, hold.day):
                self.spent[period] += used
                self.requests[period] += 1
        return used

    def free(self, server: str) -> None:
        for hold in self.holds.values():
            hold.freed = hold.freed or hold.server == server

    def _fitting(self, used: Amount, hold: ModelHold) -> Amount:
        """As much as is left in its month and day, token by token, input first."""
        paid = NOTHING
        for name in ("input_tokens", "output_tokens", "activations", "harvest_tokens"):
            for _ in range(getattr(used, name)):
                more = replace(paid, **{name: getattr(paid, name) + 1})
                lefts = {limit: self.left(limit, hold.month, hold.day) for limit in BUDGETS}
                if any(left is not None and getattr(more, BUDGETS[limit][1]) > left for limit, left in lefts.items() if _has(limit, name)):
                    break
                paid = more
        return paid


def _has(limit: str, name: str) -> bool:
    """Whether a member of `Amount` counts in a budget."""
    member = BUDGETS[limit][1]
    return member == name or (member == "tokens" and name in ("input_tokens", "output_tokens"))

"""Keys as `ster keys` shows them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ster.cli.tables import table

if TYPE_CHECKING:
    from ster.state.amounts import Usage
    from ster.state.keys import Key


def described(key: Key, found: Usage | None = None) -> dict[str, Any]:
    """As JSON; with its usage as `GET /v1/usage` has it."""
    document: dict[str, Any] = {"id": key.id, "name": key.name, "shown": key.shown, "state": key.state, "created_at": int(key.created_at)}
    document["limits"] = dict(key.limits)
    if found is not None:
        from ster.state.usage import described as usage_described

        document["usage"] = usage_described(found)
    return document


def listed(found: list[tuple[Key, Usage]]) -> str:
    rows = [
        [key.name, key.shown + "...", key.state, _date(key.created_at), f"{usage.month.requests:,}", f"{usage.month.spent.tokens:,}"]
        for key, usage in found
    ]
    return table(["name", "key", "state", "made", "requests this month", "tokens"], rows) if rows else "There are no keys."


def shown(key: Key, found: Usage) -> str:
    from ster.state.amounts import BUDGETS

    rows = []
    for limit in BUDGETS:
        spent, held = found.used(limit)
        left = found.left(limit)
        rows.append([limit, _count(found.limits.get(limit)), f"{spent:,}", f"{held:,}", _count(None if left is None else max(left, 0))])
    lines = [f"{key.name}: {key.shown}..., {key.state}, made {_date(key.created_at)}, {key.id}"]
    lines.append(table(["", "limit", "spent", "held", "left"], rows))
    lines.append(f"running {found.running} of {_count(found.limits.get('concurrency'))}")
    lines.append(f"requests_per_minute {_count(found.limits.get('requests_per_minute'))}")
    return "\n".join(lines)


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))

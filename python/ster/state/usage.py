"""Usage as JSON, the same for `GET /v1/usage` and `ster keys show`."""

from __future__ import annotations

from typing import Any

from ster.state.amounts import BUDGETS, Balance, Usage


def described(found: Usage) -> dict[str, Any]:
    """As JSON. What has no limit has no `limit` and no `left`."""
    document: dict[str, Any] = {"budgets": {}}
    for limit in BUDGETS:
        spent, held = found.used(limit)
        budget = {"spent": spent, "held": held, "renews_at": int(found.renews_at(limit))}
        left = found.left(limit)
        if left is not None:
            budget |= {"limit": found.limits[limit], "left": max(left, 0)}
        document["budgets"][limit] = budget
    document |= {"month": _period(found.month), "day": _period(found.day), "running": found.running}
    return document | {name: found.limits[name] for name in ("concurrency", "requests_per_minute") if name in found.limits}


def _period(balance: Balance) -> dict[str, Any]:
    return {"period": balance.period, "requests": balance.requests, "renews_at": int(balance.renews_at)}

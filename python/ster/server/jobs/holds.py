"""The Hold of a Job, which belongs to no server: it is taken with the Job's row, and settled with its end."""

from __future__ import annotations

from sqlalchemy import Connection

from ster.server.callers import Caller
from ster.server.plan import Plan
from ster.state.budget import NOTHING, Amount, settle, take_hold


def take(connection: Connection, caller: Caller, plan: Plan) -> str | None:
    """The id of the Hold; None where nothing is counted.

    Raises:
        OverBudget, KeyInactiveError: see `take_hold`.
    """
    if caller.key is None:
        return None
    most = Amount(plan.prompt_tokens, sum(work.max_tokens for work in plan.works), int(plan.layers is not None))
    return take_hold(connection, caller.key, most, None).id


def pay(connection: Connection, hold_id: str | None, used: Amount = NOTHING) -> None:
    """End a Hold; what fails or is cancelled costs nothing."""
    if hold_id is not None:
        settle(connection, hold_id, used)

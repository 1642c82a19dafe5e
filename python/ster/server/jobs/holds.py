"""The Hold of a Job, which belongs to no server: it is taken with the Job's row, and settled with its end."""

from __future__ import annotations

from sqlalchemy import Connection

from ster.server.callers import Caller
from ster.server.errors import invalid_api_key, key_paused, over_budget
from ster.server.plan import Plan
from ster.state.amounts import NOTHING, Amount, KeyInactiveError, OverBudget
from ster.state.budget import settle, take_hold


def take(connection: Connection, caller: Caller, plan: Plan) -> str | None:
    """The id of the Hold; None where nothing is counted.

    Raises:
        ApiError: 429, a limit leaves no room; 401, 403, the key was revoked or paused a moment ago.
    """
    if caller.key is None:
        return None
    most = Amount(plan.prompt_tokens, plan.max_output, int(plan.layers is not None))
    try:
        return take_hold(connection, caller.key, most, None).id
    except OverBudget as refused:
        raise over_budget(refused) from None
    except KeyInactiveError as inactive:
        raise (key_paused() if inactive.state == "paused" else invalid_api_key()) from None


def pay(connection: Connection, hold_id: str | None, used: Amount = NOTHING) -> None:
    """End a Hold; what fails or is cancelled costs nothing."""
    if hold_id is not None:
        settle(connection, hold_id, used)

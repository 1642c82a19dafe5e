"""`GET /v1/usage`: what the caller's key has spent, holds and has left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ster.server.callers import caller_of
from ster.server.errors import state_unavailable
from ster.server.requests import json_response
from ster.server.state_threads import log_trouble
from ster.state.budget import usage
from ster.state.keys import get_key
from ster.state.usage import described

if TYPE_CHECKING:
    from ster.server.accounts import Accounts


async def usage_page(request: Request) -> Response:
    """
    Raises:
        ApiError: 503, the database does not answer.
    """
    accounts: Accounts | None = request.app.state.accounts
    key_id = caller_of(request).key
    if accounts is None or key_id is None:
        return json_response({"object": "usage", "counted": False, "budgets": {}})

    def read() -> dict[str, Any]:
        with accounts.state.database.read() as connection:
            key = get_key(connection, key_id)
            return {"object": "usage", "counted": True, "key": {"id": key.id, "name": key.name}, **described(usage(connection, key_id))}

    try:
        return json_response(await accounts.run(read))
    except Exception as error:
        log_trouble("reading the usage of a key", error)
        raise state_unavailable() from None

"""`/v1/harvest`: to ask for a harvest, to see how far it is, to cancel it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from ster.server.body import Bodies, Body, read_body
from ster.server.callers import caller_of
from ster.server.errors import invalid
from ster.server.form import Json
from ster.server.harvests.documents import base_url, document, summary
from ster.server.harvests.errors import unavailable
from ster.server.harvests.files import answer_file
from ster.server.harvests.plan import make_plan
from ster.server.harvests.request import HarvestRequest
from ster.server.harvests.runner import Runner
from ster.server.harvests.store import Store
from ster.server.lease import Lease
from ster.server.longpoll import poll
from ster.server.models import Models
from ster.server.requests import json_response
from ster.server.schema import parse_body
from ster.server.settings import Settings
from ster.server.state_threads import in_state
from ster.server.waiting import claim, held, model_of
from ster.state.queue import FINAL, Found
from ster.state.state import State

MOST_LISTED = 100
Asked = tuple[HarvestRequest, bytes]


class Harvests:
    """What a server with a state has of harvests.

    bodies: memory for those of submissions, which take seconds to be tokenised, and nobody else's waits for them.
    """

    def __init__(self, state: State, models: Models, settings: Settings, stopping: Callable[[], bool]) -> None:
        cap = min(settings.max_harvest_body_bytes, settings.max_body_bytes)
        self.bodies = Bodies(cap, 2 * cap)
        self.store = Store(state, settings)
        self.runner = Runner(self.store, models, stopping)


def harvests_of(request: Request) -> Harvests:
    """
    Raises:
        ApiError: 503, the server keeps no state.
    """
    found: Harvests | None = request.app.state.harvests
    if found is None:
        raise unavailable()
    return found


async def harvest_list(request: Request) -> Response:
    return await (_submit(request) if request.method == "POST" else _listing(request))


async def one_harvest(request: Request) -> Response:
    return await (_cancel(request) if request.method == "DELETE" else _get(request))


async def _submit(request: Request) -> Response:
    harvests = harvests_of(request)
    settings = harvests.store.settings
    body = await read_body(request, lambda raw: (parse_body(HarvestRequest, raw, settings), raw), harvests.bodies)
    try:
        lease = claim(request, body.content[0].model)
    except BaseException:
        body.close()
        raise
    return await held(request, _take_in(request, harvests.store, body, lease))


async def _take_in(request: Request, store: Store, body: Body[Asked], lease: Lease) -> Response:
    try:
        loaded = await model_of(request, lease)
        asked, raw = body.content
        plan = await body.in_turn(partial(make_plan, loaded, store.settings), asked)
        id = await in_state(request, store.add, caller_of(request), lease.served.name, asked, raw, plan)
        return json_response({"job_id": id, "status": "pending", "model": lease.served.name, "n_prompts": len(asked.prompts)}, 202)
    finally:
        lease.close()
        body.close()


async def harvest_file(request: Request) -> Response:
    return await answer_file(request, harvests_of(request).store)


async def _get(request: Request) -> Response:
    store, caller, id = harvests_of(request).store, caller_of(request), request.path_params["id"]
    base = base_url(request)

    async def look() -> Found:
        return await in_state(request, store.get, caller, id)

    row, headers = await poll(request, look, lambda row: row.state in FINAL)
    return json_response(await run_in_threadpool(document, store, row, base), headers=headers)


async def _listing(request: Request) -> Response:
    return json_response(await in_state(request, _list, request))


def _list(request: Request) -> Json:
    store = harvests_of(request).store
    given = request.query_params.get("limit", "20")
    if not (given.isascii() and given.isdecimal() and len(given) <= 3 and 1 <= int(given) <= MOST_LISTED):
        raise invalid(f"limit must be a whole number, 1 to {MOST_LISTED}.", "limit")
    found = store.list(caller_of(request), int(given), request.query_params.get("after"))
    if found is None:
        raise invalid("after must be the id of a harvest of yours.", "after")
    rows, more = found
    return {"object": "list", "data": [summary(store, row) for row in rows], "has_more": more}


async def _cancel(request: Request) -> Response:
    store, caller, id = harvests_of(request).store, caller_of(request), request.path_params["id"]
    return json_response(await in_state(request, lambda: summary(store, store.cancel(caller, id)) | {"result": None}))

"""`/v1/jobs`: taken in, shown, listed and cancelled. A caller sees its own alone."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson
from sqlalchemy import Connection, func, select
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from ster.errors import SterError
from ster.server.body import Body, read_body
from ster.server.callers import Caller, caller_of
from ster.server.completions import plan_completion
from ster.server.errors import invalid
from ster.server.form import Json
from ster.server.jobs.errors import (
    job_not_cancellable,
    job_not_found,
    job_result_missing,
    job_storage_full,
    jobs_unavailable,
    too_many_jobs,
)
from ster.server.jobs.holds import pay, take
from ster.server.jobs.runner import DAY, Runner
from ster.server.jobs.shown import JobWithResult
from ster.server.jobs.size import most_bytes
from ster.server.lease import Lease
from ster.server.loaded import Loaded
from ster.server.longpoll import poll
from ster.server.plan import Plan, sentence
from ster.server.requests import json_response, record_of
from ster.server.schema import JobRequest, parse_body
from ster.server.settings import Settings
from ster.server.state_threads import in_state
from ster.server.waiting import claim, held, model_of
from ster.state.queue import FINAL, Found
from ster.state.state import State
from ster.state.tables import jobs

ID = re.compile(r"job-[0-9a-f]{32}")
MAX_LISTED = 100
LISTED = 20
Asked = tuple[JobRequest, bytes]


async def job_list(request: Request) -> Response:
    """`POST /v1/jobs`, `GET /v1/jobs`."""
    return await (_submit if request.method == "POST" else _list)(request)


async def one_job(request: Request) -> Response:
    """`GET /v1/jobs/{id}`, `DELETE /v1/jobs/{id}`."""
    return await (_cancel if request.method == "DELETE" else _get)(request)


def _runner_of(request: Request) -> Runner:
    """
    Raises:
        ApiError: 503, there is no state.
    """
    runner: Runner | None = request.app.state.jobs
    if runner is None:
        raise jobs_unavailable()
    return runner


# POST


async def _submit(request: Request) -> Response:
    settings: Settings = request.app.state.settings
    runner = _runner_of(request)
    body = await read_body(request, lambda raw: (parse_body(JobRequest, raw, settings), raw))
    try:
        lease = claim(request, body.content[0].model)
    except BaseException:
        body.close()
        raise
    return await held(request, _take_in(request, runner, body, lease))


async def _take_in(request: Request, runner: Runner, body: Body[Asked], lease: Lease) -> Response:
    try:
        loaded = await model_of(request, lease)
        plan, raw, seed = await body.in_turn(partial(_plan, request, loaded), body.content)
        row = await in_state(request, _queue, request, runner, lease.served.name, plan, raw, seed)
    finally:
        lease.close()
        body.close()
    runner.wake()
    return json_response(row, 202)


def _plan(request: Request, loaded: Loaded, given: Asked) -> tuple[Plan, bytes, int]:
    """Returns: with the body as it was sent, and the seed.

    Raises:
        ApiError: it cannot be done.
    """
    settings: Settings = request.app.state.settings
    asked, raw = given
    seed = secrets.randbits(63) if asked.seed is None else asked.seed  # whoever runs it, and however often, draws the same
    plan = plan_completion(loaded, settings, asked.model_copy(update={"seed": seed}))
    _check_works(plan)
    record_of(request).prompt_tokens = plan.prompt_tokens
    return plan, raw, seed


def _queue(request: Request, runner: Runner, model: str, plan: Plan, raw: bytes, seed: int) -> Json:
    """Write the Job's row, and take its Hold with it.

    Raises:
        ApiError: there is no room for it.
    """
    settings: Settings = request.app.state.settings
    state: State = request.app.state.state
    caller, id, size = caller_of(request), "job-" + secrets.token_hex(16), len(raw) + most_bytes(plan)
    with state.database.write() as connection:
        hold = take(connection, caller, plan)
        _check_room(connection, runner, settings, caller, size)
        runner.queue.add(connection, id=id, owner=caller.id, model=model, hold_id=hold, size=size, seed=seed, request=raw)
    row = runner.queue.get(caller.id, id)
    assert row is not None
    return _document(row, settings)


def _check_works(plan: Plan) -> None:
    """
    Raises:
        ApiError: the engine could never run one of them.
    """
    for work in plan.works:
        try:
            plan.loaded.scheduler.check(work)
        except SterError as error:
            raise invalid(sentence(error), None) from None


def _check_room(connection: Connection, runner: Runner, settings: Settings, caller: Caller, size: int) -> None:
    """
    Raises:
        ApiError: 429.
    """
    if runner.queue.live(connection, caller.id) >= settings.max_jobs:
        raise too_many_jobs(settings.max_jobs)
    stored, first = connection.execute(
        select(func.coalesce(func.sum(jobs.c.size), 0), func.min(jobs.c.ended_at)).where(jobs.c.owner == caller.id)
    ).one()
    if stored + size > settings.max_job_bytes:
        first = time.time() if first is None else first
        raise job_storage_full(settings.max_job_bytes, first + settings.job_days * DAY - time.time())


# GET


async def _get(request: Request) -> Response:
    runner = _runner_of(request)
    row, headers = await poll(request, _look(request, runner), lambda row: row.state in FINAL)
    document = _document(row, request.app.state.settings)
    if row.state != "done":
        return json_response(document, headers=headers)
    result = await run_in_threadpool(runner.results.open, row.id)
    if result is None:
        raise job_result_missing()
    return JobWithResult(document, result)


def _look(request: Request, runner: Runner) -> Callable[[], Awaitable[Found]]:
    """Find the caller's Job that the path names."""
    owner, id = caller_of(request).id, _id_of(request)

    async def look() -> Found:
        row = await in_state(request, runner.queue.get, owner, id)
        if row is None:
            raise job_not_found()
        return row

    return look


async def _list(request: Request) -> Response:
    runner = _runner_of(request)
    owner = caller_of(request).id
    limit, after = _limit_of(request), request.query_params.get("after")
    page = None if after is not None and not ID.fullmatch(after) else await in_state(request, runner.queue.list, owner, limit, after)
    if page is None:
        raise invalid("after must be the id of a Job of yours.", "after")
    rows, more = page
    data = [_document(row, request.app.state.settings) for row in rows]
    ids: Json = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": data, **ids, "has_more": more})


def _limit_of(request: Request) -> int:
    text = request.query_params.get("limit", str(LISTED))
    if not (text.isascii() and text.isdecimal()) or len(text) > 3 or not 1 <= int(text) <= MAX_LISTED:
        raise invalid(f"limit must be a whole number, 1 to {MAX_LISTED}.", "limit")
    return int(text)


# DELETE


async def _cancel(request: Request) -> Response:
    runner = _runner_of(request)
    row = await in_state(request, _end, request, runner, caller_of(request).id, _id_of(request))
    return json_response(_document(row, request.app.state.settings))


def _end(request: Request, runner: Runner, owner: str, id: str) -> Found:
    """
    Raises:
        ApiError: 404; 409, it has ended.
    """
    state: State = request.app.state.state
    with state.database.write() as connection:
        found = runner.queue.cancel(connection, owner, id)
        if found is None:
            raise job_not_found()
        was, ended = found
        if not ended:
            raise job_not_cancellable(was.state)
        pay(connection, was.hold_id)
    runner.cancelled(id)
    row = runner.queue.get(owner, id)
    return was if row is None else row


def _id_of(request: Request) -> str:
    """
    Raises:
        ApiError: 404, no Job has such an id.
    """
    id: str = request.path_params["id"]
    if not ID.fullmatch(id):
        raise job_not_found()
    return id


def _document(row: Found, settings: Settings) -> Json:
    """A Job without its result; what does not apply is absent."""
    document: dict[str, Any] = {"id": row.id, "object": "job", "status": row.state, "model": row.model, "created_at": int(row.created_at)}
    if row.started_at is not None:
        document["started_at"] = int(row.started_at)
    if row.ended_at is not None:
        document |= {"ended_at": int(row.ended_at), "expires_at": int(row.ended_at + settings.job_days * DAY)}
    if row.error is not None:
        document["error"] = orjson.loads(row.error)
    return document

"""From a request to its answer: it waits for its model, is planned, and carried out.

One answer when all is done, or a stream of events (see `ster.server.stream`). What is slow keeps its client waiting (see
`ster.server.waiting`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from ster.server.body import Body, read_body
from ster.server.form import Form, Head, Json
from ster.server.lease import Lease
from ster.server.loaded import Loaded
from ster.server.ongoing import Ongoing
from ster.server.plan import Plan
from ster.server.requests import json_response, record_of
from ster.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, parse_body
from ster.server.settings import Settings
from ster.server.stream import EventStream
from ster.server.waiting import claim, held, model_of

Completing = TypeVar("Completing", CompletionRequest, ChatRequest)
Reading = TypeVar("Reading", TokenizeRequest, DetokenizeRequest)
Planner = Callable[[Loaded, Settings, Completing], Plan]


async def respond(request: Request, schema: type[Completing], planner: Planner[Completing], form: Callable[[Plan], Form]) -> Response:
    """Answer a request for completions.

    planner: makes the plan, or refuses with an `ApiError`; called in a thread.

    Raises:
        ClientGoneError. ApiError: the request failed before its answer began.
    """
    settings: Settings = request.app.state.settings
    body = await read_body(request, lambda raw: parse_body(schema, raw, settings))
    try:
        stream = body.content.stream
        lease = claim(request, body.content.model)
    except BaseException:
        body.close()
        raise
    return await held(request, _answer(request, body, lease, planner, form), stream=stream)


async def reply(request: Request, schema: type[Reading], work: Callable[[Loaded, Settings, Reading], Json]) -> Response:
    """Answer a request to the tokenizer of a model. work: what it is told; called in a thread.

    Raises:
        ClientGoneError. ApiError: the request failed before its answer began.
    """
    settings: Settings = request.app.state.settings
    body = await read_body(request, lambda raw: parse_body(schema, raw, settings))
    try:
        lease = claim(request, body.content.model)
    except BaseException:
        body.close()
        raise

    async def answer() -> Response:
        try:
            loaded = await model_of(request, lease)
            return json_response(await body.in_turn(partial(work, loaded, settings), body.content))
        finally:
            lease.close()
            body.close()

    return await held(request, answer())


async def reply_about(request: Request, name: str | None, work: Callable[[Loaded], Json]) -> Response:
    """Answer a request that has no body and is about a model; None: the first. work: what it is told; called in a thread.

    Raises:
        ClientGoneError. ApiError: the request failed before its answer began.
    """
    lease = claim(request, name)

    async def answer() -> Response:
        try:
            return json_response(await run_in_threadpool(work, await model_of(request, lease)))
        finally:
            lease.close()

    return await held(request, answer())


async def _answer(
    request: Request, body: Body[Completing], lease: Lease, planner: Planner[Completing], form_of: Callable[[Plan], Form]
) -> Response:
    settings: Settings = request.app.state.settings
    try:
        loaded = await model_of(request, lease)
        plan = await body.in_turn(partial(planner, loaded, settings), body.content)
        form = form_of(plan)
        ongoing = Ongoing(plan, lease, request.receive, record_of(request), settings, eager=plan.stream)
    except BaseException:
        lease.close()
        raise
    finally:
        body.close()
    head = Head(form.prefix + secrets.token_hex(8), int(time.time()), loaded.facts.name)
    try:
        await run_in_threadpool(ongoing.submit)
        if plan.stream:
            # A failure in the first pass is still told by the status; after a while the stream begins all the same.
            return EventStream(ongoing, form, head, await ongoing.next())
        while not ongoing.choices.finished:
            await ongoing.next()
        answer = await run_in_threadpool(_whole, ongoing, form, head)
    except BaseException:
        ongoing.close()
        raise
    ongoing.close()
    return Response(answer, media_type="application/json")


def _whole(ongoing: Ongoing, form: Form, head: Head) -> bytes:
    choices = ongoing.choices
    document = head.of(form.object) | {"choices": [form.choice(choices, choice) for choice in choices]}
    document |= form.extra(choices) | {"usage": choices.usage()}
    if ongoing.plan.layers is not None:
        document["activations"] = ongoing.activations()
    return orjson.dumps(document)

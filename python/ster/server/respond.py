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

from ster.server.accounts import take_bill
from ster.server.body import Body, read_body
from ster.server.callers import caller_of
from ster.server.choices import Choices
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
        plan, bill = await take_bill(request.app.state.accounts, caller_of(request), plan)
        ongoing = Ongoing(plan, bill, lease, request.receive, record_of(request), settings, eager=plan.stream)
    except BaseException:
        lease.close()
        raise
    finally:
        body.close()
    try:
        form = form_of(plan)
        head = Head(form.prefix + secrets.token_hex(8), int(time.time()), loaded.facts.name)
        await run_in_threadpool(ongoing.submit)
        if plan.stream:
            # A failure in the first pass is still told by the status; after a while the stream begins all the same.
            stream = EventStream(ongoing, form, head, await ongoing.next())
            stream.headers.update(bill.headers)
            return stream
        while not ongoing.choices.finished:
            await ongoing.next()
        answer = await run_in_threadpool(whole, ongoing.choices, form, head)
        ongoing.check_client()
        ongoing.owe(ongoing.choices.completion_tokens, activations=plan.layers is not None)
    except BaseException as error:
        ongoing.close()
        if isinstance(error, Exception):
            await bill.settled()  # whoever is refused may ask again at once
        raise
    ongoing.close()
    await bill.settled()
    return Response(answer, headers=bill.headers, media_type="application/json")


def whole(choices: Choices, form: Form, head: Head) -> bytes:
    """The answer of choices that are finished.

    Raises:
        ApiError: see `Choices.activations`.
    """
    document = head.of(form.object) | {"choices": [form.choice(choices, choice) for choice in choices]}
    document |= form.extra(choices) | {"usage": choices.usage()}
    if choices.plan.layers is not None:
        document["activations"] = choices.activations()
    return orjson.dumps(document)

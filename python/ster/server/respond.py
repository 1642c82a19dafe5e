"""A plan, carried out: one answer when all is done, or a stream of events (see `ster.server.stream`)."""

from __future__ import annotations

import secrets
import time

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from ster.server.accounts import take_bill
from ster.server.callers import caller_of
from ster.server.form import Form, Head
from ster.server.ongoing import Ongoing
from ster.server.plan import Plan
from ster.server.requests import record_of
from ster.server.settings import Settings
from ster.server.stream import EventStream


async def respond(request: Request, plan: Plan, form: Form) -> Response:
    """Carry out `plan`.

    Raises:
        ClientGoneError. ApiError: the request failed before its answer began.
    """
    settings: Settings = request.app.state.settings
    head = Head(form.prefix + secrets.token_hex(8), int(time.time()), plan.loaded.facts.name)
    plan, bill = await take_bill(request.app.state.accounts, caller_of(request), plan)
    ongoing = Ongoing(plan, bill, request.receive, record_of(request), settings, eager=plan.stream)
    try:
        await run_in_threadpool(ongoing.submit)
        if plan.stream:
            # A failure in the first pass is still told by the status; after a while the stream begins all the same.
            first = await ongoing.next(settings.keepalive_seconds)
            stream = EventStream(ongoing, form, head, first)
            stream.headers.update(bill.headers)
            return stream
        while not ongoing.choices.finished:
            await ongoing.next()
        body = await run_in_threadpool(_whole, ongoing, form, head)
        ongoing.check_client()
        ongoing.owe(ongoing.choices.completion_tokens, activations=plan.layers is not None)
    except BaseException as error:
        ongoing.close()
        if isinstance(error, Exception):
            await bill.settled()  # whoever is refused may ask again at once
        raise
    ongoing.close()
    await bill.settled()
    return Response(body, headers=bill.headers, media_type="application/json")


def _whole(ongoing: Ongoing, form: Form, head: Head) -> bytes:
    choices = ongoing.choices
    document = head.of(form.object) | {"choices": [form.choice(choices, choice) for choice in choices]}
    document |= form.extra(choices) | {"usage": choices.usage()}
    if ongoing.plan.layers is not None:
        document["activations"] = ongoing.activations()
    return orjson.dumps(document)

"""What surrounds every request: its id, its line in the log, its count in the metrics, and the form of whatever goes wrong."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import orjson
from starlette.requests import Request
from starlette.responses import Response

from ster.server.errors import ApiError, encodable, internal_error
from ster.server.linger import linger

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ster.server.metrics import Metrics

log = logging.getLogger("ster.server")
GONE = 499  # what the log calls a request whose client left before the answer


class ClientGoneError(Exception):
    """The client has left: there is nobody to answer."""


@dataclass
class Record:
    """What the log says of a request. Never a prompt, nor anything else of its body but the name of a model that is served."""

    id: str = field(default_factory=lambda: "req_" + secrets.token_hex(16))
    model: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    status: int = GONE
    began: float = field(default_factory=time.perf_counter)


def record_of(request: Request) -> Record:
    record: Record = request.scope["ster.record"]
    return record


def json_response(document: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(document), status, headers, "application/json")


def error_response(error: ApiError, request_id: str) -> Response:
    headers = {name: value.encode("latin-1", "backslashreplace").decode("latin-1") for name, value in error.headers.items()}
    return json_response(error.body(request_id), error.status, headers)


class Requests:
    """The outermost layer: gives each request its id, in every answer's `X-Request-Id`, and writes its line when it has ended."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = scope["ster.record"] = Record()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", record.id.encode())]
            await send(message)

        try:
            await self.app(scope, *linger(scope, receive, answer))
        finally:
            ended(self.metrics, record, scope["method"], scope["path"])


def ended(metrics: Metrics, record: Record, method: str | None, path: str | None) -> None:
    """Count a request, and write its line. method, path: None where it was not HTTP."""
    seconds = time.perf_counter() - record.began
    metrics.ended(path, record)
    line: dict[str, object] = {"id": record.id, "method": method, "path": path and encodable(path), "status": record.status}
    if record.model is not None:
        line |= {"model": record.model, "prompt_tokens": record.prompt_tokens, "completion_tokens": record.completion_tokens}
    log.info(orjson.dumps({"time": _now(), **line, "seconds": round(seconds, 4)}).decode())


class Errors:
    """Whatever is raised inside becomes an answer, or ends the connection where the answer has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record: Record = scope["ster.record"]
        began = False

        async def watched(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except ClientGoneError as gone:
            release(gone)
            record.status = GONE
        except ApiError as error:
            release(error)
            await error_response(error, record.id)(scope, receive, send)
        except Exception:
            log_crash(record.id)
            if began:
                raise  # half an answer must not look whole
            await error_response(internal_error(), record.id)(scope, receive, send)


def release(error: BaseException | None) -> None:
    """Let go of the frames that `error` came through. Some of them hold the body, and refer to the error in turn: all that would stay
    until Python looks for cycles, which is seldom."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def late(error: Exception, record: Record) -> ApiError | None:
    """What a failure is told as when the answer has begun: its status is in the log alone. None: there is nobody to tell."""
    if not isinstance(error, ClientGoneError | ApiError):
        log_crash(record.id, error)
    release(error)
    if isinstance(error, ClientGoneError):
        record.status = GONE
        return None
    if not isinstance(error, ApiError):
        error = internal_error()
    record.status = error.status
    return error


def log_crash(request_id: str, error: BaseException | None = None) -> None:
    """The traceback of `error`, or of what is being handled, under the request's id."""
    log.error("%s crashed", request_id, exc_info=error or True)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

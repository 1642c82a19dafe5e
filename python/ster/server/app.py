"""The HTTP application: routes, and the layers around them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Collection, Sequence
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from ster.server.accounts import Accounts
from ster.server.body import Bodies
from ster.server.chat import chat_completions
from ster.server.completions import completions
from ster.server.errors import ApiError, method_not_allowed, not_found, shutting_down
from ster.server.guard import Guard
from ster.server.harvests.routes import Harvests, harvest_file, harvest_list, one_harvest
from ster.server.hashes import weights_hash
from ster.server.jobs.routes import job_list, one_job
from ster.server.jobs.runner import Runner
from ster.server.longpoll import LongPolls
from ster.server.metrics import CONTENT_TYPE, Metrics
from ster.server.models import Models
from ster.server.openapi import openapi
from ster.server.query import StrictRoute
from ster.server.requests import Errors, Requests, json_response
from ster.server.served import Served, ServedSpec
from ster.server.settings import Settings
from ster.server.state_threads import StateThreads
from ster.server.tokens import detokenize, tokenize, tokenizer_info
from ster.server.usage import usage_page

if TYPE_CHECKING:
    from ster.state.state import State


async def health(request: Request) -> Response:
    """The process lives, whatever its models do."""
    models: Models = request.app.state.models
    return json_response({"status": "ok", "models": {served.name: served.state for served in models}})


async def ready(request: Request) -> Response:
    """Every model answers, those that load on use included."""
    if request.app.state.draining:
        raise shutting_down()
    models: Models = request.app.state.models
    for served in models:
        served.check_ready()
    return json_response({"status": "ready", "models": [served.name for served in models]})


async def list_models(request: Request) -> Response:
    models: Models = request.app.state.models
    return json_response({"object": "list", "data": [served.entry() for served in models]})


async def get_model(request: Request) -> Response:
    return json_response(_served(request).entry())


async def model_status(request: Request) -> Response:
    return json_response(_served(request).status())


def _served(request: Request) -> Served:
    """The model in the path, which is missing like any other page when there is none."""
    models: Models = request.app.state.models
    try:
        return models.named(request.path_params["id"])
    except ApiError as error:
        raise ApiError(404, error.message, code=error.code, param=error.param) from None


async def metrics_page(request: Request) -> Response:
    metrics: Metrics = request.app.state.metrics
    return Response(metrics.text(request.app.state.models), media_type=CONTENT_TYPE)


async def openapi_page(request: Request) -> Response:
    models: Models = request.app.state.models
    accounts: Accounts | None = request.app.state.accounts
    settings: Settings = request.app.state.settings
    keyed = bool(settings.api_keys) or (accounts is not None and accounts.keys.required)
    return json_response(openapi(settings, [served.name for served in models], keyed=keyed))


ROUTES = [
    StrictRoute("/v1/completions", completions, methods=["POST"]),
    StrictRoute("/v1/chat/completions", chat_completions, methods=["POST"]),
    StrictRoute("/v1/harvest", harvest_list, methods=["GET", "POST"]),
    StrictRoute("/v1/harvest/{id}", one_harvest, methods=["GET", "DELETE"]),
    StrictRoute("/v1/harvest/{id}/files/{name}", harvest_file),
    StrictRoute("/v1/jobs", job_list, methods=["GET", "POST"]),
    StrictRoute("/v1/jobs/{id}", one_job, methods=["GET", "DELETE"]),
    StrictRoute("/v1/models", list_models),
    StrictRoute("/v1/models/{id:path}/status", model_status),
    StrictRoute("/v1/models/{id:path}/weights_hash", weights_hash),
    StrictRoute("/v1/models/{id:path}", get_model),
    StrictRoute("/v1/usage", usage_page),
    StrictRoute("/tokenize", tokenize, methods=["POST"]),
    StrictRoute("/detokenize", detokenize, methods=["POST"]),
    StrictRoute("/tokenizer_info", tokenizer_info),
    StrictRoute("/health", health),
    StrictRoute("/ready", ready),
    StrictRoute("/metrics", metrics_page),
    StrictRoute("/openapi.json", openapi_page),
]


def create_app(
    models: Sequence[ServedSpec], settings: Settings, *, hosts: Collection[str] | None = None, state: State | None = None
) -> Starlette:
    """The application, for any ASGI server. Its lifespan loads the models in a thread, so that `/health` answers meanwhile.

    hosts: see `ster.server.guard.Guard`. state: of keys, Jobs and harvests, which whoever opened it closes; None: there are none.
    """
    metrics = Metrics(route.path for route in ROUTES)
    accounts = None if state is None else Accounts(state, metrics)
    layers = [Middleware(Requests, metrics=metrics)]
    if settings.allowed_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["authorization", "content-type"],
                expose_headers=["x-request-id", "retry-after", "x-acs-longpoll", "x-acs-max-tokens-clamped"],
            )
        )
    known = None if accounts is None else accounts.keys
    layers += [Middleware(Errors), Middleware(Guard, keys=settings.api_keys, hosts=hosts, known=known, metrics=metrics)]
    app = Starlette(routes=ROUTES, middleware=layers, exception_handlers={HTTPException: _refuse}, lifespan=_lifespan)
    app.router.redirect_slashes = False
    app.state.settings = settings
    app.state.bodies = Bodies(settings.max_body_bytes, settings.bodies_bytes)
    app.state.metrics = metrics
    app.state.models = Models(models, settings)
    app.state.state = state
    app.state.state_threads = StateThreads()
    app.state.harvests = None if state is None else Harvests(state, app.state.models, settings, lambda: bool(app.state.draining))
    app.state.accounts = accounts
    app.state.draining = False
    app.state.longpolls = LongPolls()
    app.state.jobs = None if state is None else Runner(state, app.state.models, settings, lambda: bool(app.state.draining))
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    models: Models = app.state.models
    runners = [app.state.jobs, app.state.harvests.runner] if app.state.state is not None else []
    accounts: Accounts | None = app.state.accounts
    if accounts is not None:
        accounts.start()
    threading.Thread(target=models.load, name="ster-load", daemon=True).start()
    unloading = asyncio.ensure_future(models.unload_unused())
    for runner in runners:
        runner.start()
    try:
        yield
    finally:
        for runner in runners:
            await run_in_threadpool(runner.stop)
        unloading.cancel()
        await run_in_threadpool(app.state.state_threads.close)
        await run_in_threadpool(models.drain, 0.0)
        if accounts is not None:
            await run_in_threadpool(accounts.close)


async def _refuse(request: Request, error: Exception) -> Response:
    """What the router refuses, in the form of every other refusal."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 405:
        raise method_not_allowed(request.method, path, (error.headers or {}).get("Allow", ""))
    if error.status_code == 404:
        raise not_found(path)
    raise ApiError(error.status_code, str(error.detail), code="invalid_request")

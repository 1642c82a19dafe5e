"""The OpenAPI 3.1 document. Every schema in it is made from the models that requests are checked with, caps from the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ster._native import __version__
from ster.server import answers, schema
from ster.server.fields import X_LIMIT
from ster.server.harvests import answers as harvest_answers
from ster.server.harvests.request import HarvestRequest
from ster.server.settings import Settings

Json = dict[str, Any]
REF = "#/components/schemas/{model}"
ANSWERS: tuple[type[BaseModel], ...] = (
    answers.Completion,
    answers.ChatCompletion,
    answers.Job,
    answers.JobList,
    answers.ModelList,
    answers.ModelEntry,
    answers.ModelStatus,
    answers.WeightsHash,
    answers.Tokens,
    answers.Text,
    answers.TokenizerInfo,
    answers.Health,
    answers.Ready,
    answers.KeyUsage,
    answers.Error,
    harvest_answers.HarvestAccepted,
    harvest_answers.Harvest,
    harvest_answers.HarvestList,
)
REQUESTS: tuple[type[BaseModel], ...] = (
    schema.CompletionRequest,
    schema.JobRequest,
    schema.ChatRequest,
    schema.TokenizeRequest,
    schema.DetokenizeRequest,
    HarvestRequest,
)

EVERYWHERE = {
    400: "The request cannot be carried out; `param` names the field, or the query parameter: those that are not listed are refused.",
    401: "No API key, or a wrong one.",
    403: "The API key is paused, or the Host header names another machine.",
    405: "The path takes other methods, see the header Allow.",
    500: "The server failed; its log has the cause under the request_id.",
}
WITH_BODY = {
    408: "The body took too long to arrive.",
    413: "The body is over a cap: its bytes, or its lists and objects.",
    415: "The body is not application/json.",
}
LOADING = {
    503: "The model failed to load, or takes longer than a request may wait; or the server is shutting down, or full of large bodies; or"
    " its database does not answer."
}
NOT_READY = {503: "A model is loading for the start of the server, or failed to load; or the server is shutting down."}
COUNTED = {503: "The server's database does not answer."}
WAITED = {429: "Too many requests are waiting; try again after Retry-After seconds."}
NO_STATE = {
    503: "The server keeps no state, and so no harvests; its database does not answer; it is shutting down; or the model failed to load."
}
NO_JOBS = {
    503: "The server keeps no state, and so no Jobs; its database does not answer; it is shutting down; or the model failed to load."
}
NO_JOB = {404: "The caller has no such Job."}
NO_HARVEST = {404: "The caller has no such harvest."}
GENERATING = {
    429: "Too many requests are waiting, or a limit of the API key leaves no room; `code` says which. Try again after Retry-After seconds.",
    502: "The activations do not fit the request.",
    504: "The request took too long.",
}
WAITING = (
    "The answer. It waits for its model to load and for its turn; after some seconds it begins, with spaces that a JSON parser skips. From"
    " then on an error is in its body, of the form that other statuses have, under this status."
)
# A stream has no schema: OpenAPI 3.1 does not say whether one would be of the stream or of an event, and tools differ.
STREAM = (
    WAITING + " With `stream: true` its events: a chunk for each token; then, where asked for, one with the usage and one with the"
    " activations, both without choices; then `data: [DONE]`. An error after the beginning is the last event; while there is nothing to"
    " send, comments come."
)
STREAMED: dict[type[BaseModel], str] = {
    answers.Completion: '{"id":"cmpl-1","object":"text_completion","created":1,"model":"llama-8b","choices":'
    '[{"index":0,"text":" blue","logprobs":null,"finish_reason":"length"}]}',
    answers.ChatCompletion: '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"llama-8b","choices":'
    '[{"index":0,"delta":{"content":"Light"},"logprobs":null,"finish_reason":"length"}]}',
}


def openapi(settings: Settings, models: Sequence[str] = (), *, keyed: bool = False) -> Json:
    """The document, not to be changed: equal arguments give the same one.

    models: the ids that `model` may have; none: any text. keyed: there are keys beside those of the settings.
    """
    return _document(settings, tuple(models), keyed or bool(settings.api_keys))


def query_parameters() -> dict[tuple[str, str], frozenset[str]]:
    """By path and method, `("/v1/jobs", "GET")`: the names of those that it takes."""
    return {
        (path, method.upper()): frozenset(each["name"] for each in operation.get("parameters", ()) if each["in"] == "query")
        for path, item in _paths(()).items()
        for method, operation in item.items()
        if method != "parameters"
    }


@lru_cache(maxsize=8)
def _document(settings: Settings, models: tuple[str, ...], keyed: bool) -> Json:
    security: list[Json] = [{"bearer": []}] if keyed else [{}, {"bearer": []}]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Ster",
            "version": __version__,
            "description": "Completions with activations and steering. Numbers are bit for bit the same alone and under load.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "security": security,
        "paths": _paths(models),
        "components": {
            "schemas": _schemas(settings, models),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "headers": {
                "RequestId": {"schema": {"type": "string"}, "description": "Also in the body of errors, and in the server's log."},
                "RetryAfter": {"schema": {"type": "integer"}, "description": "Seconds."},
                "Clamped": {
                    "schema": {"type": "string"},
                    "description": "`requested=N,applied=M,reason=budget`, where `max_tokens` was left out and the API key has fewer left.",
                },
            },
        },
    }


def _examples(models: tuple[str, ...]) -> dict[type[BaseModel], list[Json]]:
    model = models[0] if models else "llama-8b"
    plain: Json = {"model": model, "max_tokens": 2}
    return {
        schema.CompletionRequest: [
            {**plain, "prompt": "The sky is"},
            {**plain, "prompt": "The sky is", "output_residual_stream": [0], "stream": True},
        ],
        schema.JobRequest: [{**plain, "prompt": "The sky is", "output_residual_stream": [0]}],
        schema.ChatRequest: [{**plain, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}],
        schema.TokenizeRequest: [{"prompt": "The sky is", "add_special_tokens": False}],
        schema.DetokenizeRequest: [{"tokens": [1, 2]}],
        HarvestRequest: [{"model": model, "prompts": ["The sky is", "The sea is"], "layers": [0]}],
    }


def _paths(models: tuple[str, ...]) -> Json:
    model_id: Json = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    model_query: Json = {"name": "model", "in": "query", "schema": {"type": "string"}, "description": "Left out: the first model."}
    if models:
        model_query["schema"] = {"enum": list(models)}
    missing = {404: "There is no such model."}
    return {
        "/v1/completions": {"post": _post("complete", "Continue a prompt", schema.CompletionRequest, answers.Completion)},
        "/v1/chat/completions": {
            "post": _post("chat", "Answer a conversation, by the checkpoint's chat template", schema.ChatRequest, answers.ChatCompletion)
        },
        "/v1/models": {"get": _get("listModels", "The models, with their facts and caps", answers.ModelList)},
        "/v1/models/{id}": {"get": _get("getModel", "One model", answers.ModelEntry, missing), "parameters": [model_id]},
        "/v1/models/{id}/status": {
            "get": _get("getModelStatus", "Whether it is loaded, and since when", answers.ModelStatus, missing),
            "parameters": [model_id],
        },
        **_job_paths(),
        **_harvest_paths(),
        "/v1/usage": {"get": _get("usage", "What the caller's API key has spent, holds and has left", answers.KeyUsage, COUNTED)},
        "/v1/models/{id}/weights_hash": {
            "get": _get(
                "getWeightsHash", "By which artifacts know the model", answers.WeightsHash, {**missing, **LOADING, **WAITED}, (), WAITING
            ),
            "parameters": [model_id],
        },
        "/tokenize": {"post": _post("tokenize", "A text or a conversation as token ids", schema.TokenizeRequest, answers.Tokens)},
        "/detokenize": {"post": _post("detokenize", "Token ids as text", schema.DetokenizeRequest, answers.Text)},
        "/tokenizer_info": {
            "get": _get(
                "tokenizerInfo", "Named tokens and the chat template", answers.TokenizerInfo, {**LOADING, **WAITED}, [model_query], WAITING
            )
        },
        "/health": {"get": _get("health", "The process lives", answers.Health, open=True)},
        "/ready": {"get": _get("ready", "Every model answers", answers.Ready, NOT_READY, open=True)},
        "/metrics": {"get": _get("metrics", "Prometheus text", None)},
        "/openapi.json": {"get": _get("openapi", "This document", {"type": "object"}, open=True)},
    }


def _of_those(what: str) -> tuple[Json, Json, list[Json]]:
    """Parameters of what is done in the background: its id, how long to wait for its end, and where a list begins and ends."""
    id: Json = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    wait: Json = {"name": "wait", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 60}}
    wait["description"] = "Seconds to wait for its end. Where too many wait, the answer comes at once, with X-Acs-Longpoll: declined."
    limit: Json = {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}}
    after: Json = {"name": "after", "in": "query", "schema": {"type": "string"}}
    after["description"] = f"The id of {what}: those that come after it."
    return id, wait, [limit, after]


def _job_paths() -> Json:
    id, wait, page = _of_those("a Job")
    taken = _post("submitJob", "Make a completion in the background", schema.JobRequest, answers.Job)
    late = "It was taken in as well, after its model had taken long to load: an answer that began before, with spaces; or an error."
    taken["responses"]["202"] = taken["responses"]["200"] | {"description": "It is queued, and goes on when the server restarts."}
    taken["responses"]["200"] = taken["responses"]["200"] | {"description": late}
    _add_errors(taken, NO_JOBS | {429: "The caller or the key has no room for it now; `code` says which."})
    missing = {**NO_JOB, **NO_JOBS}
    return {
        "/v1/jobs": {
            "post": taken,
            "get": _get("listJobs", "The caller's own Jobs, the newest first, without results", answers.JobList, NO_JOBS, page),
        },
        "/v1/jobs/{id}": {
            "get": _get("getJob", "How far a Job is, and its Completion when it is done", answers.Job, missing, [wait]),
            "delete": _get("cancelJob", "End a Job that waits or runs", answers.Job, {**missing, 409: "It is done, failed or cancelled."}),
            "parameters": [id],
        },
    }


def _harvest_paths() -> Json:
    id, wait, page = _of_those("a harvest")
    name: Json = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    signed: list[Json] = [
        {"name": "expires", "in": "query", "schema": {"type": "integer"}, "description": "Of a URL that was signed."},
        {"name": "signature", "in": "query", "schema": {"type": "string"}, "description": "Takes the place of a key."},
    ]
    accepted = _post("harvest", "Read the activations of many prompts into files", HarvestRequest, harvest_answers.HarvestAccepted)
    accepted["responses"]["202"] = accepted["responses"].pop("200") | {"description": "It is queued, and goes on when the server restarts."}
    _add_errors(accepted, NO_STATE | {429: "The caller, the key, the server or its disk has no room for it now."})
    one = _get("getHarvest", "How far a harvest is, and its files", harvest_answers.Harvest, {**NO_HARVEST, **NO_STATE}, [wait])
    cancelled = {**NO_HARVEST, **NO_STATE, 409: "It is done, failed or cancelled."}
    file = _get("getHarvestFile", "A file of a harvest, in whole or in ranges", None, parameters=signed)
    content: Json = {"application/octet-stream": {"schema": {}}, "application/json": {"schema": {"type": "object"}}}
    file["responses"]["200"]["content"] = content
    file["responses"]["206"] = {**file["responses"]["200"], "description": "The bytes that the header Range names."}
    gone = {404: "No such harvest or file.", 410: "The files are gone, or the time of the URL is over.", 416: "There are no such bytes."}
    _add_errors(file, {**NO_STATE, **gone, 403: "The URL was not signed by this server, or the Host header names another machine."})
    return {
        "/v1/harvest": {
            "post": accepted,
            "get": _get("listHarvests", "The caller's own harvests", harvest_answers.HarvestList, NO_STATE, page),
        },
        "/v1/harvest/{id}": {
            "get": one,
            "delete": _get("cancelHarvest", "End a harvest, and remove its files", harvest_answers.Harvest, cancelled),
            "parameters": [id],
        },
        "/v1/harvest/{id}/files/{name}": {"get": file, "parameters": [id, name]},
    }


def _post(operation: str, summary: str, body: type[BaseModel], answer: type[BaseModel]) -> Json:
    content: Json = {"application/json": {"schema": _ref(answer)}}
    errors, description = {**WITH_BODY, **LOADING, **WAITED}, WAITING
    if answer in STREAMED:
        content["text/event-stream"] = {"example": f"data: {STREAMED[answer]}\n\ndata: [DONE]\n\n"}
        errors, description = {**errors, **GENERATING}, STREAM
    found = _operation(operation, summary, content, errors, description)
    if answer in STREAMED:
        found["responses"]["200"]["headers"]["X-Acs-Max-Tokens-Clamped"] = {"$ref": "#/components/headers/Clamped"}
    return {**found, "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body)}}}}


def _get(
    operation: str,
    summary: str,
    answer: type[BaseModel] | Json | None,
    errors: Mapping[int, str] | None = None,
    parameters: Sequence[Json] = (),
    description: str = "OK",
    *,
    open: bool = False,
) -> Json:
    """answer: None is text. open: needs no key."""
    content: Json = {"text/plain": {"schema": {"type": "string"}}}
    if answer is not None:
        content = {"application/json": {"schema": answer if isinstance(answer, dict) else _ref(answer)}}
    found = _operation(operation, summary, content, errors or {}, description)
    return {**found, **({"parameters": list(parameters)} if parameters else {}), **({"security": []} if open else {})}


def _operation(operation: str, summary: str, content: Json, errors: Mapping[int, str], answer: str = "OK") -> Json:
    ids = {"X-Request-Id": {"$ref": "#/components/headers/RequestId"}}
    responses: Json = {"200": {"description": answer, "content": content, "headers": ids}}
    found = {"operationId": operation, "summary": summary, "responses": responses}
    _add_errors(found, {**EVERYWHERE, **errors})
    return found


def _add_errors(operation: Json, errors: Mapping[int, str]) -> None:
    ids = {"X-Request-Id": {"$ref": "#/components/headers/RequestId"}}
    for status, description in sorted(errors.items()):
        retry = {"Retry-After": {"$ref": "#/components/headers/RetryAfter"}} if status in (429, 503) else {}
        error = {"application/json": {"schema": _ref(answers.Error)}}
        operation["responses"][str(status)] = {"description": description, "content": error, "headers": {**ids, **retry}}


def _ref(model: type[BaseModel]) -> Json:
    return {"$ref": REF.format(model=model.__name__)}


def _schemas(settings: Settings, models: tuple[str, ...]) -> Json:
    _, found = models_json_schema([(model, "validation") for model in (*REQUESTS, *ANSWERS)], ref_template=REF)
    schemas: Json = found["$defs"]
    _settle(schemas, settings)
    for request, examples in _examples(models).items():
        schemas[request.__name__]["examples"] = examples
        if models:
            field = schemas[request.__name__]["properties"]["model"]
            _text_of(field)["enum"] = list(models)
    return schemas


def _text_of(field: Json) -> Json:
    """The alternative that is text, where the other is null."""
    return next((each for each in field.get("anyOf", ()) if each.get("type") == "string"), field)


def _settle(node: Any, settings: Settings) -> None:
    """Caps in place of the names of settings; pydantic's titles, which repeat the names of fields, are left out."""
    if isinstance(node, list):
        for each in node:
            _settle(each, settings)
    elif isinstance(node, dict):
        for keyword, setting in node.pop(X_LIMIT, {}).items():
            node[keyword] = getattr(settings, setting)
        if isinstance(node.get("title"), str):
            del node["title"]
        for each in node.values():
            _settle(each, settings)

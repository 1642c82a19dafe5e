"""The OpenAPI document: whole, and no other than what the server takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel
from serving import Client, running

import ster
from ster.server.errors import ApiError, invalid, misfit, queue_full
from ster.server.harvests.request import HarvestRequest
from ster.server.openapi import ANSWERS, REQUESTS, openapi
from ster.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, JobRequest, TokenizeRequest, parse_body
from ster.server.settings import Settings
from ster.server.tensors import encode
from ster.state.state import open_state

CAPS = Settings(max_steering_vectors=2, max_stops=3, max_logprobs=50, max_prompts=4, max_harvest_prompts=4)
DOCUMENT = openapi(CAPS)
CROSS = ("Set ", "Send ", "prompts x n")  # refusals that no schema can say

DIRECTIONS = {"data": "AAAA", "dtype": "float32", "shape": [2, 64], "compression": "none"}
BODIES: dict[type[BaseModel], dict[str, Any]] = {
    CompletionRequest: {"model": "m", "prompt": "x", "max_tokens": 1, "echo": True, "stream": True},
    JobRequest: {"model": "m", "prompt": "x", "max_tokens": 1, "echo": True},
    ChatRequest: {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": True, "stream": True},
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": [1]},
    HarvestRequest: {"model": "m", "prompts": ["x"], "layers": "all", "project_onto": DIRECTIONS},
}
VECTOR: dict[str, Any] = {"activations": [[1, 2.5]], "layer_indices": [1]}
POOL: list[Any] = [
    *(None, True, False, -3, -2, -1, 0, 1, 2, 3, 16, 17, 50, 51, 100, 101, 10**6, 10**6 + 1, 2**31 - 1, 2**31, 2**63 - 1, 2**63),
    *(
        0.5,
        1.5,
        -0.1,
        100.5,
        1e-9,
        3.4028235e38,
        1e39,
        "",
        "a",
        "float32",
        "true",
        "false",
        "[1]",
        "zstd",
        "int16",
        "torch.float32",
        "system",
    ),
    *(
        [],
        [0],
        [-1],
        [True],
        ["a"],
        [""],
        ["a"] * 3,
        ["a"] * 4,
        ["a"] * 5,
        [[1]],
        [[]],
        [[1, 2]],
        [[1], [2]],
        [[1, 2, 3]],
        [None],
        [2**31],
        [1, "a"],
    ),
    *([[1]] * 5, [VECTOR], [VECTOR] * 2, [VECTOR] * 3, [{}], [{"type": "text", "text": "a"}], [{"role": "user", "content": "a"}]),
    *(
        {},
        {"include_usage": True},
        {"include_usage": None},
        {"x": 1},
        {"skip_reading_prefix_cache": "true"},
        {"output_residual_stream": "[1]"},
    ),
]


def validator(name: str, document: dict[str, Any] = DOCUMENT) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": document["components"]})


def refusal(model: type[BaseModel], body: dict[str, Any]) -> str | None:
    try:
        parse_body(model, json.dumps(body).encode(), CAPS)
    except ApiError as error:
        return error.message
    return None


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every member of `value`, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    if not path:
        return to
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]] if path[0] in copy or isinstance(copy, list) else None, path[1:], to)
    return copy


def agree(model: type[BaseModel], body: dict[str, Any]) -> None:
    valid = validator(model.__name__).is_valid(body)
    message = refusal(model, body)
    if valid != (message is None):
        assert valid and message is not None and message.startswith(CROSS), f"{body}: {message}"


@pytest.mark.parametrize("model", REQUESTS)
def test_the_document_and_the_server_agree_on_every_field(model: type[BaseModel]) -> None:
    for field in [*model.model_fields, "x"]:
        for value in POOL:
            agree(model, {**BODIES[model], field: value})
        agree(model, {key: value for key, value in BODIES[model].items() if key != field})


def test_they_agree_on_what_is_inside_a_field() -> None:
    full: dict[str, Any] = {
        **BODIES[CompletionRequest],
        "apply_steering_vectors": [
            {
                "activations": encode(np.ones((1, 2), np.float32), "float32"),
                "layer_indices": [1],
                "scale": 1,
                "norm_match": True,
                "position_indices": [1],
                "position_spans": [[1, 2]],
                "x": 1,
            }
        ],
        "stream_options": {"include_usage": True},
        "vllm_xargs": dict.fromkeys(("output_residual_stream", "skip_reading_prefix_cache", "apply_hooks", "activations_transport")),
    }
    del full["apply_steering_vectors"][0]["x"]
    for path in places(full):
        for value in POOL:
            body = changed(full, path, value)
            # What is in lists of numbers is NumPy's to check, and what is in the texts of vllm_xargs is no matter of a schema.
            if path[-1] != "activations" and not (path[:1] == ("vllm_xargs",) and isinstance(value, str)):
                agree(CompletionRequest, body)
    for path in places(BODIES[HarvestRequest]):
        for value in [*POOL, [64, 1], [65, 1], [1, 64, 1], "none", "bfloat16", "all"]:
            agree(HarvestRequest, changed(BODIES[HarvestRequest], path, value))
    chat = {**BODIES[ChatRequest], "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "tool_calls": None}]}
    for path in places(chat):
        for value in POOL:
            agree(ChatRequest, changed(chat, path, value))


def test_rows_of_numbers_are_described() -> None:
    vectors = validator("SteeringVector")
    for activations in ([[1, 2.5]], [[[1], [2]]], encode(np.ones((1, 2), np.float32), "float32")):
        assert vectors.is_valid({**VECTOR, "activations": activations})
    for activations in ([], [[]], [1], [["1"]], [[True]], [[None]], [[1e39]], [[[[1]]]], "x", None, {}):
        assert not vectors.is_valid({**VECTOR, "activations": activations})


def test_caps_are_those_of_the_settings() -> None:
    text = orjson.dumps(openapi(Settings())).decode()
    assert "x-limit" not in text
    properties = openapi(Settings())["components"]["schemas"]["CompletionRequest"]["properties"]
    assert properties["logprobs"]["anyOf"][0] == {"type": "integer", "minimum": 0, "maximum": 100}
    assert properties["apply_steering_vectors"]["anyOf"][0]["maxItems"] == 8
    assert DOCUMENT["components"]["schemas"]["CompletionRequest"]["properties"]["logprobs"]["anyOf"][0]["maximum"] == 50


def test_every_schema_is_one_and_every_reference_leads_somewhere() -> None:
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)

    def follow(node: Any) -> None:
        if isinstance(node, dict) and isinstance(node.get("$ref"), str):
            target: Any = DOCUMENT
            for part in node["$ref"].removeprefix("#/").split("/"):
                target = target[part]
        for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            follow(inner)

    follow(DOCUMENT)


def test_the_examples_are_valid_and_taken() -> None:
    for model in REQUESTS:
        for example in DOCUMENT["components"]["schemas"][model.__name__]["examples"]:
            validator(model.__name__).validate(example)
            assert refusal(model, example) is None


def test_requests_take_no_other_fields() -> None:
    for name, schema in DOCUMENT["components"]["schemas"].items():
        if name.endswith("Request") or name in ("SteeringVector", "EncodedTensor", "StreamOptions", "VllmXargs", "ChatMessage", "TextPart"):
            assert schema["additionalProperties"] is False, name


def test_paths_methods_and_statuses() -> None:
    operations = {
        (path, method): entry
        for path, item in DOCUMENT["paths"].items()
        for method, entry in item.items()
        if method in ("get", "post", "delete")
    }
    assert set(operations) == {
        ("/v1/completions", "post"),
        ("/v1/chat/completions", "post"),
        ("/v1/jobs", "post"),
        ("/v1/jobs", "get"),
        ("/v1/jobs/{id}", "get"),
        ("/v1/jobs/{id}", "delete"),
        ("/v1/harvest", "post"),
        ("/v1/harvest", "get"),
        ("/v1/harvest/{id}", "get"),
        ("/v1/harvest/{id}", "delete"),
        ("/v1/harvest/{id}/files/{name}", "get"),
        ("/v1/models", "get"),
        ("/v1/models/{id}", "get"),
        ("/v1/models/{id}/status", "get"),
        ("/v1/usage", "get"),
        ("/v1/models/{id}/weights_hash", "get"),
        ("/tokenize", "post"),
        ("/detokenize", "post"),
        ("/tokenizer_info", "get"),
        ("/health", "get"),
        ("/ready", "get"),
        ("/metrics", "get"),
        ("/openapi.json", "get"),
    }
    complete = operations["/v1/completions", "post"]
    assert set(complete["responses"]) == {*"200 400 401 403 405 408 413 415 429 500 502 503 504".split()}
    assert set(complete["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "404" in operations["/v1/models/{id}", "get"]["responses"]
    contents = [response["content"] for entry in operations.values() for response in entry["responses"].values()]
    assert {key for content in contents for media_type in content.values() for key in media_type} == {"schema", "example"}
    for entry in operations.values():
        for status, response in entry["responses"].items():
            if status not in ("200", "202", "206"):
                assert response["content"] == {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    assert len({entry["operationId"] for entry in operations.values()}) == len(operations)


def test_a_key_is_needed_where_there_are_keys_and_the_open_pages_stay_open() -> None:
    assert openapi(Settings())["security"] == [{}, {"bearer": []}]
    guarded = openapi(Settings(api_keys=("k",)))
    assert guarded["security"] == [{"bearer": []}] == openapi(Settings(), keyed=True)["security"]
    open_pages = [path for path, item in guarded["paths"].items() if item.get("get", {}).get("security") == []]
    assert sorted(open_pages) == ["/health", "/openapi.json", "/ready"]


def test_the_models_that_are_served_may_be_named() -> None:
    document = openapi(Settings(), ["llama-8b", "other"])
    assert validator("CompletionRequest", document).is_valid({"model": "llama-8b", "prompt": "x"})
    assert not validator("CompletionRequest", document).is_valid({"model": "llama-9b", "prompt": "x"})
    assert validator("TokenizeRequest", document).is_valid({"model": None, "prompt": "x"})


def test_the_documented_answers_are_valid() -> None:
    tensor = {"data": "KLUv", "dtype": "int16", "original_dtype": "torch.bfloat16", "shape": [2, 5, 4096], "compression": "zstd"}
    choice = {"index": 0, "text": " burning\n", "logprobs": None, "finish_reason": "length", "prompt_logprobs": None}
    completion = {
        "id": "cmpl-998dce4da6c3c3b2",
        "object": "text_completion",
        "created": 1791780538,
        "model": "meta-llama/Llama-3.1-8B",
        "choices": [choice],
        "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6},
        "activations": {"residual_stream": tensor},
    }
    validator("Completion").validate(completion)
    assert not validator("Completion").is_valid({**completion, "activations": None})
    for error in (invalid("No.", "n"), queue_full(), misfit()):
        validator("Error").validate(error.body("req_9f2c4e1a7b3d4c5e8f6a0b1c2d3e4f5a"))


def test_every_answer_is_described() -> None:
    for answer in ANSWERS:
        assert DOCUMENT["components"]["schemas"][answer.__name__]["type"] == "object"


def _without_other_members(node: Any) -> Any:
    """The document as if answers had no members but those that it names."""
    if isinstance(node, list):
        return [_without_other_members(each) for each in node]
    if not isinstance(node, dict):
        return node
    closed = {key: _without_other_members(each) for key, each in node.items()}
    return {"additionalProperties": False, **closed} if isinstance(node.get("properties"), dict) else closed


def test_real_answers_are_as_described(toy: Client, chatting: Path, toy_model: ster.Model, tmp_path: Path) -> None:
    exact = _without_other_members(DOCUMENT)

    def check(name: str, answer: httpx.Response, status: int = 200) -> None:
        assert answer.status_code == status, answer.text
        validator(name, exact).validate(answer.json())

    everything = {"logprobs": 2, "prompt_logprobs": 1, "echo": True, "return_token_ids": True, "output_residual_stream": [0]}
    check("Completion", toy.complete(max_tokens=2))
    check("Completion", toy.complete(max_tokens=2, **everything))
    check("Completion", toy.complete(max_tokens=4, temperature=1, seed=1, n=3, stop=["s"]))
    check("ModelList", toy.get("/v1/models"))
    check("ModelEntry", toy.get("/v1/models/toy"))
    check("ModelStatus", toy.get("/v1/models/toy/status"))
    check("WeightsHash", toy.get("/v1/models/toy/weights_hash"))
    check("Tokens", toy.post("/tokenize", json={"prompt": "the sea"}))
    check("Text", toy.post("/detokenize", json={"tokens": [5, 6]}))
    check("TokenizerInfo", toy.get("/tokenizer_info"))
    check("Health", toy.get("/health"))
    check("Ready", toy.get("/ready"))
    check("KeyUsage", toy.get("/v1/usage"))
    check("Error", toy.get("/nope"), 404)
    check("Error", toy.complete(n=0), 400)
    state = open_state(tmp_path)
    with running({"toy": lambda: toy_model}, state=state) as client:
        job = client.post("/v1/jobs", json={"model": "toy", "prompt": "the sea", "max_tokens": 2, "output_residual_stream": [0]})
        check("Job", job, 202)
        check("Job", client.get(f"/v1/jobs/{job.json()['id']}", params={"wait": 30}))
        check("JobList", client.get("/v1/jobs"))
        check("Error", client.delete(f"/v1/jobs/{job.json()['id']}"), 409)
        check("Error", client.get("/v1/jobs/x"), 404)
    state.close()
    assert toy.get("/openapi.json").json() == openapi(Settings(), ["toy"])
    with running({"chat": lambda: ster.load(chatting)}) as client:
        body = {"model": "chat", "messages": [{"role": "user", "content": "the sea"}], "max_tokens": 2}
        check("ChatCompletion", client.post("/v1/chat/completions", json=body))
        extra = {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True, "output_residual_stream": True}
        check("ChatCompletion", client.post("/v1/chat/completions", json={**body, **extra}))

"""Requests that run together do not touch each other, whatever some of them do."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from serving import Client, error_of, running, until

import ster
from ster.server.settings import Settings
from ster.server.tensors import encode
from ster.toy import HIDDEN

PROMPT = "the sea is calm and quiet tonight ."
NAMES = ("a", "a-b", "a-b-c", "a-b-c-d")


def steering(row: Any, **fields: Any) -> dict[str, Any]:
    return {"apply_steering_vectors": [{"activations": [row], "layer_indices": [1], **fields}]}


def not_a_number() -> dict[str, Any]:
    """An encoded vector with a NaN in it."""
    row = np.full((1, HIDDEN), 0.5, np.float32)
    row[0, 9] = np.nan
    return {"apply_steering_vectors": [{"activations": encode(row, "float32"), "layer_indices": [1]}]}


WRONG: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a width too small": (lambda: steering([1.0] * (HIDDEN - 1)), "Each vector needs 64 numbers"),
    "a width too large": (lambda: steering([1.0] * (HIDDEN + 1)), "found 65"),
    "NaN, encoded": (not_a_number, "not finite"),
    "scale times vector overflows": (lambda: steering([1e10] * HIDDEN, scale=1e30), "non-finite value at token 0"),
    "two vectors overflow together": (
        lambda: {"apply_steering_vectors": steering([3e38] * HIDDEN)["apply_steering_vectors"] * 2},
        "non-finite value at token 0",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_an_error_and_not_an_empty_text(toy: Client, case: str, stream: bool) -> None:
    fields, message = WRONG[case]
    refused = toy.complete(PROMPT, max_tokens=4, temperature=0, stream=stream, **fields())
    assert error_of(refused) == (400, "invalid_request", "apply_steering_vectors")
    assert message in refused.json()["error"]["message"]


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_in_json_is_no_json(toy: Client, constant: str) -> None:
    body = json.dumps({"model": "toy", "prompt": PROMPT, "max_tokens": 4, **steering([1.0] * HIDDEN)}).replace("1.0]", f"{constant}]")
    assert constant in body
    assert error_of(toy.post("/v1/completions", content=body))[:2] == (400, "bad_json")


def test_a_scale_of_1e30_is_computed(toy: Client) -> None:
    """float32 holds what it makes of a vector of ones, and the norm before each block brings it back: a text, with every row finite."""
    answer = toy.answer(PROMPT, max_tokens=4, temperature=0, output_residual_stream=True, **steering([1.0] * HIDDEN, scale=1e30))
    assert answer["choices"][0]["text"].strip() and answer["usage"]["completion_tokens"] == 4


def test_sixteen_at_once_beside_those_that_go_wrong(toy_model: ster.Model) -> None:
    """Half are steered. Names that begin alike are not the server's ids. What each is told is what it is told alone."""
    generator = np.random.default_rng(0)

    def fields(number: int) -> dict[str, Any]:
        asked: dict[str, Any] = {"max_tokens": 24, "temperature": number % 4 // 2, "seed": number, "logprobs": 2, "user": NAMES[number % 4]}
        if number % 2:
            asked |= steering(generator.normal(0, 0.5, HIDDEN).tolist(), norm_match=number % 3 == 0)
        if number % 5 == 0:
            asked["output_residual_stream"] = [0, 2]
        return asked

    asked = [fields(number) for number in range(16)]
    with running({"toy": lambda: toy_model}, Settings(max_running=16, prefill_tokens=16)) as client:
        quiet = [client.answer(PROMPT, **each) for each in asked]
        answers: dict[int, httpx.Response] = {}
        refused: list[httpx.Response] = []

        def ask(number: int) -> None:
            body = {"model": "toy", "prompt": PROMPT, **asked[number]}
            answers[number] = httpx.post(f"{client.url}/v1/completions", json=body, headers={"x-request-id": NAMES[number % 4]}, timeout=30)

        def go_wrong(body: bytes) -> None:
            refused.append(httpx.post(f"{client.url}/v1/completions", content=body, timeout=30))

        def leave() -> None:
            body = {"model": "toy", "prompt": PROMPT, "max_tokens": 200, "stream": True, "user": "a"}
            with httpx.stream("POST", f"{client.url}/v1/completions", json=body, timeout=30) as response:
                next(response.iter_text())

        bodies = [json.dumps({"model": "toy", "prompt": PROMPT, "max_tokens": 4, **make()}).encode() for make, _ in WRONG.values()]
        bodies += [b" " * 100_000_000, json.dumps({"model": "toy", "prompt": PROMPT, **steering([float("nan")] * HIDDEN)}).encode()]
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
        threads += [threading.Thread(target=go_wrong, args=(body,)) for body in bodies] + [threading.Thread(target=leave)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        stats = client.models[0].loaded.scheduler.stats
        until(lambda: not (stats().running or stats().waiting or stats().pinned_bytes))
        assert client.get("/health").status_code == 200

    for number, before in enumerate(quiet):
        after = answers[number].json()
        for each in (before, after):
            for passing in ("id", "created"):
                del each[passing]
        assert after == before
    ids = {answer.headers["x-request-id"] for answer in answers.values()}
    assert len(ids) == 16 and all(id.startswith("req_") for id in ids)
    assert sorted(answer.status_code for answer in refused) == [400] * (len(WRONG) + 1) + [413]

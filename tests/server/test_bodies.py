"""Bodies that are large: once their request is answered, nothing of them stays."""

from __future__ import annotations

import gc
import http.client
import json
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from serving import Client, running, until

import ster
from ster.server.settings import Settings

SIZE = 8 << 20
HEAD = {"model": "toy", "prompt": "the sea is calm", "max_tokens": 1}
OVERFLOW = [{"activations": [[3e38] * 64], "layer_indices": [0], "scale": 2}]
WIDTH = [{"activations": [[[0.5] * 63] * 5000], "layer_indices": [0]}]


@pytest.fixture(scope="module")
def roomy(toy_model: ster.Model) -> Iterator[Client]:
    with running({"toy": lambda: toy_model}, Settings(max_body_bytes=SIZE + 1000, body_seconds=1.0)) as client:
        yield client


def large(**fields: Any) -> bytes:
    return json.dumps({**HEAD, "user": "x" * SIZE, **fields}).encode()


def send(client: Client, body: bytes | Iterable[bytes]) -> int:
    """httpx would keep the body itself."""
    connection = http.client.HTTPConnection("127.0.0.1", int(client.url.rpartition(":")[2]))
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def begin(client: Client, *, wait: bool) -> int:
    """Send all of a body but its end; wait for an answer, or leave."""
    with client.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % SIZE + b" " * (SIZE - 9))
        return int(connection.recv(1000)[9:12]) if wait else 0


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (large(), 200),
        (large(nonsense=1), 400),
        (large(model="another"), 400),
        (large(prompt=[3] * 300), 400),
        (large(apply_steering_vectors=OVERFLOW), 400),
        (large(user=None, apply_steering_vectors=WIDTH), 400),
        (large()[:-1], 400),
        ([b" " * 100_000] * (SIZE // 100_000 + 2), 413),
        ("begun", 408),
        ("left", 0),
    ],
    ids=["good", "field", "model", "prompt", "overflow", "width", "no JSON", "too large", "late", "left"],
)
def test_nothing_of_a_body_stays(roomy: Client, body: bytes | list[bytes] | str, status: int) -> None:
    """Without the collector of cycles, which comes seldom: bodies would pile up until then."""
    ask = lambda: begin(roomy, wait=body == "begun") if isinstance(body, str) else send(roomy, body)  # noqa: E731
    ask()  # what is made once
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        assert ask() == status
        until(lambda: tracemalloc.get_traced_memory()[0] < SIZE / 8)
    finally:
        tracemalloc.stop()
        gc.enable()

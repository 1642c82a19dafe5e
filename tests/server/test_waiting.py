"""Models that load on use and go when idle, and clients that wait: an answer that was waited for is the answer."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, OpenAI
from serving import Client, error_of, running, until

import ster
from ster.errors import CheckpointError
from ster.server.answers import ModelEntry, ModelStatus
from ster.server.errors import ApiError
from ster.server.lease import LeaseClosedError
from ster.server.served import Served
from ster.server.settings import Settings
from ster.server.waiting import Waiting

PROMPT = "the sea is calm"
BODY: dict[str, Any] = {
    "model": "toy",
    "prompt": [PROMPT],
    "max_tokens": 3,
    "seed": 1,
    "logprobs": 2,
    "output_residual_stream": [1, 3],
}
LAZY = Settings(load_on_use=True, keepalive_seconds=0.05)
PATIENT = Settings(load_on_use=True, keepalive_seconds=30.0)


class Loader:
    """Loads when it is let; counts. error: what it then comes to instead."""

    def __init__(self, open_model: Callable[[], ster.Model]) -> None:
        self.calls = 0
        self.gate = threading.Event()
        self.error: BaseException | None = None
        self._open = open_model

    def __call__(self) -> ster.Model:
        self.calls += 1
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        return self._open()


@pytest.fixture
def loader(toy_model: ster.Model) -> Iterator[Loader]:
    found = Loader(lambda: toy_model)
    yield found
    found.gate.set()


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Waiting]:
    """The answers that have begun without being there."""
    found: list[Waiting] = []
    init = Waiting.__init__

    def begin(self: Waiting, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        found.append(self)

    monkeypatch.setattr(Waiting, "__init__", begin)
    return found


def answer_of(document: Any) -> Any:
    """All of an answer but its name and its time."""
    return {key: value for key, value in document.items() if key not in ("id", "created")}


def post(client: Client, **fields: Any) -> httpx.Response:
    return httpx.post(f"{client.url}/v1/completions", json={**BODY, **fields}, timeout=30)


# The answer that was waited for


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", BODY),
        ("/tokenize", {"prompt": PROMPT, "model": "toy"}),
        ("/detokenize", {"tokens": [3, 4], "model": "toy"}),
        ("/tokenizer_info", None),
    ],
)
def test_an_answer_after_spaces_is_the_same_answer(toy: Client, loader: Loader, path: str, body: Any) -> None:
    ask = ("GET", path) if body is None else ("POST", path)
    expected = toy.request(*ask, json=body).json()
    with running({"toy": loader}, LAZY) as client, client.stream(*ask, json=body) as response:
        assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
        parts = response.iter_raw()
        begun = [next(parts), next(parts), next(parts)]
        loader.gate.set()
        text = b"".join([*begun, *parts]).decode()
    assert set(b"".join(begun)) == {ord(" ")} and text.lstrip(" ")[0] == "{"
    assert answer_of(json.loads(text)) == answer_of(expected)


def test_a_computation_is_waited_for_like_a_load(toy: Client, toy_model: ster.Model) -> None:
    with running({"toy": lambda: toy_model}, Settings(keepalive_seconds=0.05)) as client:
        with ExitStack() as paused:
            paused.enter_context(client.models.pass_lock)
            with client.stream("POST", "/v1/completions", json=BODY) as response:
                parts = response.iter_raw()
                begun = next(parts) + next(parts)
                paused.close()
                text = begun + b"".join(parts)
        assert begun.strip() == b"" and answer_of(json.loads(text)) == answer_of(toy.answer(**BODY))


def test_a_stream_begins_before_its_model_is_there(toy: Client, loader: Loader) -> None:
    expected = toy.events(**BODY)
    with running({"toy": loader}, LAZY) as client:
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert response.headers["cache-control"] == "no-store"
            lines = response.iter_lines()
            assert [next(lines) for _ in range(4)] == [": keepalive", "", ": keepalive", ""]
            loader.gate.set()
            events = [line[6:] for line in lines if line.startswith("data: ")]
        assert events.pop() == "[DONE]" == expected.pop()[6:]
        assert [answer_of(json.loads(event)) for event in events] == [answer_of(event) for event in expected]


def test_a_chat_waits_too(chatting: Path) -> None:
    body = {"model": "toy", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2, "seed": 3}
    loader = Loader(lambda: ster.load(chatting))
    with running({"toy": loader}, LAZY) as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            parts = response.iter_raw()
            assert next(parts) == b" "
            loader.gate.set()
            waited = json.loads(b"".join(parts))
        assert answer_of(waited) == answer_of(client.post("/v1/chat/completions", json=body).json())


def test_what_comes_soon_is_as_without_waiting(loader: Loader, toy: Client) -> None:
    loader.gate.set()
    with running({"toy": loader}, PATIENT) as client:
        answer = client.complete(**BODY)
        assert answer.headers["content-length"] and answer_of(answer.json()) == answer_of(toy.answer(**BODY))
        assert error_of(client.complete(max_tokens=300)) == (400, "context_length_exceeded", "max_tokens")


def test_the_sdk_waits(toy: Client, loader: Loader, begun: list[Waiting]) -> None:
    fields: dict[str, Any] = {"model": "toy", "prompt": PROMPT, "max_tokens": 3, "temperature": 0}
    with running({"toy": loader}, LAZY) as client, ThreadPoolExecutor() as pool:
        sdk = OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0)
        whole = pool.submit(sdk.completions.create, **fields)
        stream = pool.submit(lambda: list(sdk.completions.create(**fields, stream=True)))
        until(lambda: client.models[0].waiting == 2)
        until(lambda: len(begun) == 2)
        loader.gate.set()
        expected = toy.answer(max_tokens=3, temperature=0)["choices"][0]["text"]
        assert whole.result(10).choices[0].text == expected
        assert "".join(chunk.choices[0].text for chunk in stream.result(10)) == expected
        sdk.close()


# What fails


def test_a_load_that_fails_soon_is_a_status(loader: Loader) -> None:
    loader.error = CheckpointError("no weights in /home/me/secret")
    loader.gate.set()
    with running({"toy": loader}, PATIENT) as client:
        for stream in (False, True):
            refused = client.complete(max_tokens=1, stream=stream)
            assert error_of(refused) == (503, "model_failed", None) and "secret" not in refused.text
        assert loader.calls == 1  # the second came too soon after it


@pytest.mark.parametrize("error", [CheckpointError("gone"), RuntimeError("a bug"), KeyboardInterrupt("a panic")])
def test_a_load_that_fails_late_is_told_in_the_body(
    loader: Loader, begun: list[Waiting], error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    loader.error = error
    with caplog.at_level(logging.INFO, "ster.server"), running({"toy": loader}, LAZY) as client, ThreadPoolExecutor() as pool:
        whole, stream = (pool.submit(post, client, stream=stream) for stream in (False, True))
        until(lambda: client.models[0].waiting == 2)
        until(lambda: len(begun) == 2)
        loader.gate.set()
        for answer in (whole.result(10), stream.result(10)):
            assert answer.status_code == 200
            document = json.loads(answer.text.rpartition("data: ")[2])
            assert set(document) == {"error", "request_id"} and document["error"]["code"] == "model_failed"
            assert document["request_id"] == answer.headers["x-request-id"]
        assert whole.result().text.startswith(" ") and stream.result().text.startswith(": keepalive\n\n")
        statuses = lambda: [json.loads(line)["status"] for line in caplog.messages if line.startswith('{"time"')]  # noqa: E731
        until(lambda: statuses() == [503, 503])
        assert 'ster_requests_total{path="/v1/completions",status="503"} 2' in client.get("/metrics").text


def test_the_sdk_is_told_of_a_late_failure(loader: Loader, begun: list[Waiting]) -> None:
    with running({"toy": loader}, LAZY) as client, ThreadPoolExecutor() as pool:
        loader.error = CheckpointError("gone")
        sdk = OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0)
        fields: dict[str, Any] = {"model": "toy", "prompt": PROMPT, "max_tokens": 1}
        whole = pool.submit(sdk.completions.create, **fields)
        stream = pool.submit(lambda: list(sdk.completions.create(**fields, stream=True)))
        until(lambda: client.models[0].waiting == 2)
        until(lambda: len(begun) == 2)
        loader.gate.set()
        assert whole.result(10).error["code"] == "model_failed"  # type: ignore[attr-defined]
        with pytest.raises(APIError, match="failed to load"):
            stream.result(10)
        sdk.close()


def test_a_refusal_that_needs_the_model_comes_when_it_is_there(loader: Loader, begun: list[Waiting]) -> None:
    with running({"toy": loader}, LAZY) as client, ThreadPoolExecutor() as pool:
        late = pool.submit(post, client, max_tokens=300, output_residual_stream=None)
        until(lambda: client.models[0].waiting == 1)
        assert error_of(client.complete(nonsense=1)) == (400, "invalid_request", "nonsense")  # this one needs no model
        until(lambda: begun)
        loader.gate.set()
        assert late.result(10).status_code == 200 and late.result().json()["error"]["code"] == "context_length_exceeded"
        until(lambda: client.models[0].uses == 0)


def test_what_failed_is_tried_again_after_a_pause(loader: Loader) -> None:
    loader.error = CheckpointError("not yet")
    loader.gate.set()
    with running({"toy": loader}, Settings(load_on_use=True, load_retry_seconds=0.0)) as client:
        assert error_of(client.complete(max_tokens=1))[1] == "model_failed"
        loader.error = None
        assert client.complete(max_tokens=1).status_code == 200 and loader.calls == 2
        assert client.models[0].error is None and client.get("/ready").status_code == 200


def test_a_load_that_takes_too_long_is_a_refusal_and_goes_on(loader: Loader) -> None:
    with running({"toy": loader}, Settings(load_on_use=True, load_seconds=0.1)) as client:
        refused = client.complete(max_tokens=1)
        assert error_of(refused) == (503, "model_load_timeout", None) and refused.headers["retry-after"]
        loader.gate.set()
        assert client.complete(max_tokens=1).status_code == 200 and loader.calls == 1


def test_no_more_wait_for_a_model_than_may(loader: Loader) -> None:
    with running({"toy": loader}, Settings(load_on_use=True, queue=1, max_running=1)) as client, ThreadPoolExecutor() as pool:
        waiting = [pool.submit(post, client) for _ in range(2)]
        until(lambda: client.models[0].waiting == 2)
        assert error_of(client.complete(max_tokens=1)) == (429, "queue_full", None)
        loader.gate.set()
        assert [each.result(10).status_code for each in waiting] == [200, 200]


# Who waits


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_waits_no_more(loader: Loader, stream: bool) -> None:
    with running({"toy": loader}, LAZY) as client:
        body = json.dumps({**BODY, "stream": stream}).encode()
        connection = client.connect()
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        until(lambda: client.models[0].waiting)
        connection.close()
        until(lambda: client.models[0].uses == 0)
        until(lambda: 'path="/v1/completions",status="499"' in client.get("/metrics").text)
        loader.gate.set()
        until(lambda: client.models[0].state == "ready")


def test_a_large_body_has_its_share_of_memory_while_it_waits(loader: Loader) -> None:
    with running({"toy": loader}, Settings(load_on_use=True, max_body_bytes=1 << 20)) as client, ThreadPoolExecutor() as pool:
        bodies, free = client.app.state.bodies, client.app.state.bodies.free
        waiting = pool.submit(post, client, user="x" * 500_000)
        until(lambda: client.models[0].waiting)
        assert free - bodies.free > 500_000
        loader.gate.set()
        assert waiting.result(10).status_code == 200 and bodies.free == free


def test_many_who_ask_at_once_load_once(loader: Loader) -> None:
    with running({"toy": loader}, PATIENT) as client, ThreadPoolExecutor(20) as pool:
        asking = [pool.submit(post, client) for _ in range(10)]

        def use() -> ster.Model:
            with client.models[0].lease() as loaded:
                return loaded.model

        using = [pool.submit(use) for _ in range(10)]
        until(lambda: client.models[0].waiting == 20)
        loader.gate.set()
        assert len({json.dumps(answer_of(each.result(10).json())) for each in asking}) == 1
        assert len({id(each.result(10)) for each in using}) == 1
        assert loader.calls == 1
        until(lambda: client.models[0].uses == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_the_server_waits_for_no_load(loader: Loader, stream: bool) -> None:
    with running({"toy": loader}, PATIENT) as client, ThreadPoolExecutor() as pool:
        waiting = pool.submit(post, client, stream=stream)
        until(lambda: client.models[0].waiting)
        client.models.drain(20.0)
        assert error_of(waiting.result(5)) == (503, "shutting_down", None)
        assert error_of(client.complete(max_tokens=1)) == (503, "shutting_down", None)
        loader.gate.set()
        until(lambda: "ster-load-toy" not in [thread.name for thread in threading.enumerate()])
        assert client.models[0].loaded is None  # no engine is left behind


# Leases


def served_of(client: Client) -> Served:
    found: Served = client.models[0]
    return found


def test_a_lease_from_a_thread(loader: Loader) -> None:
    with running({"toy": loader}, PATIENT) as client, ThreadPoolExecutor() as pool:
        served = served_of(client)
        with pytest.raises(ApiError, match="has not loaded within 0.01 seconds"), served.lease(0.01):
            pass
        assert served.uses == 0
        lease = served.claim()
        told = pool.submit(lease.result)
        lease.close()
        with pytest.raises(LeaseClosedError):
            told.result(10)
        loader.gate.set()
        with served.lease() as loaded, served.lease() as again:
            assert loaded is again is served.loaded and served.uses == 2
        lease.close()  # once more
        assert served.uses == 0


def test_a_lease_from_an_event_loop(loader: Loader) -> None:
    async def use(served: Served) -> None:
        with pytest.raises(ApiError, match="has not loaded within 0.01 seconds"):
            async with served.lease_async(0.01):
                pass
        waiting = asyncio.ensure_future(enter(served))
        while not served.waiting:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert served.uses == 0
        loader.gate.set()
        async with served.lease_async() as loaded, served.lease_async() as again:
            assert loaded is again is served.loaded and served.uses == 2
        assert served.uses == 0

    async def enter(served: Served) -> None:
        async with served.lease_async():
            pass

    with running({"toy": loader}, PATIENT) as client:
        asyncio.run(use(served_of(client)))


def test_a_lease_of_a_model_that_fails(loader: Loader) -> None:
    loader.error = CheckpointError("gone")
    with running({"toy": loader}, PATIENT) as client, ThreadPoolExecutor() as pool:
        leases = [served_of(client).claim() for _ in range(2)]
        told = [pool.submit(lease.result) for lease in leases]
        loader.gate.set()
        found = [each.exception(10) for each in told]
        assert all(isinstance(error, ApiError) and error.code == "model_failed" for error in found) and found[0] is not found[1]
        for lease in leases:
            lease.close()
        with pytest.raises(ApiError, match="Requests in 30 seconds try again"):
            served_of(client).claim()


# Going


IDLE = Settings(load_on_use=True, idle_seconds=0.05)


def test_a_model_that_loads_again_gives_the_same_answers(toy_dir: Path) -> None:
    loads: list[weakref.ref[Any]] = []

    def load() -> ster.Model:
        model = ster.load(toy_dir)
        loads.extend([weakref.ref(model), weakref.ref(model.tokenizer)])
        return model

    with running({"toy": load}, IDLE) as client:
        served = served_of(client)
        first = client.answer(**BODY)
        assert served.loaded is not None and served.loaded.scheduler._thread is not None
        engine = served.loaded.scheduler._thread
        loads += [weakref.ref(served.loaded.scheduler), weakref.ref(served.loaded.scheduler._batch)]
        until(lambda: served.state == "idle")
        until(lambda: all(each() is None for each in loads))  # nothing of it is left
        assert not engine.is_alive()
        assert answer_of(client.answer(**BODY)) == answer_of(first)
        assert served.loads == 2


def test_what_loads_at_the_start_may_go_later(toy_model: ster.Model) -> None:
    loader = Loader(lambda: toy_model)
    with running({"toy": loader}, Settings(idle_seconds=0.05), wait=False) as client:
        assert status_of(client)["state"] == "loading" and error_of(client.get("/ready")) == (503, "model_loading", None)
        loader.gate.set()
        until(lambda: loader.calls == 1 and served_of(client).state == "idle")
        assert client.get("/ready").status_code == 200 and client.complete(max_tokens=1).status_code == 200


def test_nobody_is_unloaded_under(toy_model: ster.Model) -> None:
    """A stream, a request that waits for its turn, a lease: each keeps the model, however long ago it was asked for."""
    settings = Settings(load_on_use=True, idle_seconds=1e-9, keepalive_seconds=0.02)
    with running({"toy": lambda: toy_model}, settings) as client:
        served = served_of(client)
        with served.lease() as loaded, ExitStack() as paused:
            paused.enter_context(client.models.pass_lock)
            with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
                lines = response.iter_lines()
                until(lambda: served.uses == 2)
                served.unload_if_unused()
                assert next(lines) == ": keepalive" and served.loaded is loaded
                paused.close()
                rest = list(lines)
            assert rest[-2] == "data: [DONE]" and served.loaded is loaded
            until(lambda: served.uses == 1)
            served.unload_if_unused()
            assert served.loaded is loaded
        until(lambda: served.state == "idle")


def test_leases_and_unloading_in_every_order(toy_model: ster.Model) -> None:
    """Whoever has a lease has an engine that answers; there is never more than one of a model."""
    with running({"toy": lambda: toy_model}, Settings(load_on_use=True, idle_seconds=1e-9)) as client:
        served = served_of(client)
        over, chance = threading.Event(), random.Random(0)

        def unload() -> None:
            while not over.is_set():
                served.unload_if_unused()
                time.sleep(0.001)

        def use() -> None:
            for _ in range(20):
                with served.lease() as loaded:
                    engine = loaded.scheduler._thread
                    assert served.loaded is loaded and not loaded.scheduler._closed and engine is not None and engine.is_alive()
                time.sleep(chance.random() / 200)

        with ThreadPoolExecutor() as pool:
            unloading = pool.submit(unload)
            using = [pool.submit(use) for _ in range(3)]
            for each in using:
                each.result(60)
            over.set()
            unloading.result(10)
        until(lambda: served.state == "idle")
        assert served.loads > 1 and served.uses == 0


# What is said of it


def status_of(client: Client) -> dict[str, Any]:
    status: dict[str, Any] = client.get("/v1/models/toy/status").json()
    entry = client.get("/v1/models/toy").json()
    ModelStatus.model_validate(status)
    ModelEntry.model_validate(entry)
    assert client.get("/health").json()["models"] == {"toy": status["state"]}
    assert entry["status"] == {"ready": "live"}.get(status["state"], status["state"])
    assert status["warm"] == (status["state"] == "ready") and status["since"] <= time.time() + 0.001
    return {**status, "capabilities": entry.get("capabilities")}


def test_the_states_of_a_model(loader: Loader) -> None:
    settings = Settings(load_on_use=True, idle_seconds=3600.0, load_retry_seconds=0.5)
    always = {"id", "object", "warm", "state", "since", "uses", "capabilities"}
    with running({"toy": loader}, settings) as client, ThreadPoolExecutor() as pool:
        served = served_of(client)
        idle = status_of(client)
        assert (idle["state"], set(idle), idle["capabilities"]) == ("idle", always, None)
        assert client.get("/ready").json() == {"status": "ready", "models": ["toy"]}

        waiting = pool.submit(post, client)
        until(lambda: served.waiting)
        loading = status_of(client)
        assert (loading["state"], loading["uses"], set(loading)) == ("loading", 1, always) and loading["since"] >= idle["since"]
        assert client.get("/ready").status_code == 200  # requests are held, not refused

        loader.error = CheckpointError("gone")
        loader.gate.set()
        assert error_of(waiting.result(10))[0] == 503
        failed = status_of(client)
        assert (failed["state"], set(failed)) == ("failed", always | {"retry_at"})
        assert error_of(client.get("/ready")) == (503, "model_failed", None)

        loader.error = None
        until(lambda: served.retry_seconds == 0)
        assert client.complete(max_tokens=1).status_code == 200
        until(lambda: served.uses == 0)
        ready = status_of(client)
        assert (ready["state"], set(ready)) == ("ready", always | {"load_seconds", "unloads_at"})
        assert 0 < ready["unloads_at"] - time.time() <= 3600
        page = client.get("/metrics").text
        assert 'ster_model_loads_total{model="toy"} 1\n' in page and 'ster_model_uses{model="toy"} 0\n' in page

        served._unused_since -= 3600.0
        served.unload_if_unused()
        gone = status_of(client)
        assert (gone["state"], set(gone)) == ("idle", always | {"load_seconds"})
        assert gone["capabilities"] == ready["capabilities"]  # still known
        assert 'ster_model_ready{model="toy"} 0\n' in client.get("/metrics").text
        assert client.complete(model="toy-llama", max_tokens=1).status_code == 200  # by the name it is known by now

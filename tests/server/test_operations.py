"""What those who run it see: the log, the metrics, limits of time and number, the end."""

import json
import logging
import re
import threading

import httpx
import pytest
from serving import Client, error_of, running, until

import ster
from ster.errors import InputError
from ster.server.run import Address, curl, listen, url_of
from ster.server.settings import Settings

PROMPT = "the sea is calm"


def test_a_line_for_every_request(toy: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ster.server"):
        greedy = {"max_tokens": 2, "temperature": 0}
        answers = [toy.complete(**greedy), toy.complete(**greedy, n=2, stream=True), toy.get("/nope?secret")]
        ours = lambda: [record for record in caplog.records if record.name == "ster.server"]  # noqa: E731
        until(lambda: len(ours()) == 3)  # a line comes after its answer
    lines = [json.loads(record.getMessage()) for record in ours()]
    assert [line["id"] for line in lines] == [answer.headers["x-request-id"] for answer in answers]
    whole, stream, nothing = lines
    assert list(whole) == ["time", "id", "method", "path", "status", "model", "prompt_tokens", "completion_tokens", "seconds"]
    assert (whole["method"], whole["path"], whole["status"], whole["model"]) == ("POST", "/v1/completions", 200, "toy")
    assert (whole["prompt_tokens"], whole["completion_tokens"], stream["completion_tokens"]) == (4, 2, 4)
    assert nothing["path"] == "/nope" and nothing["status"] == 404 and "model" not in nothing and nothing["seconds"] >= 0


def test_metrics_are_prometheus_text(toy: Client) -> None:
    toy.complete(max_tokens=2, temperature=0)
    toy.get("/a-path-nobody-knows")
    until(lambda: 'path="other"' in toy.get("/metrics").text)
    page = toy.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for line in page.text.splitlines():
        if not line.startswith("# "):
            match = re.fullmatch(r'([a-z_]+(?:\{[a-z_]+="[^"]*"(?:,[a-z_]+="[^"]*")*\})?) ([0-9.e+-]+)', line)
            assert match, line
            samples[match[1]] = float(match[2])
    assert samples['ster_requests_total{path="/v1/completions",status="200"}'] >= 1
    assert samples['ster_requests_total{path="other",status="404"}'] >= 1
    assert samples['ster_tokens_total{model="toy",kind="completion"}'] >= 2
    assert samples['ster_model_ready{model="toy"}'] == 1 and samples['ster_running{model="toy"}'] == 0
    assert samples['ster_cache_budget_bytes{model="toy"}'] == 4 << 30
    assert samples['ster_step_seconds_bucket{model="toy",le="+Inf"}'] == samples['ster_step_seconds_count{model="toy"}'] > 0


def test_a_full_queue_says_when_to_come_back(toy_model: ster.Model) -> None:
    with running({"toy": lambda: toy_model}, Settings(queue=1, max_running=1, request_seconds=5)) as client:
        answers: list[httpx.Response] = []
        with client.models.pass_lock:
            body = {"model": "toy", "prompt": PROMPT, "max_tokens": 1}
            ask = lambda: answers.append(httpx.post(f"{client.url}/v1/completions", json=body))  # noqa: E731
            threads = [threading.Thread(target=ask) for _ in range(2)]
            stats = client.models[0].loaded.scheduler.stats
            for index, thread in enumerate(threads):
                thread.start()
                until(lambda index=index: stats().running + stats().waiting > index)
            refused = client.complete(max_tokens=1)
            assert error_of(refused) == (429, "queue_full", None) and refused.headers["retry-after"] == "5"
            assert refused.json()["error"]["type"] == "rate_limit_error"
        for thread in threads:
            thread.join(10)
        assert [answer.status_code for answer in answers] == [200, 200]


def test_a_request_that_takes_too_long(toy_model: ster.Model) -> None:
    with running({"toy": lambda: toy_model}, Settings(request_seconds=0.3, keepalive_seconds=0.1)) as client:
        with client.models.pass_lock:
            assert client.complete(max_tokens=1).json()["error"]["code"] == "timeout"
            events = client.events(max_tokens=1)
        assert events[-1]["error"]["code"] == "timeout" and set(events[:-1]) <= {": keepalive"}
        stats = client.models[0].loaded.scheduler.stats
        until(lambda: not stats().running and not stats().waiting)
        until(lambda: client.complete(max_tokens=1).status_code == 200)  # where a machine is slow, not the first


def test_a_body_that_does_not_come(toy_model: ster.Model) -> None:
    with running({"toy": lambda: toy_model}, Settings(body_seconds=0.2)) as client:
        connection = client.connect()
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"model"')
        assert b" 408 " in connection.recv(10_000)
        connection.close()


def test_draining_ends_what_runs_and_refuses_what_comes(toy_model: ster.Model) -> None:
    with running({"toy": lambda: toy_model}, Settings(keepalive_seconds=0.05)) as client:
        answers: list[httpx.Response] = []
        begun = threading.Semaphore(0)

        def ask(stream: bool) -> None:
            body = {"model": "toy", "prompt": PROMPT, "max_tokens": 100, "stream": stream}
            with httpx.stream("POST", f"{client.url}/v1/completions", json=body, timeout=60) as response:
                begun.release()
                response.read()
            answers.append(response)

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        stats = client.models[0].loaded.scheduler.stats
        with client.models.pass_lock:
            for thread in threads:
                thread.start()
            until(lambda: stats().running + stats().waiting == 2)
            assert begun.acquire(timeout=30) and begun.acquire(timeout=30)
            client.app.state.draining = True
            drain = threading.Thread(target=client.models.drain, args=(0.1,))
            drain.start()
            until(lambda: client.models[0].loaded.scheduler._closed)
            assert error_of(client.complete(max_tokens=1)) == (503, "shutting_down", None)
            assert error_of(client.get("/ready")) == (503, "shutting_down", None)
            assert client.get("/health").status_code == 200
            until(lambda: client.models[0].loaded.scheduler._stopping)
        for thread in (*threads, drain):
            thread.join(10)
        assert len(answers) == 2
        for answer in answers:  # both have begun
            text = answer.text.split("data: ")[-1]
            assert answer.status_code == 200 and json.loads(text)["error"]["code"] == "shutting_down"


def test_an_address_that_is_taken_is_one_sentence() -> None:
    with listen(Address(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(InputError, match=f"failed to listen on port {port} of 127.0.0.1: address already in use"):
            listen(Address(port=port))
    with pytest.raises(InputError, match="failed to listen on port 1 of no.such.host.invalid: "):
        listen(Address("no.such.host.invalid", 1))


def test_where_it_listens() -> None:
    with listen(Address(port=0)) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    with listen(Address("0.0.0.0", 0)) as listener:
        assert url_of(listener).startswith("http://127.0.0.1:")
    line = curl("http://127.0.0.1:8000", 'it\'s "mine"', key=True)
    assert "$STER_API_KEY" in line and "it'\"'\"'s" in line

"""Who is asked again, after how long, and when that ends: servers that are busy, that failed, that break off or are not there."""

from __future__ import annotations

import email.utils
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harvesting import PROMPTS, contents
from lens_stub import PROMPT, Raw, Stub, kept

import ster
from ster.errors import InputError, RemoteError
from ster.remote.retry import Patience

NOW = 1_000_000_000  # seconds since 1970


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waits between attempts take no time, and are listed. It is always NOW: what a slow machine takes is no part of anyone's patience."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("ster.remote.transport.sleep", sleep)
    monkeypatch.setattr("ster.remote.retry.time", SimpleNamespace(time=lambda: float(NOW), monotonic=lambda: 0.0))
    return waits


def test_a_server_that_is_busy_is_asked_again(stub: Stub, remote: ster.RemoteModel, toy_model: ster.Model, no_waits: list[float]) -> None:
    date = email.utils.formatdate(NOW + 4, usegmt=True)
    busy = [
        Raw(b'{"error": {"message": "queue full"}}', 429, {"Retry-After": "2"}),
        Raw(b"", 503, {"Retry-After": date}),
        Raw(b"<html>", 502, {"Content-Type": "text/html"}),
    ]
    stub.plan = [lambda body, document, raw=raw: raw for raw in busy[:1]]  # type: ignore[misc]
    assert kept(remote, toy_model) == [0] and no_waits == [2.0]
    stub.plan = [lambda body, document, raw=raw: raw for raw in busy[1:]]  # type: ignore[misc]
    no_waits.clear()
    assert kept(remote, toy_model) == [0] and no_waits == [4.0, 1.0]
    no_waits.clear()
    stub.spoil = lambda body, document: busy[0]
    with pytest.raises(RemoteError, match=r"the server refuses \(429\): queue full: prompts\[0\]"):
        kept(remote, toy_model)
    assert no_waits == [2.0, 2.0]  # five seconds are all it may wait


@pytest.mark.parametrize("again", ["0", "Thu, 01 Jan 1970 00:01:00 GMT", "-1"])
def test_waits_double_where_the_server_asks_for_none(
    stub: Stub, remote: ster.RemoteModel, toy_model: ster.Model, no_waits: list[float], again: str
) -> None:
    stub.spoil = lambda body, document: Raw(b"{}", 503, {"Retry-After": again})
    with pytest.raises(RemoteError, match="answers 503"):
        kept(remote, toy_model)
    assert no_waits == [0.5, 1.0, 2.0]


def test_patience_ends_by_the_clock_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("ster.remote.retry.time", SimpleNamespace(monotonic=lambda: now))  # other threads keep the real clock
    patience = Patience(10)
    assert patience.after(503, {}) == 0.5
    now += 9.5
    assert patience.after(503, {}) is None


@pytest.mark.parametrize("code", ["queue_full", "model_loading", "model_failed", "internal_error"])
def test_an_error_told_late_is_taken_as_its_status(
    stub: Stub, remote: ster.RemoteModel, toy_model: ster.Model, no_waits: list[float], code: str
) -> None:
    late = Raw(b"  " + json.dumps({"error": {"message": "Later.", "code": code}}).encode())
    stub.plan = [lambda body, document: late]
    assert kept(remote, toy_model) == [0] and no_waits == [0.5]
    stub.spoil = lambda body, document: late
    with pytest.raises(RemoteError, match="refuses: Later"):
        kept(remote, toy_model)
    assert len(no_waits) == (2 if code == "internal_error" else 4)


def test_a_stream_is_asked_for_again_until_it_begins(
    stub: Stub, remote: ster.RemoteModel, toy_model: ster.Model, no_waits: list[float]
) -> None:
    error = json.dumps({"error": {"message": "Full.", "code": "queue_full"}}).encode()
    event = b'data: {"choices": [{"index": 0, "text": " a", "token_ids": [5], "finish_reason": null}]}\n\n'
    stream = {"Content-Type": "text/event-stream"}
    own = toy_model.generate(PROMPT, max_new_tokens=3).token_ids
    for busy in (Raw(error, 429), Raw(b"gone", 200, cut=0), Raw(b"data: " + error + b"\n\n", 200, stream)):
        stub.plan = [lambda body, document, busy=busy: busy]  # type: ignore[misc]
        assert [step.token_id for step in remote.stream(PROMPT, max_new_tokens=3)] == own
    assert no_waits == [0.5] * 3
    stub.plan = [lambda body, document: Raw(event + b"data: " + error + b"\n\n", 200, stream)]
    with pytest.raises(RemoteError, match="refuses: Full"):
        list(remote.stream(PROMPT, max_new_tokens=3))


def test_a_server_that_failed_is_asked_once_again(
    stub: Stub, remote: ster.RemoteModel, toy_model: ster.Model, no_waits: list[float]
) -> None:
    failed = Raw(b'{"error": {"message": "steering failed"}}', 500)
    stub.plan = [lambda body, document: failed]
    assert kept(remote, toy_model) == [0]
    stub.spoil = lambda body, document: failed
    stub.requests.clear()
    with pytest.raises(RemoteError, match=r"refuses \(500\): steering failed"):
        kept(remote, toy_model)
    assert len(stub.completions()) == 2


def test_a_connection_that_breaks_off(stub: Stub, remote: ster.RemoteModel, toy_model: ster.Model, no_waits: list[float]) -> None:
    broken = lambda body, document: Raw(json.dumps(document).encode(), cut=300)  # noqa: E731
    stub.plan = [broken]
    assert kept(remote, toy_model) == [0]
    stub.spoil = broken
    with pytest.raises(RemoteError, match=r"broke off the connection: .*: prompts\[0\]$"):
        kept(remote, toy_model)


def test_a_server_that_is_not_there(no_waits: list[float]) -> None:
    with pytest.raises(RemoteError, match=r"^http://127\.0\.0\.1:1 cannot be reached") as refused:
        ster.connect("http://127.0.0.1:1/v1")
    assert refused.value.hint and len(no_waits) == 3


def test_a_harvest_goes_on_after_its_server_has_gone(stub: Stub, toy_model: ster.Model, tmp_path: Path, no_waits: list[float]) -> None:
    with ster.connect(stub.url, concurrency=1) as remote:
        ster.harvest(remote, PROMPTS, tmp_path / "whole", shard_size=2)
        gone: list[Any] = [None] * 3
        stub.plan = gone
        stub.spoil = lambda body, document: Raw(b"gone", cut=0)
        with pytest.raises(RemoteError, match="broke off the connection"):
            ster.harvest(remote, PROMPTS, tmp_path / "cut", shard_size=2)
        assert (tmp_path / "cut" / "shard_00000.safetensors").exists() and not (tmp_path / "cut" / "manifest.json").exists()
        with pytest.raises(InputError, match="is not finished"):
            ster.open_harvest(tmp_path / "cut")
        stub.spoil = None
        stub.requests.clear()
        ster.harvest(remote, PROMPTS, tmp_path / "cut", shard_size=2)
        ran = [tuple(body["prompt"]) for body in stub.completions()]
        assert tuple(toy_model.encode(PROMPTS[0])) not in ran  # its shard was kept
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")

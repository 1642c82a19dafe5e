"""A database that is locked, away or full: what needs none is answered all the same, and the rest is told to come again."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `serve` is not installed")

from server.jobbing import BODY, serving, state_of, submit
from serving import Client, error_of, until
from sqlalchemy.exc import OperationalError

import ster
from ster.server import accounts, state_threads
from ster.server.harvests import runner as harvest_runner
from ster.server.jobs import runner as job_runner

UNAVAILABLE = (503, "state_unavailable", None)
HARVEST = {"model": "toy", "prompts": ["a"]}
NO_JOB, NO_HARVEST = "job-" + "0" * 32, "00000000-0000-0000-0000-000000000000"
ROUTES: list[tuple[str, str, Any]] = [
    ("POST", "/v1/jobs", BODY),
    ("GET", "/v1/jobs", None),
    ("GET", f"/v1/jobs/{NO_JOB}", None),
    ("DELETE", f"/v1/jobs/{NO_JOB}", None),
    ("POST", "/v1/harvest", HARVEST),
    ("GET", "/v1/harvest", None),
    ("GET", f"/v1/harvest/{NO_HARVEST}", None),
    ("GET", f"/v1/harvest/{NO_HARVEST}/files/manifest.json", None),
    ("DELETE", f"/v1/harvest/{NO_HARVEST}", None),
]


@pytest.fixture
def client(tmp_path: Path, toy_model: ster.Model) -> Iterator[Client]:
    with serving(tmp_path / "state", toy_model) as client:
        yield client


@contextlib.contextmanager
def away(client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever asks the database is told that it is full."""

    def refused(*_: Any) -> Any:
        raise OperationalError("begin", None, Exception("database or disk is full"))

    database = state_of(client).database
    with monkeypatch.context() as patch:
        for method in ("read", "write"):
            patch.setattr(type(database), method, contextlib.contextmanager(refused))
        yield


def test_every_route_of_the_state_says_to_come_again(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = client.app.state.accounts.keys  # whether there are keys is asked once a second, and was not to be what is tested
    monkeypatch.setattr(type(known), "_is_old", lambda _: False)
    with away(client, monkeypatch), caplog.at_level(logging.WARNING, "ster.server"):
        for method, path, body in ROUTES:
            refused = client.request(method, path, json=body)
            assert error_of(refused) == UNAVAILABLE, path
            assert refused.headers["retry-after"] == "5"
        lines = [record for record in caplog.records if "tries again" in record.getMessage()]
        assert len(lines) >= len(ROUTES) and not any(record.exc_info for record in lines)
    assert client.post("/v1/jobs", json=BODY).status_code == 202


def test_whoever_waits_for_the_database_keeps_no_completion_waiting(client: Client) -> None:
    """More of them than there are threads for plans."""
    known = client.app.state.accounts.keys
    known._is_old = lambda: False
    hanging = threading.Event()
    runner = client.app.state.jobs
    get = runner.queue.get

    def hangs(*given: Any) -> Any:
        hanging.wait()
        return get(*given)

    id = submit(client)
    runner.queue.get = hangs
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(client.get(f"/v1/jobs/{id}").status_code)) for _ in range(45)]
    try:
        for thread in threads:
            thread.start()
        until(lambda: client.app.state.state_threads._executor._work_queue.qsize() >= 45 - state_threads.THREADS)
        assert client.post("/v1/completions", json=BODY, timeout=20).status_code == 200
    finally:
        hanging.set()
        for thread in threads:
            thread.join()
    assert codes == [200] * 45


def test_what_is_not_begun_in_time_is_given_up(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = threading.Event()
    threads = client.app.state.state_threads
    for _ in range(state_threads.THREADS):
        threads._executor.submit(hanging.wait)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(state_threads, "BEGIN_SECONDS", 0.05)
            assert error_of(client.post("/v1/jobs", json=BODY)) == UNAVAILABLE
    finally:
        hanging.set()
    assert client.get("/v1/jobs").json()["data"] == []


def test_a_database_that_is_away_for_a_while_is_a_line_each_time(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (accounts, harvest_runner, job_runner):
        for name in ("KEEP_SECONDS", "LOOK_SECONDS", "IDLE_SECONDS", "RECOVER_SECONDS"):
            monkeypatch.setattr(module, name, 0.05, raising=False)
    client.app.state.accounts.keys._asked_at = float("-inf")
    with away(client, monkeypatch), caplog.at_level(logging.WARNING, "ster.server"):
        assert error_of(client.get("/v1/jobs")) == UNAVAILABLE
        names = ("the look-up of a key", "the runner of Jobs", "the runner of harvests")
        until(lambda: all(f"{name}: the database does not answer" in caplog.text for name in names))
        assert not any(record.exc_info for record in caplog.records if record.getMessage().startswith(names))
    with caplog.at_level(logging.WARNING, "ster.server"):
        state_threads.log_trouble("something else", ValueError("a bug"))
        assert caplog.records[-1].exc_info

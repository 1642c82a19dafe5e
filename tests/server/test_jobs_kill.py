"""A server that is killed at any step of a Job: the Job ends once all the same, and its Hold is settled once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `serve` is not installed")

import sqlalchemy as sa
from server.jobbing import ended, same_completion, serving, state_of
from server.killed_jobs import FIELDS, STEPS

import ster
from ster.state.amounts import NOTHING, Amount
from ster.state.budget import usage
from ster.state.keys import create_key
from ster.state.state import open_state
from ster.state.tables import holds, jobs

TESTS = Path(__file__).resolve().parents[1]
NEVER = ("taken in, not committed", "the Hold taken, nothing else")
ENOUGH = {"monthly_tokens": 1_000_000, "monthly_activations": 100}


def kill(step: str, folder: Path, url: str, key: str, model: Path) -> None:
    line = [sys.executable, str(TESTS / "server" / "killed_jobs.py"), step, str(folder), url, key, str(model)]
    path = os.pathsep.join([str(TESTS), str(Path(ster.__file__).parents[1])])
    found = subprocess.run(line, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert found.returncode == -signal.SIGKILL, found.stderr


@pytest.mark.parametrize("step", STEPS)
def test_a_job_ends_once_wherever_its_server_is_killed(
    step: str, tmp_path: Path, database_url: str, toy_dir: Path, toy_model: ster.Model
) -> None:
    folder = tmp_path / "state"
    state = open_state(folder, database_url)
    with state.database.write() as connection:
        mine, key = create_key(connection, "mine", ENOUGH)
        _, other = create_key(connection, "other", ENOUGH)
    state.close()
    kill(step, folder, database_url, key, toy_dir)
    with serving(folder, toy_model, url=database_url) as client:
        client.headers["authorization"] = f"Bearer {key}"
        page = client.get("/v1/jobs").json()["data"]
        assert len(page) == (0 if step in NEVER else 1)
        found = ended(client, page[0]["id"]) if page else None
        with state_of(client).database.read() as connection:
            assert connection.execute(sa.select(holds)).all() == []
            spent = usage(connection, mine.id).month
            attempts = connection.execute(sa.select(jobs.c.attempts)).scalars().all()
        if found is None or step == "cancelled":
            assert (spent.spent, spent.requests) == (NOTHING, 0)
            assert found is None or (found["status"] == "cancelled" and "result" not in found)
            return
        assert found["status"] == "done" and attempts[0] <= 2
        counted = found["result"]["usage"]
        assert (spent.spent, spent.requests) == (Amount(counted["prompt_tokens"], counted["completion_tokens"], 1), 1)
        client.headers["authorization"] = f"Bearer {other}"
        assert same_completion(found["result"], client.answer(**FIELDS))


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_job_that_ends_every_server_is_given_up(tmp_path: Path, database_url: str, toy_dir: Path, toy_model: ster.Model) -> None:
    folder = tmp_path / "state"
    state = open_state(folder, database_url)
    with state.database.write() as connection:
        mine, key = create_key(connection, "mine", ENOUGH)
    state.close()
    for _ in range(3):
        kill("running", folder, database_url, key, toy_dir)
    with serving(folder, toy_model, url=database_url) as client:
        client.headers["authorization"] = f"Bearer {key}"
        *others, first = [ended(client, each["id"]) for each in client.get("/v1/jobs").json()["data"]]
        assert first["status"] == "failed" and first["error"]["code"] == "job_failed"
        assert all(each["status"] == "done" for each in others)  # of those that were taken in before their server was killed
        with state_of(client).database.read() as connection:
            assert usage(connection, mine.id).month.requests == len(others) and connection.execute(sa.select(holds)).all() == []

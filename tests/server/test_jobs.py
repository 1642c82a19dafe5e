"""Jobs: completions made in the background. What a kill does to them: `test_jobs_kill.py`."""

from __future__ import annotations

import contextlib
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

pytest.importorskip("sqlalchemy", reason="the extra `serve` is not installed")

import sqlalchemy as sa
from server.jobbing import BODY, ended, job, runner_of, same_completion, serving, state_of, submit
from serving import Client, error_of, running, until

import ster
from ster.server import longpoll
from ster.server.jobs import execution as execution_module
from ster.server.jobs import results as results_module
from ster.server.jobs import runner as runner_module
from ster.server.settings import Settings
from ster.state.budget import usage
from ster.state.keys import create_key, set_state
from ster.state.tables import jobs


@pytest.fixture
def client(tmp_path: Path, toy_model: ster.Model) -> Iterator[Client]:
    with serving(tmp_path / "state", toy_model) as client:
        yield client


@pytest.fixture
def held(client: Client) -> Iterator[Client]:
    """Nothing of it runs a pass, until the end."""
    with client.models.pass_lock:
        yield client


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 1.3, "seed": 5, "n": 3},
    "ids": {"prompt": [[1, 5, 6], [7, 8]], "seed": 2, "echo": True, "logprobs": 2},
    "read": {"output_residual_stream": [0, 2], "seed": 1, "activation_dtype": "bfloat16"},
    "steered": {"apply_steering_vectors": [{"activations": [[0.5] * 64], "layer_indices": [1]}], "seed": 3, "output_residual_stream": True},
    "scored": {"prompt_logprobs": -1, "max_tokens": 1, "return_token_ids": True},
}


@pytest.mark.parametrize("case", CASES)
def test_the_result_is_the_completion(client: Client, case: str) -> None:
    fields = {"seed": 0, **CASES[case]}
    found = ended(client, submit(client, **fields))
    assert found["status"] == "done" and "error" not in found
    assert same_completion(found["result"], client.post("/v1/completions", json={**BODY, **fields}).json())


def test_a_job_goes_from_queued_to_done(client: Client) -> None:
    with client.models.pass_lock:
        response = client.post("/v1/jobs", json=BODY)
        first = response.json()
        assert response.status_code == 202
        assert {**first, "id": 0, "created_at": 0} == {"id": 0, "object": "job", "status": "queued", "model": "toy", "created_at": 0}
        until(lambda: job(client, first["id"])["status"] == "running")
        found = job(client, first["id"])
        assert found["started_at"] >= found["created_at"] and not found.keys() & {"ended_at", "result", "error"}
    found = ended(client, first["id"])
    assert found["result"]["object"] == "text_completion" and found["expires_at"] - found["ended_at"] == 7 * 86400
    assert found["result"]["created"] == found["created_at"]
    assert job(client, first["id"]) == found


def test_without_a_seed_one_is_drawn_when_the_job_comes(client: Client) -> None:
    with client.models.pass_lock:
        id = submit(client, temperature=1.5)
    first = ended(client, id)["result"]
    state = state_of(client)
    with state.database.write() as connection:
        row = connection.execute(sa.select(jobs)).one()
        connection.execute(sa.update(jobs).values(state="queued"))
    runner_of(client).wake()
    assert ended(client, id)["result"] == first
    assert same_completion(first, client.post("/v1/completions", json={**BODY, "temperature": 1.5, "seed": row.seed}).json())


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"stream_options": {"include_usage": True}},
        {"messages": [{"role": "user", "content": "x"}]},
    ],
)
def test_a_job_is_a_completion_in_one_piece(client: Client, fields: dict[str, Any]) -> None:
    status, code, param = error_of(client.post("/v1/jobs", json={**BODY, **fields}))
    assert (status, code, param) == (400, "invalid_request", next(iter(fields)))


def test_a_job_that_shall_stream_is_told_what_to_leave_out(client: Client) -> None:
    answer = client.post("/v1/jobs", json={**BODY, "stream": True})
    assert answer.json()["error"]["message"] == "A Job does not stream: leave stream out."


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "other"},
        {"n": 0},
        {"x": 1},
        {"prompt": ""},
        {"prompt": [1, 99]},
        {"prompt": [5] * 300},
        {"max_tokens": 300},
        {"output_residual_stream": [9]},
        {"output_residual_stream": [0], "n": 2},
        {"apply_steering_vectors": [{"activations": [[1.0]], "layer_indices": [0]}]},
        {"apply_steering_vectors": [{"activations": [[[1.0] * 64]], "layer_indices": [0], "position_indices": [99]}]},
    ],
)
def test_whatever_a_completion_is_refused_for_a_job_is_too(client: Client, fields: dict[str, Any]) -> None:
    body = {**BODY, **fields}
    refusal = client.post("/v1/jobs", json=body)
    assert (refusal.status_code, refusal.json()["error"]) == (400, client.post("/v1/completions", json=body).json()["error"])
    assert client.get("/v1/jobs").json()["data"] == []


def test_what_the_engine_could_never_run_is_refused(tmp_path: Path, toy_model: ster.Model) -> None:
    with serving(tmp_path, toy_model, Settings(kv_cache_bytes=toy_model.engine.cache_block_bytes)) as client:
        body = {**BODY, "max_tokens": 200}
        refusal = client.post("/v1/jobs", json=body)
        assert refusal.status_code == 400 and refusal.json()["error"] == client.post("/v1/completions", json=body).json()["error"]


def test_what_fails_says_why_and_no_more(client: Client) -> None:
    """A vector that drives the stream to infinity is found out when it runs."""
    vectors = [{"activations": [[3e38] * 64], "layer_indices": [1]}] * 2
    found = ended(client, submit(client, apply_steering_vectors=vectors))
    refusal = client.post("/v1/completions", json={**BODY, "apply_steering_vectors": vectors}).json()
    assert found["status"] == "failed" and "result" not in found and found["error"] == refusal["error"]


def test_there_is_no_such_job(client: Client) -> None:
    for id in ("job-" + "0" * 32, "job-x", "%00", "job-" + "0" * 400):
        for method in ("GET", "DELETE"):
            assert error_of(client.request(method, f"/v1/jobs/{id}")) == (404, "job_not_found", None)


def test_a_result_is_sent_in_pieces(client: Client) -> None:
    """A large one, of which a reader that does not read has no more than a few pieces in memory; it is whole when it is read."""
    id = submit(client)
    found = ended(client, id)
    path = state_of(client).folder / "jobs" / f"{id}.json"
    path.write_bytes(orjson.dumps({"text": "x" * (64 << 20)}))
    tracemalloc.start()
    try:
        connections = [client.connect() for _ in range(4)]
        for connection in connections:
            connection.sendall(f"GET /v1/jobs/{id} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert all(connection.recv(12) == b"HTTP/1.1 200" for connection in connections)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
        for connection in connections:
            connection.close()
    finally:
        tracemalloc.stop()
    response = client.get(f"/v1/jobs/{id}")
    assert response.json() == {**found, "result": orjson.loads(path.read_bytes())}
    assert int(response.headers["content-length"]) == len(response.content) and response.headers["content-type"] == "application/json"
    assert client.head(f"/v1/jobs/{id}").headers["content-length"] == response.headers["content-length"]


# Cancelling


def test_a_job_that_waits_is_cancelled(tmp_path: Path, toy_model: ster.Model) -> None:
    with serving(tmp_path, toy_model, Settings(jobs_running=1)) as client, client.models.pass_lock:
        first, second = submit(client), submit(client)
        until(lambda: job(client, first)["status"] == "running")
        found = client.delete(f"/v1/jobs/{second}").json()
        assert found["status"] == "cancelled" and "ended_at" in found and "started_at" not in found
        assert error_of(client.delete(f"/v1/jobs/{second}")) == (409, "job_not_cancellable", None)
        assert job(client, second) == found


def test_a_job_that_runs_is_cancelled_before_the_next_pass(client: Client) -> None:
    scheduler = client.models[0].loaded.scheduler
    with client.models.pass_lock:
        id = submit(client, max_tokens=200)
        until(lambda: scheduler.stats().background_running)
        assert client.delete(f"/v1/jobs/{id}").json()["status"] == "cancelled"
        passes = scheduler.stats().passes
    until(lambda: not scheduler.stats().running)
    assert scheduler.stats().passes <= passes + 1
    until(lambda: not runner_of(client)._active)
    assert job(client, id)["status"] == "cancelled" and scheduler.stats().cache_bytes >= scheduler.stats().pinned_bytes == 0


def test_a_job_that_is_done_is_not_cancelled(client: Client) -> None:
    id = submit(client)
    assert ended(client, id)["status"] == "done"
    assert error_of(client.delete(f"/v1/jobs/{id}")) == (409, "job_not_cancellable", None)
    assert job(client, id)["status"] == "done"


def test_a_job_that_is_cancelled_while_its_result_is_written_leaves_none(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    results = runner_of(client).results
    write = results.write

    def slow(id: str, document: bytes) -> None:
        write(id, document)
        assert client.delete(f"/v1/jobs/{id}").status_code == 200

    monkeypatch.setattr(results, "write", slow)
    id = submit(client)
    assert ended(client, id)["status"] == "cancelled"
    until(lambda: not runner_of(client)._active)
    assert list((state_of(client).folder / "jobs").iterdir()) == []


# Whose


def test_a_caller_sees_its_own_alone(tmp_path: Path, toy_model: ster.Model) -> None:
    with serving(tmp_path, toy_model, Settings(api_keys=("one", "two"))) as client:
        client.headers["authorization"] = "Bearer one"
        id = submit(client)
        ended(client, id)
        client.headers["authorization"] = "Bearer two"
        assert client.get("/v1/jobs").json()["data"] == []
        assert error_of(client.get("/v1/jobs", params={"after": id})) == (400, "invalid_request", "after")
        for method in ("GET", "DELETE"):
            assert error_of(client.request(method, f"/v1/jobs/{id}")) == (404, "job_not_found", None)
        client.headers["authorization"] = "Bearer one"
        assert [each["id"] for each in client.get("/v1/jobs").json()["data"]] == [id]
        del client.headers["authorization"]
        assert client.get("/v1/jobs").status_code == 401


def test_a_list_has_the_newest_first_and_pages(client: Client) -> None:
    empty = client.get("/v1/jobs").json()
    assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    ids = [submit(client, max_tokens=1) for _ in range(5)]
    for id in ids:
        ended(client, id)
    found: list[str] = []
    more = True
    while more:
        page = client.get("/v1/jobs", params={"limit": 2, **({"after": found[-1]} if found else {})}).json()
        assert page["first_id"] == page["data"][0]["id"] and page["last_id"] == page["data"][-1]["id"]
        assert all("result" not in each and each["status"] == "done" for each in page["data"])
        found += [each["id"] for each in page["data"]]
        more = page["has_more"]
    assert found == ids[::-1]
    for query in ({"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"limit": "²"}, {"after": "job-x"}, {"after": "\0"}):
        assert error_of(client.get("/v1/jobs", params=query)) == (400, "invalid_request", next(iter(query)))


def test_a_server_without_a_state_keeps_no_jobs(toy: Client) -> None:
    for method, path in (("POST", "/v1/jobs"), ("GET", "/v1/jobs"), ("GET", "/v1/jobs/job-1"), ("DELETE", "/v1/jobs/job-1")):
        assert error_of(toy.request(method, path, json=BODY if method == "POST" else None)) == (503, "jobs_unavailable", None)


# Waiting


def test_who_waits_is_answered_when_the_job_ends(client: Client) -> None:
    with client.models.pass_lock:
        id = submit(client)
        began = time.monotonic()
        assert job(client, id, wait=1)["status"] in ("queued", "running") and time.monotonic() - began >= 1
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(job(client, id, wait=30)))
        thread.start()
        until(lambda: client.app.state.longpolls._waiting.total())
    thread.join(30)
    assert found[0]["status"] == "done" and "result" in found[0]
    assert client.app.state.longpolls._waiting.total() == 0
    for wait in ("61", "-1", "x", "1.5", ""):
        assert error_of(client.get(f"/v1/jobs/{id}", params={"wait": wait})) == (400, "invalid_request", "wait")


def test_only_a_few_may_wait(tmp_path: Path, toy_model: ster.Model) -> None:
    with serving(tmp_path, toy_model, Settings(api_keys=("a", "b", "c"))) as client, contextlib.ExitStack() as paused:
        paused.enter_context(client.models.pass_lock)
        ids = {}
        for key in "abc":
            client.headers["authorization"] = f"Bearer {key}"
            ids[key] = submit(client)
        del client.headers["authorization"]

        def get(key: str, wait: int) -> Any:
            return client.get(f"/v1/jobs/{ids[key]}", params={"wait": wait}, headers={"authorization": f"Bearer {key}"})

        polls = client.app.state.longpolls
        threads = []
        for key, most in (("a", 4), ("b", 8)):
            for _ in range(4):
                threads.append(threading.Thread(target=get, args=(key, 60)))
                threads[-1].start()
            until(lambda most=most: polls._waiting.total() == most)  # type: ignore[misc]
            for other in ("a",) if most == 4 else ("a", "b", "c"):
                declined = get(other, 30)
                assert declined.status_code == 200 and declined.json()["status"] in ("queued", "running")
                assert (declined.headers["x-acs-longpoll"], declined.headers["retry-after"]) == ("declined", "5")
            assert "x-acs-longpoll" not in get("c", 0).headers
        paused.close()  # the Jobs end, and with them who waits
        for thread in threads:
            thread.join()
        assert polls._waiting.total() == 0


def test_who_waits_and_leaves_gives_back_its_place(held: Client) -> None:
    id = submit(held)
    connection = held.connect()
    connection.sendall(f"GET /v1/jobs/{id}?wait=60 HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    until(lambda: held.app.state.longpolls._waiting.total() == 1)
    connection.close()
    until(lambda: held.app.state.longpolls._waiting.total() == 0)


def test_a_wait_ends_with_the_server(held: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longpoll, "LOOK_SECONDS", 0.02)
    id = submit(held)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(job(held, id, wait=60)))
    thread.start()
    until(lambda: held.app.state.longpolls._waiting.total())
    held.app.state.draining = True
    thread.join(10)
    assert found[0]["status"] in ("queued", "running")


# Caps


def test_a_caller_has_so_many_jobs(tmp_path: Path, toy_model: ster.Model) -> None:
    with serving(tmp_path, toy_model, Settings(max_jobs=2, api_keys=("a", "b"))) as client:
        client.headers["authorization"] = "Bearer a"
        with client.models.pass_lock:
            ids = [submit(client), submit(client)]
            full = client.post("/v1/jobs", json=BODY)
            assert error_of(full) == (429, "too_many_jobs", None) and full.headers["retry-after"] == "30"
            client.headers["authorization"] = "Bearer b"
            submit(client)
            client.headers["authorization"] = "Bearer a"
        for id in ids:
            ended(client, id)
        submit(client)


def test_a_callers_jobs_have_so_many_bytes(tmp_path: Path, toy_model: ster.Model) -> None:
    """A capture counts before it is there; what is there counts as it is."""
    with serving(tmp_path, toy_model, Settings(max_job_bytes=100_000)) as client:
        fields = {"output_residual_stream": True, "max_tokens": 40}  # 4 layers x 44 tokens x 64 x 4 bytes, in base64
        first = submit(client, **fields)
        full = client.post("/v1/jobs", json={**BODY, **fields})
        assert error_of(full) == (429, "job_storage_full", None)
        assert int(full.headers["retry-after"]) > 6 * 86400
        ended(client, first)
        with state_of(client).database.read() as connection:
            size = connection.execute(sa.select(jobs.c.size)).scalar_one()
        path = state_of(client).folder / "jobs" / f"{first}.json"
        assert size > path.stat().st_size > 1000 and path.stat().st_mode & 0o077 & ~0o044 == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["the sea is calm", "the sea"], "n": 3, "echo": True, "return_token_ids": True, "max_tokens": 60},
        {"n": 2, "logprobs": 67, "max_tokens": 60, "temperature": 1.0},
        {"logprobs": 5, "echo": True, "prompt_logprobs": 3},
        {"prompt_logprobs": -1, "n": 2, "max_tokens": 1},
        {"output_residual_stream": True, "logprobs": 0},
    ],
)
def test_a_result_is_no_larger_than_it_counts_before_it_is_there(client: Client, fields: dict[str, Any]) -> None:
    fields = {"seed": 1, "activation_dtype": "float32", **fields}
    with client.models.pass_lock:
        id = submit(client, **fields)
        with state_of(client).database.read() as connection:
            most = connection.execute(sa.select(jobs.c.size)).scalar_one()
    assert ended(client, id)["status"] == "done"
    with state_of(client).database.read() as connection:
        size = connection.execute(sa.select(jobs.c.size)).scalar_one()
    assert size <= most


def test_scores_count_before_they_are_there(tmp_path: Path, toy_model: ster.Model) -> None:
    with serving(tmp_path, toy_model, Settings(max_job_bytes=300_000)) as client, client.models.pass_lock:
        fields = {**BODY, "max_tokens": 20, "logprobs": 67}
        answers = [client.post("/v1/jobs", json=fields) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [202, 202, 429, 429]
        assert error_of(answers[-1]) == (429, "job_storage_full", None)


def test_a_submission_reads_no_row_of_the_jobs_that_are_kept(client: Client) -> None:
    """Their prompts are in the rows: all it asks about them is in an index."""
    asked: list[str] = []
    database = state_of(client).database

    def listen(_: Any, __: Any, statement: str, *___: Any) -> None:
        if statement.startswith(("SELECT count(*)", "SELECT coalesce(sum(jobs.size)")) and "jobs.owner" in statement:
            asked.append(statement)

    sa.event.listen(database.engine, "before_cursor_execute", listen)
    with client.models.pass_lock:
        submit(client)
    sa.event.remove(database.engine, "before_cursor_execute", listen)
    assert len(asked) == 2
    with database.read() as connection:
        for statement in asked:
            values = ("local",) * statement.count("?")
            plan = connection.exec_driver_sql(f"explain query plan {statement}", values).all()
            assert all("USING COVERING INDEX ix_jobs_owner_state" in step[3] for step in plan), plan


# What stays, and what goes


def test_jobs_are_kept_for_some_days(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = submit(client), submit(client)
    ended(client, old), ended(client, new)
    state = state_of(client)
    with state.database.write() as connection:
        connection.execute(sa.update(jobs).where(jobs.c.id == old).values(ended_at=time.time() - 8 * 86400))
    monkeypatch.setattr(results_module, "STALE_SECONDS", -1.0)
    (state.folder / "jobs" / ".half.part").write_bytes(b"{")
    (state.folder / "jobs" / f"job-{'0' * 32}.json").write_bytes(b"{}")
    runner_of(client)._sweep()
    assert [path.name for path in (state.folder / "jobs").iterdir()] == [f"{new}.json"]
    assert error_of(client.get(f"/v1/jobs/{old}")) == (404, "job_not_found", None)
    assert job(client, new)["status"] == "done"
    (state.folder / "jobs" / f"{new}.json").unlink()
    assert error_of(client.get(f"/v1/jobs/{new}")) == (500, "job_result_missing", None)


def test_however_many_files_are_old_the_sweep_keeps_what_is_wanted(tmp_path: Path, toy_model: ster.Model, database_url: str) -> None:
    with serving(tmp_path / "state", toy_model, url=database_url) as client:
        id = submit(client)
        ended(client, id)
        assert runner_of(client)._wanted([*map(str, range(70_000)), id]) == {id}


def test_a_job_begins_again_when_the_server_fails_and_not_for_ever(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    run = execution_module.Execution.run
    failures = iter([OSError("a bug")] * 2 + [None] + [OSError("a bug")] * 9)

    def broken(self: execution_module.Execution) -> Any:
        if error := next(failures):
            raise error
        return run(self)

    monkeypatch.setattr(execution_module.Execution, "run", broken)
    assert ended(client, submit(client))["status"] == "done"
    found = ended(client, submit(client))
    assert found["status"] == "failed" and found["error"]["code"] == "job_failed" and "bug" not in found["error"]["message"]
    assert next(failures) and len(list(failures)) == 5


def test_an_end_that_the_database_did_not_take_is_begun_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "RECOVER_SECONDS", 0.0)
    finish = runner_of(client).queue.finish
    failures = iter([True])

    def broken(*args: Any, **values: Any) -> bool:
        done = finish(*args, **values)
        if next(failures, False):
            raise OSError("the database went away")
        return done

    monkeypatch.setattr(runner_of(client).queue, "finish", broken)
    assert ended(client, submit(client))["status"] == "done"


def test_a_server_that_was_taken_for_dead_runs_each_job_once_and_at_last(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It slept, say, and another server put back what it runs: it takes that again when its own thread has let go, and not before."""
    monkeypatch.setattr(runner_module, "RECOVER_SECONDS", 0.0)
    monkeypatch.setattr(runner_module, "LOOK_SECONDS", 0.01)
    runner, begun, going, most = runner_of(client), [], set(), []
    run, gate = runner_module.Runner._carry_out, threading.Event()

    def noted(self: runner_module.Runner, active: runner_module.Active) -> Any:
        begun.append(active.row.attempts)
        going.add(active)
        most.append(len(going))
        try:
            return run(self, active)
        finally:
            gate.wait(60)
            going.discard(active)

    monkeypatch.setattr(runner_module.Runner, "_carry_out", noted)
    with client.models.pass_lock:
        id = submit(client)
        until(lambda: runner._active and next(iter(runner._active.values())).execution is not None)
        first = runner._active[id]
        with state_of(client).database.write() as connection:
            connection.execute(sa.update(jobs).values(state="queued", server_id=None, started_at=None))
        until(first.ended.is_set)
        gate.wait(0.2)
        assert job(client, id)["status"] == "queued" and runner._active[id] is first
        gate.set()
    assert ended(client, id)["status"] == "done"
    assert begun == [1, 2] and max(most) == 1
    until(lambda: not runner._active and not runner._threads)


# A server that ends


def test_a_server_that_ends_puts_its_jobs_back_and_the_next_goes_on(tmp_path: Path, toy_model: ster.Model) -> None:
    with serving(tmp_path, toy_model, Settings(jobs_running=2)) as client, client.models.pass_lock:
        ids = [submit(client, seed=index, max_tokens=100) for index in range(4)]
        until(lambda: len(runner_of(client)._active) == 2)
        client.app.state.draining = True
        runner_of(client)._stopped.set()
    with serving(tmp_path, toy_model) as client:
        for index, id in enumerate(ids):
            found = ended(client, id)
            assert found["status"] == "done"
            assert same_completion(found["result"], client.answer(seed=index, max_tokens=100))
        with state_of(client).database.read() as connection:
            assert connection.execute(sa.select(jobs.c.attempts)).scalars().all() == [1] * 4


def test_a_job_runs_on_a_model_that_loads_when_it_is_used(tmp_path: Path, toy_model: ster.Model) -> None:
    with serving(tmp_path, toy_model, Settings(load_on_use=True, idle_seconds=0.05)) as client:
        assert client.models[0].state == "idle"
        ids = [submit(client, seed=1) for _ in range(3)]
        assert all(ended(client, id)["status"] == "done" for id in ids)
        until(lambda: client.models[0].state == "idle")
        with state_of(client).database.write() as connection:
            connection.execute(sa.update(jobs).values(state="queued"))
        runner_of(client).wake()
        assert all(ended(client, id)["status"] == "done" for id in ids)


def test_a_job_waits_for_a_model_that_fails_to_load(tmp_path: Path, toy_model: ster.Model, toy_dir: Path) -> None:
    with serving(tmp_path, toy_model) as client, client.models.pass_lock:
        id = submit(client, seed=1)
    fails = iter([True, True])

    def load() -> ster.Model:
        if next(fails, False):
            raise ster.errors.FileError("the disk is away")
        return ster.load(toy_dir)

    from ster.state.state import open_state

    state = open_state(tmp_path)
    with running({"toy": load}, Settings(load_retry_seconds=0.2, load_on_use=True), state=state) as client:
        assert ended(client, id)["status"] == "done"
        with state.database.read() as connection:
            assert connection.execute(sa.select(jobs.c.attempts)).scalar_one() == 1
    state.close()


# Several servers


@pytest.mark.parametrize("cancel", [False, True])
def test_two_servers_run_each_job_once(
    tmp_path: Path, toy_model: ster.Model, toy_dir: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, cancel: bool
) -> None:
    """Any of them answers for any Job; and cancels it, whoever runs it."""
    runs: list[str] = []
    run = execution_module.Execution.run

    def counted(self: execution_module.Execution) -> Any:
        runs.append(self._id)
        return run(self)

    monkeypatch.setattr(execution_module.Execution, "run", counted)
    monkeypatch.setattr(runner_module, "LOOK_SECONDS", 0.05)
    other = ster.load(toy_dir)
    chosen = Settings(jobs_running=2)
    with serving(tmp_path, toy_model, chosen, url=database_url) as a, serving(tmp_path, other, chosen, url=database_url) as b:
        if cancel:
            with a.models.pass_lock, b.models.pass_lock:
                ids = [submit(a, max_tokens=200) for _ in range(4)]
                until(lambda: len(runner_of(a)._active) == len(runner_of(b)._active) == 2)
                for id in ids:
                    assert b.delete(f"/v1/jobs/{id}").json()["status"] == "cancelled"
                until(lambda: not runner_of(a)._active and not runner_of(b)._active)
            assert all(job(a, id)["status"] == "cancelled" for id in ids)
            return
        ids = [submit((a, b)[index % 2], seed=index, temperature=1.0) for index in range(24)]
        for index, id in enumerate(ids):
            found = ended((b, a)[index % 2], id)
            assert found["status"] == "done" and same_completion(found["result"], a.answer(seed=index, temperature=1.0, max_tokens=12))
    assert sorted(runs) == sorted(ids)


# Beside requests


def test_requests_hardly_notice_many_jobs(tmp_path: Path, toy_model: ster.Model) -> None:
    """Counted in passes: a token in each, whatever waits in the background."""
    with serving(tmp_path, toy_model, Settings(jobs_running=16, max_running=8)) as client:
        scheduler = client.models[0].loaded.scheduler
        generator = np.random.default_rng(0)
        with client.models.pass_lock:
            ids = [submit(client, prompt=generator.integers(3, 60, 40).tolist(), max_tokens=150, seed=index) for index in range(32)]
            until(lambda: scheduler.stats().background_running)
        counted = []
        for seed in range(4):
            before = scheduler.stats().passes
            client.answer(prompt=[5, 6, 7, 8], max_tokens=20, seed=seed)
            counted.append(scheduler.stats().passes - before)
        # Beside its 20 tokens: passes before it came and after it was answered, for as long as an answer is on its way.
        assert min(counted) <= 20 + 12, counted
        assert all(ended(client, id)["status"] == "done" for id in ids)


# What they cost


def test_a_job_holds_what_it_may_use_and_costs_what_it_did(tmp_path: Path, toy_model: ster.Model) -> None:
    """While it waits and runs, its Hold counts; what fails or is cancelled costs nothing."""
    with serving(tmp_path, toy_model) as client:
        database = state_of(client).database
        with database.write() as connection:
            mine, key = create_key(connection, "mine", {"monthly_tokens": 40, "concurrency": 1})
        client.headers["authorization"] = f"Bearer {key}"

        def counts() -> tuple[int, int, int]:
            with database.read() as connection:
                month = usage(connection, mine.id).month
            return month.spent.tokens, month.held.tokens, month.requests

        overflow = [{"activations": [[3e38] * 64], "layer_indices": [1]}] * 2
        with client.models.pass_lock:
            cancelled = submit(client)
            assert counts() == (0, 4 + 12, 0)
            client.delete(f"/v1/jobs/{cancelled}")
            assert counts() == (0, 0, 0)
            ids = [submit(client, temperature=0), submit(client, apply_steering_vectors=overflow)]
            assert counts() == (0, 32, 0)
            refusal = client.post("/v1/jobs", json=BODY)
            assert error_of(refusal) == (429, "budget_exceeded", None) and refusal.headers["retry-after"]
            assert len(client.get("/v1/jobs").json()["data"]) == 3
        assert [ended(client, id)["status"] for id in ids] == ["done", "failed"]
        assert counts() == (16, 0, 1)
        with database.write() as connection:
            set_state(connection, "mine", "revoked")
        assert client.post("/v1/jobs", json=BODY).status_code == 401


def test_a_job_of_a_key_that_is_revoked_ends_and_is_paid(tmp_path: Path, toy_model: ster.Model) -> None:
    with serving(tmp_path, toy_model) as client:
        database = state_of(client).database
        with database.write() as connection:
            mine, key = create_key(connection, "mine", {"monthly_tokens": 40})
        client.headers["authorization"] = f"Bearer {key}"
        with client.models.pass_lock:
            submit(client)
            until(lambda: bool(runner_of(client)._active))
            with database.write() as connection:
                set_state(connection, "mine", "revoked")
        until(lambda: not runner_of(client)._active and len(list((state_of(client).folder / "jobs").glob("*.json"))) == 1)
        with database.read() as connection:
            month = usage(connection, mine.id).month
        assert (month.spent.tokens, month.held.tokens) == (16, 0)

"""A harvest that was taken comes to its end once, whatever happens to servers; unless it is cancelled, and then it is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harvest_serving import PROMPTS, downloaded, ended, harvesting, see, submit
from harvesting import contents
from serving import Client, error_of, until
from sqlalchemy import select

import ster
from ster.harvest import disk
from ster.server.harvests import beat as beat_module
from ster.server.harvests.reading import ServedReadable
from ster.server.settings import Settings
from ster.state import presence
from ster.state.budget import usage
from ster.state.database import Database
from ster.state.keys import create_key
from ster.state.place import find_place
from ster.state.queue import Queue
from ster.state.tables import harvests, holds, servers

SIZE = 3  # prompts in a shard: three shards


@pytest.fixture(scope="module")
def expected(toy_model: ster.Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("expected") / "out"
    ster.harvest(toy_model, PROMPTS, folder, shard_size=SIZE)
    return contents(folder)


class Gate:
    """Stops every reading before its first pass, until it is opened. read: first tokens of what was let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.at = threading.Semaphore(0)
        plain = ServedReadable.read

        def read(readable: Any, *args: Any, **options: Any) -> None:
            self.at.release()
            while not self.open.wait(0.05):
                readable._check()
            plain(readable, *args, **options)

        monkeypatch.setattr(ServedReadable, "read", read)

    def wait(self) -> None:
        """Until something is about to be read."""
        assert self.at.acquire(timeout=30)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate(monkeypatch)
    yield found
    found.open.set()


def rows_of(folder: Path, url: str | None = None) -> list[Any]:
    database = Database(find_place(folder, url).url)
    with database.read() as connection:
        found = list(connection.execute(select(harvests)))
    database.close()
    return found


# A server that ends

# A server without HTTP, which takes a harvest in unless there is one, runs it, and ends itself at its n-th step: a call that changes
# something on disk, the moment before a transaction's end, or the moment after it. What it reads, it notes.
DYING = """
import os, signal, sys
step, model, folder, noted, url = int(sys.argv[1]), *sys.argv[2:6]
import orjson, ster
from ster.harvest import disk
from ster.server.callers import NOBODY
from ster.server.harvests.plan import make_plan
from ster.server.harvests.reading import ServedReadable
from ster.server.harvests.request import HarvestRequest
from ster.server.harvests.routes import Harvests
from ster.server.models import Models
from ster.server.served import ServedSpec
from ster.server.settings import Settings
from ster.state.database import Database
from ster.state.state import open_state

settings = Settings()
models = Models([ServedSpec("toy", lambda: ster.load(model))], settings)
models.load()
state = open_state(folder, url or None)
harvests = Harvests(state, models, settings, lambda: False)
count = 0

def passed():
    global count
    count += 1
    if count == step:
        os.kill(os.getpid(), signal.SIGKILL)

def dying(function):
    def call(*args, **options):
        passed()
        return function(*args, **options)
    return call

for name in ("fsync", "replace", "unlink"):
    setattr(disk.os, name, dying(getattr(os, name)))

import contextlib
plain_write, plain_read = Database.write, ServedReadable.read

@contextlib.contextmanager
def write(self):
    with plain_write(self) as connection:
        yield connection
        passed()
    passed()

def read(self, prompts, names, *args, **options):
    with open(noted, "a") as file:
        file.write(names[0] + "\\n")
    plain_read(self, prompts, names, *args, **options)

Database.write, ServedReadable.read = write, read
raw = orjson.dumps({"model": "toy", "prompts": orjson.loads(sys.argv[6]), "shard_size": 3})
store, runner = harvests.store, harvests.runner
if not store.queue.list(NOBODY.id, 1)[0]:
    asked = HarvestRequest.model_validate(orjson.loads(raw), context=settings)
    store.add(NOBODY, "toy", asked, raw, make_plan(models[0].loaded, settings, asked))
while store.queue.list(NOBODY.id, 1)[0][0].state in ("queued", "running"):
    runner._recovered = 0.0
    runner._turn()
print(count, flush=True)
os._exit(0)
"""


def die(step: int, model: Path, folder: Path, noted: Path, url: str = "") -> subprocess.CompletedProcess[str]:
    import orjson

    line = [sys.executable, "-c", DYING, str(step), str(model), str(folder), str(noted), url, orjson.dumps(PROMPTS).decode()]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env=dict(os.environ))


def shards_on_disk(folder: Path) -> set[str]:
    """Names of the first prompts of shards that the journal has."""
    found: set[str] = set()
    for each in (folder / "harvests").glob("*"):
        journal = disk.Journal(each).read()
        found |= {f"prompts[{SIZE * int(name[6:11])}]" for name in (journal[1] if journal else ())}
        if (each / disk.MANIFEST).exists():
            found |= {f"prompts[{SIZE * n}]" for n in range(3)}
    return found


def survive(steps: list[int], toy_dir: Path, folder: Path, url: str = "") -> None:
    """Kill one server after another, each at its step; what is on disk by then is never read again. The last one brings it to its end."""
    noted = folder.with_suffix(".read")
    noted.write_text("")
    for step in [*steps, 0]:
        had, before = shards_on_disk(folder), len(noted.read_text().split())
        result = die(step, toy_dir, folder, noted, url)
        assert result.returncode in (0, -signal.SIGKILL), result.stderr
        assert not had & set(noted.read_text().split()[before:]), "a shard was computed twice"
        if result.returncode == 0:
            return
    raise AssertionError("it never came to its end")


# Two at most: a harvest that ends three servers before a shard more is on disk is given up, and where that is depends on how fast all goes.
@pytest.mark.parametrize("steps", [[2, 4], [9, 13], [20, 24], [31, 33]])
def test_killed_at_any_step_it_goes_on_and_comes_out_the_same(
    toy_dir: Path, toy_model: ster.Model, tmp_path: Path, expected: dict[str, bytes], steps: list[int]
) -> None:
    survive(steps, toy_dir, tmp_path / "state")
    with harvesting(toy_model, tmp_path / "state") as client:
        listed = client.get("/v1/harvest").json()["data"]
        assert len(listed) == 1
        assert downloaded(see(client, listed[0]["job_id"])) == expected


@pytest.mark.slow
def test_killed_at_each_step(toy_dir: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    whole = int(die(0, toy_dir, tmp_path / "whole", tmp_path / "whole.read").stdout)
    for step in range(1, whole + 1):
        folder = tmp_path / f"{step}"
        survive([step], toy_dir, folder)
        assert [contents(each) for each in (folder / "harvests").iterdir()] == [expected]
        assert [row.state for row in rows_of(folder)] == ["done"]


def test_what_ends_one_server_after_another_is_given_up(toy_dir: Path, tmp_path: Path) -> None:
    """It fails, and nothing of it stays."""
    noted = tmp_path / "read"
    assert die(6, toy_dir, tmp_path / "state", noted).returncode == -signal.SIGKILL  # its claim is written
    for step in (4, 4):
        assert die(step, toy_dir, tmp_path / "state", noted).returncode == -signal.SIGKILL
    assert die(0, toy_dir, tmp_path / "state", noted).returncode == 0
    (row,) = rows_of(tmp_path / "state")
    assert row.state == "failed" and row.attempts == 3 and row.request == b""


def test_shut_down_it_is_put_back_and_goes_on(toy_model: ster.Model, tmp_path: Path, expected: dict[str, bytes], gate: Gate) -> None:
    with harvesting(toy_model, tmp_path) as client:
        id = submit(client, shard_size=SIZE)
        gate.wait()
        assert see(client, id)["status"] == "running"
    (row,) = rows_of(tmp_path)
    assert (row.state, row.server_id, row.attempts) == ("queued", None, 0)
    gate.open.set()
    with harvesting(toy_model, tmp_path) as client:
        assert downloaded(ended(client, id)) == expected


def test_what_is_done_never_becomes_less_unless_it_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beat_module, "BEAT_SECONDS", 0.0)
    told: list[int] = []

    def update(_: Any, __: Any, **values: Any) -> bool:
        told.append(values["tokens_done"])
        return True

    database = SimpleNamespace(write=contextlib.nullcontext)
    store: Any = SimpleNamespace(database=database, folder_of=tmp_path.joinpath, queue=SimpleNamespace(update=update))
    (tmp_path / "kept").mkdir()
    for id in ("kept", "gone"):
        beat = beat_module.Beat(store, SimpleNamespace(id=id, attempts=1, tokens_done=70), lambda: False)
        beat.check()
        for done in (0, 40, 80):
            beat.report(done, 100)
        beat.begin_anew()
        beat.report(10, 100)
    assert told == [70, 70, 70, 80, 10, 0, 0, 40, 80, 10]


def test_another_model_under_its_name_begins_it_anew(
    toy_model: ster.Model, toy_copy: Path, tmp_path: Path, gate: Gate, change: Callable[..., None]
) -> None:
    """What was read of the other is not mixed with it."""
    with harvesting(toy_model, tmp_path / "state") as client:
        id = submit(client, shard_size=SIZE)
        gate.wait()
    gate.open.set()
    change(toy_copy / "config.json", rms_norm_eps=0.1)
    other = ster.load(toy_copy)
    with harvesting(other, tmp_path / "state") as client:
        found = downloaded(ended(client, id))
    ster.harvest(other, PROMPTS, tmp_path / "out", shard_size=SIZE)
    assert found == contents(tmp_path / "out")


# Two servers


def test_two_servers_share_a_database_and_run_each_harvest_once(
    toy_model: ster.Model, tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    plain = ServedReadable.read

    def note(self: Any, prompts: Any, names: Any, *args: Any, **options: Any) -> None:
        read.append(threading.current_thread().name + " " + str(list(prompts[0])))
        plain(self, prompts, names, *args, **options)

    monkeypatch.setattr(ServedReadable, "read", note)
    settings = Settings(max_live_harvests=20)
    with (
        harvesting(toy_model, tmp_path, settings, url=database_url) as one,
        harvesting(toy_model, tmp_path, settings, url=database_url) as two,
    ):
        ids = [submit(client, [f"calm{' sea' * n}"]) for n, client in enumerate([one, two] * 4)]
        for n, id in enumerate(ids):
            found = ended((two, one)[n % 2], id)  # each sees what the other was asked
            assert found["status"] == "done" and len(downloaded(found)) == 3
    assert len(read) == len(ids)


def test_a_server_that_lives_takes_over_from_one_that_is_dead(
    toy_model: ster.Model, tmp_path: Path, database_url: str, gate: Gate, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another finds it dead; it comes back, and changes nothing that is no longer its own."""
    monkeypatch.setattr("ster.server.harvests.runner.RECOVER_SECONDS", 0.2)
    monkeypatch.setattr("ster.server.harvests.runner.BUSY_SECONDS", 0.2)
    monkeypatch.setattr(presence, "BEAT_SECONDS", 1000.0)
    with harvesting(toy_model, tmp_path, url=database_url) as one:
        id = submit(one, shard_size=SIZE)
        gate.wait()
        state = one.app.state.state
        with state.database.write() as connection:  # as after a long sleep of its machine
            mine = servers.c.id == state.presence.id
            connection.execute(servers.update().where(mine).values(beat_at=time.time() - 2 * presence.DEAD_SECONDS))
            assert Queue(state.database, harvests).recover(connection, "{}", "srv_other", ()) == []
            connection.execute(servers.delete().where(servers.c.id == "srv_other"))
        with harvesting(toy_model, tmp_path, url=database_url) as two:
            until(lambda: rows_of(tmp_path, database_url)[0].server_id != state.presence.id, 30)
            one.app.state.harvests.runner.stop()
            gate.open.set()
            assert downloaded(ended(two, id)) == expected


# Cancelled


def test_cancelled_while_it_waits_or_runs_it_is_gone(toy_model: ster.Model, tmp_path: Path, gate: Gate) -> None:
    with harvesting(toy_model, tmp_path) as client:
        running, waiting = submit(client), submit(client)
        gate.wait()
        for id, before in ((waiting, "pending"), (running, "running")):
            assert see(client, id)["status"] == before
            answer = client.delete(f"/v1/harvest/{id}")
            assert answer.status_code == 200 and answer.json()["status"] == "cancelled"
            assert see(client, id) == answer.json()
            assert error_of(client.delete(f"/v1/harvest/{id}"))[:2] == (409, "harvest_not_cancellable")
            assert error_of(client.get(f"/v1/harvest/{id}/files/manifest.json"))[:2] == (404, "harvest_not_done")
        gate.open.set()
        done = ended(client, submit(client))
        assert error_of(client.delete(f"/v1/harvest/{done['job_id']}"))[:2] == (409, "harvest_not_cancellable")
        until(lambda: [path.name for path in (tmp_path / "harvests").iterdir()] == [done["job_id"]])
        assert see(client, running)["status"] == "cancelled"
    assert {row.id: row.request for row in rows_of(tmp_path)} == dict.fromkeys((running, waiting, done["job_id"]), b"")


# What it costs


def spent(client: Client, key: str) -> tuple[int, int]:
    """(harvest tokens spent, held) of a key."""
    with client.app.state.state.database.read() as connection:
        month = usage(connection, key).month
        return month.spent.harvest_tokens, month.held.harvest_tokens


def test_tokens_are_held_until_it_ends_and_paid_when_it_is_done(
    toy_model: ster.Model, tmp_path: Path, database_url: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled, failed and refused harvests cost nothing."""
    tokens = sum(len(toy_model.prompt_tokens(prompt)) for prompt in PROMPTS)
    database = Database(find_place(tmp_path, database_url).url)
    with database.write() as connection:
        made, text = create_key(connection, "k", {"monthly_harvest_tokens": 2 * tokens + 5})
    database.close()
    key = made.id
    with harvesting(toy_model, tmp_path, url=database_url) as client:
        client.headers["authorization"] = f"Bearer {text}"
        first, second = submit(client), submit(client)
        gate.wait()
        assert spent(client, key) == (0, 2 * tokens)
        refused = client.post("/v1/harvest", json={"model": "toy", "prompts": PROMPTS})
        assert error_of(refused)[:2] == (429, "harvest_quota_exceeded") and "retry-after" in refused.headers
        assert f"needs {tokens}, and 5 of" in refused.text and len(client.get("/v1/harvest").json()["data"]) == 2
        assert client.delete(f"/v1/harvest/{second}").status_code == 200
        assert spent(client, key) == (0, tokens)
        gate.open.set()
        ended(client, first)
        assert spent(client, key) == (tokens, 0)

        def full(path: Path, chunks: Any) -> Any:
            raise disk.failed(path, OSError(28, "No space left on device"))

        monkeypatch.setattr(disk, "write_part", full)
        assert ended(client, submit(client))["status"] == "failed"
        assert spent(client, key) == (tokens, 0)
        with client.app.state.state.database.read() as connection:
            assert connection.execute(select(holds)).all() == []

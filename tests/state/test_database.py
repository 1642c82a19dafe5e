"""The database: its tables are those of this version, writes come one after another, servers that are dead are noticed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `serve` is not installed")

import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from databases import new_database

from ster.errors import FileError, InputError
from ster.state import presence
from ster.state.database import Database
from ster.state.place import find_place
from ster.state.presence import Presence, bury_dead, living
from ster.state.tables import keys, metadata, servers


def test_migrations_make_the_tables(database_url: str) -> None:
    database = Database(find_place(url=database_url).url)
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    Database(find_place(url=database_url).url).close()  # again, with nothing to do
    database.close()


def test_servers_that_start_at_once_migrate_once(database_url: str) -> None:
    url = find_place(url=database_url).url
    with ThreadPoolExecutor(4) as pool:
        for database in pool.map(lambda _: Database(url), range(4)):
            database.close()


def test_a_later_version_is_refused(database_url: str) -> None:
    url = find_place(url=database_url).url
    database = Database(url)
    with database.write() as connection:
        connection.execute(sa.text("update alembic_version set version_num = '9999'"))
    database.close()
    with pytest.raises(InputError, match="later version of Ster: it has `9999`"):
        Database(url)


def test_what_cannot_be_opened_is_said_without_the_password(tmp_path: Path) -> None:
    (tmp_path / "ster.db").write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(FileError, match=r"failed to open the database sqlite:///.*: file is not a database"):
        Database(f"sqlite:///{tmp_path / 'ster.db'}")
    with pytest.raises(FileError) as refused:
        Database("postgresql+psycopg://ster:secret@127.0.0.1:1/none")
    assert "secret" not in str(refused.value)
    with pytest.raises(InputError, match="begins with `mysql:`"):
        find_place(tmp_path, "mysql://x")


def test_postgresql_is_not_waited_for_without_end(postgres_server: str, tmp_path: Path) -> None:
    """Neither for its locks nor for its machine; what the URL says counts."""
    url = find_place(tmp_path, new_database(postgres_server, "limits")).url
    database = Database(url)
    with database.read() as connection:
        limits = [connection.execute(sa.text(f"show {name}")).scalar_one() for name in ("statement_timeout", "lock_timeout")]
        parameters = connection.connection.dbapi_connection.info.get_parameters()  # type: ignore[union-attr]
    database.close()
    assert limits == ["30s", "15s"] and parameters["tcp_user_timeout"] == "20000" and parameters["keepalives_idle"] == "10"
    database = Database(url + "?options=-c%20lock_timeout%3D3s")
    with database.read() as connection:
        assert connection.execute(sa.text("show lock_timeout")).scalar_one() == "3s"
    database.close()


def test_the_folder_is_private(tmp_path: Path) -> None:
    place = find_place(tmp_path / "a" / "b")
    assert place.folder.stat().st_mode & 0o777 == 0o700
    assert place.url == f"sqlite:///{tmp_path / 'a' / 'b' / 'ster.db'}"


def test_writes_come_one_after_another(database_url: str) -> None:
    """Each reads a number and writes one more: with anything between the two, some would be lost."""
    database = Database(find_place(url=database_url).url)
    row = {"id": "k", "name": "n", "hash": "h", "shown": "s", "state": "active", "created_at": 0.0, "concurrency": 0}
    with database.write() as connection:
        connection.execute(sa.insert(keys).values(row))

    def add(_: int) -> None:
        with database.write() as connection:
            count = connection.execute(sa.select(keys.c.concurrency).where(keys.c.id == "k").with_for_update()).scalar_one()
            connection.execute(sa.update(keys).values(concurrency=count + 1))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(add, range(64)))
    with database.read() as connection:
        assert connection.execute(sa.select(keys.c.concurrency)).scalar_one() == 64
    database.close()


def test_what_is_not_committed_never_was(database_url: str) -> None:
    database = Database(find_place(url=database_url).url)
    row = {"id": "k", "name": "n", "hash": "h", "shown": "s", "state": "active", "created_at": 0.0}
    with pytest.raises(ZeroDivisionError), database.write() as connection:
        connection.execute(sa.insert(keys).values(row))
        raise ZeroDivisionError
    with database.read() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(keys)).scalar_one() == 0
    database.close()


def test_a_server_that_is_killed_is_dead(database_url: str) -> None:
    url = find_place(url=database_url).url
    program = (
        "import sys, time\nfrom ster.state.database import Database\nfrom ster.state.presence import Presence\n"
        f"presence = Presence(Database({url!r}))\npresence.start()\nprint(presence.id, flush=True)\ntime.sleep(60)"
    )
    database = Database(url)
    mine = Presence(database)
    mine.start()
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        other = process.stdout.readline().strip()
        assert alive(database) == {mine.id, other}
        process.kill()
    assert alive(database) == {mine.id}
    mine.stop()
    assert alive(database) == set()
    database.close()


def test_a_server_that_does_not_beat_is_dead_and_comes_back(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "BEAT_SECONDS", 0.05)
    database = Database(find_place(url=database_url).url)
    mine = Presence(database)
    with database.write() as connection:
        row = {"id": "srv_far", "host": "elsewhere", "pid": os.getpid(), "started_at": 0.0, "beat_at": 0.0}
        connection.execute(sa.insert(servers).values(row))
    assert alive(database) == set()
    mine.start()
    with database.write() as connection:
        connection.execute(sa.delete(servers))
    back = threading.Event()
    for _ in range(200):
        if alive(database) == {mine.id}:
            break
        back.wait(0.05)
    assert alive(database) == {mine.id}
    mine.stop()
    database.close()


def alive(database: Database) -> set[str]:
    with database.write() as connection:
        bury_dead(connection)
        return set(connection.execute(living()).scalars())


@pytest.mark.parametrize("gone", [False, True])
def test_a_server_does_not_take_itself_for_dead(database_url: str, gone: bool) -> None:
    """Be it that it has not beaten for long, or that another buried it."""
    database = Database(find_place(url=database_url).url)
    mine = Presence(database)
    with database.write() as connection:
        for id in {"srv_far", mine.id} - ({mine.id} if gone else set()):
            row = {"id": id, "host": "elsewhere", "pid": os.getpid(), "started_at": 0.0, "beat_at": 0.0}
            connection.execute(sa.insert(servers).values(row))
        bury_dead(connection, mine.id)
        assert connection.execute(living()).scalars().all() == [mine.id]
        bury_dead(connection)  # as another would
        assert connection.execute(living()).scalars().all() == [mine.id]
    database.close()


def test_only_where_a_pid_is_known_is_a_server_judged_by_it(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another boot, or another namespace of pids, under the same name: the beat alone says."""
    database = Database(find_place(url=database_url).url)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    here, parts = presence.place(), presence.place().split()
    assert len(parts) == 3 or not sys.platform.startswith("linux")
    others = {" ".join([*parts[:at], "other", *parts[at + 1 :]]) for at in range(len(parts))} | {f"{here} other"}
    with database.write() as connection:
        for number, place in enumerate([here, *sorted(others)]):
            row = {"id": f"srv_{number}", "host": place, "pid": process.pid, "started_at": 0.0, "beat_at": time.time()}
            connection.execute(sa.insert(servers).values(row))
    assert alive(database) == {f"srv_{number}" for number in range(1, len(others) + 1)}
    database.close()

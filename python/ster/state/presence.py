"""Which servers live. A server writes that it does every few seconds; one that has not for long, or whose process is gone, is dead."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path

from sqlalchemy import Connection, Select, delete, select, text, update

from ster.state.database import Database
from ster.state.tables import servers

log = logging.getLogger("ster.server")
BEAT_SECONDS = 5.0
DEAD_SECONDS = 60.0  # clocks of machines that share a database may differ by much less than this
BOOT = Path("/proc/sys/kernel/random/boot_id")
REGISTER = text(  # several threads of one process may do it at once
    "insert into servers (id, host, pid, started_at, beat_at) values (:id, :host, :pid, :now, :now) on conflict (id) do nothing"
)


class Presence:
    """This process among the servers, from `start` to `stop`. id: what Holds and claims name it by."""

    def __init__(self, database: Database) -> None:
        self.id = "srv_" + secrets.token_hex(16)
        self._database = database
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ster-presence", daemon=True)

    def start(self) -> None:
        with self._database.write() as connection:
            beat(connection, self.id)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._database.write() as connection:
            connection.execute(delete(servers).where(servers.c.id == self.id))

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                with self._database.write() as connection:
                    beat(connection, self.id)
            except Exception:
                log.exception("the database did not take a beat")


def beat(connection: Connection, id: str) -> None:
    """Write that this process, the server `id`, lives. Its row may be gone: another took it for dead, as after a sleep of the machine."""
    now = time.time()
    if not connection.execute(update(servers).where(servers.c.id == id).values(beat_at=now)).rowcount:
        row = {"id": id, "host": place(), "pid": os.getpid(), "now": now}
        connection.execute(REGISTER, row)


def bury_dead(connection: Connection, own: str | None = None) -> None:
    """Remove servers that are dead, so that nothing which names them counts as theirs any more: see `living`.

    own: this process, where it is a server. It lives, however long it has not written so: it beats first, and does not bury itself.
    """
    if own is not None:
        beat(connection, own)
    here, now = place(), time.time()
    for row in connection.execute(select(servers).with_for_update(skip_locked=True)).all():
        if row.id == own:
            continue
        if row.beat_at < now - DEAD_SECONDS or (row.host == here and not _runs(row.pid)):
            connection.execute(delete(servers).where(servers.c.id == row.id))


def living() -> Select[tuple[str]]:
    """The ids, for `column.not_in(living())`."""
    return select(servers.c.id)


def place() -> str:
    """Where a pid names one process: the host's name, and where the system tells them, which boot and which namespace of pids. Containers
    may share a name, and each has a process 1."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(BOOT.read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


def _runs(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        try:
            os.kill(pid, 0)
        except PermissionError:
            return True
        return True
    return False

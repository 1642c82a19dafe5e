"""Which servers live. A server writes that it does every few seconds; one that has not for long, or whose process is gone, is dead."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time

from sqlalchemy import Connection, Select, delete, insert, select, update

from ster.state.database import Database
from ster.state.tables import servers

log = logging.getLogger("ster.server")
BEAT_SECONDS = 5.0
DEAD_SECONDS = 60.0  # clocks of machines that share a database may differ by much less than this


class Presence:
    """This process among the servers, from `start` to `stop`. id: what Holds and claims name it by."""

    def __init__(self, database: Database) -> None:
        self.id = "srv_" + secrets.token_hex(16)
        self._database = database
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ster-presence", daemon=True)

    def start(self) -> None:
        with self._database.write() as connection:
            self._register(connection)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._database.write() as connection:
            connection.execute(delete(servers).where(servers.c.id == self.id))

    def _register(self, connection: Connection) -> None:
        now = time.time()
        row = {"id": self.id, "host": socket.gethostname(), "pid": os.getpid(), "started_at": now, "beat_at": now}
        connection.execute(insert(servers).values(row))

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                with self._database.write() as connection:
                    found = connection.execute(update(servers).where(servers.c.id == self.id).values(beat_at=time.time()))
                    if not found.rowcount:  # it was taken for dead, as after a long sleep of the machine: what it held is no longer its own
                        self._register(connection)
            except Exception:
                log.exception("the database did not take a beat")


def bury_dead(connection: Connection) -> None:
    """Remove servers that are dead, so that nothing which names them counts as theirs any more: see `living`."""
    host, now = socket.gethostname(), time.time()
    for row in connection.execute(select(servers).with_for_update(skip_locked=True)):
        if row.beat_at < now - DEAD_SECONDS or (row.host == host and not _runs(row.pid)):
            connection.execute(delete(servers).where(servers.c.id == row.id))


def living() -> Select[tuple[str]]:
    """The ids, for `column.not_in(living())`."""
    return select(servers.c.id)


def _runs(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        try:
            os.kill(pid, 0)
        except PermissionError:
            return True
        return True
    return False

"""A harvest that runs, seen from its row: how far it is, and whether it is still to go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from ster.harvest.disk import Journal
from ster.server.harvests.store import Store
from ster.server.state_threads import log_trouble

BEAT_SECONDS = 1.0


class ClaimLostError(Exception):
    """The harvest was cancelled, or this server was taken for dead."""


class StoppedError(Exception):
    """The server is shutting down."""


class Beat:
    """Once a second. row: as it was claimed. stopping: whether the server is shutting down. begun: everything about the harvest is settled.

    A harvest is given up that ends one server after another, and one that comes on is not: once a shard more is on disk, it counts from
    the beginning how often it was tried. Until the shards that were kept are verified, as many tokens are done as were before.
    """

    def __init__(self, store: Store, row: Any, stopping: Callable[[], bool]) -> None:
        self._store, self._row, self._stopping = store, row, stopping
        self._next = 0.0
        self._done = self._least = row.tokens_done if store.folder_of(row.id).exists() else 0
        self._run_id: str | None = None
        self._journal = Journal(store.folder_of(row.id))
        self._size: int | None = None  # of the journal at first
        self.begun = False

    def report(self, done: int, total: int) -> None:
        """The progress of `ster.harvest`.

        Raises:
            ClaimLostError, StoppedError
        """
        if not self.begun:
            self.begun = True
            found = self._journal.read()  # None where every shard is on disk
            if found is not None:
                self._run_id, self._size = str(found[0]["run_id"]), self._journal.path.stat().st_size
        self._done = max(done, self._least)
        self.check()

    def begin_anew(self) -> None:
        """Nothing is kept of it."""
        self._done = self._least = 0

    def check(self) -> None:
        """
        Raises:
            ClaimLostError, StoppedError
        """
        if self._stopping():
            raise StoppedError
        comes_on = self._row.attempts > 1 and self._comes_on()
        if time.monotonic() < self._next and not comes_on:
            return
        self._next = time.monotonic() + BEAT_SECONDS
        values: dict[str, Any] = {"tokens_done": self._done}
        if self._run_id is not None:
            values["run_id"] = self._run_id
        if comes_on:
            values["attempts"] = 1
        try:
            with self._store.database.write() as connection:
                ours = self._store.queue.update(connection, self._row, **values)
        except SQLAlchemyError as error:
            log_trouble(f"how far harvest {self._row.id} is", error)
            return
        if not ours:
            raise ClaimLostError
        self._row.attempts = values.get("attempts", self._row.attempts)

    def _comes_on(self) -> bool:
        """A shard more is on disk than at first."""
        try:
            return self._size is not None and self._journal.path.stat().st_size > self._size
        except FileNotFoundError:
            return False

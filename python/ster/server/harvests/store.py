"""The harvests of a state: rows of its database, and a folder for the files of each."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import Connection, func, select, text, update

from ster.errors import InputError
from ster.harvest.disk import locked
from ster.progress import in_bytes
from ster.server.callers import Caller
from ster.server.errors import ApiError, invalid_api_key, key_paused, over_budget
from ster.server.harvests.errors import (
    concurrency_exceeded,
    job_not_found,
    no_room,
    not_cancellable,
    too_many_harvests,
)
from ster.server.harvests.plan import HarvestPlan
from ster.server.harvests.request import HarvestRequest
from ster.server.harvests.signing import Signer, load_secret
from ster.server.settings import Settings
from ster.state.amounts import NOTHING, Amount, KeyInactiveError, OverBudget
from ster.state.budget import settle, take_hold
from ster.state.database import pieces
from ster.state.queue import Found, Queue
from ster.state.state import State
from ster.state.tables import harvests

FOLDER = "harvests"
ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
MARGIN_BYTES = 64 << 20  # of the disk, for the database and all else
REMEMBERED_SECONDS = 30 * 86400.0  # how long a row stays without its files
SUBMITTING = 0x48617276  # any number that is ours, for PostgreSQL's advisory lock


class Store:
    """Its methods may be called from any thread. queue: of the rows. wake: set when there may be something to do.

    Raises:
        FileError: the folder cannot be used.
    """

    def __init__(self, state: State, settings: Settings) -> None:
        self.database = state.database
        self.server_id = state.presence.id
        self.queue = Queue(state.database, harvests)
        self.settings = settings
        self.folder = state.folder / FOLDER
        self._make_folder()
        self.signer = Signer(load_secret(state.folder))
        self.wake = threading.Event()

    def _make_folder(self) -> None:
        """It may be removed from outside while the server runs."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def folder_of(self, id: str) -> Path:
        return self.folder / id

    def add(self, caller: Caller, model: str, asked: HarvestRequest, raw: bytes, plan: HarvestPlan) -> str:
        """Queue a harvest, with its Hold; its id. All of it happens, or nothing.

        Raises:
            ApiError: 429, the caller or the server has as many as may be, the disk no room, the key not so many tokens left.
        """
        id = str(uuid.uuid4())
        with self.database.write() as connection:
            self._check_room(connection, caller, plan)
            hold = None if caller.key is None else self._hold(connection, caller.key, plan.tokens)
            row = {"id": id, "owner": caller.id, "model": model, "hold_id": hold, "request": raw}
            self.queue.add(connection, **row, prompts=len(asked.prompts), tokens=plan.tokens, tokens_done=0, bytes=plan.bytes)
        self.wake.set()
        return id

    def get(self, caller: Caller, id: str) -> Found:
        """
        Raises:
            ApiError: 404, there is none, or it is another's.
        """
        row = self.queue.get(caller.id, id) if ID.fullmatch(id) else None
        if row is None:
            raise job_not_found(id)
        return row

    def list(self, caller: Caller, limit: int, after: str | None) -> tuple[Sequence[Found], bool] | None:
        """See `Queue.list`."""
        return None if after is not None and not ID.fullmatch(after) else self.queue.list(caller.id, limit, after)

    def find(self, id: str) -> Found | None:
        """Whoever has it."""
        if not ID.fullmatch(id):
            return None
        with self.database.read() as connection:
            columns = [column for column in harvests.c if column.name != "request"]
            return connection.execute(select(*columns).where(harvests.c.id == id)).one_or_none()

    def cancel(self, caller: Caller, id: str) -> Found:
        """The row, cancelled. It costs nothing, and its files go.

        Raises:
            ApiError: 404. 409, it is final.
        """
        with self.database.write() as connection:
            found = self.queue.cancel(connection, caller.id, id) if ID.fullmatch(id) else None
            if found is None:
                raise job_not_found(id)
            row, ended = found
            if not ended:
                raise not_cancellable(row.state)
            self._release(connection, row)
        self.wake.set()
        return self.get(caller, id)

    def finish(self, row: Found, outcome: str | ApiError) -> bool:
        """End a claimed row: with its run_id, and what it read is paid; or with an error, and nothing is. False: the claim was lost, and
        nothing was done."""
        with self.database.write() as connection:
            if isinstance(outcome, ApiError):
                done, used = self.queue.finish(connection, row, "failed", _text_of(outcome)), NOTHING
            else:
                done = self.queue.finish(connection, row, "done", run_id=outcome, tokens_done=row.tokens)
                used = Amount(harvest_tokens=row.tokens)
            if done:
                self._release(connection, row, used)
        return done

    def recover(self, error: ApiError) -> None:
        """Put back what dead servers were at, and what this one was while it is at nothing; what has failed too often ends with `error`."""
        with self.database.write() as connection:
            for row in self.queue.recover(connection, _text_of(error), self.server_id, ()):
                self._release(connection, row)

    def retry(self, row: Any, error: ApiError) -> None:
        """Queue a claimed row again whose attempt came to nothing; or end it, when that has happened too often."""
        with self.database.write() as connection:
            if self.queue.retry(connection, row, _text_of(error)):
                self._release(connection, row)

    def expires(self, row: Any) -> float | None:
        """Until when the files of a finished harvest are kept, in seconds since 1970."""
        return None if row.state != "done" else float(row.ended_at) + self.settings.harvest_seconds

    def sweep(self) -> None:
        """Remove the folders that nobody has a use for, unless a process is still at work in one; and rows that are long over."""
        self._make_folder()
        names = [path.name for path in self.folder.iterdir() if path.is_dir()]
        now = time.time()
        with self.database.read() as connection:
            query = select(harvests.c.id, harvests.c.state, harvests.c.ended_at)
            rows = [row for some in pieces(names) for row in connection.execute(query.where(harvests.c.id.in_(some)))]
        for row in rows:
            expires = self.expires(row)
            if row.state in ("failed", "cancelled") or (expires is not None and expires <= now):
                with contextlib.suppress(InputError):
                    self.remove_folder(row.id)
        old = [row.id for row in self.queue.expired(now - self.settings.harvest_seconds - REMEMBERED_SECONDS)]
        gone = [id for id in old if not self.folder_of(id).exists()]
        if gone:
            with self.database.write() as connection:
                self.queue.remove(connection, gone)

    def remove_folder(self, id: str) -> None:
        """
        Raises:
            InputError: a process is at work in it.
        """
        folder = self.folder_of(id)
        if folder.exists():
            with locked(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def _check_room(self, connection: Connection, caller: Caller, plan: HarvestPlan) -> None:
        if not self.database.is_sqlite:  # where others write meanwhile, two could take the last place
            connection.execute(text("select pg_advisory_xact_lock(:number)"), {"number": SUBMITTING})
        settings = self.settings
        if self.queue.live(connection, caller.id) >= settings.max_live_harvests:
            raise concurrency_exceeded(settings.max_live_harvests)
        left = harvests.c.bytes * (1.0 - harvests.c.tokens_done * 1.0 / harvests.c.tokens)
        query = select(func.count(), func.coalesce(func.sum(left), 0.0)).where(harvests.c.state.in_(("queued", "running")))
        count, promised = connection.execute(query).one()
        if count >= settings.max_queued_harvests:
            raise too_many_harvests(settings.max_queued_harvests)
        self._make_folder()
        free = max(shutil.disk_usage(self.folder).free - MARGIN_BYTES - int(promised), 0)
        if plan.bytes > free:
            raise no_room(in_bytes(plan.bytes), in_bytes(free))

    @staticmethod
    def _hold(connection: Connection, key: str, tokens: int) -> str:
        try:
            return take_hold(connection, key, Amount(harvest_tokens=tokens), None).id
        except OverBudget as refused:
            raise over_budget(refused) from None
        except KeyInactiveError as inactive:
            raise (key_paused() if inactive.state == "paused" else invalid_api_key()) from None

    @staticmethod
    def _release(connection: Connection, row: Found, used: Amount = NOTHING) -> None:
        """Of a row that has ended: its Hold, and the prompts, which nobody needs any more."""
        if row.hold_id is not None:
            settle(connection, row.hold_id, used)
        connection.execute(update(harvests).where(harvests.c.id == row.id).values(request=b""))


def _text_of(error: ApiError) -> str:
    """As it stands in the row, and in the answer."""
    return orjson.dumps(error.body("")["error"]).decode()

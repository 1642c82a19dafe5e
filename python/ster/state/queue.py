"""What waits to be done by any server: rows that are queued, claimed by one server, and done once.

A claim is a server's id and the number of the attempt. Whatever ends or changes a claimed row says both, so a server that was taken for
dead and comes back changes nothing that is no longer its own.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, Literal

from sqlalchemy import Connection, Row, Table, and_, delete, func, insert, or_, select, update

from ster.state.database import Database, pieces
from ster.state.presence import bury_dead, living
from ster.state.tables import keys

MAX_ATTEMPTS = 3  # a row that ended so many servers is not given to another
State = Literal["queued", "running", "done", "failed", "cancelled"]
FINAL = ("done", "failed", "cancelled")
Found = Row[Any]
PAUSED = select(keys.c.id).where(keys.c.state == "paused")


class Queue:
    """The rows of `table`, which is `jobs` or `harvests`. Methods that take a connection are part of its transaction (`Database.write`),
    in which the Hold of a row is taken and settled too."""

    def __init__(self, database: Database, table: Table) -> None:
        self._database = database
        self._table = table
        self._shown = [column for column in table.c if column.name != "request"]  # which may be large

    def add(self, connection: Connection, **values: Any) -> None:
        """Queue a row of the table's columns; `state`, `created_at` and `attempts` are given."""
        row = {"state": "queued", "created_at": time.time(), "attempts": 0, **values}
        connection.execute(insert(self._table).values(row))

    def get(self, owner: str, id: str) -> Found | None:
        """One row of `owner`, without its `request`; None: there is none, or it is another's."""
        with self._database.read() as connection:
            return connection.execute(select(*self._shown).where(self._table.c.id == id, self._table.c.owner == owner)).one_or_none()

    def list(self, owner: str, limit: int, after: str | None = None) -> tuple[Sequence[Found], bool] | None:
        """At most `limit` rows of `owner`, the newest first, those that come after the row `after`; and whether there are more. None:
        there is no such row."""
        table = self._table
        query = select(*self._shown).where(table.c.owner == owner).order_by(table.c.created_at.desc(), table.c.id.desc())
        with self._database.read() as connection:
            if after is not None:
                last = connection.execute(
                    select(table.c.created_at).where(table.c.id == after, table.c.owner == owner)
                ).scalar_one_or_none()
                if last is None:
                    return None
                query = query.where(or_(table.c.created_at < last, and_(table.c.created_at == last, table.c.id < after)))
            rows = connection.execute(query.limit(limit + 1)).all()
        return rows[:limit], len(rows) > limit

    def live(self, connection: Connection, owner: str) -> int:
        """How many rows of `owner` are not final."""
        table = self._table
        query = select(func.count()).select_from(table).where(table.c.owner == owner, table.c.state.in_(("queued", "running")))
        return connection.execute(query).scalar_one()

    def claim(self, models: Collection[str], server_id: str, held: Collection[str] = ()) -> Found | None:
        """Take one row of these models to run, with its `request`; None: there is none.

        The oldest of the owner of whom fewest run, and of those the one whose last began longest ago: a thousand rows of one owner keep
        none of a few of another waiting. Rows that the server still has in hand (`held`), as after it was taken for dead, are not taken,
        nor those of a key that is paused.
        """
        table = self._table
        waiting = and_(table.c.state == "queued", table.c.model.in_(models), table.c.id.not_in(held), table.c.owner.not_in(PAUSED))
        with self._database.read() as connection:  # nobody is kept from writing while there is nothing to do
            if connection.execute(select(table.c.id).where(waiting).limit(1)).first() is None:
                return None
        with self._database.write() as connection:
            for owner in self._turns(connection, models):
                query = select(table).where(waiting, table.c.owner == owner).order_by(table.c.created_at, table.c.id).limit(1)
                row = connection.execute(query.with_for_update(skip_locked=True)).one_or_none()
                if row is not None:
                    changed = (
                        update(table)
                        .where(table.c.id == row.id)
                        .values(state="running", server_id=server_id, started_at=time.time(), attempts=row.attempts + 1)
                    )
                    return connection.execute(changed.returning(table)).one()
        return None

    def _turns(self, connection: Connection, models: Collection[str]) -> Sequence[str]:
        """Owners with something queued, in the order in which they have their turn."""
        table, other = self._table, self._table.alias()
        running = (
            select(func.count()).select_from(other).where(other.c.owner == table.c.owner, other.c.state == "running").scalar_subquery()
        )
        began = select(func.coalesce(func.max(other.c.started_at), 0.0)).where(other.c.owner == table.c.owner).scalar_subquery()
        query = (
            select(table.c.owner)
            .where(table.c.state == "queued", table.c.model.in_(models), table.c.owner.not_in(PAUSED))
            .group_by(table.c.owner)
            .order_by(running, began, func.min(table.c.created_at))
        )
        return connection.execute(query).scalars().all()

    def update(self, connection: Connection, claimed: Found, **values: Any) -> bool:
        """Change a row that is still claimed as `claimed` says; False: it is not, and nothing was changed."""
        table = self._table
        mine = and_(
            table.c.id == claimed.id,
            table.c.state == "running",
            table.c.server_id == claimed.server_id,
            table.c.attempts == claimed.attempts,
        )
        return bool(connection.execute(update(table).where(mine).values(**values)).rowcount)

    def finish(self, connection: Connection, claimed: Found, state: State, error: str | None = None, **values: Any) -> bool:
        """End a claimed row; False: the claim was lost, and whatever else the transaction was to do must not be."""
        return self.update(connection, claimed, state=state, error=error, ended_at=time.time(), server_id=None, hold_id=None, **values)

    def put_back(self, connection: Connection, claimed: Found) -> bool:
        """Queue a claimed row again, as if it had never been claimed; False: the claim was lost."""
        return self.update(connection, claimed, state="queued", server_id=None, started_at=None, attempts=claimed.attempts - 1)

    def cancel(self, connection: Connection, owner: str, id: str) -> tuple[Found, bool] | None:
        """End a row of `owner` that waits or runs; the row as it was, whose `hold_id` is to be freed, and whether this ended it: False, it
        was final. None: there is none, or it is another's."""
        table = self._table
        row = connection.execute(select(*self._shown).where(table.c.id == id, table.c.owner == owner).with_for_update()).one_or_none()
        if row is None:
            return None
        if row.state in FINAL:
            return row, False
        ended = {"state": "cancelled", "ended_at": time.time(), "server_id": None, "hold_id": None}
        connection.execute(update(table).where(table.c.id == id).values(**ended))
        return row, True

    def retry(self, connection: Connection, claimed: Found, error: str) -> bool:
        """Queue a claimed row again, whose attempt came to nothing; after `MAX_ATTEMPTS` it fails with `error` instead: True, and its Hold
        is to be freed."""
        if claimed.attempts >= MAX_ATTEMPTS:
            return self.finish(connection, claimed, "failed", error)
        self.update(connection, claimed, state="queued", server_id=None, started_at=None)
        return False

    def recover(self, connection: Connection, error: str, server_id: str, held: Collection[str]) -> Sequence[Found]:
        """`retry` what dead servers had claimed, and what this one has, of whose end the database did not hear; but nothing that it has in
        hand, by their ids (`held`). Those that failed are returned as they were, for their Holds to be freed, in the order of their owners:
        keys are locked in that order, here as elsewhere, so that no two transactions wait for each other."""
        bury_dead(connection, server_id)
        table = self._table
        lost_by = or_(table.c.server_id.not_in(living()), table.c.server_id == server_id)
        query = select(*self._shown).where(table.c.state == "running", table.c.id.not_in(held), lost_by)
        lost = connection.execute(query.with_for_update(skip_locked=True)).all()
        return sorted((row for row in lost if self.retry(connection, row, error)), key=lambda row: str(row.owner))

    def still(self, claimed: Collection[Found]) -> set[str]:
        """The ids of those that are still claimed so."""
        table = self._table
        query = select(table.c.id, table.c.server_id, table.c.attempts).where(
            table.c.id.in_([row.id for row in claimed]), table.c.state == "running"
        )
        with self._database.read() as connection:
            found = {(row.id, row.server_id, row.attempts) for row in connection.execute(query)}
        return {row.id for row in claimed if (row.id, row.server_id, row.attempts) in found}

    def expired(self, before: float) -> Sequence[Found]:
        """Rows that ended before then."""
        table = self._table
        with self._database.read() as connection:
            return connection.execute(select(*self._shown).where(table.c.state.in_(FINAL), table.c.ended_at < before)).all()

    def remove(self, connection: Connection, ids: Collection[str]) -> None:
        """Rows that are final."""
        for some in pieces(list(ids)):
            connection.execute(delete(self._table).where(self._table.c.id.in_(some), self._table.c.state.in_(FINAL)))

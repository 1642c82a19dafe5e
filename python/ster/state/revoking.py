"""What waits of a key when it is revoked: nobody could ask for it any more, nor cancel it."""

from __future__ import annotations

import time

from sqlalchemy import Connection, select, update

from ster.state.amounts import NOTHING
from ster.state.budget import settle
from ster.state.tables import harvests, jobs


def cancel_queued(connection: Connection, key_id: str) -> int:
    """Cancel the Jobs and harvests of a key that are queued, and free their Holds; whoever calls it has locked the key's row.

    What is being claimed or cancelled at this moment is left to whoever does: they may wait for the key's row.

    Returns: how many were cancelled.
    """
    count = 0
    for table in (jobs, harvests):
        queued = select(table.c.id, table.c.hold_id).where(table.c.owner == key_id, table.c.state == "queued")
        for row in connection.execute(queued.with_for_update(skip_locked=True)).all():
            ended = {"state": "cancelled", "ended_at": time.time(), "hold_id": None, "request": b""}
            connection.execute(update(table).where(table.c.id == row.id).values(**ended))
            if row.hold_id is not None:
                settle(connection, row.hold_id, NOTHING)
            count += 1
    return count

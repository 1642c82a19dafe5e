"""Budgets: what a key holds while a request runs, and what it has spent.

Held + spent never passes a limit, whoever asks at the same moment: each function that changes either locks the key's row first. All of them
work on an open transaction of `Database.write`, beside rows of the caller's own, and all or nothing of it happens.

A month and a day are UTC's, and those in which the Hold was taken: what it turns into is spent there, however late, and what is held or
spent in one month says nothing of the next.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import Connection, Row, and_, bindparam, case, delete, func, insert, or_, select, update

from ster.state.amounts import (
    BUDGETS,
    NOTHING,
    Amount,
    Balance,
    Hold,
    KeyInactiveError,
    OverBudget,
    Usage,
    end_of,
    fitting,
    most_output,
    periods,
)
from ster.state.presence import bury_dead, living
from ster.state.tables import LIMITS, holds, keys, spent, starts

FORGET_SECONDS = 7 * 86400.0
"""How long a Hold that was freed is remembered, should its server come back."""

KEPT_MINUTES = 2880
"""Counts of minutes that stay: a clock may be set back."""


def take_hold(
    connection: Connection,
    key_id: str,
    amount: Amount,
    server_id: str | None,
    now: float | None = None,
    *,
    least_output: int | None = None,
    hold_id: str | None = None,
) -> Hold:
    """Hold `amount` until `settle`; it counts as a start of `requests_per_minute`.

    server_id: whose request it is: it counts as running, and is freed when that server is dead. None: a Job's or a harvest's, which stays.
    least_output: where the budgets have fewer output tokens left than asked for, take what there is, but not less than this.
    hold_id: see `new_hold_id`; left out, it gets one.

    Raises:
        OverBudget: a limit leaves no room. KeyInactiveError: the key is not active, or not there.
    """
    now = time.time() if now is None else now
    key = _locked(connection, key_id)
    if key is None or key.state != "active":
        raise KeyInactiveError("revoked" if key is None else key.state)
    found = _usage(connection, key, *periods(now))
    started = _check_rate(connection, key_id, found, now)
    _check_running(found, running=server_id is not None)
    if least_output is not None:
        room = most_output(found, amount.input_tokens)
        amount = replace(amount, output_tokens=max(min(amount.output_tokens, room), least_output))
    for limit, (_, member) in BUDGETS.items():
        left, asked = found.left(limit), getattr(amount, member)
        if left is not None and asked > max(left, 0):
            raise OverBudget(limit, found.limits[limit], max(left, 0), asked, found.used(limit)[1], found.renews_at(limit))
    if started is not None:
        _count_start(connection, key_id, int(now // 60), started)
    hold = Hold(hold_id or new_hold_id(), key_id, amount)
    row = {"id": hold.id, "key_id": key_id, "server_id": server_id, "created_at": now, **asdict(amount)}
    connection.execute(insert(holds).values(**row, month=found.month.period, day=found.day.period))
    return hold


def new_hold_id() -> str:
    """For who wants to know a Hold's id before its transaction is committed, and to settle it whatever became of that."""
    return "hold_" + secrets.token_hex(16)


def settle(connection: Connection, hold_id: str, used: Amount, requests: int = 1) -> Amount:
    """End a Hold: what was used, at most what it held, is spent, in the month and on the day when it was taken; nothing used releases it.

    A Hold that was freed because its server was taken for dead spends at most what its budgets have left. One that was settled before is
    gone, and nothing happens. requests: how many are counted, where anything was used.

    Returns: what was spent.
    """
    key_id = connection.execute(select(holds.c.key_id).where(holds.c.id == hold_id)).scalar()
    key = None if key_id is None else _locked(connection, key_id)
    row = connection.execute(select(holds).where(holds.c.id == hold_id).with_for_update()).first()
    if key is None or row is None:
        return NOTHING
    used = used.least(_amount(row))
    if row.freed_at is not None:
        used = fitting(used, _usage(connection, key, row.month, row.day))
    connection.execute(delete(holds).where(holds.c.id == hold_id))
    if used != NOTHING:
        for period in (row.month, row.day):
            _spend(connection, key.id, period, used, requests)
    return used


def free_dead(connection: Connection, now: float | None = None, own: str | None = None) -> int:
    """Free what servers hold that are dead; see `ster.state.presence`.

    own: this process, where it is a server: what it holds that another freed, which took it for dead, counts again where the budgets still
    have room for it; what does not fit stays freed.

    Returns: how many Holds.
    """
    now = time.time() if now is None else now
    bury_dead(connection, own)
    dead = (holds.c.server_id.is_not(None), holds.c.server_id.not_in(living()), holds.c.freed_at.is_(None))
    mine = (holds.c.server_id == own, holds.c.freed_at.is_not(None))  # nothing where `own` is None
    freed = 0
    changed = select(holds.c.key_id).where(or_(and_(*dead), and_(*mine))).distinct().order_by(holds.c.key_id)
    for key_id in connection.execute(changed).scalars().all():
        key = _locked(connection, key_id)
        freed += connection.execute(update(holds).where(holds.c.key_id == key_id, *dead).values(freed_at=now)).rowcount
        for row in connection.execute(select(holds).where(holds.c.key_id == key_id, *mine).order_by(holds.c.created_at)).all():
            if key is not None and _amount(row) == fitting(_amount(row), _usage(connection, key, row.month, row.day)):
                connection.execute(update(holds).where(holds.c.id == row.id).values(freed_at=None))
    old = select(holds.c.id).where(holds.c.freed_at < now - FORGET_SECONDS).with_for_update(skip_locked=True)
    connection.execute(delete(holds).where(holds.c.id.in_(old)))
    return freed


def usage(connection: Connection, key_id: str, now: float | None = None) -> Usage:
    """What is spent and held in the present month and day. A transaction that reads will do.

    Raises:
        KeyInactiveError: there is no such key.
    """
    key = connection.execute(select(keys).where(keys.c.id == key_id)).first()
    if key is None:
        raise KeyInactiveError("revoked")
    return _usage(connection, key, *periods(time.time() if now is None else now))


def _locked(connection: Connection, key_id: str) -> Row[Any] | None:
    """The key's row, which nobody else changes or counts by until the transaction ends."""
    return connection.execute(select(keys).where(keys.c.id == key_id).with_for_update()).first()


def _limits(key: Row[Any]) -> dict[str, int]:
    return {limit: value for limit in LIMITS if (value := key._mapping[limit]) is not None}


MEMBERS = tuple(asdict(NOTHING))
# Made once, which takes longer than to run it: what a key holds in a month, on a day, and how many of its requests run.
HELD = select(
    *(
        func.coalesce(func.sum(case((column == bindparam(period), holds.c[name]), else_=0)), 0)
        for column, period in ((holds.c.month, "in_month"), (holds.c.day, "on_day"))
        for name in MEMBERS
    ),
    func.count(holds.c.server_id),
).where(holds.c.key_id == bindparam("of"), holds.c.freed_at.is_(None))


def _usage(connection: Connection, key: Row[Any], month: str, day: str) -> Usage:
    """Of any month and day, in two queries: they run with each request."""
    *held, count = map(int, connection.execute(HELD, {"of": key.id, "in_month": month, "on_day": day}).one())
    rows = connection.execute(select(spent).where(spent.c.key_id == key.id, spent.c.period.in_((month, day))))
    found = {row.period: (_amount(row), row.requests) for row in rows}

    def balance(period: str, held: list[int]) -> Balance:
        gone, requests = found.get(period, (NOTHING, 0))
        return Balance(period, end_of(period), gone, Amount(*held), requests)

    return Usage(_limits(key), balance(month, held[: len(MEMBERS)]), balance(day, held[len(MEMBERS) :]), count)


def _amount(row: Row[Any]) -> Amount:
    return Amount(*(row._mapping[name] for name in MEMBERS))


def _check_running(found: Usage, *, running: bool) -> None:
    limit = found.limits.get("concurrency")
    if running and limit is not None and found.running >= limit:
        raise OverBudget("concurrency", limit, 0, 1, found.running, None)


def _check_rate(connection: Connection, key_id: str, found: Usage, now: float) -> int | None:
    """How many have started in this minute of the clock; None where no limit holds, and nobody counts."""
    limit = found.limits.get("requests_per_minute")
    if limit is None:
        return None
    minute = int(now // 60)
    count = connection.execute(select(starts.c.count).where(starts.c.key_id == key_id, starts.c.minute == minute)).scalar() or 0
    if count >= limit:
        raise OverBudget("requests_per_minute", limit, 0, 1, 0, (minute + 1) * 60.0)
    return count


def _count_start(connection: Connection, key_id: str, minute: int, count: int) -> None:
    if count:
        connection.execute(update(starts).where(starts.c.key_id == key_id, starts.c.minute == minute).values(count=count + 1))
    else:
        connection.execute(delete(starts).where(starts.c.key_id == key_id, starts.c.minute < minute - KEPT_MINUTES))
        connection.execute(insert(starts).values(key_id=key_id, minute=minute, count=1))


def _spend(connection: Connection, key_id: str, period: str, used: Amount, requests: int) -> None:
    added = {name: spent.c[name] + value for name, value in asdict(used).items()} | {"requests": spent.c.requests + requests}
    done = connection.execute(update(spent).where(spent.c.key_id == key_id, spent.c.period == period).values(added))
    if not done.rowcount:
        connection.execute(insert(spent).values(key_id=key_id, period=period, requests=requests, **asdict(used)))

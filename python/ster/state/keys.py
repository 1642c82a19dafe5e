"""Keys: made, found, paused, revoked. Each function works on an open transaction of `ster.state.database.Database`."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, Row, Select, insert, select, update
from sqlalchemy.exc import IntegrityError

from ster.errors import InputError
from ster.state.revoking import cancel_queued
from ster.state.tables import LIMITS, keys

PREFIX = "sk-ster-"
SHOWN = len(PREFIX) + 4
MOST = 2**62
"""Of a limit: sums of two stay within 64 bits."""
KeyState = Literal["active", "paused", "revoked"]


@dataclass(frozen=True)
class Key:
    """What is known of a key, which is not the key itself. shown: its first characters. limits: those that hold, by `LIMITS`' names."""

    id: str
    name: str
    shown: str
    state: KeyState
    created_at: float
    limits: Mapping[str, int]


def create_key(connection: Connection, name: str, limits: Mapping[str, int] | None = None) -> tuple[Key, str]:
    """A new key, and its text, which nobody can find out again.

    Raises:
        InputError: the name is empty, not printable or in use; a limit that there is not, or below 0.
    """
    if not name or not name.isprintable() or len(name) > 100:
        raise InputError("the name of a key must have 1 to 100 printable characters")
    _check_limits(limits or {})
    if connection.execute(select(keys.c.id).where(keys.c.name == name)).first() is not None:
        raise _in_use(name)
    secret = PREFIX + secrets.token_hex(24)
    row = {"id": "key_" + secrets.token_hex(16), "name": name, "hash": hash_of(secret), "shown": secret[:SHOWN], "state": "active"}
    try:
        connection.execute(insert(keys).values(**row, created_at=time.time(), **(limits or {})))
    except IntegrityError:  # made at the same moment
        raise _in_use(name) from None
    return get_key(connection, row["id"]), secret


def list_keys(connection: Connection) -> list[Key]:
    """All of them, the revoked too, in the order they were made."""
    return [_key(row) for row in connection.execute(select(keys).order_by(keys.c.created_at, keys.c.id))]


def any_key(connection: Connection) -> bool:
    """Whether there has ever been one."""
    return connection.execute(select(keys.c.id).limit(1)).first() is not None


def find_key(connection: Connection, given: str) -> Key | None:
    """The key whose text this is, whatever its state. It is looked for by its hash, so that time tells nothing about others."""
    row = connection.execute(select(keys).where(keys.c.hash == hash_of(given))).first()
    return None if row is None else _key(row)


def get_key(connection: Connection, name: str) -> Key:
    """By its name or its id.

    Raises:
        InputError: there is none.
    """
    return _key(_one(connection, select(keys), name))


def set_state(connection: Connection, name: str, state: KeyState) -> Key:
    """Pause, resume or revoke. Jobs and harvests that are queued wait while their key is paused, and are cancelled when it is revoked.

    Raises:
        InputError: there is no such key, or it is revoked, which is final.
    """
    key = _key(_one(connection, select(keys).with_for_update(), name))
    if key.state == "revoked" and state != "revoked":
        raise InputError(f"the key {key.name} is revoked, which is final", "create another one")
    connection.execute(update(keys).where(keys.c.id == key.id).values(state=state))
    if state == "revoked":
        cancel_queued(connection, key.id)
    return get_key(connection, key.id)


def set_limits(connection: Connection, name: str, limits: Mapping[str, int | None]) -> Key:
    """Change the limits that are named; None: it no longer holds. What is held or spent stays, be it more than the new limit.

    Raises:
        InputError: there is no such key, or a limit that there is not, or below 0.
    """
    _check_limits(limits)
    key = _key(_one(connection, select(keys).with_for_update(), name))
    if limits:
        connection.execute(update(keys).where(keys.c.id == key.id).values(**limits))
    return get_key(connection, key.id)


def hash_of(given: str) -> str:
    return hashlib.sha256(given.encode("utf-8", "surrogateescape")).hexdigest()


def _one(connection: Connection, query: Select[Any], name: str) -> Row[Any]:
    for column in (keys.c.id, keys.c.name) if name.isprintable() else ():  # a database could not even be asked for some others
        row = connection.execute(query.where(column == name)).first()
        if row is not None:
            return row
    raise InputError(f"there is no key {name}", "`ster keys list` lists them")


def _key(row: Row[Any]) -> Key:
    found = row._mapping
    limits = {limit: found[limit] for limit in LIMITS if found[limit] is not None}
    return Key(row.id, row.name, row.shown, row.state, row.created_at, limits)


def _check_limits(limits: Mapping[str, int | None]) -> None:
    for limit, value in limits.items():
        if limit not in LIMITS:
            raise InputError(f"there is no limit {limit}", f"expected one of {', '.join(LIMITS)}")
        if value is not None and not 0 <= value <= MOST:
            raise InputError(f"{limit} must be 0 to {MOST}, found {value}")


def _in_use(name: str) -> InputError:
    return InputError(f"there is a key called {name} already", "a revoked key keeps its name, for what it has spent")

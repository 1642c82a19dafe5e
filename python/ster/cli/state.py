"""Where commands find the state of servers, and what becomes of one that cannot be opened."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ster.cli.options import NO_STATE

if TYPE_CHECKING:
    from ster.state.database import Database
    from ster.state.state import State

INSTALL = "run `pip install '.[{extra}]'` in Ster's folder (the distribution is called ster-lm, and it is not on PyPI)"


def open_database(folder: str | None, url: str | None) -> Database:
    """The database of the state that the options or the environment name, without becoming a server.

    Raises:
        InputError, FileError: it cannot be opened, or is not installed, or there is none.
    """
    from ster.errors import InputError

    _check_extra(url)
    from ster.state.database import Database
    from ster.state.place import find_place

    if _is_none(folder):
        raise InputError("--state none has no keys", "name the folder that the server has, or leave it out")
    return Database(find_place(folder, url).url)


def open_server_state(folder: str | None, url: str | None) -> State | None:
    """As `open_database`, for a server; None: `none` is named, and no database.

    Raises:
        InputError, FileError: it cannot be opened: a server does not start without the keys that it may have.
    """
    from ster.errors import FileError, InputError

    if _is_none(folder):
        if url is not None:
            raise InputError("--state none goes without --database")
        return None
    _check_extra(url)
    from ster.state.state import open_state

    try:
        return open_state(folder, url)
    except FileError as error:
        hint = error.hint or "--state DIR names another folder; --state none serves without keys and Jobs"
        raise FileError(error.message, hint) from None


def _is_none(folder: str | None) -> bool:
    return (folder or os.environ.get("STER_STATE")) == NO_STATE


def _check_extra(url: str | None) -> None:
    """
    Raises:
        InputError: what the state is made of is not installed.
    """
    from importlib.util import find_spec

    from ster.errors import InputError

    missing = [name for name in ("sqlalchemy", "alembic", "platformdirs") if find_spec(name) is None]
    if missing:
        message = f"the state of servers needs the extra `serve`, of which {', '.join(missing)} cannot be imported"
        raise InputError(message, INSTALL.format(extra="serve"))
    if (url or os.environ.get("STER_DATABASE", "")).startswith("postgres") and find_spec("psycopg") is None:
        raise InputError("PostgreSQL needs the extra `postgres`: psycopg cannot be imported", INSTALL.format(extra="serve,postgres"))

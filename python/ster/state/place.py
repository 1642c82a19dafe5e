"""Where the state is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_state_path

from ster._files import make_folder, reason
from ster.errors import FileError, InputError

STATE, DATABASE = "STER_STATE", "STER_DATABASE"
FILE = "ster.db"


@dataclass(frozen=True)
class Place:
    """folder: for results that are files, and for SQLite. url: of the database."""

    folder: Path
    url: str


def find_place(folder: str | os.PathLike[str] | None = None, url: str | None = None) -> Place:
    """The place that is named, or the environment's (`STER_STATE`, `STER_DATABASE`), or the user's own folder; it is made.

    Raises:
        FileError: the folder cannot be made or written to. InputError: a URL of neither SQLite nor PostgreSQL.
    """
    found = Path(folder or os.environ.get(STATE) or user_state_path("ster", appauthor=False)).expanduser().absolute()
    url = url or os.environ.get(DATABASE)
    if url is None:
        url = f"sqlite:///{found / FILE}"
    elif url.startswith(("postgresql://", "postgres://")):
        url = "postgresql+psycopg://" + url.partition("://")[2]
    elif not url.startswith(("postgresql+psycopg://", "sqlite:///")):
        raise InputError(f"the database URL begins with `{url.partition(':')[0]}:`", "expected sqlite:///PATH or postgresql://...")
    make_folder(found)
    try:
        found.chmod(0o700)  # prompts and results of Jobs are in it
    except OSError as error:
        raise FileError(f"failed to keep {found} private: {reason(error)}") from None
    if not os.access(found, os.W_OK | os.X_OK):
        raise FileError(f"failed to write to {found}: permission denied", "name another folder with --state or STER_STATE")
    return Place(found, url)

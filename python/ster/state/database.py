"""The database: opened, brought to this version's tables, and written to one transaction at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import SQLAlchemyError

from ster.errors import FileError, InputError

MIGRATIONS = Path(__file__).with_name("migrations")
BUSY_SECONDS = 30
CONNECT_SECONDS = 10
LOCK_SECONDS = 15
"""Of PostgreSQL: a statement waits no longer for a lock; `BUSY_SECONDS`: it takes no longer in all."""
SILENT_SECONDS = 20
"""After so long without a sign of PostgreSQL's machine, its connection is broken off."""
MIGRATING = 0x53746572  # any number that is ours, for PostgreSQL's advisory lock

T = TypeVar("T")
PIECE = 1000


def pieces(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """As many as one statement may name: PostgreSQL takes no more than 65,535 parameters, and SQLite fewer in some builds."""
    for start in range(0, len(values), PIECE):
        yield values[start : start + PIECE]


class Database:
    """One for a process; its methods may be called from any thread. Its errors have no values in them, which may be prompts.

    Raises:
        FileError: it cannot be opened. InputError: it is of a later version of Ster.
    """

    def __init__(self, url: str) -> None:
        self.is_sqlite = url.startswith("sqlite")
        shown = make_url(url).render_as_string(hide_password=True)
        if self.is_sqlite:
            self.engine = create_engine(url, hide_parameters=True, connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False})
            _prepare_sqlite(self.engine)
        else:
            given: dict[str, Any] = {"pool_pre_ping": True, "pool_size": 16, "max_overflow": 16}
            self.engine = create_engine(url, hide_parameters=True, connect_args=_postgres_limits(make_url(url).query), **given)
        try:
            self._migrate()
        except InputError:
            self.close()
            raise
        except SQLAlchemyError as error:
            self.close()
            cause = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
            raise FileError(f"failed to open the database {shown}: {cause}") from None

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that may write. On SQLite nobody else writes from its beginning to its end; on PostgreSQL rows that are read to be
        changed are to be selected `with_for_update()`, which SQLite ignores."""
        with self.engine.connect() as connection:
            if self.is_sqlite:
                connection = connection.execution_options(ster_immediate=True)
            with connection.begin():
                yield connection

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that reads, all of it as of one moment, and keeps nobody from writing."""
        with self.engine.connect() as connection:
            if not self.is_sqlite:
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                yield connection

    def close(self) -> None:
        self.engine.dispose()

    def _migrate(self) -> None:
        from alembic import command
        from alembic.config import Config
        from alembic.runtime.migration import MigrationContext
        from alembic.script import ScriptDirectory

        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        scripts = ScriptDirectory.from_config(config)
        with self.write() as connection:
            if not self.is_sqlite:  # two servers that start at once
                for limit in ("statement_timeout", "lock_timeout"):
                    connection.execute(text(f"set local {limit} = 0"))
                connection.execute(text("select pg_advisory_xact_lock(:number)"), {"number": MIGRATING})
            now = MigrationContext.configure(connection).get_current_revision()
            if now == scripts.get_current_head():
                return
            if now is not None and now not in {script.revision for script in scripts.walk_revisions()}:
                raise InputError(
                    f"the database is of a later version of Ster: it has `{now}`", "install that version, or name another state"
                )
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


def _postgres_limits(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a connection. given: those of the URL, which come first."""
    limits: dict[str, Any] = {
        "connect_timeout": CONNECT_SECONDS,
        "options": f"-c statement_timeout={BUSY_SECONDS}s -c lock_timeout={LOCK_SECONDS}s",
        "keepalives_idle": SILENT_SECONDS // 2,
        "keepalives_interval": SILENT_SECONDS // 4,
        "keepalives_count": 2,
        "tcp_user_timeout": SILENT_SECONDS * 1000,
    }
    return {name: value for name, value in limits.items() if name not in given}


def _prepare_sqlite(engine: Engine) -> None:
    """WAL, in which readers and a writer do not wait for each other, and transactions that begin where SQLAlchemy says so.

    `synchronous` NORMAL: a process that is killed loses nothing; a computer that loses power may lose the last moments, and stays sound.
    """

    @event.listens_for(engine, "connect")
    def connected(connection: Any, record: object) -> None:
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        immediate = connection.get_execution_options().get("ster_immediate")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

"""PostgreSQL of its own for tests: from Debian's packages or from the path, on a port of its own, gone afterwards."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa


def find_tools() -> Path | None:
    """The folder of `initdb` and `pg_ctl`, of the latest version that is here."""
    found = [Path(path).resolve().parent for path in (shutil.which("initdb"), shutil.which("pg_ctl")) if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in found if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None)


@contextlib.contextmanager
def postgres(tools: Path) -> Iterator[str]:
    """A running server's URL, without the name of a database. It does not run as root, and then runs as Debian's user for it."""
    user = pwd.getpwnam("postgres") if os.getuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="ster-pg-"))  # short, for the socket's path
    if user is not None:
        os.chown(folder, user.pw_uid, user.pw_gid)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(tool: str, *args: str) -> None:
        line = [str(tools / tool), *args]
        given = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL, cwd=folder, timeout=60, **given)  # type: ignore[call-overload]

    data = str(folder / "data")
    run("initdb", "-D", data, "-U", "ster", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off -c max_connections=200"
    run("pg_ctl", "-D", data, "-o", options, "-l", str(folder / "log"), "-w", "start")
    try:
        yield f"postgresql://ster@127.0.0.1:{port}"
    finally:
        run("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
        shutil.rmtree(folder, ignore_errors=True)


def new_database(server: str, name: str) -> str:
    """The URL of an empty database on `server`."""
    engine = sa.create_engine(server.replace("postgresql://", "postgresql+psycopg://") + "/postgres", isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f'create database "{name}"'))
    engine.dispose()
    return f"{server}/{name}"

"""Routes that ask the state do so on threads of their own: a database that hangs does not take those that completions are planned on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.requests import Request

from ster.server.errors import state_unavailable
from ster.server.requests import log_crash, record_of

log = logging.getLogger("ster.server")
T = TypeVar("T")
THREADS = 8
BEGIN_SECONDS = 30.0
"""How long a request waits for one of them."""


class StateThreads:
    """From the first `run` to `close`."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(THREADS, "ster-state")

    async def run(self, name: str, work: Callable[[], T]) -> T:
        """`work()`, in a thread. name: of what is done, for the log.

        Raises:
            ApiError: 503, the database does not answer, or others wait for it so long that this was not begun; whatever `work` raises.
        """
        task = self._executor.submit(work)
        done = asyncio.wrap_future(task)
        try:
            await asyncio.wait({done}, timeout=BEGIN_SECONDS)
            if not done.done() and task.cancel():
                raise state_unavailable()
            return await done
        except asyncio.CancelledError:
            done.cancel()  # nobody is there to be told; what has begun ends by itself
            raise
        except SQLAlchemyError as error:
            log_trouble(name, error)
            raise state_unavailable() from None

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)


async def in_state(request: Request, work: Callable[..., T], *arguments: object) -> T:
    """`work(*arguments)`; see `StateThreads.run`."""
    threads: StateThreads = request.app.state.state_threads
    return await threads.run(record_of(request).id, lambda: work(*arguments))


def log_trouble(name: str, error: Exception) -> None:
    """A line where the database is away, locked or without room, which passes; the traceback of anything else. name: of what failed."""
    if isinstance(error, OperationalError | PoolTimeoutError):
        cause = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
        log.warning("%s: the database does not answer, and whoever asked tries again: %s", name, cause)
    else:
        log_crash(name, error)

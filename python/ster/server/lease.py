"""Uses of a model: while there is one, the model stays loaded."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

from ster.server.errors import ApiError, model_load_timeout

if TYPE_CHECKING:
    from ster.server.loaded import Loaded
    from ster.server.served import Served


class LeaseClosedError(Exception):
    """The lease was closed, by another thread, while this one waited for its model."""


class Lease:
    """One use of a model, from the moment it is asked for; made by `Served.claim`, from any thread. The model is loaded if it is not,
    and is not unloaded before `close`.

    outcome: the model, or the `ApiError` that it has come to.
    """

    def __init__(self, served: Served) -> None:
        self.served = served
        self.outcome: Future[Loaded] = Future()

    @property
    def waits(self) -> bool:
        """The model is not there yet."""
        return not self.outcome.done()

    def result(self, seconds: float | None = None) -> Loaded:
        """The model; waits for it, but not longer than `seconds`. Not for event loops, which this would stop.

        Raises:
            ApiError: it failed to load, took longer than that, or the server is shutting down. LeaseClosedError: see `close`.
        """
        try:
            return self.outcome.result(seconds)
        except CancelledError:
            raise LeaseClosedError(self.served.name) from None
        except FutureTimeoutError:
            raise model_load_timeout(self.served.name, seconds or 0.0) from None

    async def arrival(self, seconds: float | None = None) -> Loaded:
        """`result` for event loops. Cancelled, or after `seconds`, the lease waits no more, and is still to be closed."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.outcome), seconds)
        except asyncio.TimeoutError:
            raise model_load_timeout(self.served.name, seconds or 0.0) from None

    def close(self) -> None:
        """The use is over. From any thread, more than once; whoever waits in `result` is told."""
        self.outcome.cancel()
        self.served.release(self)

    # For `Served`

    def give(self, loaded: Loaded) -> None:
        if self._begins():
            self.outcome.set_result(loaded)

    def refuse(self, error: ApiError) -> None:
        if self._begins():
            self.outcome.set_exception(error)

    def _begins(self) -> bool:
        """Nobody has given up waiting."""
        return self.waits and self.outcome.set_running_or_notify_cancel()

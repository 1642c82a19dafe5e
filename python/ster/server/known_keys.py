"""The keys of the state, as the server knows them: what it has looked up counts for a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, TypeVar

from ster.server.errors import key_paused, state_unavailable
from ster.server.state_threads import log_trouble
from ster.state.keys import Key, any_key, find_key, hash_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from ster.state.database import Database

T = TypeVar("T")
FRESH_SECONDS = 1.0
"""How long a key that was revoked or paused may still open what costs nothing. What costs tokens looks at the key itself."""


class KnownKeys:
    """Keys by their hash, for the event loop; the database is asked on `executor`. Keys that there are not are asked for each time."""

    def __init__(self, database: Database, executor: Executor) -> None:
        self._database = database
        self._executor = executor
        self._found: dict[str, tuple[Key, float]] = {}
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()
        self.required = False
        """There has been a key, as far as is known: nobody comes in without one any more."""

    async def are_there(self) -> bool:
        """Whether there has ever been a key.

        Raises:
            ApiError: 503, the database does not say: the server is not open meanwhile.
        """
        if not self.required and self._is_old():
            async with self._asking:  # one of many asks for all
                if self._is_old():
                    asked = time.monotonic()
                    self.required = await self._ask(any_key)
                    self._asked_at = asked
        return self.required

    def _is_old(self) -> bool:
        return time.monotonic() >= self._asked_at + FRESH_SECONDS

    async def find(self, given: str) -> Key | None:
        """The active key whose text this is; None: there is none, or it was revoked.

        Raises:
            ApiError: 403, it is paused. 503, the database does not say.
        """
        hashed = hash_of(given)
        key, until = self._found.get(hashed, (None, 0.0))
        if key is None or time.monotonic() >= until:
            asked = time.monotonic()
            key = await self._ask(lambda connection: find_key(connection, given))
            if key is None:
                return None
            self._found[hashed] = (key, asked + FRESH_SECONDS)
        if key.state == "paused":
            raise key_paused()
        return key if key.state == "active" else None

    async def _ask(self, ask: Callable[[Connection], T]) -> T:
        def read() -> T:
            with self._database.read() as connection:
                return ask(connection)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, read)
        except Exception as error:
            log_trouble("the look-up of a key", error)
            raise state_unavailable() from None

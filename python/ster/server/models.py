"""All that a server serves, by name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.concurrency import run_in_threadpool

from ster.server.errors import model_not_found
from ster.server.passes import Passes
from ster.server.served import Served, ServedSpec
from ster.server.settings import Settings

LEAST_SLEEP = 0.05  # seconds


class Models(Sequence[Served]):
    """All that is served, by name. Memory for caches is shared out evenly among them, loaded or not: what one can run does not depend on
    who else is there. Passes of two models never run at the same time."""

    def __init__(self, specs: Sequence[ServedSpec], settings: Settings) -> None:
        share = replace(settings, kv_cache_bytes=settings.kv_cache_bytes // max(len(specs), 1))
        self.pass_lock = Passes()  # whoever holds it keeps every engine from its next pass
        self._settings = settings
        self._models = [Served(spec, share, self.pass_lock) for spec in specs]
        self._by_name = {served.name: served for served in self._models}

    def __getitem__(self, index: Any) -> Any:
        return self._models[index]

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[Served]:
        return iter(self._models)

    def named(self, name: str | None) -> Served:
        """The model that a request asks for, by the name it is served under or its checkpoint's; None: the first.

        Raises:
            ApiError: 400 `model_not_found`.
        """
        if name is None:
            return self._models[0]
        if name in self._by_name:
            return self._by_name[name]
        for served in self._models:
            if served.checkpoint == name:
                return served
        raise model_not_found(name)

    def load(self) -> None:
        """Load those that are to load when the server starts, one after the other."""
        for served in self._models:
            if not served.settled.is_set():
                served.load()

    async def unload_unused(self) -> None:
        """Unload each model when nobody has used it for long enough, until this is cancelled."""
        longest = self._settings.idle_seconds
        if longest is None:
            return
        while True:
            # Whoever is used or loaded meanwhile has `longest` from then on.
            left = min([longest, *(left for served in self if (left := served.seconds_to_unload()) is not None)])
            await asyncio.sleep(max(left, LEAST_SLEEP))
            for served in self._models:
                await run_in_threadpool(served.unload_if_unused)

    def drain(self, seconds: float) -> None:
        """Refuse new work, and end what still runs after `seconds`; waits for that."""
        threads = [threading.Thread(target=served.drain, args=(seconds,), daemon=True) for served in self._models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

"""A model that a server answers for: who loads it, who uses it, when it goes.

It is `idle` (not in memory), `loading`, `ready` or `failed`. With `Settings.load_on_use` it is idle until somebody claims it, otherwise it
loads when the server starts; with `Settings.idle_seconds` it becomes idle again when nobody has used it for so long. What failed to load is
tried again by the first claim that comes `Settings.load_retry_seconds` later.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ster.errors import SterError
from ster.model import Model
from ster.server.errors import ApiError, model_failed, model_loading, shutting_down
from ster.server.lease import Lease
from ster.server.loaded import Loaded, capabilities, loaded_from
from ster.server.malloc import trim
from ster.server.passes import Passes
from ster.server.settings import Settings

log = logging.getLogger("ster.server")
State = Literal["idle", "loading", "ready", "failed"]


@dataclass(frozen=True)
class ServedSpec:
    """A model to serve. name: what requests call it. loader: opens it, in a thread; called again when it loads again. checkpoint: the
    model's own name, where that is known before it is opened."""

    name: str
    loader: Callable[[], Model]
    checkpoint: str | None = None


class Served:
    """One model under its name. `loaded` is there when `state` is "ready", `error` when it is "failed".

    checkpoint: the model's own name, which answers have; None until it is known. since: Unix seconds at which it came into its state.
    load_seconds: how long the last load took, None before the first. settled: set when it no longer loads for the start of the server.
    """

    def __init__(self, spec: ServedSpec, settings: Settings, pass_lock: Passes) -> None:
        self.name = spec.name
        self.checkpoint = spec.checkpoint
        self.created = int(time.time())
        self.state: State = "idle" if settings.load_on_use else "loading"
        self.since = time.time()
        self.loaded: Loaded | None = None
        self.error: SterError | None = None
        self.loads = 0
        self.load_seconds: float | None = None
        self.settled = threading.Event()
        if settings.load_on_use:
            self.settled.set()
        self._loader = spec.loader
        self._settings = settings
        self._pass_lock = pass_lock
        self._known: dict[str, Any] = {}  # what `entry` says of the model when it is not loaded
        self._changing = threading.Lock()  # held while it loads or unloads; taken before the other
        self._lock = threading.Lock()  # guards the rest, and is held for moments
        self._leases: set[Lease] = set()
        self._closed = False
        self._unused_since = time.monotonic()
        self._failed_at = 0.0

    # Uses

    def claim(self) -> Lease:
        """A use of the model, which loads if it is not there. Waits for nothing: see `Lease.result`, and `lease` for both.

        Raises:
            ApiError: 503, the server is shutting down, or the model failed to load a moment ago.
        """
        with self._lock:
            if self._closed:
                raise shutting_down()
            if self.state == "failed" and self.retry_seconds > 0:
                raise model_failed(self.name, self.retry_seconds)
            lease = Lease(self)
            self._leases.add(lease)
            if self.loaded is not None:
                lease.give(self.loaded)
            elif self.state != "loading":
                self.error = None
                self._enter("loading")
                log.info("loading %s", self.name)
                threading.Thread(target=self.load, name=f"ster-load-{self.name}", daemon=True).start()
        return lease

    @contextlib.contextmanager
    def lease(self, seconds: float | None = None) -> Iterator[Loaded]:
        """The model, which stays loaded inside; waits for it. For threads, not for event loops.

        seconds: the longest wait for the model; None: `Settings.load_seconds`.

        Raises:
            ApiError: 503, it failed to load, took longer, or the server is shutting down.
        """
        lease = self.claim()
        try:
            yield lease.result(self._settings.load_seconds if seconds is None else seconds)
        finally:
            lease.close()

    @contextlib.asynccontextmanager
    async def lease_async(self, seconds: float | None = None) -> AsyncIterator[Loaded]:
        """`lease` for event loops."""
        lease = self.claim()
        try:
            yield await lease.arrival(self._settings.load_seconds if seconds is None else seconds)
        finally:
            lease.close()

    def release(self, lease: Lease) -> None:
        """See `Lease.close`."""
        with self._lock:
            if lease in self._leases:
                self._leases.remove(lease)
                self._unused_since = time.monotonic()

    @property
    def uses(self) -> int:
        """Leases that are open."""
        return len(self._leases)

    @property
    def waiting(self) -> int:
        """Leases whose model is not there yet."""
        with self._lock:
            return sum(lease.waits for lease in self._leases)

    # States

    def load(self) -> None:
        """Open the model, start its engine thread and serve those who wait. Raises nothing: `state` says how it went."""
        with self._changing:  # what it was before has been freed
            began = time.monotonic()
            try:
                loaded = loaded_from(self._loader(), self._settings, self._pass_lock)
            except SterError as error:
                if self.settled.is_set():  # whoever started the server says it otherwise
                    log.error("loading %s failed: %s", self.name, error)
                self._fail(error)
            except BaseException as error:  # a bug, or a panic of the engine
                log.exception("loading %s crashed", self.name)
                self._fail(SterError("loading crashed") if isinstance(error, Exception) else SterError("the engine crashed"))
            else:
                self._settle(loaded, time.monotonic() - began)
        self.settled.set()

    def unload_if_unused(self) -> None:
        """Free the model's memory, if nobody has used it for `Settings.idle_seconds`."""
        if self.seconds_to_unload() != 0.0:
            return
        with self._changing:
            loaded = self.loaded
            known = {} if loaded is None else self._entry_of(loaded)
            with self._lock:
                if loaded is None or self.seconds_to_unload() != 0.0:
                    return
                self.loaded, self._known = None, known
                self._enter("idle")
            loaded.scheduler.drain(0.0)
            del loaded
            gc.collect()  # a cycle that some request left would keep gigabytes until Python looks for it
            trim()
        log.info("%s is unloaded: nobody used it for %g s", self.name, self._settings.idle_seconds)

    def seconds_to_unload(self) -> float | None:
        """From now, if nobody asks; None where nothing would unload it."""
        if self._settings.idle_seconds is None or self.loaded is None or self._leases or self._closed:
            return None
        return max(self._unused_since + self._settings.idle_seconds - time.monotonic(), 0.0)

    def drain(self, seconds: float) -> None:
        """Refuse whoever waits for the model or claims it from now on; then see `Scheduler.drain`. A load that is under way is not waited
        for, and comes to nothing."""
        with self._lock:
            self._closed = True
            loaded = self.loaded
            self._refuse(shutting_down)
        if loaded is not None:
            loaded.scheduler.drain(seconds)

    def check_ready(self) -> None:
        """
        Raises:
            ApiError: 503, it has failed to load, or is loading for the start of the server.
        """
        if self.state == "failed":
            raise model_failed(self.name, self.retry_seconds)
        if not self.settled.is_set():
            raise model_loading(self.name)

    @property
    def retry_seconds(self) -> float:
        """From now until a claim has it loaded again after a failure."""
        return max(self._failed_at + self._settings.load_retry_seconds - time.monotonic(), 0.0)

    # What is said of it

    def entry(self) -> dict[str, Any]:
        """The model in `GET /v1/models`; what is not known yet is absent."""
        loaded = self.loaded
        entry: dict[str, Any] = {"id": self.name, "object": "model", "created": self.created, "owned_by": "ster"}
        known = self._known if loaded is None else self._entry_of(loaded)
        if not known and self.checkpoint is not None:
            known = {"served_model_name": self.checkpoint}
        return entry | {"status": {"ready": "live"}.get(self.state, self.state)} | known

    def status(self) -> dict[str, Any]:
        """What a person wants to know who waits for it. Times are Unix seconds; what does not apply is absent."""
        now, state, to_unload = time.time(), self.state, self.seconds_to_unload()
        status: dict[str, Any] = {"id": self.name, "object": "model.status", "warm": state == "ready", "state": state}
        status |= {"since": round(self.since, 3), "uses": self.uses}
        if self.load_seconds is not None:
            status["load_seconds"] = round(self.load_seconds, 3)
        if state == "failed":
            status["retry_at"] = round(now + self.retry_seconds, 3)
        if state == "ready" and to_unload is not None:
            status["unloads_at"] = round(now + to_unload, 3)
        return status

    def _entry_of(self, loaded: Loaded) -> dict[str, Any]:
        return {"served_model_name": loaded.facts.name, "capabilities": capabilities(loaded, self._settings)}

    # With the lock

    def _enter(self, state: State) -> None:
        self.state = state
        self.since = time.time()

    def _refuse(self, error: Callable[[], ApiError]) -> None:
        """Whoever waits. An error each: threads add their frames to those they raise."""
        for lease in self._leases:
            if lease.waits:
                lease.refuse(error())

    # On the thread that loads

    def _settle(self, loaded: Loaded, seconds: float) -> None:
        with self._lock:
            if self._closed:
                return
            loaded.scheduler.start()
            self.loaded, self.error = loaded, None
            self.checkpoint = loaded.facts.name
            self.loads += 1
            self.load_seconds = seconds
            self._unused_since = time.monotonic()
            self._enter("ready")
            for lease in self._leases:
                lease.give(loaded)

    def _fail(self, error: SterError) -> None:
        with self._lock:
            self.error = error.with_traceback(None)  # whose frames hold what was loaded of it
            self._failed_at = time.monotonic()
            self._enter("failed")
            self._refuse(lambda: model_failed(self.name, self._settings.load_retry_seconds))

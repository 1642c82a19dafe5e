"""Runs the harvests of a state, one at a time, on a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import orjson

from ster.errors import ArtifactError, FileError, InputError, SterError
from ster.harvest import harvest
from ster.harvest.manifest import read_manifest
from ster.server.errors import ApiError
from ster.server.harvests.beat import Beat, ClaimLostError, StoppedError
from ster.server.harvests.errors import gave_up
from ster.server.harvests.plan import directions_of, layers_of
from ster.server.harvests.reading import ServedReadable
from ster.server.harvests.request import HarvestRequest
from ster.server.harvests.store import Store
from ster.server.loaded import Loaded
from ster.server.models import Models
from ster.server.plan import sentence
from ster.server.served import Served
from ster.server.state_threads import log_trouble
from ster.server.work import ShuttingDown

log = logging.getLogger("ster.server")
IDLE_SECONDS = 1.0  # between looks for what other servers were asked
RECOVER_SECONDS = 10.0
SWEEP_SECONDS = 60.0
BUSY_SECONDS = 5.0
LOOK_SECONDS = 0.2


class BusyError(Exception):
    """Another process is at work in the folder."""


class Runner:
    """stopping: whether the server is shutting down; asked every now and then."""

    def __init__(self, store: Store, models: Models, stopping: Callable[[], bool]) -> None:
        self._store = store
        self._models = models
        self._ending = stopping
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ster-harvests", daemon=True)
        self._recovered = self._swept = 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Put back what runs, for another server or the next start to go on with; waits for that."""
        self._ended.set()
        self._store.wake.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def _stopping(self) -> bool:
        return self._ended.is_set() or self._ending()

    # On the thread

    def _serve(self) -> None:
        while not self._stopping:
            try:
                idle = not self._turn()
            except Exception as error:
                log_trouble("the runner of harvests", error)
                idle = True
            if idle:
                self._store.wake.wait(IDLE_SECONDS)
                self._store.wake.clear()

    def _turn(self) -> bool:
        """Run one harvest; False: there was none."""
        now = time.monotonic()
        if now >= self._recovered:
            self._recovered = now + RECOVER_SECONDS
            self._store.recover(gave_up())
        if now >= self._swept or self._store.wake.is_set():
            self._swept = now + SWEEP_SECONDS
            self._store.sweep()
        names = [served.name for served in self._models if _answers(served)]
        row = self._store.queue.claim(names, self._store.server_id) if names else None
        if row is None:
            return False
        self._run(SimpleNamespace(**row._mapping))
        self._store.sweep()
        return True

    def _run(self, row: Any) -> None:
        """row: as it was claimed, which `Beat` keeps up to date."""
        try:
            with self._model(row.model) as loaded:
                run_id = self._harvest(row, loaded)
            self._store.finish(row, run_id)
        except ClaimLostError:
            log.info("harvest %s is no longer this server's", row.id)
        except (StoppedError, ShuttingDown):
            self._put_back(row)
        except BusyError:  # a process that was taken for dead is still at work in the folder
            self._put_back(row)
            self._ended.wait(BUSY_SECONDS)
        except ApiError as error:
            if error.status != 503:
                self._store.finish(row, error)
            else:  # the model or the server went away: no fault of the harvest's
                self._put_back(row)
                self._ended.wait(IDLE_SECONDS)
        except SterError as error:
            self._store.finish(row, self._refusal(row, error))
        except Exception:
            log.exception("harvest %s crashed", row.id)
            self._store.retry(row, gave_up())

    def _put_back(self, row: Any) -> None:
        with self._store.database.write() as connection:
            self._store.queue.put_back(connection, row)

    @contextlib.contextmanager
    def _model(self, name: str) -> Iterator[Loaded]:
        """
        Raises:
            ApiError: it cannot be loaded, or not now. StoppedError.
        """
        lease = self._models.named(name).claim()
        try:
            end = time.monotonic() + self._store.settings.load_seconds
            while lease.waits and time.monotonic() < end:
                if self._stopping:
                    raise StoppedError
                self._ended.wait(LOOK_SECONDS)
            yield lease.result(0)
        finally:
            lease.close()

    def _harvest(self, row: Any, loaded: Loaded) -> str:
        """Its `run_id`. What is on disk of it is gone on with; unless it is of another model or version, when it is begun anew."""
        asked = HarvestRequest.model_validate(orjson.loads(row.request), context=self._store.settings)
        folder = self._store.folder_of(row.id)
        beat = Beat(self._store, row, lambda: self._stopping)
        model = ServedReadable(loaded, special_tokens=asked.add_special_tokens, check=beat.check)
        layers, directions = layers_of(loaded, asked), directions_of(loaded, asked.project_onto)

        def run() -> str:
            size = asked.shard_size
            harvest(model, asked.prompts, folder, layers=layers, directions=directions, shard_size=size, progress=beat.report)
            return str(read_manifest(folder)["run_id"])

        if not folder.exists():
            return run()
        try:
            return run()
        except (InputError, ArtifactError):
            if beat.begun:
                raise
        try:
            self._store.remove_folder(row.id)
        except InputError:
            raise BusyError from None
        beat.begin_anew()
        return run()

    def _refusal(self, row: Any, error: SterError) -> ApiError:
        """What its owner is told: nothing of where the server keeps its files."""
        message = sentence(type(error)(error.message.replace(str(self._store.folder_of(row.id)), "its folder")))
        if isinstance(error, FileError):
            log.error("harvest %s: %s", row.id, error)
            return ApiError(500, f"The server could not store the harvest: {message}", code="harvest_storage_failed")
        return ApiError(400, message, code="harvest_failed")


def _answers(served: Served) -> bool:
    """A harvest would not wait in vain; the first one loads a model that is not there."""
    return served.state in ("ready", "idle") or (served.state == "failed" and served.retry_seconds == 0)

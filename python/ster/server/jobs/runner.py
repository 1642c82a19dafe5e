"""Who runs Jobs: claims some at a time, for the scheduler to batch, and sees that each ends once, whatever happens to a server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection

import orjson
from sqlalchemy import select

from ster.server.completions import plan_completion
from ster.server.errors import ApiError, internal_error
from ster.server.jobs.errors import job_gave_up
from ster.server.jobs.execution import EndedError, Execution
from ster.server.jobs.holds import pay
from ster.server.jobs.results import Results
from ster.server.lease import Lease, LeaseClosedError
from ster.server.loaded import Loaded
from ster.server.models import Models
from ster.server.plan import Plan
from ster.server.requests import release
from ster.server.schema import JobRequest, parse_body
from ster.server.served import Served
from ster.server.settings import Settings
from ster.server.state_threads import log_trouble
from ster.state.amounts import Amount
from ster.state.database import pieces
from ster.state.queue import Found, Queue
from ster.state.state import State
from ster.state.tables import jobs

log = logging.getLogger("ster.server")
LOOK_SECONDS = 1.0  # between two looks for Jobs that another server took in or cancelled
RECOVER_SECONDS = 5.0
SWEEP_SECONDS = 600.0
DAY = 86400.0


class Active:
    """A Job that this server has claimed."""

    def __init__(self, row: Found) -> None:
        self.row = row
        self.ended = threading.Event()
        self.lease: Lease | None = None
        self.execution: Execution | None = None

    def end(self) -> None:
        """From any thread: it is no longer wanted here."""
        self.ended.set()
        if self.execution is not None:
            self.execution.end()
        if self.lease is not None:
            self.lease.close()

    def check(self) -> None:
        """
        Raises:
            EndedError: after `end`, which may have come before there was something to end.
        """
        if self.ended.is_set():
            raise EndedError


class Runner:
    """The Jobs that this server runs, from `start` to `stop`. draining: the server takes no more work."""

    def __init__(self, state: State, models: Models, settings: Settings, draining: Callable[[], bool]) -> None:
        self.queue = Queue(state.database, jobs)
        self.results = Results(state.folder)
        self._state = state
        self._models = models
        self._settings = settings
        self._draining = draining
        self._active: dict[str, Active] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()  # guards the two
        self._planning = threading.Lock()
        self._woken = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ster-jobs", daemon=True)
        self._next_recovery = self._next_sweep = 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Put back what runs, for any server to begin again; returns when nothing runs."""
        self._stopped.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            active, threads = list(self._active.values()), list(self._threads.values())
        for each in active:
            each.end()
        for thread in threads:
            thread.join()

    def wake(self) -> None:
        """There may be something to claim."""
        self._woken.set()

    def cancelled(self, id: str) -> None:
        """The Job's row is final. What runs of it here ends before the next pass."""
        with self._lock:
            active = self._active.get(id)
        if active is not None:
            active.end()

    # On the runner's thread

    def _serve(self) -> None:
        while not self._stopped.is_set():
            self._woken.clear()
            try:
                self._keep()
                while not self._stopped.is_set() and self._claim():
                    pass
            except Exception as error:
                log_trouble("the runner of Jobs", error)
            self._woken.wait(LOOK_SECONDS)

    def _claim(self) -> bool:
        """Take a Job to run, if there is one and room for it."""
        with self._lock:
            if self._draining() or len(self._active) >= self._settings.jobs_running:
                return False
            held = list(self._active)
        names = [served.name for served in self._models if _takes_jobs(served)]
        row = self.queue.claim(names, self._state.presence.id, held) if names else None
        if row is None:
            return False
        active = Active(row)
        thread = threading.Thread(target=self._run, args=(active,), name=f"ster-{row.id}", daemon=True)
        with self._lock:
            self._active[row.id] = active
            self._threads[row.id] = thread
        thread.start()
        return True

    def _keep(self) -> None:
        """Notice what other servers did, and what they no longer do."""
        with self._lock:
            active = list(self._active.values())
        if active:
            still = self.queue.still([each.row for each in active])
            for each in active:
                if each.row.id not in still:
                    each.end()
        now = time.monotonic()
        if now >= self._next_recovery:
            self._next_recovery = now + RECOVER_SECONDS
            with self._lock:
                held = list(self._active)
            with self._state.database.write() as connection:
                for row in self.queue.recover(connection, error_json(job_gave_up()), self._state.presence.id, held):
                    pay(connection, row.hold_id)
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            self._sweep()

    def _sweep(self) -> None:
        """Remove Jobs that have been kept long enough, and files that nobody needs."""
        gone = [row.id for row in self.queue.expired(time.time() - self._settings.job_days * DAY)]
        for id in gone:
            self.results.remove(id)
        if gone:
            with self._state.database.write() as connection:
                self.queue.remove(connection, gone)
        self.results.sweep(self._wanted)

    def _wanted(self, ids: Collection[str]) -> set[str]:
        found: set[str] = set()
        with self._state.database.read() as connection:
            for some in pieces(list(ids)):
                query = select(jobs.c.id).where(jobs.c.id.in_(some), jobs.c.state.in_(("running", "done")))
                found.update(connection.execute(query).scalars())
        return found

    # On a thread for each Job

    def _run(self, active: Active) -> None:
        row = active.row
        try:
            try:
                self._finish(row, *self._carry_out(active))
            except (EndedError, LeaseClosedError):
                self._put_back(row)  # changes nothing where the claim is lost
            except ApiError as error:
                release(error)
                self._fail(row, error)
            except Exception:
                log.exception("%s crashed", row.id)
                self._fail(row, internal_error())
        except Exception as error:
            log_trouble(f"the end of {row.id}, which is begun again,", error)
        finally:
            if active.lease is not None:
                active.lease.close()
            with self._lock:
                if self._active.get(row.id) is active:
                    del self._active[row.id], self._threads[row.id]
            self._woken.set()

    def _carry_out(self, active: Active) -> tuple[bytes, Amount]:
        """
        Raises:
            EndedError, LeaseClosedError: it is no longer wanted here. ApiError: it failed.
        """
        row = active.row
        if not self.queue.still([row]):  # it may have been cancelled before `cancelled` could find it here
            raise EndedError
        active.lease = self._models.named(row.model).claim()
        active.check()
        plan = self._plan(row, active.lease.result(self._settings.load_seconds))
        active.execution = Execution(plan, row.id, int(row.created_at))
        active.check()
        return active.execution.run()

    def _plan(self, row: Found, loaded: Loaded) -> Plan:
        """One at a time: two million numbers take some memory before they are vectors."""
        with self._planning:
            asked = parse_body(JobRequest, row.request, self._settings).model_copy(update={"seed": row.seed})
            return plan_completion(loaded, self._settings, asked)

    def _finish(self, row: Found, document: bytes, used: Amount) -> None:
        self.results.write(row.id, document)
        with self._state.database.write() as connection:
            done = self.queue.finish(connection, row, "done", size=len(row.request) + len(document))
            if done:
                pay(connection, row.hold_id, used)
        if not done:
            now = self.queue.get(row.owner, row.id)
            if now is None or now.state == "cancelled":  # otherwise another server has the file in hand, or has written the same
                self.results.remove(row.id)

    def _fail(self, row: Found, error: ApiError) -> None:
        if error.status == 503:  # the model or the server went away: no fault of the Job's
            self._put_back(row)
            self._stopped.wait(LOOK_SECONDS)
            return
        with self._state.database.write() as connection:
            if error.code == internal_error().code:
                failed = self.queue.retry(connection, row, error_json(job_gave_up()))
            else:
                failed = self.queue.finish(connection, row, "failed", error_json(error))
            if failed:
                pay(connection, row.hold_id)

    def _put_back(self, row: Found) -> None:
        with self._state.database.write() as connection:
            self.queue.put_back(connection, row)


def error_json(error: ApiError) -> str:
    """As a Job's row and answer have it."""
    return orjson.dumps(error.body("")["error"]).decode()


def _takes_jobs(served: Served) -> bool:
    """A Job would not wait in vain; the first one loads a model that is not there."""
    return served.state in ("ready", "idle") or (served.state == "failed" and served.retry_seconds == 0)

"""Continuous batching: one thread runs all sequences of a model, which join and leave between passes.

Each turn: drop what was cancelled, admit what waits and fits, run one pass over every sequence that decodes and a share of the prompts
that do not yet, hand out what came of it. Every row's bits are the same whatever runs beside it, so nothing here shows in an answer.

Requests take turns: one that had a sequence admitted goes behind all others that wait, so that a request of a thousand keeps none of a
few waiting. When the sequence whose turn it is does not fit into memory yet, nobody overtakes it: places and memory come free until it
does, however many small ones arrive.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from ster.model import Model
from ster.server.admission import check_work
from ster.server.batch import Batch
from ster.server.prefixes import plan_key
from ster.server.running import Job, Listener, Ticket
from ster.server.settings import Settings
from ster.server.stats import Stats
from ster.server.work import Event, Failed, QueueFull, ShuttingDown, Work

log = logging.getLogger("ster.server")


class Scheduler:
    """Runs works on `model`. Its methods may be called from any thread; listeners are called on the scheduler's own.

    pass_lock: held during a pass, for several models that share the processor.
    """

    def __init__(self, model: Model, settings: Settings, pass_lock: threading.Lock | None = None) -> None:
        self._model = model
        self._settings = settings
        self._pass_lock = pass_lock or threading.Lock()
        self._stats = Stats()
        self._batch = self._new_batch()  # the thread's own
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()  # guards the rest
        self._waiting: deque[Ticket] = deque()  # the first has its turn
        self._closed = False
        self._stopping = False

    def start(self) -> None:
        """Daemon: a process that forgets to drain still ends."""
        self._thread = threading.Thread(target=self._serve, name=f"ster-scheduler-{self._model.name}", daemon=True)
        self._thread.start()

    def check(self, work: Work) -> None:
        """Refuse what can never run.

        Raises:
            SterError: the prompt, a setting, a layer or an edit cannot be used; `TooLargeError`: it needs more memory than there is.
        """
        check_work(work, self._model, self._batch.ledger)

    def submit(self, works: Sequence[Work], listener: Listener) -> Ticket:
        """Queue `works`; `listener` is called with the index of a work and what happened to it. It must not block.

        Raises:
            QueueFull: as many submissions wait as may, beyond those that a free place waits for.
            ShuttingDown: after `drain`.
            SterError: see `check`.
        """
        for work in works:
            self.check(work)
        plans = {edits: plan_key(edits) for edits in {work.edits for work in works}}
        with self._wake:
            if self._closed:
                raise ShuttingDown("the scheduler takes no more work")
            if len(self._waiting) >= self._settings.queue + self._free:
                raise QueueFull(f"{len(self._waiting)} requests are waiting")
            ticket = Ticket(listener)
            context = self._model.context_length
            ticket.jobs.extend(Job(ticket, index, work, plans[work.edits], context) for index, work in enumerate(works))
            if ticket.jobs:
                self._waiting.append(ticket)
                self._wake.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End all works of `ticket`. What they hold is free before the next pass; an event that is on its way may still arrive."""
        with self._wake:
            ticket.cancelled = True
            ticket.jobs.clear()
            with contextlib.suppress(ValueError):
                self._waiting.remove(ticket)
            self._wake.notify()

    def drain(self, seconds: float) -> None:
        """Take no more work; give what is there `seconds` to end, then fail it with `ShuttingDown`. Returns when the thread has ended,
        which a pass may delay."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is None:
            self._end(ShuttingDown("the scheduler never started"))
            return
        self._thread.join(max(seconds, 0.0))
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def stats(self) -> Stats:
        """What was done so far and what is there now; counts may be a pass old."""
        batch = self._batch
        return self._stats.now(
            waiting=len(self._waiting),
            running=len(batch.running),
            cache_bytes=batch.ledger.used,
            pinned_bytes=batch.ledger.pinned,
            cache_budget=batch.ledger.budget,
        )

    @property
    def _free(self) -> int:
        """Places for sequences."""
        return self._settings.max_running - len(self._batch.running)

    def _new_batch(self) -> Batch:
        return Batch(self._model, self._settings, self._stats, self._pass_lock)

    # On the scheduler's thread

    def _serve(self) -> None:
        going = True
        while going:
            try:
                going = self._turn()
            except BaseException as error:  # a bug, or a panic of the engine: nobody must wait for ever, and the next works may do better
                log.exception("the scheduler failed, and with it all its works")
                self._end(error.with_traceback(None))  # whose frames hold caches
                self._batch = self._new_batch()

    def _turn(self) -> bool:
        """One pass, and what goes with it; False when there will be no other."""
        with self._wake:
            while not (self._waiting or self._batch.running or self._closed):
                self._wake.wait()
            if self._stopping or not (self._waiting or self._batch.running):
                self._end(ShuttingDown("the server is shutting down"))
                return False
        began = time.perf_counter()
        self._batch.drop_cancelled()
        self._requeue(self._batch.take_orphans())
        self._admit()
        for job, event in self._batch.step():
            self._emit(job, event)
        self._requeue(self._batch.take_orphans())
        self._stats.step(time.perf_counter() - began)
        return True

    def _admit(self) -> None:
        """In turns, see above. With the lock for each: no job is to be counted as waiting and as running, or as neither."""
        going = True
        while going:
            with self._wake:
                going = bool(self._waiting) and self._free > 0 and self._batch.admit(self._waiting[0].jobs[0])
                if going:
                    ticket = self._waiting.popleft()
                    ticket.jobs.popleft()
                    if ticket.jobs:
                        self._waiting.append(ticket)

    def _requeue(self, jobs: Sequence[Job]) -> None:
        """To the front: they had their turn."""
        with self._wake:
            for job in reversed(jobs):
                ticket = job.ticket
                if ticket.cancelled:
                    continue
                if ticket.jobs:
                    self._waiting.remove(ticket)
                ticket.jobs.appendleft(job)
                self._waiting.appendleft(ticket)

    def _emit(self, job: Job, event: Event) -> None:
        if job.ticket.cancelled:
            return
        try:
            job.ticket.listener(job.index, event)
        except Exception:
            log.exception("a listener failed; its works end")
            self.cancel(job.ticket)

    def _end(self, error: BaseException) -> None:
        """Fail everything that runs or waits."""
        with self._wake:
            jobs = [running.job for running in self._batch.running] + [job for ticket in self._waiting for job in ticket.jobs]
            self._batch.running.clear()
            self._waiting.clear()
        for job in jobs:
            self._emit(job, Failed(error))

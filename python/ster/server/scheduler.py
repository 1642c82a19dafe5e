"""Continuous batching: one thread runs all sequences of a model, which join and leave between passes.

Each turn: drop what was cancelled, admit what waits and fits, run one pass over every sequence that decodes and a share of the prompts
that do not yet, hand out what came of it. Every row's bits are the same whatever runs beside it, so nothing here shows in an answer.

Requests take turns: one that had a sequence admitted goes behind all others that wait, so that a request of a thousand keeps none of a
few waiting. When the sequence whose turn it is does not fit into memory yet, nobody overtakes it: places and memory come free until it
does, however many small ones arrive. Works in the background have what is left, see `ster.server.background`.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Sequence

from ster.model import Model
from ster.server.admission import check_work
from ster.server.background import SHARE, Background
from ster.server.batch import Batch
from ster.server.passes import Passes
from ster.server.prefixes import plan_key
from ster.server.running import Job, Listener, Ticket
from ster.server.settings import Settings
from ster.server.stats import Stats
from ster.server.turns import Turns
from ster.server.work import Event, Failed, QueueFull, ShuttingDown, Work

log = logging.getLogger("ster.server")
GIVE_WAY_SECONDS = 0.01


class Scheduler:
    """Runs works on `model`. Its methods may be called from any thread; listeners are called on the scheduler's own.

    passes: for several models that share the processor.
    """

    def __init__(self, model: Model, settings: Settings, passes: Passes | None = None) -> None:
        self._model = model
        self._settings = settings
        self._passes = passes or Passes()
        self._next_pass = 0  # of all models', before which this one gives way to them when it has background works alone
        self._stats = Stats()
        self._batch = self._new_batch()  # the thread's own
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()  # guards the rest
        self._waiting = Turns()
        self._background = Background()
        self._numbers = itertools.count()
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

    def submit(self, works: Sequence[Work], listener: Listener, *, background: bool = False) -> Ticket:
        """Queue `works`; `listener` is called with the index of a work and what happened to it. It must not block.

        background: others come first, see `ster.server.background`. Any number may wait. `drain` ends them at once.

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
            if not background and len(self._waiting) >= self._settings.queue + self._free + self._batch.in_background:
                raise QueueFull(f"{len(self._waiting)} requests are waiting")
            ticket = Ticket(listener, background=background)
            context = self._model.context_length
            for index, work in enumerate(works):
                ticket.jobs.append(Job(ticket, index, work, plans[work.edits], context, next(self._numbers)))
            (self._background.turns if background else self._waiting).add(ticket)
            self._wake.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End all works of `ticket`. What they hold is free before the next pass; an event that is on its way may still arrive."""
        with self._wake:
            ticket.cancelled = True
            (self._background if ticket.background else self._waiting).remove(ticket)
            self._wake.notify()

    def drain(self, seconds: float) -> None:
        """Take no more work; give what is there `seconds` to end, then fail it with `ShuttingDown`. What is in the background fails at
        once. Returns when the thread has ended, which a pass may delay."""
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
            background_waiting=len(self._background),
            background_running=batch.in_background,
            cache_bytes=batch.ledger.used,
            pinned_bytes=batch.ledger.pinned,
            cache_budget=batch.ledger.budget,
        )

    @property
    def _free(self) -> int:
        """Places for sequences."""
        return self._settings.max_running - len(self._batch.running)

    def _new_batch(self) -> Batch:
        return Batch(self._model, self._settings, self._stats, self._passes)

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
            while not (self._there or self._closed):
                self._wake.wait()
            self._give_way()
            closed, stopping = self._closed, self._stopping
        if closed:
            self._end_background()
        if stopping or (closed and not self._there):
            self._end(ShuttingDown("the server is shutting down"))
            return False
        began = time.perf_counter()
        self._batch.drop_cancelled()
        self._requeue(self._batch.take_orphans())
        self._lift()
        self._admit()
        self._passes.mark(self, busy=self._batch.busy)
        for job, event in self._batch.step():
            self._emit(job, event)
        self._passes.mark(self, busy=self._batch.busy)
        self._requeue(self._batch.take_orphans())
        self._stats.step(time.perf_counter() - began)
        return True

    @property
    def _there(self) -> bool:
        """There is something to do."""
        return bool(self._waiting or self._batch.running or self._background)

    def _give_way(self) -> None:
        """Let other models have most of the passes while somebody waits for theirs, and nobody for this one's."""
        while (
            not (self._waiting or self._batch.busy or self._closed)
            and self._passes.busy_beside(self)
            and self._passes.count < self._next_pass
        ):
            self._wake.wait(GIVE_WAY_SECONDS)
        self._next_pass = self._passes.count + SHARE

    def _lift(self) -> None:
        with self._wake:
            stuck = self._background.turn(self._batch.running, busy=self._batch.busy or bool(self._waiting))
            if stuck is not None:
                self._background.put_back(self._batch.withdraw(stuck))

    def _admit(self) -> None:
        """In turns, see above. With the lock for each: no job is to be counted as waiting and as running, or as neither."""
        going = True
        while going:
            with self._wake:
                going = self._admit_next()

    def _admit_next(self) -> bool:
        background = self._background
        if background.due is not None:
            if going := self._fit(background.due):
                background.due = None
            return going
        if self._waiting.first is not None:
            if going := self._fit(self._waiting.first):
                self._waiting.take()
            return going
        if background.turns.first is None or self._free <= 0 or self._batch.in_background >= max(1, self._settings.max_running // 2):
            return False
        if going := self._batch.admit(background.turns.first):
            background.turns.take()
        return going

    def _fit(self, job: Job) -> bool:
        """Admit `job`, in place of what runs in the background where it has to be."""
        while not (self._free > 0 and self._batch.admit(job)):
            given_up = self._batch.give_up()
            if given_up is None:
                return False
            self._stats.given_up += 1
            if not given_up.ticket.cancelled:
                self._background.put_back(given_up)
        return True

    def _requeue(self, jobs: Sequence[Job]) -> None:
        """To the front: they had their turn."""
        with self._wake:
            for job in reversed(jobs):
                if not job.ticket.cancelled:
                    (self._background if job.ticket.background else self._waiting).put_back(job)

    def _emit(self, job: Job, event: Event) -> None:
        if job.ticket.cancelled or not job.tells(event):
            return
        try:
            job.ticket.listener(job.index, event)
        except Exception:
            log.exception("a listener failed; its works end")
            self.cancel(job.ticket)

    def _end(self, error: BaseException) -> None:
        """Fail everything that runs or waits."""
        with self._wake:
            jobs = [running.job for running in self._batch.running] + [*self._waiting.jobs(), *self._background.jobs()]
            self._batch.running.clear()
            self._waiting.clear()
            self._background.clear()
            self._passes.mark(self, busy=False)
        self._fail(jobs, error)

    def _end_background(self) -> None:
        """Those that run have left, and those that waited for their caches are orphans."""
        with self._wake:
            jobs = [self._batch.withdraw(running) for running in list(self._batch.running) if running.job.ticket.background]
            jobs += self._background.jobs()
            self._background.clear()
        self._fail(jobs, ShuttingDown("the server is shutting down"))

    def _fail(self, jobs: Iterable[Job], error: BaseException) -> None:
        for job in jobs:
            self._emit(job, Failed(error))

"""The rows of shards computed by a Ray cluster: workers with an engine each, this process reading prompts and writing files.

These are actors, not a dataset of Ray Data: that has to know all of its input before it begins, for which it takes some 75 kB a shard in
this process, and here memory does not grow with the prompts. Workers are handed shards one by one instead, and no more than wait to be
written; results wait in the cluster's object store, on the node that made them, until it is their turn.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ster import _native
from ster.errors import InputError, SterError, WorkerError
from ster.harvest.corpus import Corpus, Shard
from ster.harvest.directions import Directions
from ster.harvest.ray_connection import connected, last_line, need_ray
from ster.harvest.ray_worker import Job, Worker
from ster.harvest.shards import Form
from ster.harvest.stats import Rows
from ster.model import Model
from ster.readable import Readable

AT_ONCE = 2  # shards at a worker: one that it computes and one that waits, so that it never does
AHEAD = 3  # for every worker, begun and not written: what a slow one may hold up
RESTARTS = 3  # of a worker that died, and of the shard that it had
POLL = 0.5  # seconds: how soon Ctrl-C is heard
PATIENCE = 60.0  # seconds without any worker, before that is said


def job_for(model: Readable, form: Form, directions: Directions | None) -> Job:
    """
    Raises:
        InputError: `model` is not a checkpoint that others can open too.
    """
    if not isinstance(model, Model):
        raise InputError(f"a harvest on Ray takes a checkpoint that every worker can open, and {model.name} is none")
    return Job(
        path=str(model.path.absolute()),
        name=model.name,
        revision=model.revision,
        version=_native.__version__,
        precision=model.precision,
        weights_hash=model.weights_hash,
        config_hash=model.config_hash,
        threads=model.engine.threads,
        form=form,
        directions=directions,
    )


@dataclass(eq=False)
class _Actor:
    """opening: the answer of `open`, None once it has come. busy: answers that have not come yet."""

    actor: Any
    opening: Any
    busy: set[Any] = field(default_factory=set)


@contextlib.contextmanager
def started(address: str, job: Job, count: int | None, say: Callable[[str], object]) -> Iterator[Workers]:
    """Workers on the cluster at `address`, which end with the block. See `connected` and `Workers`."""
    theirs = need_ray().is_initialized()
    with connected(address) as ray:
        workers = Workers(ray, job, count, say)
        try:
            yield workers
        finally:
            if theirs:  # with a connection of ours they end anyway, and Ray does not complain of what they left undone
                workers.end()


class Workers:
    """Workers that are starting. say: called with a sentence.

    Raises:
        InputError: more of them than the cluster has processors for, or not one.
    """

    def __init__(self, ray: Any, job: Job, count: int | None, say: Callable[[str], object]) -> None:
        room = sum(int(node["Resources"].get("CPU", 0)) // job.threads for node in ray.nodes() if node["Alive"])
        if room < (count or 1):
            asked = f"{count or 1} worker{'s' if (count or 1) > 1 else ''} of {job.threads} thread{'s' if job.threads > 1 else ''}"
            raise InputError(f"the Ray cluster has room for {room}, not for {asked}", "ask for fewer threads or workers, or add nodes")
        self.ray, self.say = ray, say
        remote = ray.remote(num_cpus=job.threads, max_restarts=RESTARTS, max_task_retries=RESTARTS)(Worker)
        actors = [remote.remote(job) for _ in range(count or room)]
        self.workers = [_Actor(actor, actor.open.options(max_task_retries=0).remote()) for actor in actors]
        self.start: float | None = time.monotonic()

    def end(self) -> None:
        for worker in self.workers:
            with contextlib.suppress(Exception):  # the cluster may be what failed
                self.ray.kill(worker.actor)

    def free(self) -> _Actor | None:
        """The worker with the least to do, None where all have enough.

        Raises:
            SterError: one that could not open the model, or died more often than it is started again.
        """
        watched = self.watched()
        done = set(self.ray.wait(watched, num_returns=len(watched), timeout=0, fetch_local=False)[0]) if watched else set()
        for worker in self.workers:
            worker.busy -= done
            if worker.opening in done:
                self.answer(worker.opening)
                worker.opening = None
        opened = [worker for worker in self.workers if worker.opening is None]
        if opened:
            self.start = None
        elif self.start is not None and time.monotonic() - self.start > PATIENCE:
            self.say("no Ray worker has started yet: the cluster may be busy")
            self.start = None
        least = min(opened, key=lambda worker: len(worker.busy), default=None)
        return least if least is not None and len(least.busy) < AT_ONCE else None

    def wait(self) -> None:
        """Until one of them has opened the model, or refused.

        Raises:
            SterError: see `free`.
        """
        while self.free() is None:
            self.ray.wait(self.watched(), timeout=POLL, fetch_local=False)

    def watched(self) -> list[Any]:
        """Every answer that is still to come."""
        opening = [worker.opening for worker in self.workers if worker.opening is not None]
        return [*opening, *(answer for worker in self.workers for answer in worker.busy)]

    def answer(self, reference: Any) -> Any:
        """
        Raises:
            SterError: what the worker refused. WorkerError: it died.
        """
        try:
            found = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError:
            raise  # a bug, whose traceback says where
        except self.ray.exceptions.RayError as error:
            hint = "the same command goes on from the shards that are on disk"
            if "No module named" in str(error):
                hint = "install the same Ster on every node"
            raise WorkerError(f"a Ray worker failed: {last_line(error)}", hint) from None
        if isinstance(found, SterError):
            raise found
        return found


@dataclass(eq=False)
class _Begun:
    """answer: None until a worker has the shard."""

    shard: Shard
    answer: Any = None


class OnRay:
    """See `Computing`. report: called with the tokens of a shard when its rows are here."""

    def __init__(self, workers: Workers, corpus: Corpus, report: Callable[[int], object]) -> None:
        self.workers, self.corpus, self.report = workers, corpus, report
        self.ahead = AHEAD * len(workers.workers)
        self.todo: deque[_Begun] = deque()
        workers.wait()  # what they refuse is then refused before anything is written

    def begin(self, shard: Shard) -> Callable[[], list[Rows]]:
        begun = _Begun(shard)
        self.todo.append(begun)
        self._hand_out()
        return partial(self._rows, begun)

    def _hand_out(self) -> None:
        while (worker := self.workers.free()) is not None and self.todo:
            begun = self.todo.popleft()
            begun.answer = worker.actor.rows.remote(*self.corpus.read(begun.shard))
            worker.busy.add(begun.answer)

    def _rows(self, begun: _Begun) -> list[Rows]:
        while not self._arrived(begun):
            pass
        rows: list[Rows] = self.workers.answer(begun.answer)
        self.report(begun.shard.tokens)
        return rows

    def _arrived(self, begun: _Begun) -> bool:
        """Wait a little for what is next: some answer to come, or the one that is asked for to be fetched from its node."""
        self._hand_out()
        coming = self.workers.watched()
        if begun.answer is None or begun.answer in coming:
            self.workers.ray.wait(coming, timeout=POLL, fetch_local=False)
            return False
        return bool(self.workers.ray.wait([begun.answer], timeout=POLL)[0])

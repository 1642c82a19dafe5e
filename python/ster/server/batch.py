"""The sequences that run: who may join with which memory and whose beginning, what the next pass holds, what came of it. No threads."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence

from ster import _native
from ster.errors import SterError
from ster.model import Model
from ster.server.background import SHARE
from ster.server.memory import BLOCK, Ledger, blocks_of
from ster.server.passes import Passes
from ster.server.prefixes import Kept, Prefixes, common
from ster.server.running import Job, Running
from ster.server.settings import Settings
from ster.server.stats import Stats
from ster.server.work import Event, Failed, Token

LOGIT_BYTES = 64 << 20  # of logits for scored prompt rows, in one pass
RANKED_NUMBERS = 1 << 20  # prompt rows x vocabulary ranked after one pass: a tenth of a second, in which nobody decodes
WORTH_WAITING = 64  # tokens another sequence is about to run: more than a pass costs
WORTH_WAITING_TOGETHER = 16  # the choices of one request start at once, and all but one gain

Plan = list[tuple[Running, int]]
Told = list[tuple[Job, Event]]
log = logging.getLogger("ster.server")


class Batch:
    """passes: held during a pass. stats: counted on."""

    def __init__(self, model: Model, settings: Settings, stats: Stats, passes: Passes) -> None:
        self._model = model
        self._settings = settings
        self._stats = stats
        self._passes = passes
        self._chunkable = model.engine.chunkable
        self.running: list[Running] = []
        self.ledger = Ledger(settings.kv_cache_bytes, model.engine.cache_block_bytes)
        self.prefixes = Prefixes(self.ledger)
        self._refused: Job | None = None  # since nobody left
        self._shared = 0  # passes in which background works had to stand back

    @property
    def busy(self) -> bool:
        """Something runs that somebody waits for."""
        return any(not running.job.ticket.background for running in list(self.running))

    @property
    def in_background(self) -> int:
        """Sequences that make way for others."""
        return sum(running.background for running in list(self.running))

    # Who runs

    def admit(self, job: Job) -> bool:
        """Take the memory that `job` may come to need, and let it run; False when that much is not there yet."""
        if job is self._refused:
            return False
        origin, shared = self._origin(job)
        blocks = self.ledger.pin(origin.blocks[: shared // BLOCK] if origin else [])
        more = blocks_of(job.rows) - len(blocks)
        held = len(job.work.layers) * job.rows * self._model.hidden_size * 4
        size = more * self.ledger.block + held
        if not self.ledger.fits(size):
            self.ledger.unpin(blocks)
            self._refused = job
            return False
        if isinstance(origin, Kept):
            self.prefixes.touch(origin)
        self.prefixes.make_room(size)
        blocks += self.ledger.take(more)
        self.ledger.take_bytes(held)
        running = Running(job, self._model, self._model.engine.cache(), blocks, held)
        if isinstance(origin, Running) and origin.ran < shared:
            running.wait_for(origin, shared)
        elif origin is not None:
            self._fork(running, origin.cache, shared)
        self.running.append(running)
        job.said = 0
        return True

    def give_up(self) -> Job | None:
        """End the background sequence that was admitted last, so that its place and memory are free; None: there is none."""
        running = next((running for running in reversed(self.running) if running.background), None)
        return None if running is None else self.withdraw(running)

    def withdraw(self, running: Running) -> Job:
        """End it; what it has run is kept while there is room. It is to be admitted again."""
        self._retire(running, keep=True)
        return running.job

    def drop_cancelled(self) -> None:
        for running in [running for running in self.running if running.job.ticket.cancelled]:
            # Only others that wait for its cache give it a reason to stay.
            self._retire(running, keep=any(other.source is running for other in self.running))

    def take_orphans(self) -> list[Job]:
        """Those whose source went away before it ran what they wait for; they must be admitted again."""
        orphans = []
        for running in list(self.running):  # a source comes before those that wait for it
            if running.source is not None and running.source.gone:
                self._retire(running, keep=False)
                orphans.append(running.job)
        return orphans

    def _retire(self, running: Running, *, keep: bool) -> None:
        """It runs no more; `keep`: its cache may serve others."""
        running.gone = True
        self._refused = None
        if keep and running.source is None and running.job.lends and self._chunkable:
            self.prefixes.add(running.job.plan, running.tokens(), running.cache, running.blocks)
        self.ledger.unpin(running.blocks)
        self.ledger.take_bytes(-running.held)
        self.running.remove(running)  # last: who counts those that run finds the memory of the others free

    def _origin(self, job: Job) -> tuple[Kept | Running | None, int]:
        """Whose cache `job` starts from, and with how many tokens. The last token of a prompt always runs: its logits are needed."""
        if not (job.may_fork and self._chunkable):
            return None, 0
        beginning = job.tokens[:-1]
        origin: Kept | Running | None
        origin, shared = self.prefixes.find(job.plan, beginning)
        alike = [other for other in self.running if other.job.plan == job.plan and other.job.lends]
        counts = [common(other.job.tokens, beginning) for other in alike]
        for other, count in zip(alike, counts, strict=True):
            if min(count, other.ran) > shared and min(count, other.ran) >= other.cache.shortest:
                origin, shared = other, min(count, other.ran)
        if self._model.engine.sliding_window is not None:  # once it has run what is shared, it may have forgotten some of it
            return origin, shared
        now = shared
        for other, count in zip(alike, counts, strict=True):
            if other.background and not (job.ticket.background and not job.lifted):
                continue  # it may stand still for long
            worth = WORTH_WAITING_TOGETHER if other.job.ticket is job.ticket else WORTH_WAITING
            if count > shared and count >= now + worth:
                origin, shared = other, count
        return origin, shared

    def _fork(self, running: Running, cache: _native.Cache, shared: int) -> None:
        running.fork(cache, shared)
        self._stats.reused += shared

    # What runs

    def step(self) -> Told:
        """One pass; what there is to tell of it. Who is done has left, and its memory is free."""
        told: list[tuple[Running, list[Event]]] = []
        failed: Told = []
        for running, count, output in self._forward(self._plan(), failed):
            try:
                told.append((running, running.advance(count, output)))
            except Exception as error:  # such as a tokenizer that cannot decode what was chosen
                failed.append(self._fail(running, error))
        # Before those that are done leave: others may have waited for their prompt.
        for running in self.running:
            source = running.source
            if source is not None and not source.gone and source.ran >= running.shared:
                self._fork(running, source.cache, running.shared)
        for running, events in told:
            self._stats.decoded += sum(isinstance(event, Token) for event in events)
            if running.done:
                self._retire(running, keep=True)
        return failed + [(running.job, event) for running, events in told for event in events]

    def _plan(self) -> Plan:
        """Every sequence that decodes, and as much of the prompts as there is room for; of those in the background, see there."""
        ready = [running for running in self.running if running.source is None]
        divide = share_out if self._chunkable else whole
        plan: Plan = []
        rows = max(1, LOGIT_BYTES // (4 * self._model.vocab_size))
        for group, room in self._groups(ready):
            plan += [(running, 1) for running in group if not running.left]
            prompts = [running for running in group if running.left]
            shares = divide([self._most(running) for running in prompts], room)
            for running, share in zip(prompts, shares, strict=True):
                if running.scores_prompt and self._chunkable:
                    share = min(share, rows)
                    rows -= share
                if share:
                    plan.append((running, share))
        assert plan or not self.running
        return plan

    def _groups(self, ready: list[Running]) -> list[tuple[list[Running], int]]:
        """Who is in the next pass, with how many tokens of prompts."""
        room = self._settings.prefill_tokens
        if not self.busy:
            return [(ready, room)]
        groups = [([running for running in ready if not running.background], room)]
        if len(groups[0][0]) < len(ready):
            self._shared += 1
            if self._shared % SHARE == 0:
                groups.append(([running for running in ready if running.background], max(1, room // SHARE)))
        return groups

    def _most(self, running: Running) -> int:
        """How many tokens of its prompt may run in one pass."""
        if self._chunkable and running.job.work.prompt_logprobs == -1:
            return min(running.left, max(1, RANKED_NUMBERS // self._model.vocab_size))
        return running.left

    def _forward(self, plan: Plan, failed: Told) -> list[tuple[Running, int, _native.Output]]:
        """One pass, again without the one at fault when it fails; what came of the others. The engine leaves caches as they were."""
        while plan:
            try:
                with self._passes:
                    outputs = self._model.engine.forward([running.sequence(count) for running, count in plan])
            except Exception as error:
                at = culprit(error) if len(plan) > 1 else 0
                if at is None:
                    log.warning("a pass failed, and its sequences run one by one", exc_info=error)
                    return [each for item in plan for each in self._forward([item], failed)]
                failed.append(self._fail(plan[at][0], error))
                plan = plan[:at] + plan[at + 1 :]
            else:
                self._stats.passes += 1
                self._stats.prefilled += sum(count for running, count in plan if running.left)
                return [(*item, output) for item, output in zip(plan, outputs, strict=True)]
        return []

    def _fail(self, running: Running, error: Exception) -> tuple[Job, Event]:
        self._retire(running, keep=False)
        if isinstance(error, SterError):
            error = type(error)(re.sub(r"\bsequence \d+", "the text", error.message), error.hint)
        else:
            log.error("a sequence failed", exc_info=error)
        # The frames of a traceback hold caches and rows, and this error may be kept.
        return running.job, Failed(error.with_traceback(None))


def culprit(error: Exception) -> int | None:
    """Which sequence of a pass the engine's refusal names."""
    found = re.search(r"\bsequence (\d+)", str(error)) if isinstance(error, SterError) else None
    return int(found[1]) if found else None


def share_out(lefts: Sequence[int], room: int) -> list[int]:
    """How many tokens of each prompt run in a pass of `room`; `lefts`: how many each has left, the oldest first.

    Half the room is the oldest's, so that it comes to its end whatever else arrives; then the shortest come first, for they wait least
    for each other; what they leave goes to the others.

    >>> share_out([2000, 20, 300], 256)
    [128, 20, 108]
    >>> share_out([2000, 20], 256)
    [236, 20]
    """
    shares = [0] * len(lefts)
    if lefts:
        shares[0] = min(lefts[0], -(-room // 2))
        room -= shares[0]
    for index in sorted(range(len(lefts)), key=lambda index: lefts[index]):
        more = min(lefts[index] - shares[index], room)
        shares[index] += more
        room -= more
    return shares


def whole(lefts: Iterable[int], room: int) -> list[int]:
    """The same for prompts that may not be cut: the oldest in any case, others while there is room."""
    shares: list[int] = []
    for left in lefts:
        fits = not shares or sum(shares) + left <= room
        shares.append(left if fits else 0)
    return shares

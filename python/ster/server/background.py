"""Works that nobody waits for at the other end of a connection: they have what the others leave, and move on all the same.

They are admitted when no other waits, to a part of the places, and given up when another needs their place or memory: then they begin
again, and what they have told already is not told again. Beside others they have a pass now and then, with a small share of it for their
prompts. That alone could keep them waiting for ever on a server that is always full, so the oldest of them, after `PATIENCE` turns in
which others ran, is lifted: it has the next place, is in every pass, and is not given up. One at a time is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ster.server.running import Job, Running, Ticket
from ster.server.turns import Turns

SHARE = 8  # one pass of so many has background works in it, while others run; and that part of the tokens of prompts
PATIENCE = 64


class Background:
    """Those that wait, and the one that is lifted. No lock of its own."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.due: Job | None = None  # the one that is lifted, until it has its place
        self._lifted: Job | None = None
        self._passed = 0

    def __len__(self) -> int:
        """Works that wait."""
        return len(list(self.jobs()))

    def jobs(self) -> Iterator[Job]:
        if self.due is not None:
            yield self.due
        yield from self.turns.jobs()

    def put_back(self, job: Job) -> None:
        if job.lifted:
            self.due = job
        else:
            self.turns.put_back(job)

    def remove(self, ticket: Ticket) -> None:
        self.turns.remove(ticket)
        if self.due is not None and self.due.ticket is ticket:
            self.due = None

    def clear(self) -> None:
        self.turns.clear()
        self.due = None

    def turn(self, running: Iterable[Running], *, busy: bool) -> Running | None:
        """One more turn, in which others ran or waited (`busy`) or did not. It may lift a work; one that waits for another's cache, which
        has to leave the batch for that, is returned."""
        if self._lifted is not None and not (self._lifted.ended or self._lifted.ticket.cancelled):
            return None
        self._lifted = None
        candidates = {run.job: run for run in running if run.background and not run.job.ticket.cancelled}
        oldest = min((*candidates, *self.jobs()), key=lambda job: job.number, default=None)
        if oldest is None:
            self._passed = 0
            return None
        self._passed += busy
        if self._passed < PATIENCE:
            return None
        self._passed = 0
        self._lifted = oldest
        oldest.lifted = True
        if oldest not in candidates:
            self.turns.pick(oldest)
            self.due = oldest
            return None
        source = candidates[oldest].source
        return candidates[oldest] if source is not None and source.background else None

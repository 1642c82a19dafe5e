"""Submissions that wait: they take turns, a work each."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

from ster.server.running import Job, Ticket


class Turns:
    """Tickets with jobs that wait. The first has its turn, and goes behind all others with what it has left. No lock of its own."""

    def __init__(self) -> None:
        self._tickets: deque[Ticket] = deque()

    def __len__(self) -> int:
        """Submissions."""
        return len(self._tickets)

    def jobs(self) -> Iterator[Job]:
        for ticket in self._tickets:
            yield from ticket.jobs

    @property
    def first(self) -> Job | None:
        return self._tickets[0].jobs[0] if self._tickets else None

    def add(self, ticket: Ticket) -> None:
        if ticket.jobs:
            self._tickets.append(ticket)

    def take(self) -> None:
        """The first runs."""
        ticket = self._tickets.popleft()
        ticket.jobs.popleft()
        self.add(ticket)

    def pick(self, job: Job) -> None:
        """This one waits here no more, whoever's turn it is."""
        job.ticket.jobs.remove(job)
        if not job.ticket.jobs:
            self._tickets.remove(job.ticket)

    def put_back(self, job: Job) -> None:
        """To the front: it had its turn."""
        if job.ticket.jobs:
            self._tickets.remove(job.ticket)
        job.ticket.jobs.appendleft(job)
        self._tickets.appendleft(job.ticket)

    def remove(self, ticket: Ticket) -> None:
        ticket.jobs.clear()
        with contextlib.suppress(ValueError):
            self._tickets.remove(ticket)

    def clear(self) -> None:
        self._tickets.clear()

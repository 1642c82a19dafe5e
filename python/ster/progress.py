"""Saying how far a long call is: a bar on a terminal or in a notebook, a plain line now and then elsewhere, or the caller's function."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Report = Callable[[int, int], object]
Progress = bool | Report | None
Unit = Literal["", "bytes"]

PLAIN_EVERY = 2.0  # seconds between plain lines, at least
PLAIN_SHARE = 0.05  # and of the time that has passed, so that a day of work is not a thousand lines


@contextmanager
def reporter(progress: Progress, label: str, unit: Unit = "") -> Iterator[Report]:
    """A function to call with (done, total).

    Args:
        progress: False or None: silent. True: on stderr, as suits it. A function is called as it is.
        label: what is being done, one word.
        unit: what is counted, where it is not things.
    """
    if callable(progress):
        yield progress
    elif not progress or sys.stderr is None:  # None: closed before Python began
        yield lambda done, total: None
    elif sys.stderr.isatty() or "ipykernel" in sys.modules:
        with _bar(label, unit) as report:
            yield report
    else:
        yield _plain(label, unit)


def in_bytes(number: float) -> str:
    """
    >>> in_bytes(630_424), in_bytes(16_060_522_240)
    ('630.4 kB', '16.1 GB')
    """
    units = ["GB", "MB", "kB"]
    while number >= 999.95 and units:
        number /= 1000
        unit = units.pop()
    return f"{number:.0f} B" if len(units) == 3 else f"{number:.1f} {unit}"


def _plain(label: str, unit: Unit) -> Report:
    """A line now and then: a short call says nothing, and a log stays short."""
    last = start = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= max(PLAIN_EVERY, PLAIN_SHARE * (now - start)):
            last = now
            counts = f"{in_bytes(done)} of {in_bytes(total)}" if unit else f"{done}/{total}"
            print(f"{label}: {counts}", file=sys.stderr, flush=True)

    return report


@contextmanager
def _bar(label: str, unit: Unit) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    counts = DownloadColumn() if unit else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), counts, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield report

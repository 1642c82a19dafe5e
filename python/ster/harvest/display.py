"""What a harvest says while it runs: what it will take before it starts, then tokens a second and the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ster.progress import PLAIN_EVERY, PLAIN_SHARE, Progress

EARLY = 1.0  # seconds: a speed before that says little


class Display:
    """Counts tokens. Those of kept shards are done, but say nothing about the speed."""

    def __init__(self, show: Callable[[Display], object], say: Callable[[str], object]) -> None:
        self.show, self.note = show, say
        self.read = 0  # prompts, before the start
        self.total = self.done = self.computed = 0
        self.start = time.monotonic()

    def reading(self, prompts: int) -> None:
        self.read = prompts
        if prompts % 256 == 0:
            self.show(self)

    def begin(self, total: int) -> None:
        self.total, self.start = total, time.monotonic()
        self.show(self)

    def keep(self, tokens: int) -> None:
        self.done += tokens
        self.show(self)

    def compute(self, tokens: int) -> None:
        self.computed += tokens
        self.keep(tokens)

    def end(self) -> None:
        self.show(self)

    @property
    def speed(self) -> str:
        """`812 tokens/s, 3 min left`, once there is something to tell from."""
        passed = time.monotonic() - self.start
        if not self.computed or passed < EARLY:
            return ""
        rate = self.computed / passed
        left = f", {duration((self.total - self.done) / rate)} left" if self.done < self.total else ""
        return f"{rate:,.0f} tokens/s{left}"


def duration(seconds: float) -> str:
    """
    >>> [duration(each) for each in (0.4, 75, 5000, 200_000)]
    ['1 s', '75 s', '1 h 23 min', '2 d 7 h']
    """
    if seconds < 120:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // (24 * 60)} d {minutes // 60 % 24} h"


@contextmanager
def display(progress: Progress) -> Iterator[Display]:
    """progress: None or False: silent. True: on stderr. A function: called with (tokens done, tokens in all)."""
    if callable(progress):
        report = progress
        yield Display(lambda state: report(state.done, state.total) if state.total else None, _silent)
    elif not progress or sys.stderr is None:
        yield Display(_silent, _silent)
    elif sys.stderr.isatty() or "ipykernel" in sys.modules:
        with _bar() as found:
            yield found
    else:
        yield Display(_plain(), _to_stderr)


def _silent(_: object) -> None:
    pass


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _plain() -> Callable[[Display], None]:
    """A line now and then, as everywhere (see `ster.progress`)."""
    last = start = time.monotonic()

    def show(state: Display) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= max(PLAIN_EVERY, PLAIN_SHARE * (now - start)):
            last = now
            if state.total:
                speed = f", {state.speed}" if state.speed else ""
                _to_stderr(f"harvest: {state.done:,} of {state.total:,} tokens{speed}")
            else:
                _to_stderr(f"harvest: {state.read:,} prompts read")

    return show


@contextmanager
def _bar() -> Iterator[Display]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns: tuple[Any, ...] = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[counts]}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("harvest", total=None, counts="")

        def show(state: Display) -> None:
            if not state.total:
                bar.update(task, counts=f"{state.read:,} prompts read")
                return
            speed = f"  {state.speed}" if state.speed else ""
            bar.update(task, completed=state.done, total=state.total, counts=f"{state.done:,}/{state.total:,} tokens{speed}")

        yield Display(show, lambda text: console.print(text, markup=False, highlight=False))

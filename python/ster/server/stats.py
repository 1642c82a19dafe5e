"""What a scheduler counts."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace

STEP_BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # seconds


@dataclass
class Stats:
    """waiting: requests; running: sequences. background_waiting, background_running: sequences in the background; the latter are among
    those that run. given_up: how many of them had to begin again. cache_bytes: of caches, kept prefixes and captured rows, of the
    `cache_budget`; pinned_bytes: that part of it which running sequences hold.

    passes; prefilled, decoded, reused: tokens of prompts that ran, new tokens, tokens of prompts that another's cache had.
    steps: how many turns of the loop took at most `STEP_BOUNDS[i]` seconds and more than the one before; the last: longer ones.
    """

    waiting: int = 0
    running: int = 0
    background_waiting: int = 0
    background_running: int = 0
    given_up: int = 0
    cache_bytes: int = 0
    pinned_bytes: int = 0
    cache_budget: int = 0
    passes: int = 0
    prefilled: int = 0
    decoded: int = 0
    reused: int = 0
    steps: list[int] = field(default_factory=lambda: [0] * (len(STEP_BOUNDS) + 1))
    step_seconds: float = 0.0

    def step(self, seconds: float) -> None:
        """One turn took so long."""
        self.steps[bisect_left(STEP_BOUNDS, seconds)] += 1
        self.step_seconds += seconds

    def now(self, **gauges: int) -> Stats:
        """A copy that counts no further. gauges: what there is now."""
        return replace(self, **gauges, steps=list(self.steps))

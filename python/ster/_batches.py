"""Packing sequences into forward passes."""

from __future__ import annotations

from collections.abc import Sequence


def plan_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of `lengths` in batches of at most `budget` tokens; a sequence longer than that goes alone.

    Longest first, so that batches are even and the last one, not the first, is small. Results do not depend on the packing.

    >>> plan_batches([3, 9, 4], 8)
    [[1], [2, 0]]
    """
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or lengths[index] > room:
            batches.append([])
            room = budget
        batches[-1].append(index)
        room -= lengths[index]
    return batches

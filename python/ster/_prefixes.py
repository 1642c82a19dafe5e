"""Which token sequences begin alike, so that the common beginning runs once.

Chat templates and contrastive pairs share most of their tokens. Through the KV cache the rest gives the same bits, so sharing costs no more
than another pass: a saving of fewer tokens than that is left alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

WORTHWHILE = 64  # tokens: what one more pass may cost, in the time of a row
GROUP_WORTHWHILE = 16  # the groups of a batch share one pass


@dataclass(frozen=True)
class Group:
    """members: indices of sequences whose first `shared` tokens are the same."""

    members: tuple[int, ...]
    shared: int


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences share at their start.

    >>> common_prefix([5, 6, 7], [5, 6, 8, 9])
    2
    """
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def plan_prefixes(sequences: Sequence[Sequence[int]]) -> tuple[int, list[Group]]:
    """How many tokens all `sequences` share, and groups that share more; every sequence is in one group, alone if need be.

    At least one token of every sequence is left to run: its own last one.

    >>> plan_prefixes([[*range(40), 1], [*range(40), 2], [7]])
    (0, [Group(members=(0, 1), shared=40), Group(members=(2,), shared=0)])
    """
    order = sorted(range(len(sequences)), key=lambda i: list(sequences[i]))
    # In sorted order the common prefix of a run is the least of those of its neighbours.
    room = [len(sequence) - 1 for sequence in sequences]
    like = [min(common_prefix(sequences[a], sequences[b]), room[a], room[b]) for a, b in itertools.pairwise(order)]
    root = min(like, default=0)
    if root * (len(sequences) - 1) < WORTHWHILE:
        root = 0
    groups: list[Group] = []
    members, shared = order[:1], room[order[0]] if order else 0
    for n, index in enumerate(order[1:]):
        joint = min(shared, like[n])
        apart = (len(members) - 1) * (shared - root) + (like[n + 1] - root if n + 1 < len(like) else 0)
        # Join when that saves more tokens than staying apart, the next one's own prospects included.
        if len(members) * (joint - root) >= apart and joint > root:
            members, shared = [*members, index], joint
        else:
            groups += _closed(members, shared, root)
            members, shared = [index], room[index]
    return root, groups + _closed(members, shared, root)


def _closed(members: Sequence[int], shared: int, root: int) -> list[Group]:
    """One group, or none worth the trouble: every member alone."""
    if (len(members) - 1) * (shared - root) >= GROUP_WORTHWHILE:
        return [Group(tuple(members), shared)]
    return [Group((member,), root) for member in members]

"""Caches of sequences that ended, kept so that one which begins alike need not run its beginning again.

The values in a cache depend on the tokens and on what is added to the stream, so only sequences under the same steering plan share:
the same bytes of the same edits. A fork gives the same bits as running the tokens again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ster import _native
from ster.server.memory import Block, Ledger, blocks_of

WORTHWHILE = 16  # tokens: a fork copies half a block on average
MAX_KEPT = 256  # each is compared with every prompt that comes

Tokens = NDArray[np.uint32]


def plan_key(edits: Sequence[_native.Edit]) -> bytes:
    """The same for edits that add the same bits in the same order."""
    if not edits:
        return b""
    digest = hashlib.blake2b(digest_size=16)
    for edit in edits:
        digest.update(repr((edit.layer, edit.scale, edit.positions, edit.norm_match, edit.vectors.shape)).encode())
        digest.update(edit.vectors.data)
    return digest.digest()


def common(a: Tokens, b: Tokens) -> int:
    """How many tokens both begin with."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


class Kept:
    """tokens: the rows that `cache` holds. blocks: what the ledger counts for them."""

    def __init__(self, plan: bytes, tokens: Tokens, cache: _native.Cache, blocks: list[Block]) -> None:
        self.plan = plan
        self.tokens = tokens
        self.cache = cache
        self.blocks = blocks


class Prefixes:
    """Kept caches, the least recently used first."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._kept: dict[int, Kept] = {}  # by id(); dicts keep the order

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, plan: bytes, tokens: Tokens) -> tuple[Kept | None, int]:
        """The cache that shares most tokens with `tokens`, and how many; (None, 0) when that is not worth a fork."""
        best, shared = None, WORTHWHILE - 1
        for kept in self._kept.values():
            if kept.plan == plan and (count := common(kept.tokens, tokens)) > shared and count >= kept.cache.shortest:
                best, shared = kept, count
        return best, shared if best else 0

    def touch(self, kept: Kept) -> None:
        """It was used just now."""
        self._kept[id(kept)] = self._kept.pop(id(kept))

    def add(self, plan: bytes, tokens: Tokens, cache: _native.Cache, blocks: Sequence[Block]) -> None:
        """Keep `cache`, which holds `tokens` in the first of `blocks`, in place of those that hold only a beginning of it."""
        if len(tokens) < WORTHWHILE:
            return
        for kept in list(self._kept.values()):
            if kept.plan != plan:
                continue
            shared = common(kept.tokens, tokens)
            if shared == len(tokens):
                self.touch(kept)
                return
            if shared == len(kept.tokens):
                self._drop(kept)
        kept = Kept(plan, tokens, cache, self._ledger.keep(blocks[: blocks_of(len(tokens))]))
        self._kept[id(kept)] = kept
        if len(self._kept) > MAX_KEPT:
            self._drop(next(iter(self._kept.values())))

    def make_room(self, size: int) -> None:
        """Drop the oldest ones that free something until `size` more bytes are within the budget."""
        for kept in list(self._kept.values()):
            if self._ledger.free >= size:
                return
            if self._ledger.gain(kept.blocks):
                self._drop(kept)

    def _drop(self, kept: Kept) -> None:
        del self._kept[id(kept)]
        self._ledger.unkeep(kept.blocks)

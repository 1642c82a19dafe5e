"""How much memory caches and captured rows may take, and who holds which part of it.

The engine keeps keys and values in blocks of `BLOCK` positions; forks share full blocks and copy one that they write to. The ledger
counts such blocks by who holds them: a block that several sequences share counts once. Everything a sequence may come to need is
taken when it is admitted, so that nothing which runs ever runs out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ster.errors import InputError
from ster.model import Model

BLOCK = 64  # positions, `kernels::attention::BLOCK`


def check_budget(model: Model, budget: int) -> None:
    """
    Raises:
        InputError: nothing could ever run.
    """
    if budget < (block := model.engine.cache_block_bytes):
        raise InputError(
            f"{BLOCK} positions of {model.name} need {block / 2**20:.1f} MiB of cache, and there are {budget / 2**20:.1f} MiB",
            "raise --kv-cache-gb, which is shared out among the models",
        )


def blocks_of(positions: int) -> int:
    """How many blocks hold so many positions."""
    return -(-positions // BLOCK)


class Block:
    """One block of cache, allocated or promised: how many running sequences and how many kept prefixes have it."""

    __slots__ = ("kept", "running")

    def __init__(self) -> None:
        self.running = 1
        self.kept = 0


class Ledger:
    """budget, used, pinned: bytes; pinned is what running sequences hold, the rest of `used` can be freed by dropping kept prefixes."""

    def __init__(self, budget: int, block: int) -> None:
        self.budget = budget
        self.block = block
        self.used = 0
        self.pinned = 0

    def fits(self, size: int) -> bool:
        """So many more bytes fit once enough kept prefixes are dropped."""
        return self.pinned + size <= self.budget

    @property
    def free(self) -> int:
        """Bytes of the budget that nobody has."""
        return self.budget - self.used

    def take(self, count: int) -> list[Block]:
        """So many new blocks for a running sequence."""
        self._add(count * self.block, count * self.block)
        return [Block() for _ in range(count)]

    def take_bytes(self, size: int) -> None:
        """Memory that is no cache; negative gives it back."""
        self._add(size, size)

    def pin(self, blocks: Sequence[Block]) -> list[Block]:
        """One more running sequence has these."""
        for block in blocks:
            self._add(0 if block.running or block.kept else self.block, 0 if block.running else self.block)
            block.running += 1
        return list(blocks)

    def unpin(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.running -= 1
            self._add(0 if block.running or block.kept else -self.block, 0 if block.running else -self.block)

    def keep(self, blocks: Sequence[Block]) -> list[Block]:
        """One more kept prefix has these."""
        for block in blocks:
            self._add(0 if block.running or block.kept else self.block, 0)
            block.kept += 1
        return list(blocks)

    def unkeep(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.kept -= 1
            self._add(0 if block.running or block.kept else -self.block, 0)

    def gain(self, blocks: Iterable[Block]) -> int:
        """Bytes that are free once a kept prefix with these blocks is dropped."""
        return self.block * sum(not block.running and block.kept == 1 for block in blocks)

    def _add(self, used: int, pinned: int) -> None:
        self.used += used
        self.pinned += pinned
        assert 0 <= self.pinned <= self.used <= self.budget

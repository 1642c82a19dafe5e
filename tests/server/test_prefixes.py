"""Kept prefixes: who shares with whom, and that the ledger counts what is there."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ster
from ster import _native
from ster.server.memory import BLOCK, Ledger, blocks_of
from ster.server.prefixes import MAX_KEPT, WORTHWHILE, Prefixes, Tokens, common, plan_key

SIZE = 10  # bytes of a block, in these tests


def edit(layer: int = 1, value: float = 1.0, **options: object) -> _native.Edit:
    return _native.Edit(layer, np.full((1, 64), value, np.float32), **options)  # type: ignore[arg-type]


def tokens(*parts: tuple[int, int]) -> Tokens:
    """`(count, id)` each."""
    return np.concatenate([np.full(count, id, np.uint32) for count, id in parts])


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(1000, SIZE)


def keep(prefixes: Prefixes, ledger: Ledger, model: ster.Model, ids: Tokens, plan: bytes = b"") -> None:
    """As if a sequence with these tokens had just ended."""
    blocks = ledger.take(blocks_of(len(ids)))
    prefixes.add(plan, ids, model.engine.cache(), blocks)
    ledger.unpin(blocks)


def test_plans_are_told_apart_by_every_bit() -> None:
    plans = [
        (),
        (edit(),),
        (edit(layer=2),),
        (edit(value=1.0000001),),
        (edit(value=-0.0),),
        (edit(value=0.0),),
        (edit(scale=2.0),),
        (edit(positions=[0]),),
        (edit(norm_match=True),),
        (edit(), edit()),
        (edit(), edit(layer=2)),
        (edit(layer=2), edit()),
    ]
    assert len({plan_key(plan) for plan in plans}) == len(plans)
    assert plan_key((edit(), edit(layer=2))) == plan_key((edit(), edit(layer=2)))


@given(a=st.lists(st.integers(0, 1), max_size=8), b=st.lists(st.integers(0, 1), max_size=8))
def test_common_counts_equal_beginnings(a: list[int], b: list[int]) -> None:
    expected = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common(np.array(a, np.uint32), np.array(b, np.uint32)) == expected


def test_the_longest_beginning_of_the_same_plan_is_found(toy_model: ster.Model, ledger: Ledger) -> None:
    prefixes = Prefixes(ledger)
    keep(prefixes, ledger, toy_model, tokens((100, 1)))
    keep(prefixes, ledger, toy_model, tokens((50, 1), (50, 2)))
    keep(prefixes, ledger, toy_model, tokens((200, 1)), b"steered")
    kept, shared = prefixes.find(b"", tokens((70, 1), (9, 3)))
    assert shared == 70 and kept is not None and len(kept.tokens) == 100
    assert prefixes.find(b"", tokens((50, 1), (5, 2)))[1] == 55
    assert prefixes.find(b"steered", tokens((150, 1)))[1] == 150
    assert prefixes.find(b"other", tokens((150, 1))) == (None, 0)
    assert prefixes.find(b"", tokens((WORTHWHILE - 1, 1), (50, 9))) == (None, 0)


def test_a_longer_one_replaces_its_beginning(toy_model: ster.Model, ledger: Ledger) -> None:
    prefixes = Prefixes(ledger)
    keep(prefixes, ledger, toy_model, tokens((100, 1)))
    keep(prefixes, ledger, toy_model, tokens((130, 1)))
    assert len(prefixes) == 1 and ledger.used == 3 * SIZE
    keep(prefixes, ledger, toy_model, tokens((90, 1)))
    assert len(prefixes) == 1 and ledger.used == 3 * SIZE


def test_the_oldest_goes_first_and_use_makes_young(toy_model: ster.Model) -> None:
    ledger = Ledger(4 * SIZE, SIZE)
    prefixes = Prefixes(ledger)
    for id in range(4):
        keep(prefixes, ledger, toy_model, tokens((60, id)))
    kept, _ = prefixes.find(b"", tokens((60, 0)))
    assert kept is not None
    prefixes.touch(kept)
    prefixes.make_room(2 * SIZE)
    assert [prefixes.find(b"", tokens((60, id)))[1] for id in range(4)] == [60, 0, 0, 60]


def test_what_a_running_sequence_has_is_not_freed_for_nothing(toy_model: ster.Model) -> None:
    ledger = Ledger(4 * SIZE, SIZE)
    prefixes = Prefixes(ledger)
    keep(prefixes, ledger, toy_model, tokens((2 * BLOCK, 1)))
    keep(prefixes, ledger, toy_model, tokens((60, 2)))
    kept, _ = prefixes.find(b"", tokens((2 * BLOCK, 1)))
    assert kept is not None
    ledger.pin(kept.blocks)
    prefixes.make_room(2 * SIZE)
    assert [prefixes.find(b"", tokens((60, id)))[1] for id in (1, 2)] == [60, 0]


def test_only_so_many_are_kept(toy_model: ster.Model) -> None:
    ledger = Ledger(10**6, SIZE)
    prefixes = Prefixes(ledger)
    for id in range(MAX_KEPT + 5):
        keep(prefixes, ledger, toy_model, tokens((20, id)))
    assert len(prefixes) == MAX_KEPT and ledger.used == MAX_KEPT * SIZE
    assert prefixes.find(b"", tokens((20, 4))) == (None, 0)


@settings(max_examples=40)
@given(
    ends=st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 150), st.integers(0, 3), st.integers(0, 90), st.booleans()), min_size=1, max_size=25
    )
)
def test_the_ledger_counts_every_block_once(toy_model: ster.Model, ends: list[tuple[int, int, int, int, bool]]) -> None:
    """Sequences begin where others ended, some while those still run; memory is what distinct blocks take, and comes back."""
    ledger = Ledger(12 * SIZE, SIZE)
    prefixes = Prefixes(ledger)
    running = []
    for head, count, tail, more, stays in ends:
        ids = tokens((count, head), (more + 1, tail))
        kept, shared = prefixes.find(b"", ids[:-1])
        blocks = ledger.pin(kept.blocks[: shared // BLOCK] if kept else [])
        need = blocks_of(len(ids)) - len(blocks)
        if not ledger.fits(need * SIZE):
            ledger.unpin(blocks)
        else:
            prefixes.make_room(need * SIZE)
            running.append((ids, blocks + ledger.take(need)))
        if running and not stays:
            ids, blocks = running.pop(0)
            prefixes.add(b"", ids, toy_model.engine.cache(), blocks)
            ledger.unpin(blocks)
        there = {block for kept in prefixes._kept.values() for block in kept.blocks}
        pinned = {block for _, blocks in running for block in blocks}
        assert ledger.used == SIZE * len(there | pinned) <= ledger.budget
        assert ledger.pinned == SIZE * len(pinned)
    for _, blocks in running:
        ledger.unpin(blocks)
    prefixes.make_room(ledger.budget)
    assert (len(prefixes), ledger.used, ledger.pinned) == (0, 0, 0)


def test_a_block_is_what_the_engine_allocates(toy_model: ster.Model, toy_copy: Path, change: Callable[..., None]) -> None:
    # [4 layers, 2 heads, keys and values, 64 positions, 16 numbers], float32
    assert toy_model.engine.cache_block_bytes == 4 * 2 * 2 * 64 * 16 * 4
    change(toy_copy / "config.json", head_dim=16)
    assert ster.load(toy_copy).engine.cache_block_bytes == toy_model.engine.cache_block_bytes

"""Works in the background take what others leave, and come to their end all the same. That they change no bit: `test_scheduler.py`."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server.scheduling import Answer, Play, blocks, playing, same
from server.test_scheduler import LONG, ONE, TEXTS, check_ledger, expected, wait_idle
from serving import until

import ster
from ster.server import background as background_module
from ster.server.background import PATIENCE, SHARE
from ster.server.batch import Batch, Plan
from ster.server.passes import Passes
from ster.server.scheduler import Scheduler
from ster.server.settings import Settings
from ster.server.work import Event, Finished, QueueFull, Sampling, ShuttingDown, Token, Work

PLACES, PREFILL = 16, 64
MANY = [Work((*TEXTS[index % 2][: 5 + index], index % 60 + 3), 60, Sampling(temperature=1.0, seed=index)) for index in range(64)]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each pass: rows of those that somebody waits for, and of the others."""
    found: list[tuple[int, int]] = []
    make = Batch._plan

    def plan(self: Batch) -> Plan:
        made = make(self)
        sums = [sum(count for running, count in made if running.job.ticket.background is behind) for behind in (False, True)]
        found.append((sums[0], sums[1]))
        return made

    monkeypatch.setattr(Batch, "_plan", plan)
    return found


def endless(play: Play, work: Callable[[int], Work], copies: int) -> Callable[[], None]:
    """Keep so many requests there, whatever ends. Call what is returned to have no more come."""
    going = True
    counter = iter(range(1_000_000))

    def again(_: int, event: Event) -> None:
        if isinstance(event, Finished) and going:
            play.submit([work(next(counter))], again)

    def stop() -> None:
        nonlocal going
        going = False

    for _ in range(copies):
        play.submit([work(next(counter))], again)
    return stop


def passes_to_end(play: Play, works: list[Work]) -> tuple[int, list[Answer]]:
    began: list[int] = []
    ends: list[int] = []

    def note(_: int, event: Event) -> None:
        if isinstance(event, Finished):
            ends.append(play.scheduler.stats().passes)

    def submit(*_: Any) -> None:
        if not began:
            began.append(play.scheduler.stats().passes)

    play.run([ONE])
    submit()
    _, found = play.submit(works, note, background=True)
    play.wait(found)
    return max(ends) - began[0], found


@pytest.mark.parametrize("limit", ["places", "memory"])
def test_endless_requests_do_not_keep_the_background_from_its_end(toy_model: ster.Model, limit: str) -> None:
    """More requests wait than there is room for, so nothing of the background is ever admitted but when it is lifted."""
    work = lambda number: Work((5, number % 60 + 3, 6), 12)  # noqa: E731
    places = 4 if limit == "places" else 64
    memory = blocks(toy_model, 64 if limit == "places" else 4)
    with playing(toy_model, Settings(max_running=places, kv_cache_bytes=memory)) as play:
        stop = endless(play, work, 12)
        several = [LONG, Work(TEXTS[1][:100], 30)]
        passes, found = passes_to_end(play, several)
        stop()
        assert all(same(answer, expected(toy_model, each)) for each, answer in zip(several, found, strict=True))
        check_ledger(play.scheduler)
    # For each: until it is lifted, until there is room for it, its prompt (half of a pass is its own), and its tokens.
    assert passes <= sum(PATIENCE + 13 * 5 + 2 + each.max_tokens for each in several)


def test_a_request_starts_at_once_beside_many_long_works(toy_model: ster.Model, rows: list[tuple[int, int]]) -> None:
    chosen = Settings(max_running=PLACES, prefill_tokens=PREFILL, kv_cache_bytes=blocks(toy_model, 400))
    with playing(toy_model, chosen) as play:
        passes: list[int] = []
        answers: list[Answer] = []

        def note(_: int, event: Event) -> None:
            passes.append(len(rows))

        def hook(_: int, event: Event) -> None:
            if len(rows) >= 20 and not passes:  # on the scheduler's thread, between two passes
                passes.append(len(rows))
                answers.extend(play.submit([Work(TEXTS[1][:30], 40)], note)[1])

        _, found = play.submit(MANY, hook, background=True)
        play.wait(found)
        play.wait(answers)
        began, first, last = passes[0], passes[1], passes[-1]
        assert first == began + 1
        assert last - first == 39  # a token a pass
        beside = [behind for _, behind in rows[began:last]]
        assert sum(behind > 0 for behind in beside) <= len(beside) // SHARE + 1
        assert max(beside) <= PLACES // 2 + PREFILL // SHARE
        assert 0 < max(rows, key=lambda pass_: pass_[1])[1] <= PLACES // 2 + PREFILL
        assert all(same(answer, expected(toy_model, work)) for work, answer in zip(MANY, found, strict=True))
        check_ledger(play.scheduler)


def test_a_request_takes_the_place_and_memory_of_the_background(toy_model: ster.Model) -> None:
    """One place; and the work in it is given up, begins again, and tells nothing twice."""
    long = dataclasses.replace(LONG, prompt_logprobs=1, logprobs=1, sampling=Sampling(temperature=1.0, seed=3))
    with playing(toy_model, Settings(max_running=1, kv_cache_bytes=blocks(toy_model, 4))) as play:
        passes: list[int] = []
        short: list[Answer] = []

        told: list[Event] = []

        def hook(_: int, event: Event) -> None:
            told.append(event)
            if len(told) in (5, 20):
                passes.append(play.scheduler.stats().passes)
                short.extend(play.submit([Work(TEXTS[1][:180], 3)], lambda *_: passes.append(play.scheduler.stats().passes))[1])

        _, found = play.submit([long], hook, background=True)
        play.wait(found)
        play.wait(short)
        found[0].check_order(long)
        assert same(found[0], expected(toy_model, long))
        assert passes[1] == passes[0] + 1 and play.scheduler.stats().given_up == 2
        check_ledger(play.scheduler)


def test_the_background_is_not_counted_as_a_queue(toy_model: ster.Model) -> None:
    with playing(toy_model, Settings(queue=0, max_running=2), start=False) as play:
        behind = [play.submit([ONE], background=True)[1][0] for _ in range(10)]
        found = [play.submit([ONE])[1][0] for _ in range(2)]
        with pytest.raises(QueueFull):
            play.submit([ONE])
        assert (play.scheduler.stats().waiting, play.scheduler.stats().background_waiting) == (2, 10)
        play.scheduler.start()
        play.wait([*behind, *found])


def test_places_that_the_background_holds_are_free_to_others(toy_model: ster.Model) -> None:
    with playing(toy_model, Settings(queue=0, max_running=4)) as play:
        found: list[Answer] = []

        def hook(_: int, event: Event) -> None:
            if not found:
                found.extend(answer for _ in range(4) for answer in play.submit([ONE])[1])

        _, behind = play.submit([LONG, LONG], hook, background=True)
        play.wait(behind)
        play.wait(found)


def test_many_places_stay_free_for_others(toy_model: ster.Model) -> None:
    with playing(toy_model, Settings(max_running=PLACES)) as play:
        highest: list[int] = []
        _, found = play.submit(MANY, lambda *_: highest.append(play.scheduler.stats().background_running), background=True)
        play.wait(found)
        assert max(highest) == PLACES // 2


def test_nobody_waits_for_a_prompt_in_the_background(toy_model: ster.Model) -> None:
    """It stands still for most passes; what it has run already serves others all the same."""
    leader, follower = Work(TEXTS[0][:200], 30), Work((*TEXTS[0][:190], 7), 1)
    with playing(toy_model, Settings(prefill_tokens=20), start=False) as play:
        _, behind = play.submit([leader], background=True)
        ends: list[int] = []
        found: list[Answer] = []
        turns = iter(range(100))
        batch = play.scheduler._batch
        step = batch.step

        def after_four() -> Any:
            told = step()
            if next(turns) == 3:
                found.extend(play.submit([follower], lambda *_: ends.append(play.scheduler.stats().passes))[1])
            return told

        batch.step = after_four  # type: ignore[method-assign]
        play.scheduler.start()
        play.wait(behind)
        play.wait(found)
        assert ends[0] == 4 + -(-111 // 20) and play.scheduler.stats().reused == 80
        assert same(found[0], expected(toy_model, follower)) and same(behind[0], expected(toy_model, leader))


def test_who_is_lifted_waits_for_nobody_in_the_background(toy_model: ster.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two that begin alike has half of what is left to the background; the second waits for it until it is lifted."""
    monkeypatch.setattr(background_module, "PATIENCE", 3)
    several = [Work((*TEXTS[0][:190], last), 20) for last in (3, 4, 5)]
    with playing(toy_model, Settings(prefill_tokens=8, max_running=8)) as play:
        stop = endless(play, lambda number: Work((5, number % 60 + 3, 6), 12), 2)
        _, found = play.submit(several, background=True)
        play.wait(found)
        stop()
        assert all(same(answer, expected(toy_model, each)) for each, answer in zip(several, found, strict=True))
        check_ledger(play.scheduler)


@pytest.mark.parametrize("places", [1, 8])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_work_in_the_background_is_cancelled(toy_model: ster.Model, places: int, after: int) -> None:
    """While it waits, while it runs, or after it was given up."""
    with playing(toy_model, Settings(max_running=places), start=False) as play:
        tickets: list[Any] = []

        def hook(_: int, event: Event) -> None:
            seen.append(event)
            if len(seen) == after:
                play.submit([ONE])
                play.scheduler.cancel(tickets[0])

        seen: list[Event] = []
        ticket, _ = play.submit([LONG, LONG], hook, background=True)
        tickets.append(ticket)
        if not after:
            play.scheduler.cancel(ticket)
        play.scheduler.start()
        play.run([ONE])
        if after:
            play.wait_until(lambda: len(seen) >= after)
        check_ledger(play.scheduler)
        assert len(seen) == after and not any(isinstance(event, Finished) for event in seen)


def test_drain_ends_the_background_at_once_and_nothing_else(toy_model: ster.Model) -> None:
    with playing(toy_model, Settings(max_running=4)) as play:
        begun, closed = threading.Event(), threading.Event()
        _, behind = play.submit([LONG] * 6, lambda *_: (begun.set(), closed.wait(30)), background=True)  # which holds the engine
        assert begun.wait(30)
        _, found = play.submit([LONG])
        with ThreadPoolExecutor(1) as pool:
            drained = pool.submit(play.scheduler.drain, 30)
            until(lambda: play.scheduler._closed)
            closed.set()
            drained.result(60)
        assert same(found[0], expected(toy_model, LONG))
        assert all(type(answer.error) is ShuttingDown for answer in behind if not isinstance(answer.events[-1], Finished))
        assert not all(isinstance(answer.events[-1], Finished) for answer in behind)
        with pytest.raises(ShuttingDown):
            play.submit([ONE], background=True)


def test_another_model_gives_way_to_requests(toy_model: ster.Model, windowed_model: ster.Model, rows: list[tuple[int, int]]) -> None:
    """Two models share the processor; one has background works alone, the other a request."""
    passes = Passes()
    a, b = Scheduler(toy_model, Settings(), passes), Scheduler(windowed_model, Settings(), passes)
    try:
        request, behind = Play(a), Play(b)
        _, found = request.submit([Work(TEXTS[0][:10], 200)])
        _, long = behind.submit(MANY[:4], background=True)
        a.start()
        request.wait_until(lambda: bool(found[0].events))
        b.start()
        request.wait(found)
        beside = b.stats().passes
        behind.wait(long)
        assert beside <= 200 // SHARE + 2 < b.stats().passes
        assert all(same(answer, expected(windowed_model, work)) for work, answer in zip(MANY, long, strict=False))
    finally:
        a.drain(0)
        b.drain(0)


def test_the_counts_of_the_background(toy_model: ster.Model) -> None:
    with playing(toy_model, Settings(max_running=2), start=False) as play:
        _, found = play.submit([ONE] * 3, background=True)
        stats = play.scheduler.stats()
        assert (stats.waiting, stats.running, stats.background_waiting, stats.background_running) == (0, 0, 3, 0)
        play.scheduler.start()
        play.wait(found)
        wait_idle(play.scheduler)
        assert play.scheduler.stats().background_running == 0 == play.scheduler.stats().given_up
        assert [type(event) for event in found[0].events] == [Token] * 8 + [Finished]

"""Whatever runs beside a work, in whatever pieces, it says the same; and nobody waits for ever."""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.scheduling import Answer, alone, blocks, check_against_model, playing, same

import ster
from ster import _native
from ster.errors import ContextError, InputError, LayerError, NonFiniteError, SteeringError, TokenError
from ster.server import background as background_module
from ster.server import running as running_module
from ster.server.admission import check_work
from ster.server.batch import share_out, whole
from ster.server.memory import BLOCK
from ster.server.scheduler import Scheduler
from ster.server.settings import Settings
from ster.server.work import Event, Finished, QueueFull, Sampling, ShuttingDown, Token, TooLargeError, Work

VOCAB, CONTEXT, HIDDEN = 67, 256, 64
BLOCK_BYTES = 4 * 2 * 2 * 64 * 16 * 4
random = np.random.default_rng(0)
TEXTS = [tuple(random.integers(3, VOCAB, CONTEXT).tolist()) for _ in range(2)]  # what prompts begin with
VECTOR = random.normal(size=(1, HIDDEN)).astype(np.float32)
PLANS: dict[str, tuple[_native.Edit, ...]] = {
    "none": (),
    "all": (_native.Edit(1, VECTOR, scale=0.7), _native.Edit(2, VECTOR, scale=-0.3, norm_match=True)),
    "other": (_native.Edit(1, VECTOR, scale=0.8),),
    "zero": (_native.Edit(1, VECTOR, scale=0.0),),
    "first": (_native.Edit(0, VECTOR, scale=2.0, positions=[0]),),
    "overflow": (_native.Edit(2, VECTOR, scale=3e38),),
}
ONE = Work(TEXTS[0][:20], 8)
LONG = Work(TEXTS[0][:200], 40)


@st.composite
def works(draw: st.DrawFn) -> Work:
    prompt = TEXTS[draw(st.integers(0, 1))][: draw(st.integers(0, 210))] + tuple(draw(st.lists(st.integers(3, VOCAB - 1), max_size=8)))
    warm = draw(st.booleans())
    sampling = Sampling(
        temperature=draw(st.sampled_from([0.5, 1.5])) if warm else 0.0,
        top_p=draw(st.sampled_from([1.0, 0.7])) if warm else 1.0,
        top_k=draw(st.sampled_from([None, 5, 1000])) if warm else None,
        min_p=draw(st.sampled_from([0.0, 0.05])) if warm else 0.0,
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, -0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        seed=draw(st.integers(0, 3)),
        stop=draw(st.sampled_from([(), (), ("white", "loud"), ("a ", " sea")])),
    )
    return Work(
        prompt or (1,),
        draw(st.sampled_from([0, 1, 2, 7, 30, 300])),
        sampling,
        PLANS[draw(st.sampled_from([*PLANS, "none", "none", "all"]))],
        draw(st.sampled_from([(), (), (), (0, 1, 2, 3), (1,)])),
        draw(st.sampled_from([None, None, 0, 3])),
        draw(st.sampled_from([None, None, None, 0, 2, -1])),
        draw(st.sampled_from([True, True, True, False])),
    )


answers: dict[tuple[int, Work], Answer] = {}


def expected(model: ster.Model, work: Work) -> Answer:
    if (id(model), work) not in answers:
        answers[id(model), work] = alone(model, work)
    return answers[id(model), work]


def ids(prompt: Sequence[int], count: int = 4) -> Work:
    return Work(tuple(prompt), count)


# What a work says


@settings(max_examples=50, deadline=None)
@given(work=works())
def test_a_work_says_what_the_model_says(toy_model: ster.Model, work: Work) -> None:
    answer = alone(toy_model, work)
    answer.check_order(work)
    if work.edits is PLANS["overflow"]:
        with pytest.raises(NonFiniteError):
            check_against_model(toy_model, work, answer)
        assert isinstance(answer.error, NonFiniteError) and "sequence" not in str(answer.error)
    else:
        assert answer.error is None
        check_against_model(toy_model, work, answer)


LOADS = {
    "submissions": st.lists(st.lists(works(), min_size=1, max_size=3), min_size=1, max_size=7),
    "copies": st.integers(1, 3),
    "chosen": st.builds(
        lambda tokens, places, size: Settings(prefill_tokens=tokens, max_running=places, kv_cache_bytes=size * BLOCK_BYTES),
        st.sampled_from([1, 7, 64, 100, 256]),
        st.sampled_from([1, 3, 64]),
        st.sampled_from([14, 20, 1000]),
    ),
    "gaps": st.lists(st.sampled_from([0.0, 0.001, 0.004]), min_size=7, max_size=7),
    "cancels": st.lists(st.one_of(st.none(), st.none(), st.integers(0, 12)), min_size=7, max_size=7),
    "before": st.booleans(),
    "background": st.lists(st.booleans(), min_size=7, max_size=7),
    "patience": st.sampled_from([1, 3, 64]),
}


@settings(max_examples=20, deadline=None)
@given(**LOADS)
def test_load_changes_no_bit(toy_model: ster.Model, **load: Any) -> None:
    check_load(toy_model, **load)


@settings(max_examples=15, deadline=None)
@given(**LOADS)
def test_load_changes_no_bit_in_windows(windowed_model: ster.Model, **load: Any) -> None:
    check_load(windowed_model, **load)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(**LOADS)
def test_much_load_changes_no_bit(toy_model: ster.Model, **load: Any) -> None:
    check_load(toy_model, **load)


def check_load(
    toy_model: ster.Model,
    submissions: list[list[Work]],
    copies: int,
    chosen: Settings,
    gaps: list[float],
    cancels: list[int | None],
    before: bool,
    background: list[bool],
    patience: int,
) -> None:
    """Arrivals, chunks, places, memory, shared prompts, failures, cancellations (after so many events of the submission), and works in the
    background."""
    with pytest.MonkeyPatch.context() as patch, playing(toy_model, chosen, start=not before) as play:
        patch.setattr(background_module, "PATIENCE", patience)
        waited: list[tuple[list[Work], list[Answer]]] = []
        for group, gap, cancel, behind in zip(submissions, gaps, cancels, background, strict=False):
            group = [work for work in group for _ in range(copies)]
            seen: list[Event] = []
            tickets: list[Any] = []

            def hook(_: int, event: Event, seen: list[Event] = seen, tickets: list[Any] = tickets, cancel: int | None = cancel) -> None:
                seen.append(event)
                if len(seen) == cancel:
                    play.scheduler.cancel(tickets[0])

            ticket, found = play.submit(group, None if before else hook, background=behind)
            tickets.append(ticket)
            if cancel is None:
                waited.append((group, found))
            elif cancel == 0 or before:
                play.scheduler.cancel(ticket)
            if not before:
                time.sleep(gap)
        if before:
            play.scheduler.start()
        for group, found in waited:
            for work, answer in zip(group, play.wait(found), strict=True):
                answer.check_order(work)
                assert same(answer, expected(toy_model, work))
        check_ledger(play.scheduler)


def check_ledger(scheduler: Scheduler) -> None:
    """Once nothing runs, the ledger counts the kept blocks, each once."""
    wait_idle(scheduler)
    batch = scheduler._batch
    kept = {block for each in batch.prefixes._kept.values() for block in each.blocks}
    assert batch.ledger.used == batch.ledger.block * len(kept) <= batch.ledger.budget
    assert batch.ledger.pinned == 0


def wait_idle(scheduler: Scheduler) -> None:
    """Cancelled works leave before the next pass, which is soon."""
    deadline = time.monotonic() + 30
    while scheduler.stats().running or scheduler.stats().waiting or scheduler.stats().background_waiting:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("prefill", [1, 3, 63, 64, 65, 255])
def test_pieces_of_a_prompt_change_no_bit(toy_model: ster.Model, prefill: int) -> None:
    work = dataclasses.replace(LONG, edits=PLANS["all"], layers=(0, 3), logprobs=2, prompt_logprobs=1)
    with playing(toy_model, Settings(prefill_tokens=prefill)) as play:
        answer = play.run([work])[0]
        assert play.scheduler.stats().passes == -(-200 // prefill) + 39
    check_against_model(toy_model, work, answer)


def test_the_context_ends_a_text(toy_model: ster.Model) -> None:
    answer = alone(toy_model, Work(TEXTS[0][:250], 1000, layers=(2,)))
    assert len(answer.ids) == 6 and answer.tokens[-1].finish_reason == "length"
    assert answer.residual is not None and answer.residual.shape == (1, 255, HIDDEN)


def test_no_new_tokens_scores_the_prompt_alone(toy_model: ster.Model) -> None:
    work = Work(TEXTS[0][:50], 0, layers=(1,), prompt_logprobs=3)
    answer = alone(toy_model, work)
    assert answer.ids == [] and answer.prompt is not None and len(answer.prompt) == 50
    assert answer.residual is not None and answer.residual.shape == (1, 50, HIDDEN)
    check_against_model(toy_model, work, answer)
    one = alone(toy_model, Work((5,), 0, prompt_logprobs=0))
    assert one.prompt == [None]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[int]], None]:
    """Let these tokens be chosen, whatever the logits."""

    def write(chosen: Sequence[int]) -> None:
        sample = lambda logits, text, *, step, **_: chosen[step]  # noqa: E731
        monkeypatch.setattr(running_module, "_native", SimpleNamespace(sample=sample, Sequence=_native.Sequence))

    return write


def test_an_end_of_text_is_a_token_without_text(toy_model: ster.Model, script: Callable[[Sequence[int]], None]) -> None:
    script([13, 4, 2])
    answer = alone(toy_model, dataclasses.replace(ONE, layers=(0,)))
    assert [(token.id, token.text, token.finish_reason, token.stop_reason) for token in answer.tokens] == [
        (13, "loud", None, None),
        (4, " sea", None, None),
        (2, "", "stop", 2),
    ]
    assert answer.residual is not None and answer.residual.shape == (1, 22, HIDDEN)


def test_a_stop_string_is_named_and_cut_off(toy_model: ster.Model, script: Callable[[Sequence[int]], None]) -> None:
    script([13, 4, 43, 64])
    answer = alone(toy_model, dataclasses.replace(ONE, sampling=Sampling(stop=("white", " hard", "sea hard"))))
    assert [token.text for token in answer.tokens] == ["loud", " ", ""]
    assert (answer.tokens[-1].finish_reason, answer.tokens[-1].stop_reason) == ("stop", "sea hard")
    answer = alone(toy_model, dataclasses.replace(ONE, sampling=Sampling(stop=("sea", "sea har"))))
    assert (answer.ids, answer.text, answer.tokens[-1].stop_reason) == ([13, 4], "loud ", "sea")


def test_penalties_are_those_of_openai() -> None:
    from collections import Counter

    logits = np.array([1, 2, 3, 4], np.float32)
    found = running_module.penalised(logits, Counter({1: 1, 3: 3}), Sampling(presence_penalty=0.5, frequency_penalty=0.25))
    assert found.tolist() == [1, 1.25, 3, 2.75] and logits.tolist() == [1, 2, 3, 4]


def test_a_presence_penalty_lets_no_greedy_text_repeat_itself(toy_model: ster.Model) -> None:
    answer = alone(toy_model, Work(TEXTS[0][:20], 30, Sampling(presence_penalty=1000.0)))
    assert len(set(answer.ids)) == len(answer.ids) > 5


# What is shared


def test_choices_of_one_prompt_run_it_once(toy_model: ster.Model) -> None:
    prompt = TEXTS[0][:150]
    choices = [Work(prompt, 5, Sampling(temperature=1.0, seed=seed)) for seed in range(8)]
    with playing(toy_model, Settings(kv_cache_bytes=blocks(toy_model, 3 + 7))) as play:
        found = play.run(choices)
        stats = play.scheduler.stats()
    # 150 tokens take two full blocks, which all share, and a third of each choice's own.
    assert (stats.prefilled, stats.reused, stats.decoded) == (150 + 7, 7 * 149, sum(len(answer.ids) for answer in found))
    assert all(same(answer, expected(toy_model, work)) for work, answer in zip(choices, found, strict=True))
    assert len({tuple(answer.ids) for answer in found}) > 1


def test_a_prompt_that_comes_again_runs_its_end_alone(toy_model: ster.Model) -> None:
    with playing(toy_model) as play:
        first = play.run([LONG])[0]
        again = play.run([LONG])[0]
        assert play.scheduler.stats().reused == 199
        talk = Work((*LONG.prompt, *first.ids[:-1], 5, 6), 3)
        assert same(play.run([talk])[0], expected(toy_model, talk))
        assert play.scheduler.stats().reused == 199 + 200 + 39
    assert same(first, again)


@pytest.mark.parametrize("other", [{"edits": PLANS["zero"]}, {"layers": (1,)}, {"prompt_logprobs": 0}, {"share_prefix": False}])
def test_some_works_start_from_nobody(toy_model: ster.Model, other: dict[str, Any]) -> None:
    work = dataclasses.replace(LONG, **other)
    with playing(toy_model) as play:
        play.run([LONG])
        play.run([work])
        assert play.scheduler.stats().reused == 0
        # Their own caches serve others, unless they said no, under the plan they have.
        play.run([dataclasses.replace(work, layers=(), prompt_logprobs=None)])
        assert play.scheduler.stats().reused == (0 if work.share_prefix is False else 199)


def test_a_prompt_waits_for_one_that_begins_alike(toy_model: ster.Model) -> None:
    a, b, c = Work(TEXTS[0][:180], 5), Work((*TEXTS[0][:150], 3, 4), 5), Work((*TEXTS[0][:60], 5), 5)
    with playing(toy_model, Settings(prefill_tokens=32), start=False) as play:
        waited = [play.submit([work])[1][0] for work in (a, b, c)]
        play.scheduler.start()
        play.wait(waited)
        # 150 tokens are worth waiting for, 60 are not: it starts at once, from what has run already, which is nothing.
        assert (play.scheduler.stats().reused, play.scheduler.stats().prefilled) == (150, 180 + 2 + 61)
    assert all(same(answer, expected(toy_model, work)) for work, answer in zip((a, b, c), waited, strict=True))


def test_who_waits_for_a_work_that_is_cancelled_goes_on_from_what_it_ran(toy_model: ster.Model) -> None:
    leader, follower = Work(TEXTS[0][:200], 5), Work((*TEXTS[0][:190], 7), 5)
    with playing(toy_model, Settings(prefill_tokens=10), start=False) as play:
        ticket, cancelled = play.submit([leader])
        _, found = play.submit([follower])
        turns = iter(range(100))
        batch = play.scheduler._batch
        step = batch.step
        batch.step = lambda: (play.scheduler.cancel(ticket) if next(turns) == 9 else None, step())[1]  # type: ignore[method-assign]
        play.scheduler.start()
        assert same(play.wait(found)[0], expected(toy_model, follower))
        assert cancelled[0].events == [] and play.scheduler.stats().reused == 100


def test_who_waits_for_a_work_that_fails_runs_alone(toy_model: ster.Model) -> None:
    edits = (_native.Edit(1, VECTOR, scale=3e38, positions=[150]),)
    fails, short = Work(TEXTS[0][:200], 5, edits=edits), Work((*TEXTS[0][:130], 9), 25, edits=edits)
    with playing(toy_model, Settings(prefill_tokens=70), start=False) as play:
        found = [play.submit([work])[1][0] for work in (fails, fails, short)]
        play.scheduler.start()
        play.wait(found)
    assert isinstance(found[0].error, NonFiniteError) and isinstance(found[1].error, NonFiniteError)
    assert isinstance(found[2].error, NonFiniteError) and len(found[2].ids) == 20
    assert found[2].ids == expected(toy_model, dataclasses.replace(short, edits=())).ids[:20]


# Memory and places


def test_admission_waits_for_memory_in_order(toy_model: ster.Model) -> None:
    """Each of the long ones takes the whole budget; the short one fits beside neither and must not overtake."""
    long = [Work(TEXTS[side][:200], 40) for side in (0, 1)]
    order: list[str] = []
    with playing(toy_model, Settings(kv_cache_bytes=blocks(toy_model, 4)), start=False) as play:
        found = []
        for name, work in (("a", long[0]), ("b", long[1]), ("c", ONE)):
            note = lambda _, event, name=name: order.append(name) if isinstance(event, Token | Finished) else None  # noqa: E731
            found += play.submit([work], note)[1]
        play.scheduler.start()
        play.wait(found)
        assert order == ["a"] * 41 + ["b"] * 41 + ["c"] * 9
    assert all(same(answer, expected(toy_model, work)) for work, answer in zip([*long, ONE], found, strict=True))


def test_captured_rows_count(toy_model: ster.Model) -> None:
    work = Work(TEXTS[0][:100], 29, layers=(0, 1))  # 128 rows: two blocks, and 2 x 128 x 64 numbers
    size = blocks(toy_model, 2) + 2 * 128 * HIDDEN * 4
    with playing(toy_model, Settings(kv_cache_bytes=size)) as play:
        highest: list[int] = []
        _, found = play.submit([work, work], lambda *_: highest.append(play.scheduler.stats().running))
        assert all(same(answer, expected(toy_model, work)) for answer in play.wait(found))
        assert max(highest) == 1
    with playing(toy_model, Settings(kv_cache_bytes=size - 1)) as play, pytest.raises(TooLargeError, match="need 0.2 MiB"):
        play.scheduler.check(work)


def test_a_work_that_never_fits_is_refused(toy_model: ster.Model) -> None:
    with playing(toy_model, Settings(kv_cache_bytes=blocks(toy_model, 3))) as play:
        play.scheduler.check(Work(TEXTS[0][:100], 93))
        with pytest.raises(TooLargeError):
            play.scheduler.check(Work(TEXTS[0][:100], 94))
        with pytest.raises(TooLargeError):
            play.submit([ONE, LONG])
        assert play.scheduler.stats().waiting == 0


@pytest.mark.parametrize(
    ("work", "error", "match"),
    [
        (ids(()), TokenError, "no tokens"),
        (ids((1, 67)), TokenError, "token id 67"),
        (ids((-1,)), TokenError, "token id -1"),
        (ids(TEXTS[0]), ContextError, "256 tokens"),
        (Work((1,), -1), InputError, "max_tokens"),
        (Work((1,), 1, layers=(4,)), LayerError, "layer 4"),
        (Work((1,), 1, layers=(1, 0)), InputError, "ascending"),
        (Work((1,), 1, layers=(1, 1)), InputError, "ascending"),
        (Work((1,), 1, edits=(_native.Edit(4, VECTOR),)), LayerError, "layer 4"),
        (Work((1,), 1, edits=(_native.Edit(0, VECTOR[:, :3]),)), SteeringError, "width 3"),
        (Work((1,), 3, edits=(_native.Edit(0, VECTOR, positions=[3]),)), SteeringError, "position 3"),
        (Work((1,), 1, Sampling(top_p=0.0)), InputError, "top_p"),
        (Work((1,), 1, Sampling(seed=-1)), InputError, "seed"),
        (Work((1,), 1, Sampling(presence_penalty=float("nan"))), InputError, "presence_penalty"),
        (Work((1,), 1, Sampling(stop=("",))), InputError, "stop"),
        (Work((1,), 1, logprobs=-1), InputError, "logprobs"),
        (Work((1,), 1, prompt_logprobs=-2), InputError, "prompt_logprobs"),
    ],
)
def test_what_cannot_run_is_refused_before(toy_model: ster.Model, work: Work, error: type[Exception], match: str) -> None:
    with playing(toy_model) as play, pytest.raises(error, match=match):
        check_work(work, toy_model, play.scheduler._batch.ledger)


def test_beyond_the_queue_is_refused(toy_model: ster.Model) -> None:
    with playing(toy_model, Settings(queue=1, max_running=1), start=False) as play:
        _, found = play.submit([ONE] * 5)
        found += play.submit([ONE])[1]
        with pytest.raises(QueueFull):
            play.submit([ONE])
        play.scheduler.start()
        play.wait(found)
        play.run([ONE])


def test_without_a_queue_as_many_are_taken_as_there_are_places(toy_model: ster.Model) -> None:
    with playing(toy_model, Settings(queue=0, max_running=8), start=False) as play:
        found = [play.submit([ONE])[1][0] for _ in range(8)]
        with pytest.raises(QueueFull):
            play.submit([ONE])
        play.scheduler.start()
        play.wait(found)
        play.run([ONE])


# Turns


def test_a_short_request_is_not_behind_a_large_one(toy_model: ster.Model) -> None:
    """A hundred works in four places would take 75 passes of three tokens each."""
    short: list[Answer] = []
    passes: list[int] = []
    with playing(toy_model, Settings(max_running=4)) as play:

        def hook(index: int, event: Event) -> None:
            if not passes:
                passes.append(play.scheduler.stats().passes)
                note = lambda *_: passes.append(play.scheduler.stats().passes)  # noqa: E731
                short.extend(play.submit([Work((5, 6), 1)], note)[1])

        _, large = play.submit([Work((3, 4, index % 60 + 3), 3) for index in range(100)], hook)
        play.wait(large)
        play.wait(short)
    # A place is free after two passes; the large one may have the turn before.
    assert passes[1] - passes[0] <= 4


def test_requests_take_turns(toy_model: ster.Model) -> None:
    order: list[str] = []
    with playing(toy_model, Settings(max_running=1), start=False) as play:
        found = []
        for name, count in (("a", 4), ("b", 1), ("c", 2)):
            note = lambda _, event, name=name: order.append(name) if isinstance(event, Finished) else None  # noqa: E731
            found += play.submit([Work((3, 4), 1)] * count, note)[1]
        play.scheduler.start()
        play.wait(found)
    assert order == list("abcacaa")


def test_small_works_do_not_starve_a_large_one(toy_model: ster.Model) -> None:
    """The small ones come again as soon as they end, and never leave room enough by themselves."""
    order: list[str] = []
    small: list[Answer] = []
    with playing(toy_model, Settings(kv_cache_bytes=blocks(toy_model, 4), max_running=8), start=False) as play:

        def again(_: int, event: Event) -> None:
            if isinstance(event, Finished):
                order.append("small")
                if len(order) < 60:
                    small.extend(play.submit([Work((5, 6), 2 + len(order) % 3)], again)[1])

        for length in (1, 2, 3, 4):
            small += play.submit([Work((5, 6), length)], again)[1]
        _, large = play.submit([Work(TEXTS[0][:200], 2)], lambda *_: order.append("large"))
        play.scheduler.start()
        play.wait(large)
        play.wait_until(lambda: order.count("small") >= 57)
    assert order.index("large") <= 4


def test_no_works_say_nothing(toy_model: ster.Model) -> None:
    with playing(toy_model) as play:
        play.submit([])
        assert play.scheduler.stats().waiting == 0


def test_a_cancelled_work_frees_its_place_and_memory(toy_model: ster.Model) -> None:
    with playing(toy_model, Settings(max_running=1, kv_cache_bytes=blocks(toy_model, 4))) as play:
        tickets: list[Any] = []
        started = threading.Event()
        hook = lambda *_: (started.wait(10), play.scheduler.cancel(tickets[0]))  # noqa: E731
        ticket, cancelled = play.submit([dataclasses.replace(LONG, layers=())], hook)
        tickets.append(ticket)
        _, found = play.submit([Work(TEXTS[1][:200], 40)])
        started.set()
        play.wait(found)
        assert len(cancelled[0].events) == 1
        check_ledger(play.scheduler)


def test_a_queued_work_can_be_cancelled(toy_model: ster.Model) -> None:
    with playing(toy_model, Settings(queue=1), start=False) as play:
        ticket, cancelled = play.submit([ONE, ONE])
        play.scheduler.cancel(ticket)
        play.scheduler.cancel(ticket)
        _, found = play.submit([ONE])
        play.scheduler.start()
        play.wait(found)
        assert [answer.events for answer in cancelled] == [[], []]


def test_a_long_prompt_stalls_nobody_for_more_than_a_piece(toy_model: ster.Model) -> None:
    """Between two tokens of a sequence that decodes, and before the first of a short prompt, a pass holds at most so many tokens."""
    with playing(toy_model, Settings(prefill_tokens=20)) as play:
        passes: list[int] = []
        note = lambda _, event: passes.append(play.scheduler.stats().passes)  # noqa: E731
        _, first = play.submit([Work(TEXTS[1][:10], 30)], note)
        play.wait_until(lambda: len(first[0].events) >= 3)
        _, long = play.submit([Work(TEXTS[0][:200], 1)])
        _, short = play.submit([Work(TEXTS[1][20:28], 1)])
        play.wait([*first, *long, *short])
        assert passes == [*range(1, 31), 30]


@given(lefts=st.lists(st.integers(1, 500), max_size=9), room=st.integers(1, 300))
def test_the_room_of_a_pass_is_used_and_the_oldest_moves_on(lefts: list[int], room: int) -> None:
    shares = share_out(lefts, room)
    assert sum(shares) == min(room, sum(lefts))
    assert all(0 <= share <= left for share, left in zip(shares, lefts, strict=True))
    assert not lefts or shares[0] >= min(lefts[0], room // 2, 1)


@given(lefts=st.lists(st.integers(1, 500), max_size=9), room=st.integers(1, 300))
def test_prompts_that_are_not_cut_go_whole_or_not_at_all(lefts: list[int], room: int) -> None:
    shares = whole(lefts, room)
    assert all(share in (0, left) for share, left in zip(shares, lefts, strict=True))
    assert not lefts or shares[0] == lefts[0]
    assert sum(shares) <= max(room, shares[0] if shares else 0)


def test_a_model_that_looks_at_the_length_runs_prompts_whole(toy_copy: Path, change: Callable[..., None]) -> None:
    change(toy_copy / "config.json", max_position_embeddings=64, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    model = ster.load(toy_copy)
    assert not model.engine.chunkable
    several = [Work(TEXTS[0][:n], 6, layers=(1,), prompt_logprobs=prompt) for n in (100, 100, 30, 90) for prompt in (None, 2)]
    with playing(model, Settings(prefill_tokens=64)) as play:
        for work, answer in zip(several, play.run(several), strict=True):
            generated = model.generate(list(work.prompt), max_new_tokens=6, layers=[1])
            assert generated.trace is not None and answer.residual is not None
            assert answer.residual.tobytes() == generated.trace.residual.tobytes()
        assert play.scheduler.stats().reused == 0 == len(play.scheduler._batch.prefixes)


# Failures


def test_an_overflow_fails_alone(toy_model: ster.Model) -> None:
    good = [dataclasses.replace(ONE, layers=(0, 2), logprobs=1), LONG]
    bad = [dataclasses.replace(work, edits=PLANS["overflow"]) for work in good]
    with playing(toy_model, start=False) as play:
        _, found = play.submit([bad[0], good[0], bad[1], good[1], bad[0]])
        play.scheduler.start()
        play.wait(found)
    for place, work in ((1, good[0]), (3, good[1])):
        assert same(found[place], expected(toy_model, work))
    for place in (0, 2, 4):
        assert isinstance(found[place].error, NonFiniteError)
        assert "of the text" in str(found[place].error) and found[place].ids == []


class Faulty:
    """An engine whose passes fail while `fails(sequences)` says so."""

    def __init__(self, engine: _native.Engine, fails: Callable[[Sequence[_native.Sequence]], BaseException | None]) -> None:
        self._engine = engine
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, sequences: Sequence[_native.Sequence]) -> list[_native.Output]:
        if error := self._fails(sequences):
            raise error
        return self._engine.forward(sequences)


Break = Callable[[Callable[[Sequence[_native.Sequence]], BaseException | None]], ster.Model]


@pytest.fixture
def breaking(toy_dir: Path) -> Iterator[Break]:
    model = ster.load(toy_dir)

    def use(fails: Callable[[Sequence[_native.Sequence]], BaseException | None]) -> ster.Model:
        model.engine = Faulty(model.engine, fails)  # type: ignore[assignment]
        return model

    yield use


def test_an_error_that_names_nobody_makes_each_run_alone(toy_model: ster.Model, breaking: Break) -> None:
    model = breaking(lambda sequences: RuntimeError("something") if len(sequences) > 1 else None)
    several = [ONE, LONG, dataclasses.replace(ONE, edits=PLANS["overflow"])]
    with playing(model, start=False) as play:
        _, found = play.submit(several)
        play.scheduler.start()
        play.wait(found)
    assert all(same(answer, expected(toy_model, work)) for work, answer in zip(several, found, strict=True))


def test_an_error_of_one_alone_is_its_own(breaking: Break) -> None:
    errors = iter([RuntimeError("something")])
    model = breaking(lambda _: next(errors, None))
    with playing(model) as play:
        answer = play.run([ONE])[0]
        assert isinstance(answer.error, RuntimeError)
        assert play.run([ONE])[0].error is None
        check_ledger(play.scheduler)


class Panic(BaseException):
    """As pyo3's PanicException, which is no Exception."""


def test_a_crash_fails_everybody_and_the_next_is_served(breaking: Break, toy_model: ster.Model, caplog: pytest.LogCaptureFixture) -> None:
    panics = iter([None, None, Panic("a bug")])
    model = breaking(lambda _: next(panics, None))
    with playing(model, Settings(max_running=2), start=False) as play:
        _, found = play.submit([ONE, LONG, ONE])
        play.scheduler.start()
        assert [type(answer.error) for answer in play.wait(found)] == [Panic] * 3
        assert same(play.run([LONG])[0], expected(toy_model, LONG))
        check_ledger(play.scheduler)
    assert "the scheduler failed" in caplog.text


def test_a_listener_that_fails_ends_its_own_works(toy_model: ster.Model, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: int, event: Event) -> None:
        raise RuntimeError("closed")

    with playing(toy_model, start=False) as play:
        _, lost = play.submit([LONG, LONG], broken)
        _, found = play.submit([ONE])
        play.scheduler.start()
        assert same(play.wait(found)[0], expected(toy_model, ONE))
        wait_idle(play.scheduler)
        assert len(lost[0].events) + len(lost[1].events) == 1
    assert "a listener failed" in caplog.text


# The end


def test_drain_lets_works_end(toy_model: ster.Model) -> None:
    with playing(toy_model) as play:
        _, found = play.submit([ONE, LONG])
        play.scheduler.drain(30)
        assert all(same(answer, expected(toy_model, work)) for work, answer in zip([ONE, LONG], found, strict=True))
        with pytest.raises(ShuttingDown):
            play.submit([ONE])


def test_drain_does_not_wait_for_ever(breaking: Break) -> None:
    model = breaking(lambda _: time.sleep(0.05))  # type: ignore[func-returns-value]
    with playing(model, Settings(max_running=1)) as play:
        _, found = play.submit([LONG, ONE])
        play.wait_until(lambda: bool(found[0].events))
        play.scheduler.drain(0.1)
        assert [type(answer.error) for answer in found] == [ShuttingDown] * 2
        assert found[0].ids and not found[1].ids
        play.scheduler.drain(0)


def test_what_never_started_is_told_so(toy_model: ster.Model) -> None:
    with playing(toy_model, start=False) as play:
        _, found = play.submit([ONE])
        play.scheduler.drain(10)
        assert isinstance(found[0].error, ShuttingDown)


def test_idle_costs_nothing(toy_model: ster.Model) -> None:
    with playing(toy_model) as play:
        play.run([ONE])
        passes, used = play.scheduler.stats().passes, time.process_time()
        time.sleep(0.3)
        assert play.scheduler.stats().passes == passes
        assert time.process_time() - used < 0.1


def test_the_counts_add_up(toy_model: ster.Model) -> None:
    with playing(toy_model) as play:
        play.run([ONE])
        play.run([ONE])
        wait_idle(play.scheduler)
        stats = play.scheduler.stats()
    assert (stats.prefilled, stats.reused, stats.decoded, stats.passes) == (21, 19, 16, 16)
    assert (stats.waiting, stats.running, stats.cache_bytes) == (0, 0, blocks(toy_model, 1))
    assert sum(stats.steps) == 16 and stats.step_seconds > 0
    assert BLOCK == 64


# A real model


@pytest.mark.slow
def test_a_real_model_says_the_same_under_load() -> None:
    folder = os.environ.get("STER_SMOLLM2")
    if not folder:
        pytest.skip("STER_SMOLLM2 is not set: no SmolLM2-135M")
    model = ster.load(Path(folder) / "bf16")
    generator = np.random.default_rng(1)
    vector = generator.normal(size=(1, model.hidden_size)).astype(np.float32)
    plans = [(), (), (_native.Edit(12, vector, scale=2.0),), (_native.Edit(5, vector, scale=3e38),)]
    text = tuple(generator.integers(1000, 40000, 300).tolist())
    several = [
        Work(
            text[: int(generator.integers(1, 300))],
            int(generator.integers(1, 12)),
            Sampling(temperature=float(n % 2), seed=n),
            plans[n % 4],
            ((), (3, 29))[n % 3 == 0],
            (None, 4)[n % 2],
            (None, 1)[n % 5 == 0],
        )
        for n in range(24)
    ]
    with playing(model, Settings(kv_cache_bytes=blocks(model, 40), prefill_tokens=100)) as play:
        found = [answer for work in several for answer in play.submit([work])[1]]
        play.wait(found)
        assert play.scheduler.stats().reused > 0
    for work, answer in zip(several, found, strict=True):
        answer.check_order(work)
        if work.edits is plans[3]:
            assert isinstance(answer.error, NonFiniteError)
        else:
            check_against_model(model, work, answer)
            assert same(answer, alone(model, work))

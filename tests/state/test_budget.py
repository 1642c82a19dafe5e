"""Budgets do what `budget_model` does, and held + spent never passes a limit, whoever asks at the same moment."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `serve` is not installed")

import sqlalchemy as sa
from budget_model import ModelKey
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ster.state.amounts import BUDGETS, NOTHING, Amount, KeyInactiveError, OverBudget
from ster.state.budget import free_dead, settle, take_hold, usage
from ster.state.database import Database
from ster.state.keys import create_key, set_limits, set_state
from ster.state.place import find_place
from ster.state.presence import Presence
from ster.state.tables import LIMITS, holds, servers, spent

NOON = 1_790_769_600.0  # 2026-09-30 12:00 UTC
DAY = 86400.0
numbers = itertools.count()
amounts = st.builds(Amount, st.integers(0, 12), st.integers(0, 12), st.integers(0, 1), st.sampled_from([0, 0, 5]))
limits = st.dictionaries(st.sampled_from(LIMITS), st.integers(0, 40), max_size=4)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(find_place(url=database_url).url)
    yield database
    database.close()


def make_key(database: Database, **limits: int) -> str:
    with database.write() as connection:
        return create_key(connection, f"key {next(numbers)}", limits)[0].id


def take(database: Database, key: str, *amount: int, server: str | None = None, now: float | None = None, **options: Any) -> str:
    with database.write() as connection:
        return take_hold(connection, key, Amount(*amount), server, now, **options).id


def paid(database: Database, hold: str, *used: int) -> Amount:
    with database.write() as connection:
        return settle(connection, hold, Amount(*used))


def add_server(database: Database, name: str) -> None:
    """One that lives for the length of a test, as far as anybody on this machine can tell."""
    with database.write() as connection:
        row = {"id": name, "host": "elsewhere", "pid": 1, "started_at": 0.0, "beat_at": time.time() + 10**6}
        connection.execute(sa.insert(servers).values(row))


class Budgets(RuleBasedStateMachine):
    """One key, some servers, a clock that may go backwards; each step is done in the database and in the model."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.database = database
        self.key = make_key(database)
        self.model = ModelKey({})
        self.now = NOON
        self.ids: list[str] = []
        self.servers = [f"srv_{self.key[-8:]}_{number}" for number in range(3)]
        for name in self.servers:
            add_server(database, name)

    @rule(limits=limits)
    def limit(self, limits: dict[str, int]) -> None:
        self.model.limits = limits
        with self.database.write() as connection:
            set_limits(connection, self.key, {name: limits.get(name) for name in LIMITS})

    @rule(state=st.sampled_from(["active", "active", "active", "paused"]))
    def pause(self, state: Any) -> None:
        self.model.state = state
        with self.database.write() as connection:
            set_state(connection, self.key, state)

    @rule(seconds=st.sampled_from([0.5, 30.0, 61.0, 3600.0, DAY / 2, DAY, 40 * DAY, -30.0, -DAY]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(amount=amounts, server=st.sampled_from([None, 0, 1, 2]), least=st.sampled_from([None, None, 0, 1, 6]))
    def take(self, amount: Amount, server: int | None, least: int | None) -> None:
        name = None if server is None else self.servers[server]
        if least is not None:
            amount = Amount(amount.input_tokens, max(amount.output_tokens, least), amount.activations, amount.harvest_tokens)
        expected = amount if least is None else self.model.clamped(amount, least, self.now)
        refusal = self.model.refusal(expected, name, self.now)
        try:
            with self.database.write() as connection:
                hold = take_hold(connection, self.key, amount, name, self.now, least_output=least)
        except OverBudget as error:
            assert error.dimension == refusal
        except KeyInactiveError as error:
            assert error.state == refusal
        else:
            assert refusal is None and hold.amount == expected
            self.model.take(hold.id, expected, name, self.now)
            self.ids.append(hold.id)

    @rule(which=st.integers(0, 100), used=amounts)
    def settle(self, which: int, used: Amount) -> None:
        """Of all Holds that ever were: those that are gone stay so."""
        if self.ids:
            hold = self.ids[-1 - which % len(self.ids)]
            assert paid(self.database, hold, *used.each()) == self.model.settle(hold, used)

    @rule(server=st.integers(0, 2))
    def die(self, server: int) -> None:
        with self.database.write() as connection:
            connection.execute(sa.delete(servers).where(servers.c.id == self.servers[server]))
        with self.database.write() as connection:
            free_dead(connection, self.now)
        self.model.free(self.servers[server])
        add_server(self.database, self.servers[server])  # it has come back, under its name

    @invariant()
    def agree(self) -> None:
        with self.database.read() as connection:
            found = usage(connection, self.key, self.now)
        for balance in (found.month, found.day):
            period = balance.period
            assert (balance.spent, balance.held) == (self.model.spent[period], self.model.held(period))
            assert balance.requests == self.model.requests[period]
        assert found.running == self.model.running()
        assert dict(found.limits) == self.model.limits


@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
def test_budgets_do_what_the_model_does(database: Database) -> None:
    # On PostgreSQL a step takes a few milliseconds more, and the statements are the same.
    examples = 30 if database.is_sqlite else 5
    budget = settings(max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(lambda: Budgets(database), settings=budget)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("limit", BUDGETS)
def test_each_budget_has_room_for_what_it_says_and_no_more(database: Database, limit: str) -> None:
    period, member = BUDGETS[limit]
    counted = "input_tokens" if member == "tokens" else member
    one = [int(name == counted) for name in ("input_tokens", "output_tokens", "activations", "harvest_tokens")]
    key = make_key(database, **{limit: 3})
    held = [take(database, key, *one, now=NOON) for _ in range(3)]
    with pytest.raises(OverBudget) as refused:
        take(database, key, *one, now=NOON)
    error = refused.value
    assert (error.dimension, error.limit, error.left, error.asked, error.held) == (limit, 3, 0, 1, 3)
    assert error.renews_at == NOON + DAY / 2  # the last day of September, and its noon
    assert paid(database, held[0], *one) == Amount(*one)
    assert paid(database, held[1]) == NOTHING
    take(database, key, *one, now=NOON)
    with pytest.raises(OverBudget):
        take(database, key, *one, now=NOON)
    take(database, key, *one, now=NOON + DAY)
    with database.read() as connection:
        assert usage(connection, key, NOON).left(limit) == 0
        assert usage(connection, key, NOON + DAY).left(limit) == 2
        assert usage(connection, key, NOON + DAY).renews_at(limit) == NOON + DAY / 2 + DAY * (31 if period == "month" else 1)


def test_a_hold_is_spent_in_its_own_month_however_late(database: Database) -> None:
    key = make_key(database, monthly_tokens=10, daily_tokens=10)
    before = take(database, key, 4, 4, now=NOON)
    after = take(database, key, 5, 5, now=NOON + DAY)  # what is held in September says nothing of October
    assert paid(database, before, 4, 1) == Amount(4, 1)
    with database.read() as connection:
        september, october = usage(connection, key, NOON), usage(connection, key, NOON + DAY)
    assert september.month.spent == september.day.spent == Amount(4, 1) and september.month.requests == 1
    assert october.month.spent == NOTHING and october.month.held == Amount(5, 5)
    assert paid(database, after, 99, 99) == Amount(5, 5)  # never more than was held


def test_a_clock_that_goes_back_finds_what_was_spent(database: Database) -> None:
    key = make_key(database, daily_tokens=10, requests_per_minute=2)
    paid(database, take(database, key, 6, now=NOON), 6)
    take(database, key, 6, now=NOON + DAY)
    take(database, key, 4, now=NOON)
    with pytest.raises(OverBudget, match="requests_per_minute is 2, of which 0 is left"):
        take(database, key, 0, now=NOON)
    with pytest.raises(OverBudget, match="daily_tokens is 10, of which 0 is left"):
        take(database, key, 1, now=NOON - 60)


def test_concurrency_counts_what_runs_and_no_jobs(database: Database) -> None:
    add_server(database, "srv_a")
    key = make_key(database, concurrency=2)
    take(database, key, 1)
    first, _ = (take(database, key, 1, server="srv_a") for _ in range(2))
    with pytest.raises(OverBudget, match="concurrency is 2, of which 0 is left: 1 does not fit"):
        take(database, key, 1, server="srv_a")
    take(database, key, 1)
    paid(database, first)
    take(database, key, 1, server="srv_a")


def test_a_refused_hold_is_no_start_and_leaves_nothing(database: Database) -> None:
    key = make_key(database, requests_per_minute=1, daily_tokens=5)
    for _ in range(3):
        with pytest.raises(OverBudget, match="daily_tokens"):
            take(database, key, 6, now=NOON)
    take(database, key, 5, now=NOON)
    with pytest.raises(OverBudget) as refused:
        take(database, key, 0, now=NOON + 59)
    assert refused.value.dimension == "requests_per_minute" and refused.value.renews_at == NOON + 60
    take(database, key, 0, now=NOON + 60)


def test_what_is_left_is_taken_where_less_will_do(database: Database) -> None:
    key = make_key(database, monthly_tokens=10)
    with database.write() as connection:
        hold = take_hold(connection, key, Amount(4, 100), None, NOON, least_output=1)
    assert hold.amount == Amount(4, 6)
    with pytest.raises(OverBudget) as refused:
        take(database, key, 0, 100, now=NOON, least_output=1)
    assert (refused.value.asked, refused.value.left) == (1, 0)


def test_a_hold_whose_server_was_taken_for_dead_spends_what_is_left(database: Database) -> None:
    """The server lives after all: what it settles must not push what others have taken meanwhile over the limit."""
    add_server(database, "srv_b")
    key = make_key(database, monthly_tokens=10)
    slow = take(database, key, 4, 4, server="srv_b", now=NOON)
    with database.write() as connection:
        assert free_dead(connection) == 0
        connection.execute(sa.delete(servers).where(servers.c.id == "srv_b"))
        assert free_dead(connection) == 1 == 1 + free_dead(connection)
    take(database, key, 5, now=NOON)
    assert paid(database, slow, 4, 4) == Amount(4, 1)
    assert paid(database, slow, 4, 4) == NOTHING  # it was settled
    with database.read() as connection:
        assert usage(connection, key, NOON).left("monthly_tokens") == 0


def test_a_server_that_was_taken_for_dead_holds_again_what_fits(database: Database) -> None:
    add_server(database, "srv_b")
    key, full = make_key(database, monthly_tokens=10, concurrency=2), make_key(database, monthly_tokens=10)
    one, two = take(database, key, 3, 4, server="srv_b", now=NOON), take(database, full, 3, 4, server="srv_b", now=NOON)

    def held(key: str) -> int:
        with database.read() as connection:
            return usage(connection, key, NOON).month.held.tokens

    with database.write() as connection:
        connection.execute(sa.delete(servers).where(servers.c.id == "srv_b"))
        assert free_dead(connection, NOON) == 2
    other = take(database, full, 4, now=NOON)
    assert (held(key), held(full)) == (0, 4)
    with database.write() as connection:
        assert free_dead(connection, NOON, own="srv_b") == 0
    assert (held(key), held(full)) == (7, 4)
    with pytest.raises(OverBudget):
        take(database, key, 4, now=NOON)
    assert paid(database, one, 3, 4) == Amount(3, 4) and paid(database, two, 3, 4) == Amount(3, 3)
    assert paid(database, other, 4) == Amount(4)


def test_a_freed_hold_is_forgotten_after_a_while(database: Database) -> None:
    key = make_key(database)
    add_server(database, "srv_c")
    job = take(database, key, 1)
    take(database, key, 1, server="srv_c")
    with database.write() as connection:
        connection.execute(sa.delete(servers).where(servers.c.id == "srv_c"))
        assert free_dead(connection, NOON) == 1
        assert free_dead(connection, NOON + 6 * DAY) == 0
        assert connection.execute(sa.select(sa.func.count()).select_from(holds)).scalar_one() == 2
        free_dead(connection, NOON + 8 * DAY)
        assert connection.execute(sa.select(holds.c.id)).scalars().all() == [job]


def test_a_key_that_is_not_active_holds_nothing_and_settles_all_the_same(database: Database) -> None:
    key = make_key(database)
    running = take(database, key, 5)
    with database.write() as connection:
        set_state(connection, key, "revoked")
    with pytest.raises(KeyInactiveError, match="the key is revoked"):
        take(database, key, 1)
    with pytest.raises(KeyInactiveError):
        take(database, "key_none", 1)
    assert paid(database, running, 5) == Amount(5)


def test_a_limit_that_is_lowered_leaves_nothing_and_takes_nothing_back(database: Database) -> None:
    key = make_key(database, daily_tokens=10)
    hold = take(database, key, 8, now=NOON)
    with database.write() as connection:
        set_limits(connection, key, {"daily_tokens": 5})
    with pytest.raises(OverBudget) as refused:
        take(database, key, 1, now=NOON)
    assert refused.value.left == 0
    assert paid(database, hold, 8) == Amount(8)


def within(database: Database, key: str) -> None:
    """The law, in one reading."""
    with database.read() as connection:
        found = usage(connection, key)
    for limit in BUDGETS:
        left = found.left(limit)
        assert left is None or left >= 0, (limit, found)


def test_sixty_four_at_once_never_pass_a_limit(database: Database) -> None:
    limits = dict.fromkeys(BUDGETS, 100) | {"monthly_activations": 7, "monthly_harvest_tokens": 20}
    key = make_key(database, **limits)
    done: list[Amount] = []

    def request(number: int) -> int:
        draw = random.Random(number)
        amount = Amount(draw.randrange(1, 10), draw.randrange(1, 10), draw.randrange(2), draw.randrange(3))
        try:
            hold = take(database, key, *amount.each())
        except OverBudget:
            return 0
        within(database, key)
        done.append(paid(database, hold, *(draw.randrange(each + 1) for each in amount.each())))
        return 1

    with ThreadPoolExecutor(64) as pool:
        assert sum(pool.map(request, range(64))) > 5
    within(database, key)
    with database.read() as connection:
        found = usage(connection, key)
    assert found.month.held == NOTHING and found.month.spent == sum(done, NOTHING)


def test_of_sixty_four_equal_requests_as_many_are_taken_as_fit(database: Database) -> None:
    key = make_key(database, daily_tokens=109)

    def request(_: int) -> bool:
        try:
            take(database, key, 4, 6)
        except OverBudget:
            return False
        return True

    with ThreadPoolExecutor(64) as pool:
        assert sum(pool.map(request, range(64))) == 10


WORKER = """
import random, sys, threading, time
from ster.state.amounts import Amount, OverBudget
from ster.state.budget import settle, take_hold, free_dead
from ster.state.database import Database
from ster.state.presence import Presence

url, key, seed = sys.argv[1:]
database = Database(url)
presence = Presence(database)
presence.start()
print("ready", flush=True)

def work(number):
    draw = random.Random(f"{seed} {number}")
    while True:
        amount = Amount(draw.randrange(1, 20), draw.randrange(1, 20), draw.randrange(2))
        try:
            with database.write() as connection:
                hold = take_hold(connection, key, amount, presence.id)
        except OverBudget:
            time.sleep(0.002)
            continue
        time.sleep(draw.random() * 0.01)
        with database.write() as connection:
            settle(connection, hold.id, Amount(draw.randrange(2), draw.randrange(2), draw.randrange(2)))
        if number == 0:
            with database.write() as connection:
                free_dead(connection)

for number in range(3):
    threading.Thread(target=work, args=(number,), daemon=True).start()
time.sleep(3600)
"""


Worker = Callable[[str, int], subprocess.Popen[str]]


@pytest.fixture
def worker(database_url: str) -> Iterator[Worker]:
    """Starts processes that hold and settle, as servers do."""
    started: list[subprocess.Popen[str]] = []

    def start(key: str, seed: int) -> subprocess.Popen[str]:
        line = [sys.executable, "-c", WORKER, find_place(url=database_url).url, key, str(seed)]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def requests_of(database: Database, key: str) -> int:
    """That were paid in this month."""
    with database.read() as connection:
        return usage(connection, key).month.requests


def test_two_servers_one_of_which_is_killed_again_and_again(database: Database, worker: Worker) -> None:
    """Whatever moment it is: the law holds, and what the dead one held comes back whole."""
    key = make_key(database, monthly_tokens=100_000, daily_tokens=300, monthly_activations=100_000)
    lasting = worker(key, 0)
    draw = random.Random(1)
    for seed in range(1, 3):
        dying = worker(key, seed)
        end = time.monotonic() + draw.random()
        while time.monotonic() < end:
            within(database, key)
            time.sleep(0.005)
        dying.send_signal(signal.SIGKILL)
        dying.wait()
        within(database, key)
    while requests_of(database, key) == 0:
        assert lasting.poll() is None
        time.sleep(0.005)
    lasting.send_signal(signal.SIGKILL)
    lasting.wait()
    with database.write() as connection:
        free_dead(connection)
        found = usage(connection, key)
        assert found.month.held == NOTHING == found.day.held and found.running == 0
        rows = connection.execute(sa.select(spent).where(spent.c.key_id == key)).all()
    month, day = sorted(rows, key=lambda row: len(row.period))
    assert month.requests == day.requests > 0 and month.input_tokens == day.input_tokens


def test_a_transaction_that_fails_holds_nothing(database: Database) -> None:
    key = make_key(database)
    mine = Presence(database)
    with pytest.raises(ZeroDivisionError), database.write() as connection:
        take_hold(connection, key, Amount(5), mine.id)
        raise ZeroDivisionError
    with database.read() as connection:
        assert usage(connection, key).month.held == NOTHING

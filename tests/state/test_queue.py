"""Each row is done once, by whoever has claimed it; owners take turns."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `serve` is not installed")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, insert, select, update

from ster.state.amounts import Amount
from ster.state.budget import take_hold, usage
from ster.state.database import Database
from ster.state.keys import create_key, set_state
from ster.state.place import find_place
from ster.state.queue import MAX_ATTEMPTS, Found, Queue
from ster.state.tables import harvests, jobs, servers

MODELS = ("a", "b")


@pytest.fixture(params=["jobs", "harvests"])
def queue(request: pytest.FixtureRequest, database_url: str) -> Iterator[Queue]:
    database = Database(find_place(url=database_url).url)
    yield Queue(database, jobs if request.param == "jobs" else harvests)
    database.close()


def add(queue: Queue, owner: str, id: str, model: str = "a", **values: Any) -> None:
    more = {} if queue._table is jobs else {"prompts": 1, "tokens": 2, "bytes": 3}
    with queue._database.write() as connection:
        queue.add(connection, id=id, owner=owner, model=model, request=b"{}", **more, **values)


def live(queue: Queue, *ids: str) -> None:
    """Servers, on another machine, that beat just now."""
    with queue._database.write() as connection:
        for id in ids:
            row = {"id": id, "host": "elsewhere", "pid": 1, "started_at": time.time(), "beat_at": time.time()}
            connection.execute(insert(servers).values(row))


def die(queue: Queue, id: str) -> None:
    with queue._database.write() as connection:
        connection.execute(delete(servers).where(servers.c.id == id))


def recover(queue: Queue, held: Collection[str] = ()) -> list[str]:
    with queue._database.write() as connection:
        return [row.id for row in queue.recover(connection, '{"code": "x"}', "me", held)]


def end(queue: Queue, claimed: Found | None, state: Any = "done") -> bool:
    assert claimed is not None
    with queue._database.write() as connection:
        return queue.finish(connection, claimed, state)


def state(queue: Queue, id: str) -> str:
    with queue._database.read() as connection:
        return str(connection.execute(select(queue._table.c.state).where(queue._table.c.id == id)).scalar_one())


def test_a_row_is_queued_then_running_then_done(queue: Queue) -> None:
    add(queue, "o", "1", hold_id="h")
    row = queue.get("o", "1")
    assert row is not None and (row.state, row.started_at, row.attempts, row.hold_id) == ("queued", None, 0, "h")
    assert "request" not in row._fields
    claimed = queue.claim(MODELS, "s")
    assert claimed is not None and (claimed.id, claimed.request, claimed.attempts) == ("1", b"{}", 1)
    assert state(queue, "1") == "running" and queue.claim(MODELS, "s") is None
    assert end(queue, claimed) and not end(queue, claimed)
    row = queue.get("o", "1")
    assert row is not None and row.created_at <= row.started_at <= row.ended_at and row.hold_id is row.server_id is None


def test_nobody_sees_the_rows_of_another(queue: Queue) -> None:
    add(queue, "o", "1")
    assert queue.get("other", "1") is None
    assert queue.list("other", 10) == ([], False)
    with queue._database.write() as connection:
        assert queue.cancel(connection, "other", "1") is None and queue.live(connection, "other") == 0
        assert queue.live(connection, "o") == 1
    assert queue.list("other", 10, "1") is None


def test_a_list_is_whole_in_pages_of_any_size(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest come first; some are of the same moment."""
    for number, now in enumerate((1.0, 1.0, 2.0, 3.0, 3.0, 3.0, 4.0)):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda now=now: now)
            add(queue, "o", f"{number}")
            add(queue, "other", f"x{number}")
    for size in (1, 2, 3, 7, 8):
        found: list[str] = []
        more = True
        while more:
            page = queue.list("o", size, found[-1] if found else None)
            assert page is not None
            rows, more = page
            assert len(rows) <= size
            found += [row.id for row in rows]
        assert found == list("6543210")
    assert queue.list("o", 1, "none") is None


def test_only_models_that_are_asked_for_are_claimed(queue: Queue) -> None:
    add(queue, "o", "1", "c")
    assert queue.claim(MODELS, "s") is None and queue.claim((), "s") is None
    claimed = queue.claim(("c",), "s")
    assert claimed is not None and claimed.id == "1"


def test_owners_take_turns(queue: Queue) -> None:
    for number in range(4):
        add(queue, "many", f"many{number}")
    add(queue, "few", "few0")
    add(queue, "late", "late0")
    order = []
    for _ in range(6):  # one at a time
        claimed = queue.claim(MODELS, "s")
        assert claimed is not None and end(queue, claimed)
        order.append(claimed.id)
    assert order == ["many0", "few0", "late0", "many1", "many2", "many3"]


def test_who_has_less_running_comes_first(queue: Queue) -> None:
    for number, owner in itertools.product(range(3), ("o", "p")):
        add(queue, owner, f"{owner}{number}")
    claimed = [queue.claim(MODELS, "s") for _ in range(3)]
    assert [row and row.id for row in claimed] == ["o0", "p0", "o1"]
    assert end(queue, claimed[0]) and end(queue, claimed[2])
    following = [queue.claim(MODELS, "s") for _ in range(3)]
    assert [row and row.id for row in following] == ["o2", "p1", "p2"]


def test_rows_are_claimed_once_however_many_ask(queue: Queue) -> None:
    for number in range(40):
        add(queue, f"o{number % 3}", str(number))

    def work(server: int) -> list[str]:
        found = []
        while (claimed := queue.claim(MODELS, f"s{server}")) is not None:
            assert end(queue, claimed)
            found.append(claimed.id)
        return found

    with ThreadPoolExecutor(8) as pool:
        done = [id for ids in pool.map(work, range(8)) for id in ids]
    left = 0
    while (row := queue.claim(MODELS, "s")) is not None:  # all that one skipped were locked by another, who may have left by then
        left += 1
        done.append(row.id)
    assert Counter(done) == Counter(str(number) for number in range(40)) and left < 8


def test_a_claim_that_is_lost_ends_nothing(queue: Queue) -> None:
    live(queue, "s", "t")
    add(queue, "o", "1")
    mine = queue.claim(MODELS, "s")
    assert mine is not None and queue.still([mine]) == {"1"}
    assert recover(queue) == [] and state(queue, "1") == "running"
    die(queue, "s")
    assert recover(queue) == [] and state(queue, "1") == "queued"
    assert queue.still([mine]) == set() and not end(queue, mine)
    other = queue.claim(MODELS, "t")
    assert other is not None and other.attempts == 2
    with queue._database.write() as connection:
        assert not queue.put_back(connection, mine) and not queue.update(connection, mine, error="x")
    assert not end(queue, mine, "failed") and queue.still([mine, other]) == {"1"}
    assert end(queue, other) and state(queue, "1") == "done"


def test_a_server_does_not_end_what_it_claimed_again(queue: Queue) -> None:
    live(queue, "s")
    add(queue, "o", "1")
    first = queue.claim(MODELS, "s")
    die(queue, "s")
    recover(queue)
    live(queue, "s")
    second = queue.claim(MODELS, "s")
    assert not end(queue, first) and end(queue, second)


def test_what_a_server_has_forgotten_is_put_back(queue: Queue) -> None:
    live(queue, "me", "t")
    for id in ("1", "2", "3"):
        add(queue, "o", id)
    mine = [queue.claim(MODELS, "me"), queue.claim(MODELS, "me")]
    other = queue.claim(MODELS, "t")
    assert recover(queue, held=["2"]) == [] and [state(queue, id) for id in "123"] == ["queued", "running", "running"]
    assert not end(queue, mine[0]) and end(queue, mine[1]) and end(queue, other)


@pytest.mark.parametrize("present", [False, True])
def test_what_a_server_still_runs_is_its_own_however_late_it_beats(queue: Queue, present: bool) -> None:
    if present:
        live(queue, "me")
        with queue._database.write() as connection:
            connection.execute(update(servers).values(beat_at=0.0))
    add(queue, "o", "1")
    mine = queue.claim(MODELS, "me")
    assert recover(queue, held=["1"]) == [] and state(queue, "1") == "running"
    assert end(queue, mine)


def test_what_a_server_still_runs_is_not_put_back_nor_claimed_by_it_again(queue: Queue) -> None:
    """Another took it for dead, and put back what it runs."""
    for id in ("1", "2"):
        add(queue, "o", id)
    claimed = queue.claim(MODELS, "other")
    assert claimed is not None and recover(queue, held=["1"]) == [] and state(queue, "1") == "running"
    recover(queue)
    assert state(queue, "1") == "queued"
    following = queue.claim(MODELS, "me", held=["1"])
    assert following is not None and following.id == "2" and queue.claim(MODELS, "me", held=["1"]) is None
    again = queue.claim(MODELS, "me")
    assert again is not None and again.id == "1"


def test_what_ends_its_servers_is_given_up(queue: Queue) -> None:
    add(queue, "o", "1", hold_id="h")
    for attempt in range(1, MAX_ATTEMPTS):
        assert queue.claim(MODELS, f"s{attempt}") is not None
        assert recover(queue) == [] and state(queue, "1") == "queued"
    assert queue.claim(MODELS, "s") is not None
    assert recover(queue) == ["1"] and recover(queue) == []
    row = queue.get("o", "1")
    assert row is not None and (row.state, row.error, row.hold_id) == ("failed", '{"code": "x"}', None)


def test_what_is_put_back_has_not_been_tried(queue: Queue) -> None:
    add(queue, "o", "1")
    for _ in range(2 * MAX_ATTEMPTS):
        claimed = queue.claim(MODELS, "s")
        assert claimed is not None
        with queue._database.write() as connection:
            assert queue.put_back(connection, claimed)
    row = queue.get("o", "1")
    assert row is not None and (row.state, row.attempts, row.started_at) == ("queued", 0, None)


@pytest.mark.parametrize("claimed", [False, True])
def test_a_row_that_waits_or_runs_is_cancelled_once(queue: Queue, claimed: bool) -> None:
    add(queue, "o", "1", hold_id="h")
    row = queue.claim(MODELS, "s") if claimed else None
    with queue._database.write() as connection:
        found = queue.cancel(connection, "o", "1")
        assert found is not None and found[1] and (found[0].hold_id, found[0].state) == ("h", "running" if claimed else "queued")
        found = queue.cancel(connection, "o", "1")
        assert found is not None and not found[1] and (found[0].hold_id, found[0].state) == (None, "cancelled")
    assert row is None or not end(queue, row)
    assert queue.claim(MODELS, "s") is None


def test_what_ended_is_removed_later(queue: Queue) -> None:
    for id in ("1", "2", "3"):
        add(queue, "o", id)
    assert end(queue, queue.claim(MODELS, "s"))
    queue.claim(MODELS, "s")
    assert queue.expired(0.0) == []
    gone = [row.id for row in queue.expired(time.time() + 1)]
    assert gone == ["1"]
    with queue._database.write() as connection:
        queue.remove(connection, ["1", "2", "3"])
    page = queue.list("o", 10)
    assert page is not None and [row.id for row in page[0]] == ["3", "2"]


def test_however_many_ended_all_are_removed(queue: Queue) -> None:
    """More than either database takes in one statement."""
    ids = [f"{number}" for number in range(70_000)]
    more = {} if queue._table is jobs else {"prompts": 1, "tokens": 2, "bytes": 3}
    row = {"owner": "o", "model": "a", "request": b"", "state": "done", "created_at": 0.0, "ended_at": 1.0, **more}
    with queue._database.write() as connection:
        connection.execute(insert(queue._table), [{"id": id, **row} for id in ids[:2_500]])
        queue.remove(connection, ids)
    assert queue.expired(2.0) == []


def test_what_failed_is_returned_in_the_order_in_which_keys_are_locked(queue: Queue) -> None:
    for number, owner in enumerate("cabdca"):
        add(queue, owner, str(number))
    with queue._database.write() as connection:
        connection.execute(update(queue._table).values(state="running", server_id="gone", attempts=MAX_ATTEMPTS))
        failed = queue.recover(connection, "{}", "me", ())
    assert [row.owner for row in failed] == list("aabccd")


def test_what_is_queued_waits_while_its_key_is_paused_and_ends_when_it_is_revoked(queue: Queue) -> None:
    """What runs comes to its end, also where it is put back for another server; what others have queued stays."""
    with queue._database.write() as connection:
        key = create_key(connection, "mine")[0].id
        taken = [take_hold(connection, key, Amount(5), None).id for _ in range(3)]
    for number, hold in enumerate(taken):
        add(queue, key, str(number), hold_id=hold)
    running = queue.claim(MODELS, "s")
    assert running is not None
    set_key(queue, "paused")
    assert queue.claim(MODELS, "s") is None
    add(queue, "local", "other")
    other = queue.claim(MODELS, "s")
    assert other is not None and other.id == "other"
    with queue._database.write() as connection:
        queue.put_back(connection, other)
    set_key(queue, "active")
    with queue._database.read() as connection:
        assert usage(connection, key).month.held == Amount(15)
    set_key(queue, "revoked")
    assert [state(queue, id) for id in ("0", "1", "2", "other")] == ["running", "cancelled", "cancelled", "queued"]
    with queue._database.write() as connection:
        assert usage(connection, key).month.held == Amount(5)
        queue.put_back(connection, running)
    claimed = [queue.claim(MODELS, "t"), queue.claim(MODELS, "t"), queue.claim(MODELS, "t")]
    assert {row and row.id for row in claimed} == {"0", "other", None}


def set_key(queue: Queue, wanted: Any) -> None:
    with queue._database.write() as connection:
        set_state(connection, "mine", wanted)


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "claim", "done", "failed", "put_back", "cancel", "die", "recover"]), st.integers(0, 3)),
    max_size=40,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_a_row_ends_once_whatever_happens(queue: Queue, steps: list[tuple[str, int]]) -> None:
    """Ends are counted by what said that it ended a row; servers keep their claims in mind after they were taken for dead."""
    with queue._database.write() as connection:
        connection.execute(delete(queue._table))
        connection.execute(delete(servers))
    held: list[Found] = []
    ended: Counter[str] = Counter()
    added = 0
    for action, number in steps:
        server = f"s{number}"
        with queue._database.read() as connection:
            present = connection.execute(select(servers.c.id).where(servers.c.id == server)).first() is not None
        if action == "add":
            add(queue, f"o{number}", str(added := added + 1))
        elif action == "claim":
            if not present:
                live(queue, server)
            if (claimed := queue.claim(MODELS, server)) is not None:
                held.append(claimed)
        elif action == "die":
            die(queue, server)
        elif action == "recover":
            ended.update(recover(queue))
        elif action == "cancel":
            with queue._database.write() as connection:
                found = queue.cancel(connection, f"o{number % 4}", str(number + 1))
                if found is not None and found[1]:
                    ended[found[0].id] += 1
        elif number < len(held):
            row = held[-1 - number]
            with queue._database.write() as connection:
                if action == "put_back":
                    queue.put_back(connection, row)
                elif queue.finish(connection, row, action):  # type: ignore[arg-type]
                    ended[row.id] += 1
    with queue._database.read() as connection:
        rows = connection.execute(select(queue._table)).all()
    assert len(rows) == added
    assert {row.id: 1 for row in rows if row.state in ("done", "failed", "cancelled")} == dict(ended)
    assert all(row.attempts <= MAX_ATTEMPTS and (row.server_id is not None) == (row.state == "running") for row in rows)
    running = Counter(row.id for row in rows if row.state == "running")
    assert all(queue.still([row]) <= set(running) for row in held)

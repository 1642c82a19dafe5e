"""Keys: shown once, found by their hash, paused, revoked for good."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `serve` is not installed")

from ster.errors import InputError
from ster.state.database import Database
from ster.state.keys import MOST, Key, any_key, create_key, find_key, get_key, list_keys, set_limits, set_state
from ster.state.place import find_place


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(find_place(url=database_url).url)
    yield database
    database.close()


def test_a_key_is_found_by_its_text_and_by_nothing_else(database: Database) -> None:
    with database.write() as connection:
        assert not any_key(connection)
        key, secret = create_key(connection, "ann", {"daily_tokens": 0, "concurrency": 3})
        other, another = create_key(connection, "ben")
    assert secret.startswith("sk-ster-") and len(secret) == 56 and secret != another
    assert key == Key(key.id, "ann", secret[:12], "active", key.created_at, {"daily_tokens": 0, "concurrency": 3})
    with database.read() as connection:
        assert any_key(connection)
        assert find_key(connection, secret) == key == get_key(connection, "ann") == get_key(connection, key.id)
        for wrong in ("", secret[:-1], secret.upper(), key.id, key.shown, "ann", "\udcff"):
            assert find_key(connection, wrong) is None
        assert list_keys(connection) == [key, other]


def test_the_text_of_a_key_is_nowhere(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'ster.db'}")
    with database.write() as connection:
        key, secret = create_key(connection, "ann")
        assert find_key(connection, secret) == key
    assert secret not in repr(key)
    database.close()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    for path in written:
        assert secret.encode() not in path.read_bytes() and secret[20:].encode() not in path.read_bytes()


def test_a_key_is_paused_and_resumed_and_revoked_for_good(database: Database) -> None:
    with database.write() as connection:
        _, secret = create_key(connection, "ann")
        for state in ("paused", "active", "paused", "revoked", "revoked"):
            assert set_state(connection, "ann", state).state == state  # type: ignore[arg-type]
            found = find_key(connection, secret)
            assert found is not None and found.state == state
        for wanted in ("active", "paused"):
            with pytest.raises(InputError, match="the key ann is revoked, which is final"):
                set_state(connection, "ann", wanted)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="there is a key called ann already"):
            create_key(connection, "ann")


def test_limits_are_set_one_by_one(database: Database) -> None:
    with database.write() as connection:
        create_key(connection, "ann", {"monthly_tokens": 5})
        assert set_limits(connection, "ann", {"daily_tokens": 7}).limits == {"monthly_tokens": 5, "daily_tokens": 7}
        assert set_limits(connection, "ann", {"monthly_tokens": None, "daily_tokens": MOST}).limits == {"daily_tokens": MOST}
        assert set_limits(connection, "ann", {}).limits == {"daily_tokens": MOST}


@pytest.mark.parametrize(
    ("name", "limits", "message"),
    [
        ("", {}, "1 to 100 printable characters"),
        ("a\nb", {}, "1 to 100 printable characters"),
        ("a" * 101, {}, "1 to 100 printable characters"),
        ("ann", {"tokens": 1}, "there is no limit tokens"),
        ("ann", {"daily_tokens": -1}, "daily_tokens must be 0 to"),
        ("ann", {"daily_tokens": MOST + 1}, "daily_tokens must be 0 to"),
    ],
)
def test_what_cannot_be_is_refused(database: Database, name: str, limits: dict[str, int], message: str) -> None:
    with database.write() as connection, pytest.raises(InputError, match=message):
        create_key(connection, name, limits)
    with database.write() as connection, pytest.raises(InputError, match="there is no key nobody"):
        set_limits(connection, "nobody", {})


@pytest.mark.parametrize("name", ["\udcff", "a\0b", ""])
def test_a_name_that_no_key_can_have_is_none(database: Database, name: str) -> None:
    for look in (get_key, lambda connection, name: set_state(connection, name, "paused"), lambda *given: set_limits(*given, {})):
        with database.write() as connection, pytest.raises(InputError, match="there is no key"):
            look(connection, name)


def test_of_keys_with_one_name_made_at_once_one_is_made(database: Database) -> None:
    def make(_: int) -> bool:
        try:
            with database.write() as connection:
                create_key(connection, "ann")
        except InputError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(make, range(8))) == 1
    with database.read() as connection:
        assert len(list_keys(connection)) == 1

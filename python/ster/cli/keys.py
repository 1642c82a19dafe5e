"""`ster keys`: API keys of servers, and what they may spend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ster.cli import console
from ster.cli.keys_shown import described, listed, shown
from ster.cli.options import DatabaseOption, JsonOption, StateOption
from ster.cli.state import open_database

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from ster.state.keys import KeyState

keys = typer.Typer(no_args_is_help=True, help="API keys of servers: make, look at, limit, take away.", rich_markup_mode=None)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key, or its id.")]
ANY = "any"


def _limit(option: str, help: str) -> Any:
    return typer.Option(option, metavar="N|any", help=help)


MonthlyTokens = Annotated[str | None, _limit("--monthly-tokens", "Of prompts and generated, in a month of UTC.")]
DailyTokens = Annotated[str | None, _limit("--daily-tokens", "The same in a day.")]
MonthlyInput = Annotated[str | None, _limit("--monthly-input-tokens", "Of prompts.")]
MonthlyOutput = Annotated[str | None, _limit("--monthly-output-tokens", "Generated.")]
MonthlyActivations = Annotated[str | None, _limit("--monthly-activations", "Requests that read activations.")]
MonthlyHarvest = Annotated[str | None, _limit("--monthly-harvest-tokens", "Of prompts of harvests.")]
Concurrency = Annotated[str | None, _limit("--concurrency", "Requests that run at a time.")]
RequestsPerMinute = Annotated[str | None, _limit("--requests-per-minute", "Requests that start.")]


@keys.command(short_help="Make a key, which is shown once.")
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is called in lists. It stays the key's own for good.")],
    monthly_tokens: MonthlyTokens = None,
    daily_tokens: DailyTokens = None,
    monthly_input_tokens: MonthlyInput = None,
    monthly_output_tokens: MonthlyOutput = None,
    monthly_activations: MonthlyActivations = None,
    monthly_harvest_tokens: MonthlyHarvest = None,
    concurrency: Concurrency = None,
    requests_per_minute: RequestsPerMinute = None,
    state: StateOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = None,
) -> None:
    """Make a key, and print it. It is not kept: only its SHA-256 is. From the first key on, servers of this state want one.

    A limit that is not given does not hold.
    """
    limits = _limits(locals())
    with _writing(state, database) as connection:
        from ster.state.keys import create_key

        key, secret = create_key(connection, name, {limit: value for limit, value in limits.items() if value is not None})
    console.note(f"The key {key.name}, which is shown only now:")
    if as_json:
        console.result({"key": secret, **described(key)}, lambda: secret, True)
    else:
        console.data(secret)


@keys.command("list", short_help="All keys.")
def list_(state: StateOption = None, database: DatabaseOption = None, as_json: JsonOption = None) -> None:
    """List the keys, the revoked too, with what they have spent in this month."""
    with _writing(state, database) as connection:
        from ster.state.budget import free_dead, usage
        from ster.state.keys import list_keys

        free_dead(connection)
        found = [(key, usage(connection, key.id)) for key in list_keys(connection)]
    console.result({"keys": [described(*each) for each in found]}, lambda: listed(found), as_json)


@keys.command(short_help="What a key has spent, holds and has left.")
def show(name: NameArgument, state: StateOption = None, database: DatabaseOption = None, as_json: JsonOption = None) -> None:
    """Show a key with its limits, and what it has spent, holds and has left in this month and today, which are UTC's."""
    with _writing(state, database) as connection:
        from ster.state.budget import free_dead, usage
        from ster.state.keys import get_key

        free_dead(connection)
        key = get_key(connection, name)
        found = usage(connection, key.id)
    console.result(described(key, found), lambda: shown(key, found), as_json)


@keys.command(short_help="Refuse a key for a while.")
def pause(name: NameArgument, state: StateOption = None, database: DatabaseOption = None) -> None:
    """Refuse a key until it is resumed. What runs comes to its end, and is paid; Jobs and harvests that are queued wait."""
    _set_state(name, "paused", state, database)


@keys.command(short_help="Take a paused key again.")
def resume(name: NameArgument, state: StateOption = None, database: DatabaseOption = None) -> None:
    """Take a paused key again."""
    _set_state(name, "active", state, database)


@keys.command(short_help="Refuse a key for good.")
def revoke(name: NameArgument, state: StateOption = None, database: DatabaseOption = None) -> None:
    """Refuse a key for good. What runs comes to its end, and is paid; Jobs and harvests that are queued are cancelled.

    What it has spent stays known.
    """
    _set_state(name, "revoked", state, database)


@keys.command(short_help="Change the limits of a key.")
def budget(
    name: NameArgument,
    monthly_tokens: MonthlyTokens = None,
    daily_tokens: DailyTokens = None,
    monthly_input_tokens: MonthlyInput = None,
    monthly_output_tokens: MonthlyOutput = None,
    monthly_activations: MonthlyActivations = None,
    monthly_harvest_tokens: MonthlyHarvest = None,
    concurrency: Concurrency = None,
    requests_per_minute: RequestsPerMinute = None,
    state: StateOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = None,
) -> None:
    """Change the limits that are given; `any` takes one away. What is spent and held stays."""
    limits = _limits(locals())
    with _writing(state, database) as connection:
        from ster.state.budget import usage
        from ster.state.keys import set_limits

        key = set_limits(connection, name, limits)
        found = usage(connection, key.id)
    console.result(described(key, found), lambda: shown(key, found), as_json)


def _set_state(name: str, wanted: KeyState, state: str | None, database: str | None) -> None:
    with _writing(state, database) as connection:
        from ster.state.keys import set_state

        key = set_state(connection, name, wanted)
    console.note(f"The key {key.name} is {key.state}.")


@contextlib.contextmanager
def _writing(state: str | None, database: str | None) -> Iterator[Connection]:
    opened = open_database(state, database)
    try:
        with opened.write() as connection:
            yield connection
    finally:
        opened.close()


def _limits(given: dict[str, Any]) -> dict[str, int | None]:
    """Those of the options that were given; None: it is to hold no longer.

    Raises:
        InputError: neither a whole number nor `any`.
    """
    from ster.errors import InputError
    from ster.state.tables import LIMITS

    found: dict[str, int | None] = {}
    for limit in LIMITS:
        text = given[limit]
        if text is not None:
            plain = text.replace(",", "").replace("_", "")
            if text != ANY and not (plain.isascii() and plain.isdigit()):
                raise InputError(f"--{limit.replace('_', '-')} must be a whole number, 0 or more, or `any`, found {text}")
            found[limit] = None if text == ANY else int(plain)
    return found

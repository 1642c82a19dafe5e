"""Whether the extra is there, before anything that needs it is imported."""

from __future__ import annotations

from importlib.util import find_spec

from ster.errors import InputError


def check_extra() -> None:
    """
    Raises:
        InputError: what speaks to servers is not installed.
    """
    missing = [name for name in ("httpx", "zstandard") if find_spec(name) is None]
    if missing:
        hint = "run `pip install '.[remote]'` in Ster's folder (the distribution is called ster-lm, and it is not on PyPI)"
        raise InputError(f"a model behind a server needs the extra `remote`, of which {', '.join(missing)} cannot be imported", hint)

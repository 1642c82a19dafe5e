"""`ster models`: the families that run."""

from __future__ import annotations

import textwrap

from ster.cli import console
from ster.cli.options import JsonOption
from ster.cli.tables import table

WIDTH = 100


def models(as_json: JsonOption = None) -> None:
    """List the families of models that run, by the `model_type` of their config.json, and what each adds to Llama.

    A config that asks for anything its family does not know is refused, and the field named.
    """
    from ster._native import families

    found = families()
    document = {"families": [{"model_type": name, "adds": adds} for name, adds in found]}
    console.result(document, lambda: _text(found), as_json)


def _text(found: list[tuple[str, str]]) -> str:
    rows = []
    for name, adds in found:
        first, *more = textwrap.wrap(adds, WIDTH)
        rows += [[name, first], *(["", line] for line in more)]
    return table(["model_type", "adds"], rows)

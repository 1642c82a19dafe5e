"""`ster vector compare`: how alike vectors are, and which are made of which."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ster.cli import console
from ster.cli.options import JsonOption
from ster.cli.tables import bar, number, table

if TYPE_CHECKING:
    from ster.steering_artifact import Comparison


def compare(
    vectors: Annotated[list[Path], typer.Argument(metavar="VECTOR VECTOR...", help="Two or more vector files of one width.")],
    as_json: JsonOption = None,
) -> None:
    """Compare vectors layer by layer: cosine similarities, and how much of each the others explain. Needs no model.

    `explained` is the part of a vector's squared length that the best sum of multiples of the others reaches; a vector in a random
    direction reaches `by chance` on average.
    """
    from ster.interchange import load
    from ster.steering_artifact import compare

    names = [path.stem for path in vectors]
    if len(set(names)) < len(names):
        names = list(map(str, vectors))
    found = compare([load(path) for path in vectors], names)
    for note in found.notes:
        console.note(f"Warning: {note}")
    console.result(found.to_dict(), lambda: _text(found), as_json)


def _text(found: Comparison) -> str:
    if len(found.names) == 2:
        rows = [[str(at.layer), f"{at.cosine[0][1]:+.3f}", bar(abs(at.cosine[0][1]), 1.0)] for at in found.layers]
        return f"Cosine of {found.names[0]} and {found.names[1]}:\n" + table(["layer", "cosine", "size"], rows)
    parts = []
    for at in found.layers:
        names = [found.names[n] for n in at.artifacts]
        rows = [
            [name, *(f"{x:+.3f}" for x in at.cosine[n]), number(at.explained[n]), bar(at.explained[n], 1.0)] for n, name in enumerate(names)
        ]
        parts.append(f"Layer {at.layer} (explained by chance: {number(at.by_chance)})\n" + table(["", *names, "explained", ""], rows))
    return "\n\n".join(parts)

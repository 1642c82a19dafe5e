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
        return f"Cosine of {found.names[0]} and {found.names[1]}:\n" + table(["layer", "cosine", "size, 0 to 1"], rows)
    rows = []
    for at in found.layers:
        for n, artifact in enumerate(at.artifacts):
            cosines = dict(zip(at.artifacts, at.cosine[n], strict=True))
            cells = [f"{cosines[other]:+.3f}" if other in cosines else "" for other in range(len(found.names))]
            shares = [number(at.by_chance), number(at.explained[n]), bar(at.explained[n], 1.0, 10)]
            rows.append([str(at.layer) if n == 0 else "", found.names[artifact], *cells, *shares])
    head = ["layer", "vector", *found.names, "by chance", "explained", "0 to 1"]
    return "Cosines, and how much of each vector the others explain:\n" + table(head, rows)

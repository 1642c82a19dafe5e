"""`ster toy-model`: a checkpoint to try things on."""

from __future__ import annotations

from typing import Annotated

import typer

from ster.cli import console


def toy_model(folder: Annotated[str, typer.Argument(help="Folder to write; made if it is missing.")]) -> None:
    """Write the toy checkpoint: 4 layers, 67 words, random weights, the same bytes everywhere. Replaces nothing."""
    from ster.toy import write_toy_model

    console.data(write_toy_model(folder))

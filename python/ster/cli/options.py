"""Options that every command with a model shares."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ster.model import Model


class PrecisionChoice(str, Enum):
    auto = "auto"
    f32 = "f32"
    bf16 = "bf16"
    f16 = "f16"


class ChatChoice(str, Enum):
    auto = "auto"
    off = "off"


ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        envvar="STER_MODEL",
        help="Folder with config.json and *.safetensors, a GGUF file, or ORG/NAME on the Hugging Face Hub.",
    ),
]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", metavar="REV", help="Branch, tag or commit of a model of the Hub. Default: main.")
]
PrecisionOption = Annotated[
    PrecisionChoice,
    typer.Option("--precision", help="Weights as stored (auto, f32), or rounded to bf16 or f16 first. Arithmetic is always f32."),
]
ChatOption = Annotated[
    ChatChoice,
    typer.Option("--chat-template", help="auto: prompts are user turns where the model has a template. off: raw text."),
]
ThreadsOption = Annotated[int | None, typer.Option("--threads", metavar="N", min=1, help="Default: one for every core. Changes no result.")]
LayersOption = Annotated[
    str, typer.Option("--layers", "-l", metavar="LAYERS", help="all, 5, 8..16 (16 not included), 3,5,8..12; -1 is the last.")
]
PairsOption = Annotated[
    Path, typer.Option("--pairs", "-p", metavar="FILE", help='{"trait_name": "...", "pairs": [{"positive": "...", "negative": "..."}]}')
]
NO_STATE = "none"
StateOption = Annotated[
    str | None,
    typer.Option("--state", metavar="DIR", help="Folder of keys, Jobs and harvests. Default: one of the user's.  [env var: STER_STATE]"),
]
DatabaseOption = Annotated[
    str | None,
    typer.Option("--database", metavar="URL", help="PostgreSQL, for several servers. Default: in --state.  [env var: STER_DATABASE]"),
]
JsonOption = Annotated[bool | None, typer.Option("--json/--text", help="Default: text on a terminal, JSON when piped.")]
VectorArgument = Annotated[
    Path, typer.Argument(metavar="VECTOR", help="A steering artifact, or a GGUF, safetensors, npz or vllm-lens file.")
]


def read_numbers(text: str, what: str) -> list[float]:
    """`-4,-1,0.5` -> numbers.

    Raises:
        InputError: `invalid <what> "<x>"`.
    """
    from ster.errors import InputError

    found = []
    for piece in text.split(","):
        try:
            found.append(float(piece))
        except ValueError:
            raise InputError(f'invalid {what} "{piece.strip()}"', f"{what}s are numbers with commas between them, as in -1,0.5,2") from None
    return found


def open_model(model: str, revision: str | None, precision: PrecisionChoice, chat_template: ChatChoice, threads: int | None) -> Model:
    """`ster.load` with the shared options."""
    from ster.model import load

    return load(model, revision=revision, precision=precision.value, threads=threads, chat_template=chat_template.value, progress=True)

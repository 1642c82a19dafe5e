"""Options that every command with a model shares."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ster.cli import console

if TYPE_CHECKING:
    from ster.abstract_model import AbstractModel
    from ster.model import Model


class PrecisionChoice(str, Enum):
    auto = "auto"
    f32 = "f32"
    bf16 = "bf16"
    f16 = "f16"


class ChatChoice(str, Enum):
    auto = "auto"
    off = "off"


class WireChoice(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Environment(str):
    """A value that the environment gave, not the command line."""


def _with_source(context: typer.Context, parameter: typer.CallbackParam, value: str | None) -> str | None:
    source = context.get_parameter_source(parameter.name or "")
    return Environment(value) if value is not None and source is not None and source.name == "ENVIRONMENT" else value


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        envvar="STER_MODEL",
        callback=_with_source,
        help="Folder with config.json and *.safetensors, a GGUF file, or ORG/NAME on the Hugging Face Hub; with --endpoint its name there.",
    ),
]
EndpointOption = Annotated[
    str | None,
    typer.Option("--endpoint", metavar="URL", help="Run on a server instead, `ster serve` or vLLM with vllm-lens: http://host:8000/v1."),
]
ApiKeyOption = Annotated[
    str | None, typer.Option("--api-key", metavar="KEY", envvar="STER_API_KEY", callback=_with_source, help="Key of the server.")
]
ConcurrencyOption = Annotated[
    int | None, typer.Option("--concurrency", metavar="N", min=1, max=1024, help="Requests to the server at a time. Default: 8.")
]
WireOption = Annotated[
    WireChoice | None,
    typer.Option("--wire-dtype", help="How activations travel. Default: float32, exact; from vLLM the dtype it computes in."),
]
TokenizerOption = Annotated[
    Path | None, typer.Option("--tokenizer", metavar="DIR", help="Make tokens here, with the model's tokenizer.json, not on the server.")
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


@dataclass(frozen=True)
class Remote:
    """The options of a model behind a server."""

    endpoint: str | None
    api_key: str | None
    concurrency: int | None
    wire_dtype: WireChoice | None
    tokenizer: Path | None


def open_any(
    model: str | None,
    revision: str | None,
    precision: PrecisionChoice,
    chat_template: ChatChoice,
    threads: int | None,
    remote: Remote,
) -> AbstractModel:
    """The model of a command, here or behind `--endpoint`.

    Raises:
        InputError: an option of the one kind with the other. typer.BadParameter: no model.
    """
    if remote.endpoint is None:
        key = None if isinstance(remote.api_key, Environment) else remote.api_key
        _refuse("is of a server", "name one with --endpoint", api_key=key, concurrency=remote.concurrency)
        _refuse("is of a server", "name one with --endpoint", wire_dtype=remote.wire_dtype, tokenizer=remote.tokenizer)
        if model is None:
            raise typer.BadParameter("name the folder of a checkpoint, or a server with --endpoint", param_hint="--model")
        return open_model(model, revision, precision, chat_template, threads)
    other = None if precision is PrecisionChoice.auto else precision
    _refuse("is settled by the server", "give it to `ster serve` or to vLLM", precision=other, threads=threads, revision=revision)
    from ster.remote import connect

    found = connect(
        remote.endpoint,
        None if isinstance(model, Environment) else model,  # the environment names a folder here
        api_key=remote.api_key or None,
        chat_template=chat_template.value,
        wire_dtype=None if remote.wire_dtype is None else remote.wire_dtype.value,
        tokenizer=remote.tokenizer,
        concurrency=remote.concurrency or 8,
    )
    if found.wire:
        console.note(f"Note: activations travel as {found.wire_dtype}, rounded by up to {found.wire['wire_rounding']}")
    return found


def _refuse(why: str, hint: str, **options: object) -> None:
    """
    Raises:
        InputError: one of `options` is given.
    """
    from ster.errors import InputError

    for name, value in options.items():
        if value is not None:
            raise InputError(f"--{name.replace('_', '-')} {why}", hint)


def open_model(model: str, revision: str | None, precision: PrecisionChoice, chat_template: ChatChoice, threads: int | None) -> Model:
    """`ster.load` with the shared options."""
    from ster.model import load

    return load(model, revision=revision, precision=precision.value, threads=threads, chat_template=chat_template.value, progress=True)

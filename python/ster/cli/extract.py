"""`ster extract`: prompts in, one activation artifact out."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ster.cli import console
from ster.cli.options import (
    ApiKeyOption,
    ChatChoice,
    ChatOption,
    ConcurrencyOption,
    EndpointOption,
    LayersOption,
    ModelOption,
    PrecisionChoice,
    PrecisionOption,
    Remote,
    RevisionOption,
    ThreadsOption,
    TokenizerOption,
    WireOption,
    open_any,
)

if TYPE_CHECKING:
    from ster.artifacts import Format


class PositionChoice(str, Enum):
    last = "last"
    all = "all"
    mean = "mean"


class FormatChoice(str, Enum):
    json = "json"
    safetensors = "safetensors"
    npz = "npz"


def extract(
    *,
    model: ModelOption = None,
    prompts: Annotated[
        Path,
        typer.Option(
            "--prompts",
            "--input",
            "-p",
            metavar="FILE",
            help='{"prompts": ["..."]}, a JSON list, .jsonl with `prompt`, or .txt, one a line.',
        ),
    ],
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="File to write, or - for stdout. Default: activations.<format>.")
    ] = None,
    layers: LayersOption = "all",
    position: Annotated[PositionChoice, typer.Option("--position", help="Which token of each prompt.")] = PositionChoice.last,
    format: Annotated[FormatChoice | None, typer.Option("--format", "-f", help="Default: by the suffix of --output, else json.")] = None,
    revision: RevisionOption = None,
    precision: PrecisionOption = PrecisionChoice.auto,
    chat_template: ChatOption = ChatChoice.auto,
    threads: ThreadsOption = None,
    endpoint: EndpointOption = None,
    api_key: ApiKeyOption = None,
    concurrency: ConcurrencyOption = None,
    wire_dtype: WireOption = None,
    tokenizer: TokenizerOption = None,
) -> None:
    """Read the residual stream after every chosen block, for every prompt.

    Writes an activation artifact and prints its path. Values are float32, before any steering, and bit for bit the same whatever
    else is in the file of prompts and however many threads run.
    """
    from ster._files import check_writable
    from ster.errors import InputError
    from ster.layers import check_layer_syntax
    from ster.prompts import read_prompts

    # Everything that can be refused without the model is, before it is opened.
    chosen = _format(output, format.value if format else None, position.value)
    target = output if output is not None else f"activations.{chosen}"
    check_layer_syntax(layers)
    texts = read_prompts(prompts)
    if target == "-":
        if chosen != "json" and sys.stdout.isatty():
            raise InputError(f"{chosen} is not for a terminal", "name a file with --output, or pipe stdout")
    else:
        check_writable(Path(target), prompts)

    remote = Remote(endpoint, api_key, concurrency, wire_dtype, tokenizer)
    opened = open_any(model, revision, precision, chat_template, threads, remote)
    artifact = opened.activations(texts, layers, position=position.value, progress=True)
    if target == "-":
        console.data_bytes(lambda file: artifact.write(file, chosen))
    else:
        artifact.save(target, format=chosen)
        console.data(target)
    count = "1 prompt" if len(texts) == 1 else f"{len(texts)} prompts"
    console.note(f"{count}, {len(artifact.layers)} layers, hidden {opened.hidden_size}, chat template {opened.chat_template}")


def _format(output: str | None, wanted: str | None, position: str) -> Format:
    """By `--format`, else by the suffix of `--output`, else JSON; a file must not be called what it isn't.

    Raises:
        InputError: a suffix that is unknown, or that contradicts `--format`; JSON for more than the last token.
    """
    from ster.artifacts import FORMATS, choose_format
    from ster.errors import InputError

    suffix = Path(output).suffix.lower().removeprefix(".") if output and output != "-" else ""
    if wanted and suffix in FORMATS and suffix != wanted:
        raise InputError(f"{output} is named as {suffix}, but `--format` says {wanted}")
    if not wanted and suffix and suffix not in FORMATS:
        raise InputError(
            f"no format is known by the name of {output}", "end it in .json, .safetensors or .npz, or say which with `--format`"
        )
    return choose_format("", wanted or suffix or "json", position=position)

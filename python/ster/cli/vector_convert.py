"""`ster vector convert`: vector files of other tools, and back."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ster.cli import console
from ster.cli.options import VectorArgument
from ster.cli.tables import count


class VectorFormat(str, Enum):
    json = "json"
    gguf = "gguf"
    safetensors = "safetensors"
    npz = "npz"
    vllm_lens = "vllm-lens"


def convert(
    vector: VectorArgument,
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="File to write; its suffix names the format. - is stdout.")],
    format: Annotated[VectorFormat | None, typer.Option("--format", "-f", help="Format to write, whatever the suffix.")] = None,
    source: Annotated[VectorFormat | None, typer.Option("--from", help="Format to read. Default: told by the content.")] = None,
    layers: Annotated[str | None, typer.Option("--layers", "-l", metavar="LAYERS", help="Keep these layers alone.")] = None,
    model_name: Annotated[
        str | None, typer.Option("--model-name", metavar="NAME", help="Model the vectors belong to, for files that do not say.")
    ] = None,
    any_model: Annotated[
        bool, typer.Option("--any-model", help="Leave out which model they belong to: any of this width takes them, with a warning.")
    ] = False,
    scale: Annotated[float, typer.Option("--scale", metavar="X", help="For vllm-lens, whose files carry a strength.")] = 1.0,
) -> None:
    """Convert a vector file: steering artifact (json), llama.cpp and repeng control vector (gguf), safetensors, npz, vllm-lens.

    Values never change; a round trip is exact. Layer numbers are converted, and layer 0 is refused in GGUF, which cannot express it. Needs
    no model. Prints the path of the file.
    """
    from ster import interchange
    from ster.cli.output import STDOUT, check_output, write_output
    from ster.errors import InputError, LayerError
    from ster.layers import parse_layers

    if any_model and model_name is not None:
        raise InputError("`--model-name` and `--any-model` contradict each other")
    artifact = interchange.load(vector, format=source.value if source else None, model=model_name)
    if any_model:
        artifact = artifact.unbound()
    if layers is not None:
        artifact = artifact.only(parse_layers(layers, artifact.layers[-1] + 1))
    chosen = format.value if format else interchange.SUFFIXES.get(Path(output).suffix.lower())
    if chosen is None:
        name = "stdout" if output == STDOUT else output
        raise InputError(f"no format is known for {name}", f"name one with `--format`: {', '.join(interchange.FORMATS)}")
    check_output(output, vector, binary=chosen not in ("json", "vllm-lens"))
    try:
        data = interchange.dumps(artifact, format=chosen, scale=scale)
    except LayerError as error:
        raise LayerError(error.message, _without_zero(artifact.layers) or error.hint) from None
    write_output(output, data)
    console.note(f"{count(len(artifact.vectors), 'vector')}, hidden {artifact.hidden_size}, model {artifact.model or 'not named'}")
    if output != STDOUT:
        console.data(output)


def _without_zero(layers: list[int]) -> str | None:
    """How to leave layer 0 out, where something is left."""
    rest = [layer for layer in layers if layer > 0]
    if not rest:
        return None
    whole = rest == list(range(rest[0], rest[-1] + 1))
    return f"`--layers {f'{rest[0]}..{rest[-1] + 1}' if whole else ','.join(map(str, rest))}` leaves it out"

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
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="File to write; its suffix names the format.")],
    format: Annotated[VectorFormat | None, typer.Option("--format", "-f", help="Format to write, whatever the suffix.")] = None,
    source: Annotated[VectorFormat | None, typer.Option("--from", help="Format to read. Default: told by the content.")] = None,
    layers: Annotated[str | None, typer.Option("--layers", "-l", metavar="LAYERS", help="Keep these layers alone.")] = None,
    model_name: Annotated[
        str | None, typer.Option("--model-name", metavar="NAME", help="Model the vectors belong to, for files that do not say.")
    ] = None,
    scale: Annotated[float, typer.Option("--scale", metavar="X", help="For vllm-lens, whose files carry a strength.")] = 1.0,
) -> None:
    """Convert a vector file: steering artifact (json), llama.cpp and repeng control vector (gguf), safetensors, npz, vllm-lens.

    Values never change; a round trip is exact. Layer numbers are converted, and layer 0 is refused in GGUF, which cannot express it. Needs
    no model. Prints the path of the file.
    """
    from ster import interchange
    from ster._files import check_writable
    from ster.layers import parse_layers

    artifact = interchange.load(vector, format=source.value if source else None, model=model_name)
    if layers is not None:
        artifact = artifact.only(parse_layers(layers, artifact.layers[-1] + 1))
    check_writable(output)
    interchange.save(artifact, output, format=format.value if format else None, scale=scale)
    console.note(f"{count(len(artifact.vectors), 'vector')}, hidden {artifact.hidden_size}, model {artifact.model or 'not named'}")
    console.data(output)

"""`ster harvest`: prompts in, a folder of shards out."""

from __future__ import annotations

import contextlib
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ster.cli import console
from ster.cli.options import (
    ApiKeyOption,
    ChatChoice,
    ChatOption,
    ConcurrencyOption,
    EndpointOption,
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


class DtypeChoice(str, Enum):
    auto = "auto"
    f32 = "f32"
    bf16 = "bf16"
    f16 = "f16"


class HarvestFormat(str, Enum):
    safetensors = "safetensors"
    parquet = "parquet"


def harvest(
    *,
    model: ModelOption = None,
    prompts: Annotated[
        Path,
        typer.Option("--prompts", "--input", "-p", metavar="FILE", help="JSON, .jsonl, .txt (one a line), .csv, .tsv or .parquet."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write, or to go on with.")] = Path("harvest"),
    layers: Annotated[
        str | None,
        typer.Option("--layers", "-l", metavar="LAYERS", help="As elsewhere. Default: blocks at a quarter, half and three quarters."),
    ] = None,
    positions: Annotated[
        str, typer.Option("--positions", "--position", metavar="WHICH", help="all, last, or token positions, as in 0,5,-1.")
    ] = "all",
    column: Annotated[str | None, typer.Option("--column", metavar="NAME", help="Of a file with columns. Default: prompt.")] = None,
    directions: Annotated[
        Path | None,
        typer.Option("--directions", metavar="FILE", help="Keep coordinates along these (64 at most): an artifact, npz or safetensors."),
    ] = None,
    normalize: Annotated[bool, typer.Option("--normalize/--no-normalize", help="Divide directions by their length.")] = True,
    dtype: Annotated[
        DtypeChoice, typer.Option("--dtype", help="Of the values stored. auto: as the checkpoint is; f32 if quantised or mixed.")
    ] = DtypeChoice.auto,
    format: Annotated[HarvestFormat, typer.Option("--format", "-f", help="parquet: for Arrow and datasets.")] = HarvestFormat.safetensors,
    shard_size: Annotated[
        int | None, typer.Option("--shard-size", metavar="N", min=1, help="Prompts in a shard. Default: by size.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option("--ray", metavar="ADDRESS", help="Compute on a Ray cluster: auto, local, HOST:PORT. --threads is then per worker."),
    ] = None,
    ray_workers: Annotated[
        int | None, typer.Option("--ray-workers", metavar="N", min=1, help="Default: as many as the cluster has room for.")
    ] = None,
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
    """Read the residual stream of any number of prompts into files.

    Writes a folder of shards, statistics and a manifest, and prints its path. Ended at any moment, the same command goes on where it was,
    and the result is the same to the last byte. Values are read before any steering.
    """
    from ster.errors import InputError
    from ster.harvest import disk, load_directions
    from ster.harvest.positions import parse_positions
    from ster.harvest.run import check_options
    from ster.harvest.run import harvest as run
    from ster.harvest.sources import open_source
    from ster.layers import check_layer_syntax

    # Everything that can be refused without the model is, before it is opened.
    if str(output) == "-":
        raise InputError("a harvest is a folder of files, which stdout cannot take", "name a folder with --output")
    if ray is not None and endpoint is not None:
        raise InputError("--ray and --endpoint exclude each other", "a server computes by itself; Ray's workers open the model themselves")
    if ray_workers is not None and ray is None:
        raise InputError("--ray-workers needs --ray", "it says which cluster, as in --ray local")
    if layers is not None:
        check_layer_syntax(layers)
    kept = parse_positions(positions)
    check_options(format.value, shard_size, ray, ray_workers)
    onto = None if directions is None else load_directions(directions, normalize=normalize)
    open_source(prompts, column)
    disk.check_folder(output)

    remote = Remote(endpoint, api_key, concurrency, wire_dtype, tokenizer)
    opened = open_any(model, revision, precision, chat_template, threads, remote)
    # Ray prints messages of its own, and stdout is for the result.
    with contextlib.nullcontext() if ray is None else contextlib.redirect_stdout(sys.stderr):
        found = run(
            opened,
            prompts,
            output,
            layers=layers,
            positions=kept,
            column=column,
            directions=onto,
            dtype=dtype.value,
            format=format.value,
            shard_size=shard_size,
            ray=ray,
            ray_workers=ray_workers,
            progress=True,
        )
    console.data(output)
    prompt_count = "1 prompt" if len(found) == 1 else f"{len(found):,} prompts"
    layer_count = "1 layer" if len(found.layers) == 1 else f"{len(found.layers)} layers"
    console.note(f"{prompt_count}, {layer_count}, {found.dtype} [rows, {found.width}], chat template {opened.chat_template}")

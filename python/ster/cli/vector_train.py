"""`ster vector train`: pairs in, one steering artifact out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ster.cli import console
from ster.cli.options import (
    ChatChoice,
    ChatOption,
    LayersOption,
    ModelOption,
    PairsOption,
    PrecisionChoice,
    PrecisionOption,
    RevisionOption,
    ThreadsOption,
    open_model,
)
from ster.cli.tables import bar, count, number, table

if TYPE_CHECKING:
    from ster.steering_artifact import SteeringArtifact

DEFAULT_OUTPUT = "vector.json"
OutputOption = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Artifact to write.")]


def train(
    model: ModelOption,
    pairs: PairsOption,
    output: OutputOption = Path(DEFAULT_OUTPUT),
    layers: LayersOption = "all",
    method: Annotated[
        str,
        typer.Option("--method", metavar="NAME", help="caa (or mean-difference), pca, logistic (or probe), pca-centered, lda."),
    ] = "caa",
    as_json: Annotated[bool, typer.Option("--json", help="Print the artifact's summary as JSON instead of its path.")] = False,
    revision: RevisionOption = None,
    precision: PrecisionOption = PrecisionChoice.auto,
    chat_template: ChatOption = ChatChoice.auto,
    threads: ThreadsOption = None,
) -> None:
    """Learn a direction per layer from contrastive pairs.

    Writes a steering artifact of unit vectors that point to more of the trait, and prints its path. The table on stderr scores each layer
    on the training pairs themselves; `ster vector optimize` and `evaluate` score on others.
    """
    from ster import workflow
    from ster._files import check_writable
    from ster.directions import parse_method
    from ster.layers import check_layer_syntax
    from ster.pairs import PairSet

    parse_method(method)
    check_layer_syntax(layers)
    pair_set = PairSet.load(pairs)
    check_writable(output)

    opened = open_model(model, revision, precision, chat_template, threads)
    artifact = workflow.train(opened, pair_set, layers, method=method, progress=True)
    artifact.save(output)
    console.note(layer_table(artifact))
    console.note(f"{count(len(pair_set), 'pair')}, method {artifact.method}, model {opened.name}, chat template {opened.chat_template}")
    if as_json:
        console.result({"output": str(output), **artifact.summary()}, str, True)
    else:
        console.data(output)


def layer_table(artifact: SteeringArtifact) -> str:
    """Norm and training scores of every layer; the bar is the margin in units of the layer's residual norm, if that is known."""
    relative = [None if v.train_margin is None else v.train_margin / (artifact.residual_norm(v.layer) or 1.0) for v in artifact.vectors]
    top = max((value for value in relative if value is not None), default=0.0)
    rows = [
        [
            str(v.layer),
            number(row["norm"]),
            number(v.train_accuracy),
            number(v.train_margin),
            number(artifact.residual_norm(v.layer)),
            bar(each or 0.0, top),
        ]
        for v, row, each in zip(artifact.vectors, artifact.summary()["vectors"], relative, strict=True)
    ]
    what = "margin / residual norm" if artifact.residual_norm(artifact.layers[0]) else "margin"
    return table(["layer", "vector norm", "train accuracy", "train margin", "residual norm", what], rows)

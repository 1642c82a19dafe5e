"""`ster vector train`: pairs in, one steering artifact out."""

from __future__ import annotations

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
    PairsOption,
    PrecisionChoice,
    PrecisionOption,
    Remote,
    RevisionOption,
    ThreadsOption,
    TokenizerOption,
    WireOption,
    open_any,
)
from ster.cli.tables import bar, count, number, table

if TYPE_CHECKING:
    from ster.steering_artifact import SteeringArtifact

DEFAULT_OUTPUT = "vector.json"
OutputOption = Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Artifact to write; - is stdout.")]


def train(
    *,
    model: ModelOption = None,
    pairs: PairsOption,
    output: OutputOption = DEFAULT_OUTPUT,
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
    endpoint: EndpointOption = None,
    api_key: ApiKeyOption = None,
    concurrency: ConcurrencyOption = None,
    wire_dtype: WireOption = None,
    tokenizer: TokenizerOption = None,
) -> None:
    """Learn a direction per layer from contrastive pairs.

    Writes a steering artifact of unit vectors that point to more of the trait, and prints its path. The table on stderr scores each layer
    on the training pairs themselves; `ster vector optimize` and `evaluate` score on others. By default there is a vector for every layer;
    to steer, one of them is enough (`--layers` here or in `ster generate`): all at once soon ruin the text.
    """
    from ster import workflow
    from ster.cli.output import STDOUT, check_output, write_output
    from ster.directions import parse_method
    from ster.layers import check_layer_syntax
    from ster.pairs import PairSet

    parse_method(method)
    check_layer_syntax(layers)
    pair_set = PairSet.load(pairs)
    check_output(output, pairs, report_on_stdout=as_json)

    remote = Remote(endpoint, api_key, concurrency, wire_dtype, tokenizer)
    opened = open_any(model, revision, precision, chat_template, threads, remote)
    artifact = workflow.train(opened, pair_set, layers, method=method, progress=True)
    write_output(output, artifact.to_json())
    console.note(layer_table(artifact))
    console.note(f"{count(len(pair_set), 'pair')}, method {artifact.method}, model {opened.name}, chat template {opened.chat_template}")
    if as_json:
        console.result({"output": output, **artifact.summary()}, str, True)
    elif output != STDOUT:
        console.data(output)


def layer_table(artifact: SteeringArtifact) -> str:
    """Training scores of every layer; the bar is the margin in units of the layer's residual norm, if that is known.

    Norms of vectors are shown where they are not 1.
    """
    norms = [row["norm"] for row in artifact.summary()["vectors"]]
    known = artifact.residual_norm(artifact.layers[0]) is not None
    relative = [None if v.train_margin is None else v.train_margin / (artifact.residual_norm(v.layer) or 1.0) for v in artifact.vectors]
    top = max((value for value in relative if value is not None), default=0.0)
    columns = {
        "layer": [str(layer) for layer in artifact.layers],
        "train accuracy": [number(v.train_accuracy) for v in artifact.vectors],
        "train margin": [number(v.train_margin) for v in artifact.vectors],
    }
    if known:
        columns["residual norm"] = [number(artifact.residual_norm(layer)) for layer in artifact.layers]
    if any(abs(norm - 1.0) > 5e-4 for norm in norms):
        columns["norm"] = [number(norm) for norm in norms]
    if top > 0.0:
        columns[f"margin{'/norm' if known else ''} to {number(top)}"] = [bar(each or 0.0, top) for each in relative]
    return table(list(columns), list(zip(*columns.values(), strict=True)))

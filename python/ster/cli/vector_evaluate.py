"""`ster vector evaluate`: what a vector separates, and what it does to the model."""

from __future__ import annotations

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
    JsonOption,
    ModelOption,
    PairsOption,
    PrecisionChoice,
    PrecisionOption,
    Remote,
    RevisionOption,
    ThreadsOption,
    TokenizerOption,
    VectorArgument,
    WireOption,
    open_any,
    read_numbers,
)
from ster.cli.tables import bar, count, interval, number, spans, table

if TYPE_CHECKING:
    from ster.evaluation import EvaluationReport


class UnitsChoice(str, Enum):
    absolute = "absolute"
    norm = "norm"


UnitsOption = Annotated[
    UnitsChoice,
    typer.Option(
        "--units",
        help="Of strengths. norm: vectors scaled to length 1, times the layer's mean residual norm in training; 0.1 to 0.3 is for one"
        " layer, to be divided among several.",
    ),
]
SomeLayersOption = Annotated[
    str | None,
    typer.Option(
        "--layers", "-l", metavar="LAYERS", help="Use these of the vector's layers; by default all, at once, which may be far too much."
    ),
]


def evaluate(
    *,
    model: ModelOption = None,
    pairs: PairsOption,
    vector: VectorArgument,
    strengths: Annotated[
        str | None, typer.Option("--strengths", "-s", metavar="LIST", help="Steer at each of these, as in -4,-1,0.5,1,2,4.")
    ] = None,
    layers: SomeLayersOption = None,
    units: UnitsOption = UnitsChoice.absolute,
    max_kl: Annotated[float, typer.Option("--max-kl", metavar="NATS", help="Damage a picked strength may do.")] = 0.5,
    neutral: Annotated[
        Path | None,
        typer.Option("--neutral", metavar="FILE", help="Texts to measure damage on, as for --prompts. Default: 20 plain sentences."),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Also write the JSON report here; - prints it, and the text on stderr."),
    ] = None,
    as_json: JsonOption = None,
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
    """Score a vector on pairs it was not trained on; with --strengths, steer with it and measure effect and damage.

    Per strength: the share of pairs whose positive side gained more log-probability than its negative side (0.5 is no effect), the mean
    shift in nats, and on neutral text the mean KL from the unsteered predictions and the perplexity ratio. Picks the strength with the
    largest share whose KL stays within --max-kl; of equal shares, the one with the largest mean shift. All layers of the vector are steered
    at once unless --layers names some.
    """
    import orjson

    from ster import workflow
    from ster.cli.output import STDOUT, check_output, write_output
    from ster.interchange import load
    from ster.layers import check_layer_syntax
    from ster.pairs import PairSet
    from ster.prompts import read_prompts

    wanted = None if strengths is None else read_numbers(strengths, "strength")
    if layers is not None:
        check_layer_syntax(layers)
    pair_set = PairSet.load(pairs)
    artifact = load(vector)
    texts = None if neutral is None else read_prompts(neutral)
    if output is not None:
        check_output(output, pairs, vector, *([] if neutral is None else [neutral]))

    remote = Remote(endpoint, api_key, concurrency, wire_dtype, tokenizer)
    opened = open_any(model, revision, precision, chat_template, threads, remote)
    report = workflow.evaluate(
        opened, pair_set, artifact, wanted, layers=layers, neutral=texts, max_kl=max_kl, units=units.value, progress=True
    )
    if output is not None:
        write_output(output, orjson.dumps(report.to_dict(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    if output == STDOUT:
        console.note(_text(report))
    else:
        console.result(report.to_dict(), lambda: _text(report), as_json)
    for note in report.notes:
        console.note(f"Note: {note}")


def _text(report: EvaluationReport) -> str:
    layers = [
        [
            str(row.layer),
            number(row.score.accuracy),
            interval(row.score.accuracy_interval),
            number(row.score.margin),
            interval(row.score.margin_interval),
            number(row.score.auroc),
            number(row.score.margin / row.residual_norm),
        ]
        for row in report.layers
    ]
    title = f"{report.trait_name or 'vector'} ({report.method}) on {count(report.pairs, 'pair')}:"
    parts = [title, table(["layer", "accuracy", "95 %", "margin", "95 %", "AUROC", "margin/norm"], layers)]
    if report.strengths:
        assert report.neutral is not None
        rows = [
            [
                f"{row.strength:g}" + (" <" if row.picked else ""),
                number(row.share),
                interval(row.share_interval),
                number(row.mean_shift),
                number(row.mean_shift_per_token),
                number(row.mean_kl),
                number(row.perplexity_ratio),
                bar(row.share, 1.0, 10),
            ]
            for row in report.strengths
        ]
        where = spans([row.layer for row in report.layers])
        units = "mean residual norms" if report.units == "norm" else "multiples of the vector"
        layer = "layer" if len(report.layers) == 1 else "layers"
        damage = (
            f"damage on {count(report.neutral.texts, 'neutral text')}, {count(report.neutral.tokens, 'token')}; half a bar is no effect:"
        )
        parts += ["", f"Steering at {layer} {where}, strengths in {units};", damage]
        head = ["strength", "share", "95 %", "shift", "per token", "KL", "perplexity", "share to 1"]
        parts.append(table(head, rows))
        picked = "none" if report.picked is None else f"{report.picked:g}"
        parts.append(f"Picked: {picked} (largest share with KL within {report.max_kl:g} nats; ties: largest shift)")
    return "\n".join(parts)

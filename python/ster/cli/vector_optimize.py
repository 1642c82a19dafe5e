"""`ster vector optimize`: which method at which layer does best on pairs it has not seen."""

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
    JsonOption,
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
from ster.cli.tables import bar, count, interval, number, table
from ster.cli.vector_train import DEFAULT_OUTPUT, OutputOption

if TYPE_CHECKING:
    from ster.scores import Control, Ranking
    from ster.workflow import Selection


def optimize(
    *,
    model: ModelOption = None,
    pairs: PairsOption,
    output: OutputOption = DEFAULT_OUTPUT,
    layers: LayersOption = "all",
    methods: Annotated[
        str, typer.Option("--methods", "--method", metavar="NAMES", help="Methods to try, with commas; also pca-centered and lda.")
    ] = "caa,pca,logistic",
    holdout: Annotated[
        float, typer.Option("--holdout", metavar="SHARE", help="Share of pairs to rank on: the last ones in the file.")
    ] = 0.2,
    folds: Annotated[int | None, typer.Option("--folds", metavar="K", help="Cross-validate: every pair is held out once.")] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the controls; the selection draws nothing.")] = 0,
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
    """Find the method and layer that do best on held-out pairs, and write that vector, fitted on all pairs.

    Prints the artifact's summary and `selection`: every candidate, the winner's held-out figures with intervals, and what shuffled labels,
    random directions and the luck of the best of many reach. Near duplicates never stand on both sides of the split. Candidates rank by
    held-out accuracy, ties by margin, further ties by the order of layers and methods. With `--output -` stdout has the artifact, and
    stderr the tables.
    """
    from ster import workflow
    from ster.cli.output import STDOUT, check_output, write_output
    from ster.directions import parse_method
    from ster.layers import check_layer_syntax
    from ster.pairs import PairSet
    from ster.workflow import split_pairs

    names = [parse_method(name.strip()) for name in methods.split(",")]
    check_layer_syntax(layers)
    pair_set = PairSet.load(pairs)
    split_pairs(pair_set, holdout=holdout, folds=folds)
    check_output(output, pairs, report_on_stdout=bool(as_json))

    remote = Remote(endpoint, api_key, concurrency, wire_dtype, tokenizer)
    opened = open_any(model, revision, precision, chat_template, threads, remote)
    found = workflow.optimize(opened, pair_set, layers, methods=names, holdout=holdout, folds=folds, seed=seed, progress=True)
    write_output(output, found.artifact.to_json())
    for note in found.ranking.notes:
        console.note(f"Note: {note}")
    if output == STDOUT:
        console.note(_text(found))
        return
    console.result({"output": output, **found.to_dict()}, lambda: _text(found), as_json)
    console.note(f"Wrote {output}: {found.artifact.method} at layer {found.artifact.layers[0]}, from all {count(len(pair_set), 'pair')}")


def _text(found: Selection) -> str:
    """The grid of candidates, then the winner beside its controls."""
    ranking = found.ranking
    methods = list(dict.fromkeys(c.method for c in ranking.candidates))
    rows = []
    for layer in dict.fromkeys(c.layer for c in ranking.candidates):
        at = {c.method: c for c in ranking.candidates if c.layer == layer}
        cells = [f"{number(at[m].holdout_accuracy, 2)}{' <' if at[m].selected else ''}" for m in methods]
        best = max((c.holdout_accuracy or 0.0) for c in at.values())
        rows.append([str(layer), *cells, bar(best, 1.0)])
    head = f"Held-out accuracy ({count(ranking.holdout_pairs, 'pair')} held out, {ranking.train_pairs} to train on"
    head += f", {ranking.folds} folds):" if ranking.folds > 1 else "):"
    grid = table(["layer", *methods, "best, 0 to 1"], rows)
    score = ranking.holdout

    def control(name: str, control: Control) -> list[str]:
        shares = [f"{control.at_least:.3f}", f"{control.as_accurate:.3f}"]
        return [name, number(control.accuracy), number(control.margin), "", *shares]

    figures = [
        ["winner, held out", number(score.accuracy), number(score.margin), number(score.auroc), "", ""],
        ["winner, in training", number(ranking.refit.accuracy), number(ranking.refit.margin), number(ranking.refit.auroc), "", ""],
        control("shuffled labels", ranking.shuffled),
        control("random directions", ranking.random),
        control("best of all by luck", ranking.search),
    ]
    winner = (
        f"Winner: {ranking.winner.method} at layer {ranking.winner.layer}, right on {score.right} of {score.pairs} held-out pairs"
        f"\n(95 % {interval(score.accuracy_interval)}, not corrected for choosing the best of {len(ranking.candidates)})."
    )
    if score.independent < score.pairs:
        winner += f"\nNear duplicates count once: {score.independent} independent pairs."
    beside = table(["", "accuracy", "margin", "AUROC", "as good", "as accurate"], figures)
    legend = "As good: share of draws with a higher accuracy, or the same and no smaller\nmargin. As accurate: with at least that accuracy."
    return "\n".join([head, grid, "", winner, beside, legend, _verdict(ranking)])


def _verdict(ranking: Ranking) -> str:
    """By shuffled labels or the luck of the search, whichever comes nearer; a tie in accuracy counts against the winner."""
    control, share = ranking.luck
    name = "shuffled labels reach" if control == "shuffled" else "the best of all candidates by luck reaches"
    reached = f"{name} that accuracy in {100 * share:.1f} % of draws"
    if ranking.folds > 1:
        reached += "\n(over folds about three times too few)"
    if ranking.beats_luck:
        return f"Verdict: this is hardly luck. At most,\n{reached}."
    why = [reached] if share > ranking.limit else []
    if ranking.holdout.accuracy_interval[0] <= 0.5:
        why.append("the interval of the accuracy holds 0.5" if ranking.holdout.accuracy > 0.5 else "the accuracy is not above 0.5")
    return "Verdict: this may be luck; more pairs would tell. Why:\n" + ";\n".join(why) + "."

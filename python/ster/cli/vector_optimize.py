"""`ster vector optimize`: which method at which layer does best on pairs it has not seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ster.cli import console
from ster.cli.options import (
    ChatChoice,
    ChatOption,
    JsonOption,
    LayersOption,
    ModelOption,
    PairsOption,
    PrecisionChoice,
    PrecisionOption,
    RevisionOption,
    ThreadsOption,
    open_model,
)
from ster.cli.tables import bar, count, interval, number, table
from ster.cli.vector_train import DEFAULT_OUTPUT, OutputOption

if TYPE_CHECKING:
    from ster.scores import Control
    from ster.workflow import Selection


def optimize(
    model: ModelOption,
    pairs: PairsOption,
    output: OutputOption = Path(DEFAULT_OUTPUT),
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
) -> None:
    """Find the method and layer that do best on held-out pairs, and write that vector, fitted on all pairs.

    Prints the artifact's summary and `selection`: every candidate, the winner's held-out figures with intervals, and what shuffled labels,
    random directions and the luck of the best of many reach. Near duplicates never stand on both sides of the split.
    """
    from ster import workflow
    from ster._files import check_writable
    from ster.directions import parse_method
    from ster.layers import check_layer_syntax
    from ster.pairs import PairSet
    from ster.workflow import split_pairs

    names = [parse_method(name.strip()) for name in methods.split(",")]
    check_layer_syntax(layers)
    pair_set = PairSet.load(pairs)
    split_pairs(pair_set, holdout=holdout, folds=folds)
    check_writable(output)

    opened = open_model(model, revision, precision, chat_template, threads)
    found = workflow.optimize(opened, pair_set, layers, methods=names, holdout=holdout, folds=folds, seed=seed, progress=True)
    found.artifact.save(output)
    for note in found.ranking.notes:
        console.note(f"Note: {note}")
    console.result({"output": str(output), **found.to_dict()}, lambda: _text(found), as_json)
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
    grid = table(["layer", *methods, "best"], rows)
    score = ranking.holdout

    def control(name: str, control: Control) -> list[str]:
        return [name, number(control.accuracy), number(control.margin), "", f"{control.at_least:.3f}"]

    figures = [
        ["winner, held out", number(score.accuracy), number(score.margin), number(score.auroc), ""],
        ["winner, all pairs (training)", number(ranking.refit.accuracy), number(ranking.refit.margin), number(ranking.refit.auroc), ""],
        control("shuffled labels", ranking.shuffled),
        control("random directions", ranking.random),
        control("best of all candidates by luck", ranking.search),
    ]
    verdict = (
        f"Winner: {ranking.winner.method} at layer {ranking.winner.layer}, right on {score.right} of {score.pairs} held-out pairs"
        f" (95 % interval {interval(score.accuracy_interval)})."
    )
    luck = f"With labels swapped at random, the best of all candidates is as good in {100 * ranking.search.at_least:.1f} % of draws"
    luck += _judge(ranking.search.at_least)
    return "\n".join([head, grid, "", verdict, table(["", "accuracy", "margin", "AUROC", "as good"], figures), luck])


def _judge(at_least: float) -> str:
    return ": this is hardly luck." if at_least <= 0.05 else ": this may be luck; more pairs would tell."

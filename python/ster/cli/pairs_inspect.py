"""`ster pairs inspect`: what may be wrong with a pair set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ster.cli import console
from ster.cli.options import ChatChoice, ChatOption, JsonOption, PrecisionChoice, open_model
from ster.cli.tables import count, table

if TYPE_CHECKING:
    from ster.pairs import PairSet
    from ster.pairs_lint import FinalTokens, LintReport

SHOWN = 20  # lines of a list a person reads


def inspect(
    pairs: Annotated[Path, typer.Argument(metavar="FILE", help="A pair set.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="DIR", help="Also show the last token of each side, as this model reads it.")
    ] = None,
    chat_template: ChatOption = ChatChoice.auto,
    as_json: JsonOption = None,
) -> None:
    """Check a pair set and list what is doubtful: duplicates, sides that differ in length or white space only, tell-tale last words.

    Needs no model. With --model, the last token of each side is shown too: it is the one whose activation is compared. Findings are doubts,
    not refusals: the exit code is 0.
    """
    from ster.pairs import PairSet
    from ster.pairs_lint import lint

    pair_set = PairSet.load(pairs)
    final_token = None
    if model is not None:
        from ster.sides import pair_tokens

        opened = open_model(model, None, PrecisionChoice.auto, chat_template, None)
        sides = [side for pair in pair_set for side in (pair.positive, pair.negative)]
        ids = [side for pair in pair_tokens(opened, pair_set) for side in pair]
        last = {repr(side): opened.tokenizer.piece(each[-1]) for side, each in zip(sides, ids, strict=True)}
        final_token = lambda side: last[repr(side)]  # noqa: E731
    report = lint(pair_set, final_token=final_token)
    document = {
        "path": str(pairs),
        "trait_name": pair_set.trait_name,
        "pairs": len(pair_set),
        "pairs_hash": pair_set.content_hash,
        "findings": [asdict(finding) for finding in report.findings],
        "final_tokens": None if report.final_tokens is None else [asdict(tokens) for tokens in report.final_tokens],
    }
    console.result(document, lambda: _text(pair_set, report), as_json)


def _text(pair_set: PairSet, report: LintReport) -> str:
    lines = [f"{count(len(pair_set), 'pair')}, trait {pair_set.trait_name or 'not named'}, sha256 {pair_set.content_hash[:12]}"]
    kinds = Counter(finding.kind for finding in report.findings)
    lines.append(", ".join(f"{n} {kind}" for kind, n in kinds.most_common()) if kinds else "nothing doubtful found")
    if report.findings:
        rows = [["set" if f.pair is None else str(f.pair), f.kind, f.message] for f in report.findings]
        lines += ["", table(["pair", "finding", ""], _shortened(rows))]
    if report.final_tokens:
        lines += ["", "Last tokens, whose activations are compared:", _tokens(report.final_tokens)]
    return "\n".join(lines)


def _tokens(tokens: Sequence[FinalTokens]) -> str:
    kinds = Counter((t.positive, t.negative) for t in tokens)
    rows = [[repr(positive), repr(negative), str(n)] for (positive, negative), n in kinds.most_common()]
    return table(["positive", "negative", "pairs"], _shortened(rows))


def _shortened(rows: list[list[str]]) -> list[list[str]]:
    if len(rows) <= SHOWN:
        return rows
    return [*rows[:SHOWN], [*["..."] * (len(rows[0]) - 1), f"and {len(rows) - SHOWN} more (--json lists all)"]]

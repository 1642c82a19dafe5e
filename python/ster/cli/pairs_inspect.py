"""`ster pairs inspect`: what may be wrong with a pair set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ster.cli import console
from ster.cli.options import ChatChoice, ChatOption, JsonOption, PrecisionChoice, RevisionOption, open_model
from ster.cli.tables import count, table

if TYPE_CHECKING:
    from ster.pairs import PairSet
    from ster.pairs_lint import FinalTokens, LintReport

SHOWN = 20  # lines of a list a person reads
TAIL = 4  # tokens shown of a side whose end is the chat template's


def inspect(
    pairs: Annotated[Path, typer.Argument(metavar="FILE", help="A pair set.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="MODEL", help="Also show the last token of each side, as this model reads it.")
    ] = None,
    revision: RevisionOption = None,
    chat_template: ChatOption = ChatChoice.auto,
    as_json: JsonOption = None,
) -> None:
    """Check a pair set and list what is doubtful: duplicates, sides that differ in length or white space only, tell-tale last words.

    Needs no model. With --model, the last token of each side is shown too: it is the one whose activation is compared. Under a chat
    template that is often the template's own marker. Findings are doubts, not refusals: the exit code is 0.
    """
    from ster.pairs import PairSet
    from ster.pairs_lint import lint

    pair_set = PairSet.load(pairs)
    final_token, templated, tail = None, False, None
    if model is not None:
        from ster.sides import pair_tokens

        opened = open_model(model, revision, PrecisionChoice.auto, chat_template, None)
        sides = [side for pair in pair_set for side in (pair.positive, pair.negative)]
        ids = [side for pair in pair_tokens(opened, pair_set) for side in pair]
        last = {repr(side): opened.tokenizer.piece(each[-1]) for side, each in zip(sides, ids, strict=True)}
        final_token = lambda side: last[repr(side)]  # noqa: E731
        templated = opened.chat_template == "applied"
        if templated and len(set(last.values())) == 1:
            tail = [opened.tokenizer.piece(token) for token in ids[0][-TAIL:]]
    report = lint(pair_set, final_token=final_token, templated=templated)
    document = {
        "path": str(pairs),
        "trait_name": pair_set.trait_name,
        "pairs": len(pair_set),
        "pairs_hash": pair_set.content_hash,
        "findings": [asdict(finding) for finding in report.findings],
        "final_tokens": None if report.final_tokens is None else [asdict(tokens) for tokens in report.final_tokens],
        "template_end": tail,
    }
    console.result(document, lambda: _text(pair_set, report, tail), as_json)


def _text(pair_set: PairSet, report: LintReport, tail: list[str] | None) -> str:
    """tail: the last tokens of one side, where the chat template ends all sides alike."""
    lines = [f"{count(len(pair_set), 'pair')}, trait {pair_set.trait_name or 'not named'}, sha256 {pair_set.content_hash[:12]}"]
    kinds = Counter(finding.kind for finding in report.findings)
    lines.append(", ".join(f"{n} {kind}" for kind, n in kinds.most_common()) if kinds else "nothing doubtful found")
    if report.findings:
        rows = [["set" if f.pair is None else str(f.pair), f.kind, f.message] for f in report.findings]
        lines += ["", table(["pair", "finding", ""], _shortened(rows))]
    if report.final_tokens:
        lines += ["", "Last tokens, whose activations are compared:", _tokens(report.final_tokens)]
    if tail is not None:
        lines.append(
            f"The chat template ends every side alike, and its marker is what is compared. Pair 0 ends in {' '.join(map(repr, tail))}"
        )
    return "\n".join(lines)


def _tokens(tokens: Sequence[FinalTokens]) -> str:
    kinds = Counter((t.positive, t.negative) for t in tokens)
    rows = [[repr(positive), repr(negative), str(n)] for (positive, negative), n in kinds.most_common()]
    return table(["positive", "negative", "pairs"], _shortened(rows))


def _shortened(rows: list[list[str]]) -> list[list[str]]:
    if len(rows) <= SHOWN:
        return rows
    return [*rows[:SHOWN], [*["..."] * (len(rows[0]) - 1), f"and {len(rows) - SHOWN} more (--json lists all)"]]

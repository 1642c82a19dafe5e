"""`ster pairs import`: the files people have, as a pair set."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ster.cli import console
from ster.cli.tables import count

SHOWN = 10  # rejected rows named on stderr


class StyleChoice(str, Enum):
    text = "text"
    messages = "messages"


def import_(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="One file; two where the sides lie apart, the positive one first.")
    ],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Pair set to write; - is stdout.")] = "pairs.json",
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            "-f",
            metavar="NAME",
            help="caa, anthropic, correct-incorrect, persona-vectors, truthfulqa, csv, repe, two-column, suffixes, compliant, lists,"
            " tuples, dpo, cvector, two-lists, ster. Default: told by the content.",
        ),
    ] = None,
    trait_name: Annotated[str | None, typer.Option("--trait", metavar="NAME", help="Name of the trait.")] = None,
    style: Annotated[StyleChoice, typer.Option("--style", help="Question and answer as one text, or as chat messages.")] = StyleChoice.text,
    joiner: Annotated[
        str,
        typer.Option("--joiner", metavar="TEXT", help="Between question and answer where neither has white space; \\n is a line break."),
    ] = "\\n",
    template: Annotated[
        str | None, typer.Option("--template", metavar="TEXT", help="Text with {persona} and {text}, for suffixes, repe, two-lists.")
    ] = None,
    positive_persona: Annotated[
        str | None, typer.Option("--positive-persona", metavar="TEXT", help="{persona} of the positive side.")
    ] = None,
    negative_persona: Annotated[
        str | None, typer.Option("--negative-persona", metavar="TEXT", help="{persona} of the negative side.")
    ] = None,
    questions: Annotated[
        Path | None, typer.Option("--questions", metavar="FILE", help="Questions before the responses of `compliant`, as for --prompts.")
    ] = None,
    statement_column: Annotated[str, typer.Option("--statement-column", metavar="NAME", help="Of csv and repe.")] = "statement",
    label_column: Annotated[str, typer.Option("--label-column", metavar="NAME", help="Of csv and repe.")] = "label",
    positive_column: Annotated[str | None, typer.Option("--positive-column", metavar="NAME", help="Of two-column.")] = None,
    negative_column: Annotated[str | None, typer.Option("--negative-column", metavar="NAME", help="Of two-column.")] = None,
    pair_by: Annotated[
        str | None, typer.Option("--pair-by", metavar="RULE", help="order, column:NAME or random:SEED; for csv and two-lists.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Draws the incorrect answer in truthfulqa.")] = 0,
    every_answer: Annotated[bool, typer.Option("--every-answer", help="A pair for each incorrect answer in truthfulqa.")] = False,
) -> None:
    """Make a pair set of a file in another format. Rows that cannot become a pair are listed with the reason; none is guessed.

    Prints the path of the pair set.
    """
    from ster.cli.output import STDOUT, check_output, write_output
    from ster.errors import InputError
    from ster.pairs_import import Options, import_pairs
    from ster.prompts import read_prompts

    check_output(output, *files, *([] if questions is None else [questions]))
    options = Options(
        trait_name=trait_name,
        style=style.value,
        joiner=_breaks(joiner),
        template=None if template is None else _breaks(template),
        positive_persona=positive_persona,
        negative_persona=negative_persona,
        questions=None if questions is None else read_prompts(questions),
        statement_column=statement_column,
        label_column=label_column,
        positive_column=positive_column,
        negative_column=negative_column,
        pair_by=pair_by,
        seed=seed,
        every_answer=every_answer,
    )
    try:
        found = import_pairs(files, format=format, options=options)
    except InputError as error:
        raise InputError(error.message, None if error.hint is None else _in_options(error.hint)) from None
    write_output(output, found.pairs.to_json())
    for note in found.notes:
        console.note(f"Note: {note}")
    for row in found.rejected[:SHOWN]:
        console.note(f"Left out: {row.where}: {row.reason}")
    if len(found.rejected) > SHOWN:
        console.note(f"Left out: {len(found.rejected) - SHOWN} more")
    console.note(f"{count(len(found.pairs), 'pair')} from {found.format}, {count(len(found.rejected), 'row')} left out")
    if output != STDOUT:
        console.data(output)


def _in_options(hint: str) -> str:
    """Hints of the library name its arguments in backticks; here they are options.

    >>> _in_options("choose `pair_by`")
    'choose `--pair-by`'
    """
    from ster.pairs_import import Options

    for name in ("format", *(field.name for field in fields(Options))):
        option = "trait" if name == "trait_name" else name.replace("_", "-")
        hint = hint.replace(f"`{name}`", f"`--{option}`")
    return hint


def _breaks(text: str) -> str:
    """A shell has no easy way to write a line break."""
    return text.replace("\\n", "\n")

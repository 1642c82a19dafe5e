"""Every command of `ster` in one Typer app, and what becomes of its errors."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ster._files import reason
from ster.cli import console
from ster.cli.extract import extract
from ster.cli.generate import generate
from ster.cli.harvest import harvest
from ster.cli.keys import keys
from ster.cli.models import models
from ster.cli.pairs_import import import_
from ster.cli.pairs_inspect import inspect as inspect_pairs
from ster.cli.serve import serve
from ster.cli.toy_model import toy_model
from ster.cli.vector_compare import compare
from ster.cli.vector_convert import convert
from ster.cli.vector_evaluate import evaluate
from ster.cli.vector_inspect import inspect as inspect_vector
from ster.cli.vector_optimize import optimize
from ster.cli.vector_train import train
from ster.errors import SterError, SterWarning


class Commands(TyperGroup):
    """Typer checks values with pydantic and shows its words, which are not for users: `Value error, 'f64' is not one of 'f32', 'f16'.`,
    `Input should be a valid integer, unable to parse string as an integer`."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            plain = error.message.removeprefix("Value error, ").partition(", unable to parse")[0]
            error.message = re.sub("^Input should be", "must be", plain)
            raise


app = typer.Typer(
    name="ster",
    cls=Commands,
    help="Read and steer the residual stream of Llama-family models, exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(short_help="Activations of prompts, in one artifact.")(extract)
app.command(short_help="Activations of any number of prompts, in files.")(harvest)
app.command(short_help="Text from a model, steered or not.")(generate)
app.command(short_help="An HTTP server for any OpenAI client.")(serve)
vector = typer.Typer(no_args_is_help=True, help="Steering vectors: learn, choose, measure, look at, convert.", rich_markup_mode=None)
vector.command(short_help="Learn a direction per layer from pairs.")(train)
vector.command(short_help="Find the best method and layer on held-out pairs.")(optimize)
vector.command(short_help="Score a vector on pairs; steer at several strengths.")(evaluate)
vector.command("inspect", short_help="What is in a vector file.")(inspect_vector)
vector.command(short_help="How alike vectors are.")(compare)
vector.command(short_help="Vector files of other tools, and back.")(convert)
app.add_typer(vector, name="vector")
pairs = typer.Typer(no_args_is_help=True, help="Contrastive pairs: check, import.", rich_markup_mode=None)
pairs.command("inspect", short_help="What may be wrong with a pair set.")(inspect_pairs)
pairs.command("import", short_help="Files of other formats, as a pair set.")(import_)
app.add_typer(pairs, name="pairs")
app.add_typer(keys, name="keys")
app.command(short_help="The families of models that run.")(models)
app.command("toy-model", short_help="Write the toy checkpoint.")(toy_model)


def _version(wanted: bool) -> None:
    if wanted:
        from ster import __version__

        console.data(f"ster {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    pass


def run(argv: Sequence[str] | None) -> int:
    """Run a command; every SterError ends here.

    Raises:
        SystemExit, KeyboardInterrupt: as they come.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", SterWarning)
        warnings.showwarning = console.show_warning
        try:
            app(args=list(argv) if argv is not None else None, prog_name="ster")
            return 0
        except SterError as error:
            console.error(error.message, error.hint)
        except MemoryError:
            console.error("out of memory", None)
        except OSError as error:  # Typer's own writing, as of help to a full disk; files are FileErrors
            console.error(reason(error) if error.filename is None else f"{error.filename}: {reason(error)}", None)
    return 1

"""`ster generate`: text from a model, steered or not."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from ster.cli.tables import count
from ster.cli.vector_evaluate import SomeLayersOption, UnitsChoice, UnitsOption

if TYPE_CHECKING:
    from ster.abstract_model import AbstractModel, Prompt
    from ster.generation import Generation
    from ster.steering import Steering


def generate(
    *,
    model: ModelOption = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Text to continue, or to answer.")] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="A file of prompts, as for `ster extract`; prints JSON lines.")
    ] = None,
    vector: Annotated[
        list[Path] | None, typer.Option("--vector", "-v", metavar="FILE", help="Vector to steer with; repeat to add up several.")
    ] = None,
    strength: Annotated[
        list[float] | None,
        typer.Option(
            "--strength", "-s", metavar="X", help="Of each --vector, in their order; may be negative. Default: 1 for all. See --units."
        ),
    ] = None,
    layers: SomeLayersOption = None,
    units: UnitsOption = UnitsChoice.absolute,
    compare: Annotated[bool, typer.Option("--compare", help="Also generate unsteered, and show both.")] = False,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message; needs a chat template.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", metavar="N", help="Stop after so many tokens.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", "-t", metavar="X", help="0: the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", metavar="X", help="Draw from the likeliest tokens that make up this share.")] = 1.0,
    top_k: Annotated[int | None, typer.Option("--top-k", metavar="N", help="Draw from the N likeliest tokens.")] = None,
    min_p: Annotated[float, typer.Option("--min-p", metavar="X", help="Leave out tokens below this share of the likeliest one.")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", metavar="X", help="Above 1: tokens already in the text become less likely.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="The same seed gives the same text on every machine.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text; repeat for more.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object for each prompt: text, token ids, finish reason, seed, and the steering.")
    ] = False,
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
    """Continue a prompt, steered by any number of vectors.

    The text appears as it is made on a terminal, and whole when piped. With --compare the unsteered and the steered text are shown side by
    side. Every layer of a vector is added, at every token of prompt and text, unless --layers names some. To begin with, take one layer
    and --units norm with a strength of 0.1 to 0.3: the same at all layers at once breaks the text.
    """
    from ster.errors import InputError
    from ster.evaluation import MUCH, residual_sum
    from ster.generation import Settings
    from ster.interchange import load
    from ster.layers import check_layer_syntax, parse_layers
    from ster.prompts import check_prompt, read_prompts

    if (prompt is None) == (prompts is None):
        raise InputError("give either --prompt or --prompts")
    texts = [check_prompt(prompt)] if prompts is None else read_prompts(prompts)
    strengths = _strengths(vector or [], strength or [])
    if compare and not vector:
        raise InputError("--compare needs a --vector to compare with")
    if layers is not None:
        check_layer_syntax(layers)
        if not vector:
            raise InputError("--layers needs a --vector: it says at which layers that is added")
    artifacts = [load(path) for path in vector or []]
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": secrets.randbits(63) if seed is None else seed,  # one for both texts of --compare
        "stop": tuple(stop or ()),
    }
    Settings(**settings)

    remote = Remote(endpoint, api_key, concurrency, wire_dtype, tokenizer)
    opened = open_any(model, revision, precision, chat_template, threads, remote)
    steering: Steering | None = None
    applied, total = [], 0.0
    for artifact, factor in zip(artifacts, strengths, strict=True):
        opened.check_artifact(artifact, progress=True)
        used = artifact if layers is None else artifact.only(parse_layers(layers, opened.layer_count))
        term = used.at(strength=factor, units=units.value)
        steering = term if steering is None else steering + term
        applied.append(used.layers)
        total += residual_sum(used, factor, units.value) or 0.0
    if total > MUCH:
        spread = len({layer for each in applied for layer in each})
        console.note(
            f"Note: the steering adds up to {total:.3g} residual norms over {count(spread, 'layer')}; past about {MUCH:g} texts tend to"
            " break. 0.1 to 0.3 at one layer is where to start (`--layers`, `--units norm`)"
        )
    chosen = {"vectors": list(map(str, vector or [])), "strengths": strengths, "layers": applied, "units": units.value}
    label = ", ".join(f"{path.stem} {each:+g}" for path, each in zip(vector or [], strengths, strict=True))
    label += " residual norms" if units is UnitsChoice.norm else ""
    label += f", layers {layers}" if layers is not None else ""
    asked = [_prompt(text, system) for text in texts]
    try:
        if as_json or prompts is not None:
            for text, each in zip(texts, asked, strict=True):
                _print_json(opened, text, each, steering, compare, settings, chosen)
        elif compare:
            _print_both(opened, asked[0], steering, label, settings)
        else:
            _print_text(opened, asked[0], steering, settings)
    except KeyboardInterrupt:
        console.note("Interrupted.")
        raise console.Stopped from None
    if temperature > 0.0 and seed is None and not as_json and prompts is None:
        console.note(f"seed {settings['seed']}")


def _strengths(vectors: list[Path], strengths: list[float]) -> list[float]:
    """One for each vector.

    Raises:
        InputError: more or fewer, so that which belongs to which would be a guess.
    """
    from ster.errors import InputError

    if not strengths:
        return [1.0] * len(vectors)
    if len(strengths) != len(vectors):
        hint = "--vector a.json --strength 2 --vector b.json --strength -1"
        raise InputError(f"{count(len(strengths), '--strength option')} for {count(len(vectors), '--vector option')}", hint)
    return strengths


def _prompt(text: str, system: str | None) -> Prompt:
    return text if system is None else [{"role": "system", "content": system}, {"role": "user", "content": text}]


def _print_text(model: AbstractModel, prompt: Prompt, steering: Steering | None, settings: dict[str, Any]) -> None:
    if not sys.stdout.isatty():
        console.data(model.generate(prompt, steering, **settings).text)
        return
    try:
        for step in model.stream(prompt, steering, **settings):
            console.data_bytes(lambda file, text=step.text: file.write(text.encode()))  # type: ignore[misc]
    finally:
        console.data("")


def _print_both(model: AbstractModel, prompt: Prompt, steering: Steering | None, label: str, settings: dict[str, Any]) -> None:
    plain = model.generate(prompt, **settings)
    steered = model.generate(prompt, steering, **settings)
    if not sys.stdout.isatty():
        console.data(f"--- unsteered\n{plain.text}\n--- steered: {label}\n{steered.text}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = Table(show_edge=False, pad_edge=False, expand=True)
    columns.add_column("unsteered", ratio=1)
    columns.add_column(f"steered: {label}", ratio=1)
    columns.add_row(Text(plain.text), Text(steered.text))
    Console().print(columns)


def _print_json(
    model: AbstractModel,
    text: str,
    prompt: Prompt,
    steering: Steering | None,
    compare: bool,
    settings: dict[str, Any],
    chosen: dict[str, Any],
) -> None:
    """chosen: the steering in words, for the document."""
    import orjson

    drawn = settings["temperature"] > 0.0
    steered = model.generate(prompt, steering, **settings)
    document: dict[str, Any] = {"prompt": text}
    if compare:
        document |= {"unsteered": _fields(model.generate(prompt, **settings), drawn), "steered": _fields(steered, drawn)}
    else:
        document |= _fields(steered, drawn)
    document |= chosen
    console.data_bytes(lambda file: file.write(orjson.dumps(document) + b"\n"))


def _fields(found: Generation, drawn: bool) -> dict[str, Any]:
    """drawn: whether tokens were; without a draw there is no seed."""
    seed = found.seed if drawn else None
    return {"text": found.text, "token_ids": found.token_ids, "finish_reason": found.finish_reason, "seed": seed}

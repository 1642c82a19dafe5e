"""`ster serve`: an HTTP server for completions with activations and steering."""

from __future__ import annotations

import os
import re
import warnings
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ster.cli import console
from ster.cli import serve_limits as limits
from ster.cli.options import (
    ChatChoice,
    DatabaseOption,
    PrecisionChoice,
    PrecisionOption,
    RevisionOption,
    ThreadsOption,
    open_model,
)
from ster.cli.state import open_server_state

if TYPE_CHECKING:
    from ster.server.served import ServedSpec


MOST_GB = 1_000_000
MOST_SECONDS = 1_000_000
MOST_MINUTES = 1_000_000
MOST_DAYS = 100_000


class DtypeChoice(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="[NAME=]MODEL",
            help="Folder of a checkpoint, or ORG/NAME on the Hugging Face Hub; repeat for more.  [env var: STER_MODEL]",
        ),
    ] = None,
    served_name: Annotated[
        str | None, typer.Option("--served-name", metavar="NAME", help="What requests call the model. Default: the checkpoint's name.")
    ] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="Address to listen on. Other than this machine's needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", metavar="KEY", help="Key that clients must send; repeat for more.  [env var: STER_API_KEY, one key]"),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let other machines in without a key.")] = False,
    allowed_origin: Annotated[
        list[str] | None, typer.Option("--allowed-origin", metavar="ORIGIN", help="Web pages of this origin may ask; repeat for more.")
    ] = None,
    kv_cache_gb: Annotated[
        float, typer.Option("--kv-cache-gb", metavar="GB", min=0.001, help="Memory for caches and captured values.")
    ] = 4.0,
    max_running: Annotated[int, typer.Option("--max-running", metavar="N", min=1, help="Sequences that run at once.")] = 64,
    queue: Annotated[int, typer.Option("--queue", metavar="N", min=0, help="Requests that may wait; others are answered 429.")] = 256,
    request_seconds: Annotated[
        float, typer.Option("--request-seconds", metavar="S", min=0.1, help="Longest time of a request, loading not counted.")
    ] = 600.0,
    load_on_use: Annotated[
        bool, typer.Option("--load-on-use", help="Load a model when it is first asked for, not now. Requests wait for it.")
    ] = False,
    idle_minutes: Annotated[
        float | None,
        typer.Option(
            "--idle-minutes", metavar="M", min=0.01, help="Unload a model that nobody has used for so long; it loads again on its next use."
        ),
    ] = None,
    load_seconds: Annotated[
        float, typer.Option("--load-seconds", metavar="S", min=0.1, help="How long a request waits for its model to load.")
    ] = 840.0,
    shutdown_seconds: Annotated[
        float, typer.Option("--shutdown-seconds", metavar="S", min=0.0, help="After SIGTERM or Ctrl-C, for what runs to come to its end.")
    ] = 30.0,
    activation_dtype: Annotated[
        DtypeChoice, typer.Option("--activation-dtype", help="How activations travel, unless a request says. auto: as weights are stored.")
    ] = DtypeChoice.auto,
    max_capture_numbers: Annotated[
        int, typer.Option("--max-capture-numbers", metavar="N", min=1, help="Cap of layers x tokens x hidden size in a capture.")
    ] = 2**25,
    max_body_mb: Annotated[int, typer.Option("--max-body-mb", metavar="MB", min=1, help="Cap of a request's body.")] = 64,
    revision: RevisionOption = None,
    precision: PrecisionOption = PrecisionChoice.auto,
    chat_template: Annotated[
        ChatChoice,
        typer.Option(
            "--chat-template",
            help="auto: /v1/chat/completions where the model has a template; /v1/completions is raw text anyway. off: no chat.",
        ),
    ] = ChatChoice.auto,
    threads: ThreadsOption = None,
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            metavar="DIR",
            help="Folder of keys, Jobs and harvests; `none`: there are none. Default: one of the user's.  [env var: STER_STATE]",
        ),
    ] = None,
    database: DatabaseOption = None,
    public_url: Annotated[
        str | None,
        typer.Option(
            "--public-url", metavar="URL", help="What URLs of files begin with, behind a proxy. Default: as a request calls the server."
        ),
    ] = None,
    jobs_running: limits.JobsRunning = 8,
    max_jobs: limits.MaxJobs = 1000,
    max_job_gb: limits.MaxJobGb = 4.0,
    job_days: limits.JobDays = 7.0,
    max_harvests: limits.MaxHarvests = 3,
    max_harvest_prompts: limits.MaxHarvestPrompts = 4096,
    max_harvest_tokens: limits.MaxHarvestTokens = 2_000_000,
    harvest_days: limits.HarvestDays = 7.0,
) -> None:
    """Serve models over HTTP, for any OpenAI client: /v1/completions with output_residual_stream and apply_steering_vectors.

    Needs the extra `serve`: `pip install '.[serve]'` in Ster's folder. Listens on this machine alone, unless --host says otherwise.
    /openapi.json describes the API, /metrics counts. One line of JSON for each request goes to stderr; prompts are never in it.
    """
    _check_extra()
    _check_most("--kv-cache-gb", kv_cache_gb, MOST_GB)
    _check_most("--request-seconds", request_seconds, MOST_SECONDS)
    _check_most("--shutdown-seconds", shutdown_seconds, MOST_SECONDS)
    _check_most("--load-seconds", load_seconds, MOST_SECONDS)
    if idle_minutes is not None:
        _check_most("--idle-minutes", idle_minutes, MOST_MINUTES)
    _check_most("--max-job-gb", max_job_gb, MOST_GB)
    _check_most("--job-days", job_days, MOST_DAYS)
    _check_most("--harvest-days", harvest_days, MOST_DAYS)
    from ster.errors import SterWarning
    from ster.server.run import Address, serve
    from ster.server.settings import Settings

    settings = Settings(
        kv_cache_bytes=int(kv_cache_gb * 2**30),
        max_running=max_running,
        queue=queue,
        request_seconds=request_seconds,
        activation_dtype=activation_dtype.value,
        max_capture_numbers=max_capture_numbers,
        max_body_bytes=max_body_mb << 20,
        api_keys=_keys(api_key),
        allowed_origins=tuple(allowed_origin or ()),
        load_on_use=load_on_use,
        idle_seconds=None if idle_minutes is None else 60.0 * idle_minutes,
        load_seconds=load_seconds,
        public_url=_public_url(public_url),
        jobs_running=jobs_running,
        max_jobs=max_jobs,
        max_job_bytes=int(max_job_gb * 2**30),
        job_days=job_days,
        max_live_harvests=max_harvests,
        max_harvest_prompts=max_harvest_prompts,
        max_harvest_tokens=max_harvest_tokens,
        harvest_seconds=86400.0 * harvest_days,
    )
    warnings.simplefilter("once", SterWarning)  # a template that prints the date would warn with every request
    specs = _specs(_models(model), served_name, revision, precision, chat_template, threads)
    opened = open_server_state(state, database)
    try:
        serve(specs, settings, Address(host, port, insecure), shutdown_seconds=shutdown_seconds, note=console.note, state=opened)
    finally:
        if opened is not None:
            opened.close()


def _check_extra() -> None:
    """
    Raises:
        InputError: what the server is made of is not installed.
    """
    from importlib.util import find_spec

    from ster.errors import InputError

    missing = [
        name
        for name in ("starlette", "pydantic", "uvicorn", "zstandard", "sqlalchemy", "alembic", "platformdirs")
        if find_spec(name) is None
    ]
    if missing:
        hint = "run `pip install '.[serve]'` in Ster's folder (the distribution is called ster-lm, and it is not on PyPI)"
        raise InputError(f"`ster serve` needs the extra `serve`, of which {', '.join(missing)} cannot be imported", hint)


def _check_most(option: str, value: float, most: int) -> None:
    """
    Raises:
        InputError: more than `most`, or no number.
    """
    from ster.errors import InputError

    if not value <= most:  # NaN is refused too
        raise InputError(f"{option} must be at most {most:,}, found {value:g}")


def _models(given: list[str] | None) -> list[str]:
    """
    Raises:
        typer.BadParameter: there is none.
    """
    found = given or [os.environ.get("STER_MODEL", "")]  # Typer would split it at spaces
    if not found[0]:
        raise typer.BadParameter("name the folder of a checkpoint", param_hint="--model")
    return found


def _public_url(given: str | None) -> str | None:
    """
    Raises:
        InputError: not what a URL could begin with.
    """
    from ster.errors import InputError

    if given is not None and not re.fullmatch(r"https?://[A-Za-z0-9.:\[\]-]+(/[A-Za-z0-9._~/-]*)?", given):
        raise InputError(f"--public-url {given} is not a URL to begin with", "expected https://HOST, or https://HOST/PATH")
    return given


def _keys(given: list[str] | None) -> tuple[str, ...]:
    """Those of the command line, or the one of the environment, which Typer would split at spaces.

    Raises:
        InputError: a key that no client could send, or that everybody guesses.
    """
    from ster.errors import InputError

    found = given or [key for key in [os.environ.get("STER_API_KEY", "")] if key]
    for key in found:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise InputError("an API key must be printable ASCII without spaces, and not empty")
    return tuple(found)


def _specs(
    models: list[str],
    served_name: str | None,
    revision: str | None,
    precision: PrecisionChoice,
    chat_template: ChatChoice,
    threads: int | None,
) -> list[ServedSpec]:
    """What to serve, under which names. That the folders are there is found out now, not when they load; so are models of the Hub brought.

    Raises:
        InputError: two models under one name. CheckpointError: no checkpoint.
    """
    from ster.checkpoint import find_checkpoint
    from ster.errors import InputError
    from ster.server.served import ServedSpec

    if served_name is not None and len(models) > 1:
        raise InputError("--served-name names one model", "with several, give each its name: --model NAME=MODEL")
    if revision is not None and len(models) > 1:
        raise InputError("--revision is of one model", "with several, name the folders of their snapshots in the cache")
    specs: list[ServedSpec] = []
    for given in models:
        name, folder = _name_and_folder(given)
        checkpoint = find_checkpoint(folder, revision, progress=True)
        name = served_name or name or checkpoint.name
        if name in [spec.name for spec in specs]:
            raise InputError(f"two models are called {name}", "give each its name: --model NAME=MODEL")
        path = str(checkpoint.path)
        load = lambda path=path: open_model(path, None, precision, chat_template, threads)  # noqa: E731
        specs.append(ServedSpec(name, load, checkpoint.name))
    return specs


def _name_and_folder(given: str) -> tuple[str | None, str]:
    """`NAME=MODEL`; a folder that is there may have `=` in its name."""
    name, equals, folder = given.partition("=")
    if not equals or Path(given).exists():
        return None, given
    return name, folder

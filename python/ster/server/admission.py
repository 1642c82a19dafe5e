"""What can be known of a work before it runs, and is refused then."""

from __future__ import annotations

import math

from ster.errors import InputError
from ster.generation import Settings
from ster.layers import parse_layers
from ster.model import Model, check_reach
from ster.server.logprobs import WHOLE_VOCABULARY
from ster.server.memory import Ledger, blocks_of
from ster.server.work import TooLargeError, Work


def check_work(work: Work, model: Model, ledger: Ledger) -> None:
    """
    Raises:
        TokenError, ContextError, LayerError, SteeringError, InputError: the prompt, an edit or a setting cannot be used.
        TooLargeError: it needs more memory than the whole budget.
    """
    model._check_tokens(work.prompt, None)
    if work.max_tokens < 0:
        raise InputError(f"max_tokens must not be negative, found {work.max_tokens}")
    _check_sampling(work)
    for name, value, least in (("logprobs", work.logprobs, 0), ("prompt_logprobs", work.prompt_logprobs, WHOLE_VOCABULARY)):
        if value is not None and value < least:
            raise InputError(f"{name} must be at least {least}, found {value}")
    if work.layers and list(work.layers) != parse_layers(work.layers, model.layer_count):
        raise InputError(f"layers must be ascending, each once, found {list(work.layers)}")
    model._check_edits(work.edits)
    rows = work.rows(model.context_length)
    check_reach(
        work.edits, rows - 1, f"the prompt has {len(work.prompt)} tokens, and {work.new_tokens(model.context_length)} are generated"
    )
    size = blocks_of(rows) * ledger.block + len(work.layers) * rows * model.hidden_size * 4
    if size > ledger.budget:
        raise TooLargeError(
            f"{rows} {'row needs' if rows == 1 else 'rows need'} {size / 2**20:.1f} MiB of cache and captured values, and there are"
            f" {ledger.budget / 2**20:.1f} MiB in all",
            "shorten the prompt, generate fewer tokens or capture fewer layers",
        )


def _check_sampling(work: Work) -> None:
    sampling = work.sampling
    Settings(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        stop=sampling.stop,
    )
    for name in ("presence_penalty", "frequency_penalty"):
        if not math.isfinite(value := getattr(sampling, name)):
            raise InputError(f"{name} must be a finite number, found {value}")

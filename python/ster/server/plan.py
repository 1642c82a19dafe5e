"""From a request to the work that answers it; everything that can be refused is refused here, before the engine hears of it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ster.errors import SterError
from ster.server.capture import capture_layers, check_capture_cap
from ster.server.errors import context_length_exceeded, full_vocab_prompt_too_long, invalid
from ster.server.loaded import Loaded
from ster.server.logprobs import WHOLE_VOCABULARY
from ster.server.schema import ChatRequest, CompletionRequest
from ster.server.scores import Scored, check_score_cap
from ster.server.settings import Facts, Settings, WireDtype
from ster.server.vectors import check_positions, steering_edits
from ster.server.work import Sampling, Work

if TYPE_CHECKING:
    from ster import _native

AnyRequest = ChatRequest | CompletionRequest


@dataclass(frozen=True)
class Prompt:
    """One prompt. text: what `echo` shows of it."""

    tokens: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True)
class Plan:
    """A request that nothing speaks against. Choice `i` is `works[i]`, of prompt `i // n`.

    layers: to capture, ascending; None: no capture. logprobs: how many likely tokens beside the chosen one, or None. prompt_logprobs: the
    same for prompts, -1 the whole vocabulary. stream: as events, at whose end `usage` has a chunk of its own.

    It holds nothing of the request's body, which may be large.
    """

    loaded: Loaded
    prompts: list[Prompt]
    works: list[Work]
    n: int
    echo: bool
    logprobs: int | None
    prompt_logprobs: int | None
    layers: list[int] | None
    dtype: WireDtype
    return_token_ids: bool
    stream: bool
    usage: bool

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)


def make_plan(
    loaded: Loaded, settings: Settings, request: AnyRequest, prompts: list[Prompt], *, logprobs: int | None, echo: bool = False
) -> Plan:
    """
    Raises:
        ApiError: the request asks for what cannot be done.
    """
    facts = loaded.facts
    layers = capture_layers(request.output_residual_stream, facts)
    edits = steering_edits(request.apply_steering_vectors, facts, settings) if request.apply_steering_vectors is not None else []
    for prompt in prompts:
        check_tokens(prompt.tokens, facts)
    if layers is not None:
        check_capture_cap(layers, len(prompts[0].tokens), request.max_tokens, facts, settings, stream=request.stream)
    limit = _max_tokens(request, prompts, facts, settings)
    if edits:
        check_positions(edits, len(prompts[0].tokens), limit)
    _check_full_vocabulary(request, prompts, facts, settings)
    _check_scores(request, prompts, limit, logprobs, facts, settings, echo=echo)
    asked = request.activation_dtype or settings.activation_dtype
    return Plan(
        loaded=loaded,
        prompts=prompts,
        works=_works(request, prompts, limit, edits, layers, logprobs, echo),
        n=request.n,
        echo=echo,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        layers=layers,
        dtype=facts.dtype if asked == "auto" else asked,
        return_token_ids=request.return_token_ids,
        stream=request.stream,
        usage=request.stream_options is not None and request.stream_options.include_usage,
    )


def check_tokens(tokens: Sequence[int], facts: Facts, param: str = "prompt") -> None:
    """
    Raises:
        ApiError: no tokens, or an id the model has no row for.
    """
    if not tokens:
        raise invalid("The prompt has no tokens: this model's tokenizer adds none of its own.", "prompt")
    if max(tokens) >= facts.vocab or min(tokens) < 0:
        wrong = next(token for token in tokens if not 0 <= token < facts.vocab)
        raise invalid(f"{facts.name} has token ids 0 to {facts.vocab - 1}: it has no id {wrong}.", param)


def sentence(error: SterError) -> str:
    """`message` and `hint` of a refusal, as sentences."""
    parts = [part[:1].upper() + part[1:] for part in (error.message, error.hint) if part]
    return " ".join(part if part.endswith(".") else f"{part}." for part in parts)


def _max_tokens(request: AnyRequest, prompts: list[Prompt], facts: Facts, settings: Settings) -> int:
    longest = max(len(prompt.tokens) for prompt in prompts)
    limit = request.max_tokens
    if longest >= facts.context or (limit is not None and longest + limit > facts.context):
        raise context_length_exceeded(longest, limit or 0, facts.context)
    if limit is not None:
        return limit
    return min(settings.max_tokens_default_stream if request.stream else settings.max_tokens_default, facts.context - longest)


def _check_full_vocabulary(request: AnyRequest, prompts: list[Prompt], facts: Facts, settings: Settings) -> None:
    if request.prompt_logprobs != WHOLE_VOCABULARY:
        return
    limit = settings.full_vocab_prompt_tokens(facts.vocab, request.n)
    if request.captures or request.apply_steering_vectors is not None:
        limit = min(limit, settings.full_vocab_max_activation_prompt_tokens)
    tokens = sum(len(prompt.tokens) for prompt in prompts)
    if tokens > limit:
        raise full_vocab_prompt_too_long(tokens, limit)


def _check_scores(
    request: AnyRequest, prompts: list[Prompt], limit: int, logprobs: int | None, facts: Facts, settings: Settings, *, echo: bool
) -> None:
    """Every choice has the scores of its prompt; those of a chat stand once, beside the choices, and count all the same."""
    chat = isinstance(request, ChatRequest)
    prompt_tokens = request.n * sum(len(prompt.tokens) for prompt in prompts)
    asked: list[Scored] = []
    if request.prompt_logprobs is not None:
        asked.append(Scored("prompt_logprobs", "prompt_logprobs", prompt_tokens, request.prompt_logprobs))
    if logprobs is not None:
        field = "top_logprobs" if chat else "logprobs"
        if echo:
            asked.append(Scored(field, f"{field} of the echoed prompt", prompt_tokens, logprobs))
        asked.append(Scored(field, f"{field} of new tokens", request.n * len(prompts) * limit, logprobs))
    left_out = f"left out, max_tokens is {limit:,} here" if request.max_tokens is None and logprobs is not None else None
    check_score_cap(asked, facts.vocab, settings.max_score_numbers, left_out=left_out)


def _works(
    request: AnyRequest,
    prompts: list[Prompt],
    limit: int,
    edits: Sequence[_native.Edit],
    layers: list[int] | None,
    logprobs: int | None,
    echo: bool,
) -> list[Work]:
    seed = secrets.randbits(63) if request.seed is None else request.seed
    asked = [count for count in (request.prompt_logprobs, logprobs if echo else None) if count is not None]
    scored = None if not asked else WHOLE_VOCABULARY if WHOLE_VOCABULARY in asked else max(asked)
    return [
        Work(
            prompt=prompt.tokens,
            max_tokens=limit,
            sampling=_sampling(request, seed + choice),
            edits=tuple(edits),
            layers=tuple(layers or ()),
            logprobs=logprobs,
            prompt_logprobs=scored if choice == 0 else None,  # all choices of a prompt have the same
            continues=isinstance(request, CompletionRequest),
            share_prefix=request.share_prefix,
        )
        for prompt in prompts
        for choice in range(request.n)
    ]


def _sampling(request: AnyRequest, seed: int) -> Sampling:
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=None if request.top_k == -1 else request.top_k,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        seed=seed % 2**63,
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
    )

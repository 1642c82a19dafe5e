"""Every cap, limit and option of the server, and the facts about a served model that requests are checked against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WireDtype = Literal["float32", "bfloat16", "float16"]
"""How numbers travel; see `ster.server.tensors`."""


@dataclass(frozen=True)
class Settings:
    """What `ster serve` can be told. Numbers are counts unless their name says otherwise."""

    max_capture_numbers: int = 2**25
    """Layers x (prompt tokens + max_tokens) x hidden size of one capture."""
    max_steering_numbers: int = 2**21
    """Numbers in all Steering vectors of a request, each position of a span counted."""
    max_steering_vectors: int = 8
    max_span_positions: int = 4096
    """Positions that the spans of one Steering vector cover."""
    max_body_bytes: int = 64 << 20
    max_logprobs: int = 100
    full_vocab_max_prompt_tokens: int = 1024
    """Prompt tokens of a request with `prompt_logprobs: -1`."""
    full_vocab_max_activation_prompt_tokens: int = 16
    """The same beside `output_residual_stream` or `apply_steering_vectors`."""
    max_full_vocab_numbers: int = 2**22
    """Prompt tokens x vocabulary of a request with `prompt_logprobs: -1`."""
    max_tokens_default: int = 15_600
    """Where `max_tokens` is left out, at most this many tokens are generated; less where the context ends."""
    max_tokens_default_stream: int = 32_000
    max_output_work_tokens: int = 32_000
    """Prompts x n x max_tokens."""
    max_stops: int = 16
    max_prompts: int = 1024
    queue: int = 256
    """Requests that wait for a place; one more is answered 429 `queue_full`."""
    max_running: int = 64
    """Sequences in a pass."""
    kv_cache_bytes: int = 4 << 30
    """Caches of running sequences, kept prefixes and captured rows."""
    prefill_tokens: int = 256
    """Tokens of long prompts in a pass beside sequences that decode."""
    request_seconds: float = 600.0
    body_seconds: float = 30.0
    activation_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """In which dtype activations travel where the request does not say; `auto`: as the checkpoint is stored."""
    api_keys: tuple[str, ...] = ()
    """Any of them opens the API; none: it is open."""
    allowed_origins: tuple[str, ...] = ()
    """Origins that browsers may call from; none: CORS is off."""
    keepalive_seconds: float = 5.0


@dataclass(frozen=True)
class Facts:
    """What a request is checked against before it reaches the engine.

    name: of the checkpoint, as messages have it. context: tokens that a prompt and its completion may have together, `max_model_len`.
    dtype: in which its activations travel by default, see `Settings.activation_dtype`.
    """

    name: str
    layers: int
    hidden: int
    vocab: int
    context: int
    dtype: WireDtype

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
    max_body_members: int = 2**18
    """Lists, objects and members of objects in a body. 2^21 numbers of Steering vectors are at most 2^18 lists where hidden size is 16."""
    max_prompt_ids: int = 1 << 20
    """Of one prompt: more than any context, and looked at in some 30 ms."""
    max_text_bytes: int = 1 << 20
    """Of a text in UTF-8: of a prompt, more where the context is longer (see `text_cap`); what `/tokenize` takes."""
    max_logprobs: int = 100
    full_vocab_max_prompt_tokens: int = 1024
    """Prompt tokens of a request with `prompt_logprobs: -1`; see also `full_vocab_prompt_tokens`."""
    full_vocab_max_activation_prompt_tokens: int = 16
    """The same beside `output_residual_stream` or `apply_steering_vectors`."""
    max_score_numbers: int = 2**20
    """Entries of `logprobs` and `prompt_logprobs` in an answer, those of all choices: a token has one, and one for each likely token
    beside it. As many are an answer of up to 77 MB, for which the process takes 0.2 to 0.3 GiB for a while."""
    max_tokens_default: int = 15_600
    """Where `max_tokens` is left out, at most this many tokens are generated; less where the context ends."""
    max_tokens_default_stream: int = 32_000
    max_output_work_tokens: int = 32_000
    """Prompts x n x max_tokens."""
    max_choices: int = 1024
    """Prompts x n."""
    max_stops: int = 16
    max_prompts: int = 1024
    queue: int = 256
    """Requests that wait, beyond as many as there are free places; one more is answered 429 `queue_full`."""
    max_running: int = 64
    """Sequences in a pass."""
    kv_cache_bytes: int = 4 << 30
    """Caches of running sequences, kept prefixes and captured rows."""
    prefill_tokens: int = 256
    """Tokens of long prompts in a pass beside sequences that decode."""
    request_seconds: float = 600.0
    """From when its model is there."""
    body_seconds: float = 30.0
    activation_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """In which dtype activations travel where the request does not say; `auto`: as the checkpoint is stored."""
    api_keys: tuple[str, ...] = ()
    """Any of them opens the API; none: it is open."""
    allowed_origins: tuple[str, ...] = ()
    """Origins that browsers may call from; none: CORS is off."""
    keepalive_seconds: float = 5.0
    """After so long without an answer it begins, and says every so often that it is still coming."""
    load_on_use: bool = False
    """Models load when somebody first uses them, not when the server starts."""
    idle_seconds: float | None = None
    """A model that nobody uses for so long is unloaded, and loads on its next use. None: never."""
    load_seconds: float = 840.0
    """How long a request waits for its model."""
    load_retry_seconds: float = 30.0
    """After a failure to load, until a request has it tried again."""

    @property
    def bodies_bytes(self) -> int:
        """Bytes of bodies that are read and parsed at the same time."""
        return 4 * self.max_body_bytes

    def text_cap(self, context: int) -> int:
        """Bytes of a prompt. 64 a token leave room for texts of long tokens, such as indented code; prose has 4."""
        return max(self.max_text_bytes, 64 * context)

    def full_vocab_prompt_tokens(self, vocab: int, n: int = 1) -> int:
        """How many prompt tokens a request with `prompt_logprobs: -1` may have: every choice has their scores."""
        return min(self.full_vocab_max_prompt_tokens, self.max_score_numbers // (vocab * n))


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

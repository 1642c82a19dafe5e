"""What the scheduler is given and what it answers: one `Work` is one sequence to score, continue or read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ster import _native
from ster.errors import InputError
from ster.server.logprobs import TokenScore


class Overloaded(Exception):  # noqa: N818
    """There is no room now; later there may be."""


class QueueFull(Overloaded):
    """As many requests wait as may."""


class ShuttingDown(Exception):  # noqa: N818
    """The scheduler takes no more work, or ended before this work was done."""


class TooLargeError(InputError):
    """A work that the memory of this server never holds."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, as in `ster.generation.Settings`; and OpenAI's two penalties, subtracted from the logits before anything else.

    seed: 0 .. 2^64 - 1. stop: texts that end the work, cut off.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Work:
    """One choice of a completion.

    max_tokens: at most so many new tokens, fewer where the context ends; 0 scores or reads the prompt alone.
    layers: blocks to read after steering, ascending and unique. logprobs, prompt_logprobs: how many of the likeliest tokens stand
    beside each new and each prompt token; None scores nothing, -1 (of the prompt alone) is the whole vocabulary.
    share_prefix: False: starts from nobody's cache, and leaves none behind. continues: its text goes on from the prompt's, with the space
    that its first token may begin with, as a completion does; an answer in a chat is a text of its own.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    edits: tuple[_native.Edit, ...] = ()
    layers: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    share_prefix: bool = True
    continues: bool = False

    def new_tokens(self, context: int) -> int:
        """The most it can generate in a context of so many tokens."""
        return min(self.max_tokens, context - len(self.prompt))

    def rows(self, context: int) -> int:
        """The most rows that run: the prompt's, and every new token's but the last."""
        return len(self.prompt) + max(self.new_tokens(context) - 1, 0)


@dataclass(frozen=True, eq=False)
class PromptScored:
    """One entry for each prompt token; the first, before which there is nothing, has None."""

    entries: list[TokenScore | None]


@dataclass(frozen=True, eq=False)
class Token:
    """A new token. text: what it makes certain, may be empty; an end-of-text token has none of its own.

    stop_reason: the stop string, or the id of the end-of-text token, where the reason is `stop`.
    """

    id: int
    text: str
    score: TokenScore | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None


@dataclass(frozen=True, eq=False)
class Finished:
    """residual: float32 `[layers, prompt + generated - 1, hidden]`, after steering, or None when no layer was asked for; every row of the
    prompt where nothing is generated. It may be a view with gaps between layers. token_ids: the new tokens."""

    residual: NDArray[np.float32] | None
    token_ids: list[int]


@dataclass(frozen=True, eq=False)
class Failed:
    """error: a `SterError` is the work's own fault, `ShuttingDown` nobody's; anything else is a bug."""

    error: BaseException


Event = PromptScored | Token | Finished | Failed
"""In this order: `PromptScored` when asked for, `Token`s, then `Finished` or, at any time, `Failed`, after which nothing comes."""

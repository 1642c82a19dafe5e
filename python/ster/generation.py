"""Text out of a model: one pass for the prompt, then one token a pass through the KV cache, steered or not.

The rows that run are the prompt's and every generated token's but the last, which is chosen and never run. Cached decoding gives the
same bits as running the whole text again.
"""

from __future__ import annotations

import contextlib
import math
import operator
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Literal, SupportsIndex, cast

import numpy as np
from numpy.typing import NDArray

from ster import _native
from ster.errors import InputError
from ster.trace import Point, Trace

if TYPE_CHECKING:
    from ster.model import Model
    from ster.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Settings:
    """How to generate; the arguments of `Model.generate`, checked.

    Raises:
        InputError: a setting out of its range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "max_new_tokens", _integer("max_new_tokens", self.max_new_tokens))
        if self.max_new_tokens < 1:
            raise InputError("max_new_tokens must be greater than zero")
        if self.seed is not None:
            put(self, "seed", _integer("seed", self.seed))
            if not 0 <= self.seed < 2**64:
                raise InputError(f"seed must be between 0 and 2^64 - 1, found {_shown(self.seed)}")
        if self.top_k is not None:
            put(self, "top_k", _integer("top_k", self.top_k))
            if self.top_k < 1:
                raise InputError(f"top_k must be at least 1, found {_shown(self.top_k)}")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            put(self, name, _number(name, getattr(self, name)))
        put(self, "stop", stop_strings(self.stop))
        # The engine knows the other ranges; it says so before anything runs.
        self.choose(np.zeros(1, np.float32), [], 1, 0, 0)

    def choose(self, logits: NDArray[np.float32], text: Sequence[int], allowed: int, seed: int, step: int) -> int:
        """The next token from logits `[vocab]`. A `top_k` beyond the vocabulary keeps all of it."""
        return _native.sample(
            logits,
            text,
            allowed=allowed,
            temperature=self.temperature,
            top_k=None if self.top_k is None else min(self.top_k, len(logits)),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=seed,
            step=step,
        )


def stop_strings(stop: object) -> tuple[str, ...]:
    """The `stop` of `Model.generate`: None, a text, or several.

    Raises:
        InputError: anything else, or an empty text.
    """
    found: tuple[object, ...] | None = None
    if stop is None:
        found = ()
    elif isinstance(stop, str):
        found = (stop,)
    elif isinstance(stop, Iterable) and not isinstance(stop, bytes | bytearray):
        found = tuple(stop)
    if found is None or not all(isinstance(text, str) for text in found):
        raise InputError(f"stop must be a string or a list of strings, found {_shown(stop)}")
    if not all(found):
        raise InputError("a stop string must not be empty")
    return cast("tuple[str, ...]", found)


def _integer(name: str, value: object) -> int:
    """What Python and NumPy call an integer; `True`, `1.0` and text are none."""
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool):
            return operator.index(cast(SupportsIndex, value))
    raise InputError(f"{name} must be an integer, found {_shown(value)}")


def _number(name: str, value: object) -> float:
    """What Python and NumPy call a real number; one too large for a float is infinite, which the engine refuses."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} must be a number, found {_shown(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, 1 if value > cast(Real, 0) else -1)


def _shown(value: object) -> str:
    try:
        return repr(value)[:60]
    except ValueError:  # more digits than Python prints
        return "a number of thousands of digits"


@dataclass(frozen=True, eq=False)
class Step:
    """One generated token. text: what it adds to the text; empty while a character is incomplete or a stop string may be starting.

    finish_reason: set on the last step. residual: float32 `[layers, rows, hidden]` of the rows that ran to choose it (the whole prompt
    for the first), or None when no layer was asked for. steered: per edit, the positions those rows were steered at.
    """

    token_id: int
    text: str
    finish_reason: FinishReason | None
    seed: int
    residual: NDArray[np.float32] | None
    steered: list[list[int]]


@dataclass(frozen=True, eq=False, repr=False)
class Generation:
    """text: the new text, without what a stop string cut off. token_ids: new tokens, with the one that ended it.

    finish_reason: `stop` at an end-of-text token or a stop string, `length` at the limit or the end of the context.
    seed: what sampling used, to have the same text again. trace: rows prompt + generated - 1, when layers were asked for.
    steered: per edit, the positions it reached.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_token_ids: list[int]
    seed: int
    trace: Trace | None
    steered: list[list[int]]

    def __repr__(self) -> str:
        return f"<ster.Generation: {len(self.token_ids)} tokens, {self.finish_reason}: {self.text!r}>"


def stream(
    model: Model,
    prompt_ids: Sequence[int],
    edits: Sequence[_native.Edit],
    settings: Settings,
    layers: Sequence[int] | None,
    point: Point,
) -> Iterator[Step]:
    """Tokens as they come. The caller has refused what can be refused."""
    seed = secrets.randbits(63) if settings.seed is None else settings.seed
    engine, tokenizer = model.engine, model.tokenizer
    allowed = min(model.vocab_size, tokenizer.size)
    ends = set() if settings.ignore_eos else set(model.eos_token_ids)
    limit = min(settings.max_new_tokens, model.context_length - len(prompt_ids))
    writer = TextWriter(tokenizer, settings.stop)
    cache = engine.cache()
    text, run = list(prompt_ids), list(prompt_ids)
    for step in range(limit):
        again = outgrown(engine, cache)
        if again:
            cache, run = engine.cache(), text
        sequence = _native.Sequence(
            np.array(run, dtype=np.uint32), cache=cache, steering=edits, layers=layers or (), rows="all", point=point, logits="last"
        )
        output = model.forward([sequence], ["the text"])[0]
        assert output.logits is not None
        token = settings.choose(output.logits[0], text, allowed, seed, step)
        text.append(token)
        run = [token]
        ended = token in ends
        added, stopped = writer.add(token, last=ended or step + 1 == limit)
        reason: FinishReason | None = "stop" if ended or stopped else "length" if step + 1 == limit else None
        residual, steered = output.residual, output.steered
        if again:  # rows that ran before were told of then
            residual = None if residual is None else residual[:, -1:]
            steered = [[position for position in positions if position == cache.length - 1] for positions in steered]
        yield Step(token, added, reason, seed, residual, steered)
        if reason is not None:
            return


def outgrown(engine: _native.Engine, cache: _native.Cache) -> bool:
    """Whether a sequence becomes with its next token one whose keys are rotated otherwise (longrope), so that it must run anew."""
    switch = engine.switches_after
    return switch is not None and cache.length == switch


def collect(model: Model, prompt_ids: Sequence[int], steps: Iterator[Step], layers: Sequence[int] | None, point: Point) -> Generation:
    """All of a stream in one piece."""
    ids: list[int] = []
    parts: list[str] = []
    rows: list[NDArray[np.float32]] = []
    steered: list[list[int]] = []
    last: Step | None = None
    for last in steps:
        ids.append(last.token_id)
        parts.append(last.text)
        if last.residual is not None:
            rows.append(last.residual)
        steered = [before + more for before, more in zip(steered or [[] for _ in last.steered], last.steered, strict=True)]
    assert last is not None and last.finish_reason is not None
    trace = None
    if layers is not None:
        ran = [*prompt_ids, *ids[:-1]]
        names = [model.tokenizer.piece(token) for token in ran]
        trace = Trace(ran, names, list(layers), np.concatenate(rows, axis=1), None, point, steered)
    return Generation("".join(parts), ids, last.finish_reason, list(prompt_ids), last.seed, trace, steered)


class TextWriter:
    """Token ids -> text as it becomes certain: never half a character, never the beginning of a stop string.

    before: tokens that the text goes on from. Some tokenizers drop the space that a text begins with, and with them keep it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        # Behind half a character nothing certain can be said of what comes next.
        self._ids = [] if tokenizer.decode(before).endswith("\ufffd") else list(before)
        # ids[start:done] are written; decoding begins at `start`, because a token's text can depend on the one before.
        self._start = 0
        self._done = len(self._ids)
        self._held = ""

    def add(self, token: int, *, last: bool) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop string ended it. With `last`, all of it."""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._start : self._done])
        now = self._tokenizer.decode(self._ids[self._start :])
        if last or not now.endswith("\ufffd"):
            self._held += now[len(before) :]
            if len(now) > len(before):  # a token without text, such as a special one, is nothing to go on from
                self._start = self._done
            self._done = len(self._ids)
        found = min((at for at in map(self._held.find, self._stop) if at >= 0), default=None)
        if found is not None:
            return self._take(found), True
        return self._take(len(self._held) if last else len(self._held) - self._beginnings()), False

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _beginnings(self) -> int:
        """How many characters at the end may begin a stop string."""
        longest = min(max(map(len, self._stop), default=1) - 1, len(self._held))
        for count in range(longest, 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stop):
                return count
        return 0

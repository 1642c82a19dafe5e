"""One sequence between its admission and its end: what of it has run, what it is told to run next, what came of it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ster import _native
from ster.generation import TextWriter, outgrown
from ster.model import Model
from ster.server.logprobs import TokenScore, score
from ster.server.memory import Block
from ster.server.prefixes import Tokens
from ster.server.work import Event, Failed, Finished, PromptScored, Sampling, Token, Work

Listener = Callable[[int, Event], None]
SEAM = 8  # tokens of the prompt that may matter to the text of the next one: a character has up to four bytes, and a word one space


class Ticket:
    """The works of one submission. jobs: those that wait for a place. background: see `ster.server.background`."""

    def __init__(self, listener: Listener, *, background: bool = False) -> None:
        self.listener = listener
        self.background = background
        self.jobs: deque[Job] = deque()
        self.cancelled = False


class Job:
    """A work with what is known of it before it runs. plan: see `prefixes.plan_key`. rows: the most that will run. number: of arrival.

    lifted: see `ster.server.background`. said: events since it was admitted last; told: those that its listener has heard of, which may be
    more. ended: it has no more to tell.
    """

    def __init__(self, ticket: Ticket, index: int, work: Work, plan: bytes, context: int, number: int) -> None:
        self.ticket = ticket
        self.index = index
        self.work = work
        self.plan = plan
        self.tokens: Tokens = np.array(work.prompt, np.uint32)
        self.new = work.new_tokens(context)
        self.rows = work.rows(context)
        self.number = number
        self.lifted = False
        self.said = 0
        self.told = 0
        self.ended = False

    def tells(self, event: Event) -> bool:
        """The next event is news: one that was given up and begins again says what it said before, to the bit, and a failure is its end."""
        self.said += 1
        self.ended = isinstance(event, Finished | Failed)
        news = self.said > self.told or isinstance(event, Failed)
        self.told = max(self.told, self.said)
        return news

    @property
    def may_fork(self) -> bool:
        """It may start from another's cache: nothing is asked of rows that it would not run."""
        return self.work.share_prefix and not self.work.layers and self.work.prompt_logprobs is None

    @property
    def lends(self) -> bool:
        """Others may start from its cache: one that only reads its prompt runs no deeper than the last layer read."""
        return self.work.share_prefix and (self.new > 0 or not self.work.layers)


class Writer(TextWriter):
    """Says which stop string ended it."""

    def stopped_by(self) -> str:
        """After `add` found a stop string: the first in the list of those that begin where the text was cut."""
        return next(stop for stop in self._stop if self._held.startswith(stop))


class Running:
    """blocks, held: what the ledger counts for the cache, and bytes for captured rows. ran: rows in the cache.

    source, shared: while set, the sequence waits until `source` has run the first `shared` tokens, and then forks its cache.
    """

    def __init__(self, job: Job, model: Model, cache: _native.Cache, blocks: list[Block], held: int) -> None:
        work = job.work
        self.job = job
        self.cache = cache
        self.blocks = blocks
        self.held = held
        self.ran = 0
        self.source: Running | None = None
        self.shared = 0
        self.gone = False
        self.new_ids: list[int] = []
        self.done = False
        self._model = model
        self._writer = Writer(model.tokenizer, work.sampling.stop, work.prompt[-SEAM:] if work.continues else ())
        self._text = list(work.prompt) if work.sampling.repetition_penalty != 1.0 else []
        self._seen: Counter[int] = Counter()
        # Pages that no row is written to take no memory.
        self._residual = np.empty((len(work.layers), job.rows, model.hidden_size), np.float32) if work.layers else None
        self._entries: list[TokenScore | None] = [None]

    @property
    def background(self) -> bool:
        """Others come first."""
        return self.job.ticket.background and not self.job.lifted

    @property
    def left(self) -> int:
        """Tokens of the prompt that have not run."""
        return max(len(self.job.tokens) - self.ran, 0)

    @property
    def scores_prompt(self) -> bool:
        return self.job.work.prompt_logprobs is not None

    def tokens(self) -> Tokens:
        """What the cache holds."""
        new = np.array(self.new_ids[: self.ran - len(self.job.tokens)] if not self.left else [], np.uint32)
        return np.concatenate([self.job.tokens[: self.ran], new])

    def wait_for(self, source: Running, shared: int) -> None:
        self.source, self.shared = source, shared

    def fork(self, cache: _native.Cache, shared: int) -> None:
        """Begin with the first `shared` tokens of `cache`."""
        self.cache = cache.fork(shared)
        self.ran = shared
        self.source = None

    def sequence(self, count: int) -> _native.Sequence:
        """The next `count` tokens for a pass: of the prompt, or the one new token that has not run."""
        left = self.left
        tokens = self.job.tokens[self.ran : self.ran + count] if left else np.array(self.new_ids[-1:], np.uint32)
        if not left and outgrown(self._model.engine, self.cache):
            self.cache = self._model.engine.cache()
        if not left and self.cache.length < self.ran:  # it grew out of its cache, just now or in a pass that failed
            tokens = np.concatenate([self.job.tokens, np.array(self.new_ids, np.uint32)])
        work = self.job.work
        logits: Literal["none", "last", "all"] = "none"
        if left and self.scores_prompt:
            logits = "all"
        elif self.job.new and (work.layers or count >= left):  # a pass that captures and has no logits to find stops at the last layer read
            logits = "last"
        return _native.Sequence(
            tokens, cache=self.cache, steering=work.edits, layers=work.layers, rows="all", point="post_steer", logits=logits
        )

    def advance(self, count: int, output: _native.Output) -> list[Event]:
        """Take in what a pass made of the next `count` tokens; what there is to tell of it, in order."""
        start, prompt = self.ran, len(self.job.tokens)
        self.ran += count
        if self._residual is not None:
            assert output.residual is not None
            self._residual[:, start : self.ran] = output.residual[:, -count:]
        logits = output.logits
        events: list[Event] = []
        if start < prompt and self.scores_prompt:
            assert logits is not None
            self._score_prompt(start, logits)
            if self.ran >= prompt:
                events.append(PromptScored(self._entries))
        if self.ran >= prompt:
            if self.job.new:
                assert logits is not None
                events.append(self._step(logits[-1]))
            else:
                self.done = True
        if self.done:
            events.append(self._finish())
        return events

    def _score_prompt(self, start: int, logits: NDArray[np.float32]) -> None:
        """Row i says how likely token i + 1 was."""
        top = self.job.work.prompt_logprobs
        assert top is not None
        targets = self.job.tokens[start + 1 : start + 1 + len(logits)].tolist()
        self._entries += [score(row, token, top) for row, token in zip(logits, targets, strict=False)]

    def _step(self, logits: NDArray[np.float32]) -> Token:
        """Choose the next token from `[vocab]`."""
        work, model = self.job.work, self._model
        token = self._choose(logits)
        found = None if work.logprobs is None else score(logits, token, work.logprobs)
        self.new_ids.append(token)
        full = len(self.new_ids) == self.job.new
        ended = token in model.eos_token_ids
        text, stopped = self._writer.add(token, last=ended or full)
        self.done = ended or stopped or full
        if stopped:
            return Token(token, text, found, "stop", self._writer.stopped_by())
        if ended:
            return Token(token, text, found, "stop", token)
        return Token(token, text, found, "length" if full else None, None)

    def _choose(self, logits: NDArray[np.float32]) -> int:
        sampling = self.job.work.sampling
        token = _native.sample(
            penalised(logits, self._seen, sampling) if self._seen else logits,
            self._text,
            allowed=min(self._model.vocab_size, self._model.tokenizer.size),
            temperature=sampling.temperature,
            top_k=None if sampling.top_k is None else min(sampling.top_k, len(logits)),
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed,
            step=len(self.new_ids),
        )
        if sampling.repetition_penalty != 1.0:
            self._text.append(token)
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._seen[token] += 1
        return token

    def _finish(self) -> Finished:
        residual = self._residual
        if residual is not None:
            residual = residual[:, : len(self.job.tokens) + max(len(self.new_ids) - 1, 0)]
        return Finished(residual, self.new_ids)


def penalised(logits: NDArray[np.float32], seen: Counter[int], sampling: Sampling) -> NDArray[np.float32]:
    """A copy of `[vocab]`, less `presence + frequency * count` for every token that was generated `count` times: OpenAI's formula."""
    ids = np.fromiter(seen.keys(), np.int64, len(seen))
    counts = np.fromiter(seen.values(), np.float64, len(seen))
    logits = logits.copy()
    logits[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    return logits

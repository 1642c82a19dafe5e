"""Playing works through a scheduler, and what the model says they must give."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

import ster
from ster import _native
from ster.server.logprobs import TokenScore, score
from ster.server.running import Ticket
from ster.server.scheduler import Scheduler
from ster.server.settings import Settings
from ster.server.work import Event, Failed, Finished, PromptScored, Token, Work

SECONDS = 60.0  # no test takes so long


@dataclass
class Answer:
    """Everything a work said, in order."""

    events: list[Event] = field(default_factory=list)

    @property
    def tokens(self) -> list[Token]:
        return [event for event in self.events if isinstance(event, Token)]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def prompt(self) -> list[TokenScore | None] | None:
        return next((event.entries for event in self.events if isinstance(event, PromptScored)), None)

    @property
    def residual(self) -> NDArray[np.float32] | None:
        return next(event.residual for event in self.events if isinstance(event, Finished))

    @property
    def error(self) -> BaseException | None:
        return next((event.error for event in self.events if isinstance(event, Failed)), None)

    def check_order(self, work: Work) -> None:
        kinds = [type(event) for event in self.events]
        assert kinds == sorted(kinds, key=[PromptScored, Token, Finished, Failed].index)
        assert kinds.count(Finished) + kinds.count(Failed) == 1 and kinds.count(PromptScored) <= (work.prompt_logprobs is not None)
        if isinstance(last := self.events[-1], Finished):
            assert last.token_ids == self.ids
            assert [token.finish_reason is not None for token in self.tokens] == [False] * (len(self.ids) - 1) + [True] * bool(self.ids)


def same(a: Answer, b: Answer) -> bool:
    """In every bit."""
    if a.error is not None or b.error is not None:
        return type(a.error) is type(b.error)
    if (a.residual is None) != (b.residual is None):
        return False
    rows = a.residual is None or (a.residual.shape == b.residual.shape and a.residual.tobytes() == b.residual.tobytes())  # type: ignore[union-attr]
    return rows and unrolled(a.tokens) == unrolled(b.tokens) and unrolled(a.prompt) == unrolled(b.prompt)


def unrolled(value: object) -> object:
    """Scores with their lists written out, for a comparison of floats by their bits."""
    if isinstance(value, list):
        return [unrolled(each) for each in value]
    if isinstance(value, Token):
        return value.id, value.text, unrolled(value.score), value.finish_reason, value.stop_reason
    if isinstance(value, TokenScore):
        return value.id, value.logprob.hex(), value.rank, [(id, logprob.hex(), rank) for id, logprob, rank in value.top]
    return value


class Play:
    """Submissions and what came back; `hooks` are called on the scheduler's thread, after an event is noted."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._changed = threading.Condition()

    def submit(
        self, works: Sequence[Work], hook: Callable[[int, Event], None] | None = None, *, background: bool = False
    ) -> tuple[Ticket, list[Answer]]:
        answers = [Answer() for _ in works]

        def listen(index: int, event: Event) -> None:
            with self._changed:
                answers[index].events.append(event)
                self._changed.notify_all()
            if hook is not None:
                hook(index, event)

        return self.scheduler.submit(works, listen, background=background), answers

    def wait(self, answers: Sequence[Answer]) -> list[Answer]:
        """Until all of them ended."""
        with self._changed:
            done = lambda: all(a.events and isinstance(a.events[-1], Finished | Failed) for a in answers)  # noqa: E731
            assert self._changed.wait_for(done, SECONDS), "some works never ended"
        return list(answers)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """`condition` is asked after every event."""
        with self._changed:
            assert self._changed.wait_for(condition, SECONDS)

    def run(self, works: Sequence[Work]) -> list[Answer]:
        return self.wait(self.submit(works)[1])


@contextlib.contextmanager
def playing(model: ster.Model, settings: Settings | None = None, *, start: bool = True) -> Iterator[Play]:
    """A scheduler that is gone afterwards, with its memory given back."""
    scheduler = Scheduler(model, settings or Settings())
    if start:
        scheduler.start()
    try:
        yield Play(scheduler)
    finally:
        scheduler.drain(0)
    assert not any(thread is scheduler._thread for thread in threading.enumerate())


def alone(model: ster.Model, work: Work) -> Answer:
    """Through a scheduler of its own."""
    with playing(model) as play:
        return play.run([work])[0]


def blocks(model: ster.Model, count: int) -> int:
    """Bytes of so many blocks of cache."""
    return count * model.engine.cache_block_bytes


def whole_run(model: ster.Model, work: Work, ids: Sequence[int]) -> tuple[NDArray[np.float32] | None, NDArray[np.float32]]:
    """Residual rows and logits of the prompt and `ids` in one pass without a cache."""
    tokens = np.array([*work.prompt, *ids[:-1]], np.uint32)
    sequence = _native.Sequence(tokens, steering=work.edits, layers=work.layers, rows="all", point="post_steer", logits="all")
    output = model.engine.forward([sequence])[0]
    assert output.logits is not None
    return output.residual, output.logits


def check_against_model(model: ster.Model, work: Work, answer: Answer) -> None:
    """`answer` is what one pass over its own text gives, and what `Model.generate` says."""
    residual, logits = whole_run(model, work, answer.ids)
    length = len(work.prompt)
    if work.layers:
        assert residual is not None and answer.residual is not None
        rows = length + max(len(answer.ids) - 1, 0)
        assert answer.residual.tobytes() == residual[:, :rows].tobytes()
    if work.prompt_logprobs is not None:
        expected = [score(row, token, work.prompt_logprobs) for row, token in zip(logits, work.prompt[1:], strict=False)]
        assert unrolled(answer.prompt) == unrolled([None, *expected])
    if work.logprobs is not None:
        expected = [score(row, token, work.logprobs) for row, token in zip(logits[length - 1 :], answer.ids, strict=False)]
        assert unrolled([token.score for token in answer.tokens]) == unrolled(expected)
    sampling = work.sampling
    if work.max_tokens and not (sampling.presence_penalty or sampling.frequency_penalty):
        generated = model.generate(
            list(work.prompt),
            list(work.edits),
            max_new_tokens=work.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed,
            stop=sampling.stop,
            layers=work.layers or None,
            point="post_steer",
        )
        assert (answer.ids, answer.text) == (generated.token_ids, generated.text)
        assert answer.tokens[-1].finish_reason == generated.finish_reason
        if generated.trace is not None and answer.residual is not None:
            assert answer.residual.tobytes() == generated.trace.residual.tobytes()

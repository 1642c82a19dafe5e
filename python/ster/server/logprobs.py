"""Logits -> how likely the chosen token was, at which rank, and which tokens were likeliest.

Log-probabilities are those of the model: log-softmax of the logits over the whole vocabulary, in float64, before penalties, temperature
and filters. Every row is reduced alone, so a score depends on nothing that ran beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

WHOLE_VOCABULARY = -1
FLOOR = -9999.0  # what JSON clients are told instead of minus infinity, as by vLLM

Entry = tuple[int, float, int]
"""Token id, log-probability, rank: 1 is the likeliest; among equals the lower id comes first, as when sampling."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """top: the token itself, then those of the k likeliest that it is not, by rank. Its logprob is the very float of `top[0]`."""

    id: int
    logprob: float
    rank: int
    top: Sequence[Entry]


class Ranking(Sequence[Entry]):
    """A token, then the rest of the vocabulary by rank; entries are made when read, for there are 100,000 of them."""

    def __init__(self, first: Entry, ids: NDArray[np.int64], logprobs: NDArray[np.float64]) -> None:
        """ids, logprobs: of the whole vocabulary, by rank; `first` is one of them."""
        self._first = first
        self._ids = ids.astype(np.int32)
        self._logprobs = logprobs

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Entry]:
        """In pieces, so that no list of the whole is made."""
        yield self._first
        for start in range(0, len(self._ids), 4096):
            piece = slice(start, start + 4096)
            pairs = zip(self._ids[piece].tolist(), self._logprobs[piece].tolist(), strict=True)
            for rank, (id, logprob) in enumerate(pairs, start + 1):
                if id != self._first[0]:
                    yield id, logprob, rank

    @overload
    def __getitem__(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...

    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        if place == 0:
            return self._first
        place -= place < self._first[2]  # those before the first one's rank moved down by one
        return int(self._ids[place]), float(self._logprobs[place]), place + 1


def score(logits: NDArray[np.float32], token: int, top: int) -> TokenScore:
    """How likely `token` was under logits `[vocab]`, with the `top` likeliest beside it, or all of them with -1."""
    normalise = log_softmax(logits)
    logit = logits[token]
    rank = 1 + int(np.count_nonzero(logits > logit)) + int(np.count_nonzero(logits[:token] == logit))
    chosen = (token, float(normalise(logits[token : token + 1])[0]), rank)
    if top == WHOLE_VOCABULARY:
        ids = np.argsort(-logits, kind="stable")
        return TokenScore(*chosen, Ranking(chosen, ids, normalise(logits[ids])))
    ids = likeliest(logits, top)
    others = zip(ids.tolist(), normalise(logits[ids]).tolist(), range(1, len(ids) + 1), strict=True)
    return TokenScore(*chosen, [chosen, *(entry for entry in others if entry[0] != token)])


def log_softmax(logits: NDArray[np.float32]) -> Callable[[NDArray[np.float32]], NDArray[np.float64]]:
    """For some logits of `[vocab]` their log-probability in the whole of it, not below `FLOOR`.

    `(logit - highest) - log sum exp(logits - highest)`, in float64: the first difference is exact or nearly so at any magnitude.
    """
    highest = np.float64(logits.max())
    row = logits.astype(np.float64)  # numpy 1 would subtract in float32
    row -= highest
    log_sum = np.log(np.exp(row, out=row).sum())
    return lambda some: np.maximum((some.astype(np.float64) - highest) - log_sum, FLOOR)


def likeliest(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest of `[vocab]`, largest first, the lower id first among equals."""
    count = min(count, len(logits))
    if count == 0:
        return np.empty(0, np.int64)
    # The least of the chosen decides, not which of several equal to it a partition happens to choose.
    least = np.partition(logits, len(logits) - count)[len(logits) - count]
    ids = np.flatnonzero(logits >= least)
    return ids[np.argsort(-logits[ids], kind="stable")][:count]

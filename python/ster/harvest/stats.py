"""Mean and standard deviation of the stored values over tokens, and the mean length of rows; the first token of every prompt is left out.

Exact to the last bits of float64 and the same for the same shards: rows are added one after another, shards in their order. What is
counted is what is in the files, so that a shard can be counted again from its file, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ster.harvest.dtypes import Dtype, widen

ROOM = 1 << 19  # values at a time, about: 4 MB of float64
MOST_ROWS = 1024


@dataclass(frozen=True)
class Rows:
    """One prompt's part of a shard. values: `[layers, rows, width]`, as stored. positions: `[rows]`, of the tokens in their prompt."""

    values: NDArray[Any]
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int64]


@dataclass(frozen=True)
class Moments:
    """count: rows. mean, square: float64 `[layers, width]`, the latter the sum of squared distances from the mean. length: float64
    `[layers]`, the sum of the rows' Euclidean lengths."""

    count: int
    mean: NDArray[np.float64]
    square: NDArray[np.float64]
    length: NDArray[np.float64]

    def merge(self, other: Moments) -> Moments:
        """Both together. Source: Chan, Golub and LeVeque 1983, https://doi.org/10.1080/00031305.1983.10483115, equation 1.5."""
        if not other.count:
            return self
        if not self.count:
            return other
        count = self.count + other.count
        apart = other.mean - self.mean
        return Moments(
            count,
            self.mean + apart * (other.count / count),
            self.square + other.square + apart * apart * (self.count * other.count / count),
            self.length + other.length,
        )

    @property
    def std(self) -> NDArray[np.float64]:
        """Of the rows themselves: the sum of squares is divided by their number, not by one less."""
        return np.sqrt(self.square / self.count)


def no_rows(layers: int, width: int) -> Moments:
    return Moments(0, np.zeros((layers, width)), np.zeros((layers, width)), np.zeros(layers))


def moments(prompts: Iterable[Rows], dtype: Dtype, layers: int, width: int) -> Moments:
    """Of one shard.

    Distances are from its first row, which is near enough to the mean for the difference of squares to lose nothing that float32 shows.
    """
    count, origin = 0, None
    total, square, length = np.zeros((layers, width)), np.zeros((layers, width)), np.zeros(layers)
    for block in _blocks(prompts, max(1, min(MOST_ROWS, ROOM // (layers * width)))):
        values = widen(block, dtype).astype(np.float64, order="C")  # the order of sums follows that of the memory
        length += np.sqrt(np.square(values).sum(axis=2)).sum(axis=1)
        if origin is None:
            origin = values[:, :1].copy()
        values -= origin
        total += values.sum(axis=1)
        np.square(values, out=values)
        square += values.sum(axis=1)
        count += values.shape[1]
    if origin is None:
        return no_rows(layers, width)
    return Moments(count, origin[:, 0] + total / count, np.maximum(square - total * total / count, 0.0), length)


def _blocks(prompts: Iterable[Rows], size: int) -> Iterable[NDArray[Any]]:
    """The rows that count, `size` or some more at a time, so that many short prompts cost no more than a long one."""
    waiting: list[NDArray[Any]] = []
    rows = 0
    for prompt in prompts:
        counted = prompt.values[:, 1:] if prompt.positions[0] == 0 else prompt.values
        for start in range(0, counted.shape[1], size):
            waiting.append(counted[:, start : start + size])
            rows += waiting[-1].shape[1]
            if rows >= size:
                yield np.concatenate(waiting, axis=1)
                waiting, rows = [], 0
    if waiting:
        yield np.concatenate(waiting, axis=1)

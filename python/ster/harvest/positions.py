"""Which tokens of each prompt are kept: `all`, `last`, or positions such as `0,5,-1`, where -1 is the last."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from typing import Literal, SupportsIndex, cast

import numpy as np
from numpy.typing import NDArray

from ster.errors import InputError

Kept = Literal["all", "last"] | tuple[int, ...]
Positions = str | SupportsIndex | Iterable[SupportsIndex]

_SYNTAX = "positions are `all`, `last`, or numbers with commas between them: 0 is the first token, -1 the last"


def parse_positions(positions: Positions) -> Kept:
    """`all`, `last`, or the numbers asked for, ascending, each once.

    Raises:
        InputError: anything else.

    >>> parse_positions("-1,0"), parse_positions(-1)
    ((-1, 0), 'last')
    """
    if isinstance(positions, str):
        text = positions.strip()
        if text == "all" or text == "last":
            return cast(Kept, text)
        numbers = [_number(piece.strip()) for piece in text.split(",")]
    else:
        numbers = [_index(each) for each in _members(positions)]
    if not numbers:
        raise InputError("at least one position is required", _SYNTAX)
    chosen = tuple(sorted(set(numbers)))
    return "last" if chosen == (-1,) else chosen


def kept_positions(positions: Kept, tokens: int) -> NDArray[np.int64]:
    """Positions kept of a prompt of so many tokens, ascending; those that name the same token count once.

    Raises:
        IndexError: a position that it does not have; the argument is the position.

    >>> kept_positions((-1, 0, 1), 2).tolist()
    [0, 1]
    """
    if positions == "all":
        return np.arange(tokens)
    if positions == "last":
        return np.array([tokens - 1])
    assert not isinstance(positions, str)
    for position in positions:
        if not -tokens <= position < tokens:
            raise IndexError(position)
    return np.unique(np.array(positions) % tokens)


def count_kept(positions: Kept, tokens: int) -> int:
    """How many that are."""
    return tokens if positions == "all" else 1 if positions == "last" else len(kept_positions(positions, tokens))


def as_document(positions: Kept) -> str | list[int]:
    return positions if isinstance(positions, str) else list(positions)


def from_document(positions: str | Sequence[int]) -> Kept:
    return cast(Kept, positions if isinstance(positions, str) else tuple(positions))


def _number(piece: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", piece):
        raise InputError(f'invalid position "{piece}"', _SYNTAX)
    return int(piece)


def _members(positions: object) -> list[object]:
    try:
        operator.index(cast(SupportsIndex, positions))
        return [positions]
    except TypeError:
        pass
    try:
        return list(cast(Iterable[object], positions))
    except TypeError:
        raise InputError(f'invalid position "{positions}"', _SYNTAX) from None


def _index(number: object) -> int:
    try:
        if not isinstance(number, bool):
            return operator.index(cast(SupportsIndex, number))
    except TypeError:
        pass
    raise InputError(f'invalid position "{number}"', _SYNTAX)

"""Which layers: `all`, `5`, `8..16` (half-open), `3,5,8..12`; `-1` counts from the end.

Layer i is decoder block i, counted from 0; its activation is the residual stream after the block.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from typing import SupportsIndex, cast

from ster.errors import InputError, LayerError

Layers = str | SupportsIndex | Iterable[SupportsIndex]

_NUMBER = re.compile(r"-?[0-9]{1,18}")


def parse_layers(layers: Layers, layer_count: int) -> list[int]:
    """The selected layers, ascending, each once.

    Args:
        layers: the syntax above, a layer, or layers (`[0, 3]`, `range(4)`, a NumPy array).
        layer_count: blocks of the model; its layers are `0..layer_count - 1`.

    Raises:
        LayerError: a layer the model does not have; nothing is clamped.
        InputError: text that is not the syntax, or nothing selected.

    >>> parse_layers("3,0..2,-1", 6)
    [0, 1, 3, 5]
    """
    if isinstance(layers, str):
        chosen: set[int] = set()
        for first, last in _ranges(layers, layer_count):
            # Ends are looked at before the range is spelled out: `0..9999999999` must not fill the memory.
            chosen.update(range(_resolve(first, layer_count), _resolve(min(last, max(first, layer_count)), layer_count) + 1))
        return sorted(chosen)
    numbers = _members(layers)
    if not numbers:
        raise LayerError("at least one layer is required")
    return sorted({_resolve(_integer(number), layer_count) for number in numbers})


def pick_layers(layers: Layers, held: Sequence[int]) -> list[int]:
    """The selected layers of those that an artifact holds, ascending, each once; `all` is all of them.

    Raises:
        LayerError: one that it does not hold, or one counted from the end: an artifact does not know the model's.
        InputError: as in `parse_layers`.

    >>> pick_layers("4..6,9", [4, 5, 8, 9])
    [4, 5, 9]
    """
    if isinstance(layers, str):
        if layers.strip() == "all":
            return list(held)
        ranges = list(_ranges(layers, None))
    else:
        ranges = [(layer, layer) for layer in map(_integer, _members(layers))]
    if not ranges:
        raise LayerError("at least one layer is required")
    chosen: set[int] = set()
    for first, last in ranges:
        if first < 0 or last < 0:
            hint = f"name the block itself: it has {spans(held)}"
            raise LayerError(f'layers "{layers}" count from the end, and an artifact does not know how many the model has', hint)
        for layer in range(first, last + 1):
            if layer not in held:
                raise LayerError(f"the artifact has no vector for layer {layer}", f"it has {spans(held)}")
            chosen.add(layer)
    return sorted(chosen)


def spans(numbers: Iterable[int]) -> str:
    """`0, 1, 5` or, from four in a row on, `2 to 9`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs)


def _members(layers: object) -> list[object]:
    """One integer or many; a NumPy array has every method of both, so asking is not enough."""
    if isinstance(layers, bytes | bytearray):
        raise InputError(f'invalid layer "{layers!r}"', _SYNTAX)
    try:
        operator.index(cast(SupportsIndex, layers))
        return [layers]
    except TypeError:
        pass
    try:
        return list(cast(Iterable[object], layers))
    except TypeError:
        raise InputError(f'invalid layer "{layers}"', _SYNTAX) from None


def check_layer_syntax(layers: str) -> None:
    """Refuse what is wrong in any model, before one is loaded.

    Raises:
        InputError: see `parse_layers`.
    """
    for _ in _ranges(layers, None):
        pass


def _ranges(text: str, layer_count: int | None) -> Iterable[tuple[int, int]]:
    """`(first, last)`, both included, for every piece of the syntax; negative numbers are resolved once the count is known."""
    if not text.strip():
        raise InputError("no layers selected")
    if text.strip() == "all":
        yield 0, (layer_count or 1) - 1
        return
    for piece in text.split(","):
        piece = piece.strip()
        if ".." not in piece:
            if not _NUMBER.fullmatch(piece):
                raise InputError(f'invalid layer "{piece}"', _SYNTAX)
            yield int(piece), int(piece)
            continue
        start, _, end = (part.strip() for part in piece.partition(".."))
        if not (_NUMBER.fullmatch(start) and _NUMBER.fullmatch(end)):
            raise InputError(f'invalid layer range "{piece}"', _SYNTAX)
        first, stop = int(start), int(end)
        if layer_count is not None:
            first, stop = _from_end(first, layer_count), _from_end(stop, layer_count)
        if first >= stop and (layer_count is not None or (first < 0) == (stop < 0)):
            raise InputError(f'layer range "{piece}" must have start < end', "ranges leave out their end: `8..16` is 8 to 15")
        yield first, stop - 1


_SYNTAX = "layers are `all`, `5`, `8..16` (16 not included), or a list such as `3,5,8..12`; `-1` is the last one"


def _from_end(layer: int, layer_count: int) -> int:
    return layer + layer_count if -layer_count <= layer < 0 else layer


def _resolve(layer: int, layer_count: int) -> int:
    resolved = _from_end(layer, layer_count)
    if not 0 <= resolved < layer_count:
        raise LayerError(f"layer {layer} is outside the model's 0..{layer_count - 1} range")
    return resolved


def _integer(number: object) -> int:
    """Accepts what Python and NumPy call an integer; refuses `True`, `1.0` and text."""
    try:
        if not isinstance(number, bool):
            return operator.index(cast(SupportsIndex, number))
    except TypeError:
        pass
    raise InputError(f'invalid layer "{number}"', _SYNTAX)

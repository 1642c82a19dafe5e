"""`apply_steering_vectors`: what a request adds to the residual stream, from JSON to the engine's edits.

Checks go from shapes to sizes to values, and shapes of all vectors come first: nothing is converted or decompressed that the caps
refuse. Lists of numbers are looked at by NumPy and by C loops alone; two million of them take a fraction of a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ster import _native
from ster.server.capture import check_layers
from ster.server.errors import ApiError, invalid
from ster.server.fields import FLOAT32_LIMIT
from ster.server.settings import Facts, Settings
from ster.server.tensors import TensorError, decode

if TYPE_CHECKING:
    from ster.server.schema import EncodedTensor, SteeringVector

FIELD = "apply_steering_vectors"
NUMBERS = frozenset((int, float))  # what JSON numbers become; bool is a type of its own here


@dataclass(frozen=True)
class Shape:
    """Of the `activations` of one Steering vector. positions: None where a row is one vector."""

    rows: int
    positions: int | None
    width: int


def steering_edits(vectors: Sequence[SteeringVector], served: Facts, settings: Settings) -> list[_native.Edit]:
    """The engine's edits, row by row of each vector, in order.

    Raises:
        ApiError: a vector that cannot be applied to this model, whatever the prompt.
    """
    if not vectors:
        raise invalid("apply_steering_vectors has no Steering vector: list at least one, or leave the field out.", FIELD)
    if len(vectors) > settings.max_steering_vectors:
        raise invalid(f"A request takes at most {settings.max_steering_vectors} Steering vectors: this one has {len(vectors)}.", FIELD)
    shapes = [_check(vector, served, settings) for vector in vectors]
    positions = [_positions(vector, shape, settings) for vector, shape in zip(vectors, shapes, strict=True)]
    _check_numbers(shapes, positions, settings)
    edits: list[_native.Edit] = []
    for vector, shape, places in zip(vectors, shapes, positions, strict=True):
        values = _values(vector, shape, settings)
        for layer, rows in zip(vector.layer_indices, values, strict=True):
            edits.extend(_edits(layer, rows, places, vector))
    return edits


def last_position(edits: Iterable[_native.Edit]) -> int:
    """The largest position that is named; -1: none is."""
    return max((position for edit in edits for position in edit.positions or ()), default=-1)


def check_positions(edits: Iterable[_native.Edit], prompt_tokens: int, max_tokens: int) -> None:
    """
    Raises:
        ApiError: the largest position is one that no forward pass of the request runs.
    """
    last = last_position(edits)
    reach = prompt_tokens + max_tokens - 2
    if last <= reach:
        return
    tokens = f"{prompt_tokens} token{'' if prompt_tokens == 1 else 's'}"
    if reach < 0:
        raise invalid(
            f"apply_steering_vectors steers position {last}, but this request runs no forward pass that steering could change: the prompt"
            f" has {tokens} and max_tokens is {max_tokens}. Raise max_tokens.",
            FIELD,
        )
    raise invalid(
        f"apply_steering_vectors steers position {last}, but the forward passes of this request reach position {reach} at most: the prompt"
        f" has {tokens} and max_tokens is {max_tokens}, and the last generated token never runs through the model. Steer a position up to"
        f" {reach}, or raise max_tokens.",
        FIELD,
    )


def _check(vector: SteeringVector, served: Facts, settings: Settings) -> Shape:
    """Rows against Layers, then the Layers, then the width; values are not looked at."""
    layers = vector.layer_indices
    rows = _row_count(vector.activations)
    if rows != len(layers):
        raise invalid("activations needs one row for each layer in layer_indices.", FIELD)
    if (twice := _repeated(layers)) is not None:
        raise invalid(f"layer_indices names Layer {twice} twice: a Steering vector has one row for each Layer.", FIELD)
    check_layers(layers, served, FIELD)
    shape = _shape(vector.activations)
    if shape.width != served.hidden:
        raise invalid(f"Each vector needs {served.hidden} numbers, the hidden size of {served.name}: found {shape.width}.", FIELD)
    return shape


def _row_count(activations: EncodedTensor | list[Any]) -> int:
    return len(activations) if isinstance(activations, list) else activations.shape[0]


def _shape(activations: EncodedTensor | list[Any]) -> Shape:
    """
    Raises:
        ApiError: rows that are no lists, or differ in depth or length.
    """
    if not isinstance(activations, list):
        rows, *inner = activations.shape
        return Shape(rows, inner[0] if len(inner) == 2 else None, inner[-1])
    depths = [_depth(row) for row in activations]
    if min(depths) > 0 and not min(depths) == max(depths) <= 2:
        raise invalid(f"activations must be numbers, [layers][hidden] or [layers][positions][hidden]: {_deep(depths)}.", FIELD)
    _lengths(activations, "row of activations")
    if depths[0] == 1:
        return Shape(len(activations), None, len(activations[0]))
    _lengths(list(chain.from_iterable(activations)), "vector in a row of activations")
    return Shape(len(activations), len(activations[0]), len(activations[0][0]))


def _depth(row: Any) -> int:
    """How deep lists are nested at its beginning: 1 for a list of numbers."""
    depth = 0
    while type(row) is list:
        row, depth = row[0] if row else None, depth + 1
    return depth


def _deep(depths: Sequence[int]) -> str:
    other = next((index for index, depth in enumerate(depths) if depth != depths[0]), None)
    if other is None:
        return f"found lists nested {depths[0] + 1} deep"
    return f"row 0 has lists nested {depths[0]} deep, and row {other} {depths[other]}"


def _lengths(lists: list[Any], what: str) -> None:
    """
    Raises:
        ApiError: something that is no list, or lists of different lengths.
    """
    if set(map(type, lists)) != {list}:
        raise invalid(f"Each {what} must be a list, and all of the same kind: numbers, or lists of numbers.", FIELD)
    lengths = sorted(set(map(len, lists)))
    if len(lengths) != 1:
        raise invalid(f"Each {what} must have the same length: found {lengths[0]} and {lengths[-1]}.", FIELD)


def _positions(vector: SteeringVector, shape: Shape, settings: Settings) -> Sequence[int] | None:
    """Where the vectors of a row go; None: everywhere. One vector may go to many positions, else there is a position for each."""
    indices, spans = vector.position_indices, vector.position_spans
    if spans is not None:
        if indices is not None:
            raise invalid("Send position_spans or position_indices, not both.", FIELD)
        if shape.positions is not None:
            raise invalid("position_spans takes one vector for each Layer: send position_indices with a list of vectors.", FIELD)
        return _tile(spans, settings)
    if shape.positions is None:
        if indices is not None:
            raise invalid("position_indices takes a list of vectors for each Layer, one for each position: found one vector.", FIELD)
        return None
    if indices is None:
        return range(shape.positions)  # not a list: the number is not checked yet
    if len(indices) != shape.positions:
        raise invalid(f"position_indices has {len(indices)} positions, and each Layer {shape.positions} vectors: send as many.", FIELD)
    if (twice := _repeated(indices)) is not None:
        raise invalid(f"position_indices names position {twice} twice: add its vectors up, or send two Steering vectors.", FIELD)
    return indices


def _repeated(values: Iterable[int]) -> int | None:
    return next((first for first, second in pairwise(sorted(values)) if first == second), None)


def _tile(spans: list[list[int]], settings: Settings) -> list[int]:
    """[start, end) pairs -> their positions, ascending."""
    for start, end in spans:
        if end <= start:
            raise invalid(f"The span [{start}, {end}] must end after it starts: it covers {start} to its end - 1.", FIELD)
    total = sum(end - start for start, end in spans)
    if total > settings.max_span_positions:
        raise invalid(f"position_spans covers {total:,} positions: at most {settings.max_span_positions:,} are allowed.", FIELD)
    ordered = sorted(spans)
    for (start, end), (next_start, next_end) in pairwise(ordered):
        if next_start < end:
            raise invalid(f"The spans [{start}, {end}] and [{next_start}, {next_end}] overlap.", FIELD)
    return [position for start, end in ordered for position in range(start, end)]


def _check_numbers(shapes: Sequence[Shape], positions: Sequence[Sequence[int] | None], settings: Settings) -> None:
    """A vector that goes to several positions counts at each."""
    numbers = sum(
        shape.rows * (1 if places is None else len(places)) * shape.width for shape, places in zip(shapes, positions, strict=True)
    )
    if numbers > settings.max_steering_numbers:
        limit = f"at most {settings.max_steering_numbers:,} are allowed, each position of a span counted"
        raise invalid(f"apply_steering_vectors has {numbers:,} numbers: {limit}.", FIELD)


def _values(vector: SteeringVector, shape: Shape, settings: Settings) -> NDArray[np.float32]:
    """float32 `[layers, vectors, hidden]`; `vectors` is 1 where a row is one vector."""
    full = (shape.rows, shape.positions or 1, shape.width)
    if isinstance(vector.activations, list):
        rows = chain.from_iterable(vector.activations)
        return _numbers(list(rows if shape.positions is None else chain.from_iterable(rows))).reshape(full)
    tensor = vector.activations
    try:
        values = decode(tensor.data, tensor.dtype, tensor.original_dtype, tensor.shape, max_numbers=settings.max_steering_numbers)
    except TensorError as error:
        raise _refused(error) from None
    return values.reshape(full)


def _numbers(flat: list[Any]) -> NDArray[np.float32]:
    """JSON numbers -> float32, each rounded to nearest.

    Raises:
        ApiError: something else in it, which NumPy would take for a number (true, "1", null), or a number beyond float32.
    """
    if not NUMBERS.issuperset(map(type, flat)):
        raise invalid("activations must have numbers alone: found something else in a row.", FIELD)
    try:
        values = np.array(flat, np.float64)
    except OverflowError:  # an integer beyond float64
        values = np.array([math.inf])
    if not (np.abs(values) <= FLOAT32_LIMIT).all():
        raise invalid(f"activations has a number outside float32's range, from -{FLOAT32_LIMIT} to {FLOAT32_LIMIT}.", FIELD)
    return values.astype(np.float32)


def _edits(layer: int, rows: NDArray[np.float32], positions: Sequence[int] | None, vector: SteeringVector) -> Iterator[_native.Edit]:
    """`rows` `[vectors, hidden]`, for one Layer.

    norm_match scales by ||h|| / ||v||, which a zero vector does not have. What vllm-lens adds for one is zero, so it becomes an edit that
    adds nothing: its positions are still checked.
    """
    zero = ~rows.any(axis=1)
    if not vector.norm_match or not zero.any():
        yield _native.Edit(layer, rows, scale=vector.scale, positions=positions, norm_match=vector.norm_match)
    elif zero.all():
        yield _native.Edit(layer, rows, scale=0.0, positions=positions)
    else:  # so there are several vectors, with a position each
        assert positions is not None
        at = np.array(positions)
        yield _native.Edit(layer, rows[~zero], scale=vector.scale, positions=at[~zero].tolist(), norm_match=True)
        yield _native.Edit(layer, rows[zero], scale=0.0, positions=at[zero].tolist())


def _refused(error: TensorError) -> ApiError:
    return invalid(f"activations {error}.", FIELD)

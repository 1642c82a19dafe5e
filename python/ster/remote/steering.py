"""The engine's edits as `apply_steering_vectors`, or a refusal: what the wire cannot say must not be left out.

A vector of the request holds rows for several layers, with one scale, one norm_match and one set of positions. What is only added has
its scale multiplied into its rows, which are float32 as in the engine: `h + s * v` rounds the product first, so no bit changes. Edits at
one layer keep their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ster import _native
from ster.errors import SteeringError
from ster.server.tensors import encode

Key = tuple[float, bool, tuple[int, ...] | None]
"""scale, norm_match, positions."""


@dataclass
class Group:
    """One vector of a request: per layer float32 `[n, hidden]`, n the number of positions, or 1 where every row is steered."""

    key: Key
    rows: dict[int, NDArray[np.float32]] = field(default_factory=dict)


def steering_vectors(edits: Sequence[_native.Edit], caps: Mapping[str, Any]) -> list[dict[str, Any]]:
    """caps: what the server says of `max_steering_vectors` and `max_steering_numbers`, as far as it does.

    Raises:
        SteeringError: more than the caps; a product that is no finite float32.
    """
    groups = group(edits)
    most = caps.get("max_steering_vectors")
    if isinstance(most, int) and len(groups) > most:
        hint = "norm-matched edits of one strength, and others with the same positions, share a vector"
        raise SteeringError(f"the steering takes {len(groups)} vectors of a request, and the server allows {most}", hint)
    numbers = sum(rows.size for each in groups for rows in each.rows.values())
    most = caps.get("max_steering_numbers")
    if isinstance(most, int) and numbers > most:
        hint = "name fewer positions or layers: every position counts"
        raise SteeringError(f"the steering takes {numbers:,} numbers in a request, and the server allows {most:,}", hint)
    return [_vector(each) for each in groups]


def group(edits: Sequence[_native.Edit]) -> list[Group]:
    """Edits in as few vectors as their order allows: each into the first that has no row of its layer, and none after it has."""
    groups: list[Group] = []
    for edit in edits:
        key, rows = _key(edit)
        last = max((index for index, each in enumerate(groups) if edit.layer in each.rows), default=-1)
        fitting = (each for each in groups[last + 1 :] if each.key == key)
        into = next(fitting, None)
        if into is None:
            into = Group(key)
            groups.append(into)
        into.rows[edit.layer] = rows
    return groups


def reached(edits: Sequence[_native.Edit], rows: int) -> list[list[int]]:
    """Per edit, the positions it reached in a run of `rows` rows."""
    return [list(range(rows)) if edit.positions is None else sorted(p for p in edit.positions if p < rows) for edit in edits]


def below(edits: Sequence[_native.Edit], layer: int) -> list[_native.Edit]:
    """What there is before what is added at `layer`."""
    return [edit for edit in edits if edit.layer < layer]


def within(edits: Sequence[_native.Edit], rows: int) -> list[_native.Edit]:
    """Edits of a run of `rows` rows: positions beyond are left out."""
    found = []
    for edit in edits:
        if edit.positions is None or all(position < rows for position in edit.positions):
            found.append(edit)
            continue
        kept = [index for index, position in enumerate(edit.positions) if position < rows]
        if kept:
            vectors = edit.vectors if len(edit.vectors) == 1 else edit.vectors[kept]
            positions = [edit.positions[index] for index in kept]
            found.append(_native.Edit(edit.layer, vectors, scale=edit.scale, positions=positions, norm_match=edit.norm_match))
    return found


def without_effect(vectors: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same vectors at scale 0: the baseline that runs as steered requests do, and is the unsteered one."""
    return [{**vector, "scale": 0.0} for vector in vectors]


def _key(edit: _native.Edit) -> tuple[Key, NDArray[np.float32]]:
    positions = None if edit.positions is None else tuple(edit.positions)
    rows = edit.vectors
    if positions is not None and len(rows) == 1:
        rows = np.repeat(rows, len(positions), axis=0)
    scale = edit.scale
    if not edit.norm_match and scale != 0.0:  # at scale 0 nothing is added, not even a zero to minus zero
        with np.errstate(over="ignore"):
            rows = np.float32(scale) * rows
        if not np.isfinite(rows).all():
            raise SteeringError(f"the vector of layer {edit.layer} times {scale:g} is larger than float32 can hold")
        scale = 1.0
    return (scale, edit.norm_match, positions), rows


def _vector(group: Group) -> dict[str, Any]:
    scale, norm_match, positions = group.key
    layers = sorted(group.rows)
    values = np.stack([group.rows[layer] if positions is not None else group.rows[layer][0] for layer in layers])
    vector: dict[str, Any] = {"activations": encode(values, "float32"), "layer_indices": layers, "scale": scale, "norm_match": norm_match}
    return vector if positions is None else {**vector, "position_indices": list(positions)}

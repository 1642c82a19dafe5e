"""Whatever steers a run, as the engine's edits: flattened, and refused where it would have no effect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import numpy as np

from ster import _native
from ster.errors import InputError, SteeringError
from ster.steering import Steering as Plan
from ster.steering_artifact import SteeringArtifact


class HasEdits(Protocol):
    """Steering made of several edits."""

    def edits(self) -> Iterable[_native.Edit]: ...


Steering = _native.Edit | HasEdits | SteeringArtifact | Iterable[_native.Edit | HasEdits | SteeringArtifact] | None
"""What steers a run. An artifact stands for `artifact.at()`: all its layers, at strength 1."""


def check_reach(edits: Sequence[_native.Edit], reach: int, why: str) -> None:
    """Refuse a position that no pass reaches: a vector must not be accepted and then ignored.

    Raises:
        SteeringError: an edit names a position beyond `reach`.
    """
    for edit in edits:
        beyond = [position for position in edit.positions or () if position > reach]
        if beyond:
            raise SteeringError(f"steering names position {beyond[0]}, but this run reaches position {reach} at most: {why}")


def steering_parts(steering: Steering) -> list[_native.Edit | HasEdits]:
    """Whatever steers, in one flat list.

    Raises:
        InputError: something that is neither an edit, nor an artifact, nor has `.edits()`, nor holds such things.
    """
    if steering is None:
        return []
    if isinstance(steering, SteeringArtifact):
        return [steering.at()]
    if isinstance(steering, _native.Edit) or callable(getattr(steering, "edits", None)):
        return [cast("_native.Edit | HasEdits", steering)]
    if isinstance(steering, Iterable) and not isinstance(steering, str | bytes | np.ndarray):
        return [part for item in steering for part in steering_parts(item)]
    raise InputError(f"steering must be a Steering, an artifact, an Edit or a list of them, found {type(steering).__name__}")


def list_edits(parts: Iterable[_native.Edit | HasEdits], *, rows: int, prompt: int) -> list[_native.Edit]:
    """The edits of a run of `rows` rows, the first `prompt` of which are the prompt's."""
    found: list[_native.Edit] = []
    for part in parts:
        if isinstance(part, _native.Edit):
            found.append(part)
        else:
            found.extend(part.edits(rows=rows, prompt=prompt) if isinstance(part, Plan) else part.edits())
    return found

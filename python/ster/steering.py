"""What is added to the residual stream, as a value that can be added up, scaled and reused.

    calm = ster.steer(artifact, strength=2.0)
    model.generate(prompt, steering=calm - 0.5 * ster.steer(vector, layer=12))

A `Steering` is never consumed: it serves any number of runs, in `generate`, `stream`, `trace` and `evaluate` alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ster import _native
from ster.errors import InputError, LayerError, SteeringError

if TYPE_CHECKING:
    from ster.steering_artifact import SteeringArtifact

Positions = Iterable[int | tuple[int, int]] | int
Units = Literal["absolute", "norm"]


@dataclass(frozen=True, eq=False)
class Term:
    """One addition after block `layer`: `strength * vectors`, or `strength * ||h|| * v / ||v||` with `norm_match`.

    vectors: float32 `[n, hidden]`. positions: absolute, 0 = first token, one for each vector or all for one; None: every row that runs.
    """

    layer: int
    vectors: NDArray[np.float32]
    strength: float
    positions: tuple[int, ...] | None
    norm_match: bool


@dataclass(frozen=True, eq=False)
class Steering:
    """A sum of additions; made by `ster.steer` or `artifact.at`. Terms on one layer add up, in order, each rounded to float32.

    `a + b`, `a - b`, `-a`, `2 * a` scale and join; `2 * a` is not `a + a` in the last bit.
    """

    terms: tuple[Term, ...]

    @property
    def layers(self) -> list[int]:
        """Blocks after which something is added, ascending."""
        return sorted({term.layer for term in self.terms})

    def edits(self) -> list[_native.Edit]:
        """For the engine, one edit a term. Strengths are rounded to float32 here.

        Raises:
            SteeringError: a term that no model could apply: a value that is not finite, a zero vector to norm-match.
        """
        return [
            _native.Edit(term.layer, term.vectors, scale=_strength32(term.strength), positions=term.positions, norm_match=term.norm_match)
            for term in self.terms
        ]

    def __add__(self, other: Steering) -> Steering:
        return Steering(self.terms + other.terms) if isinstance(other, Steering) else NotImplemented

    def __sub__(self, other: Steering) -> Steering:
        return self + -other if isinstance(other, Steering) else NotImplemented

    def __neg__(self) -> Steering:
        return -1.0 * self

    def __mul__(self, factor: float) -> Steering:
        if not isinstance(factor, int | float | np.integer | np.floating):
            return NotImplemented
        return Steering(tuple(replace(term, strength=float(factor) * term.strength) for term in self.terms))

    __rmul__ = __mul__

    def __repr__(self) -> str:
        parts = []
        for term in self.terms:
            where = "" if term.positions is None else f" at {len(term.positions)} positions"
            parts.append(f"{term.strength:g} at layer {term.layer}{where}{', norm-matched' if term.norm_match else ''}")
        return f"<ster.Steering {'; '.join(parts) or 'nothing'}>"


def steer(
    vector: ArrayLike | SteeringArtifact,
    layer: int | None = None,
    *,
    strength: float = 1.0,
    positions: Positions | None = None,
    norm_match: bool = False,
) -> Steering:
    """Something to pass as `steering=`.

    Args:
        vector: `[hidden]`, added after block `layer`; or `[n, hidden]`, one for each of n positions; or an artifact, whose layers are
            all used unless `layer` names one.
        layer: 0-based block. Left out, an artifact brings its own.
        strength: each vector is multiplied by it. 0 is exactly the unsteered run.
        positions: absolute ones, 0 = first token, in a list; a pair in it is a span without its end: `[0, (4, 9)]`. One number is one
            position. None: every row, prompt and generated.
        norm_match: add `strength * ||h|| * v / ||v||` instead, with the norm of the whole row before any steering at that layer.

    Raises:
        InputError: no layer for an array, an array of another shape.
        LayerError: a layer the artifact has no vector for, or a negative one.
        SteeringError: a value that is not finite, positions that repeat or do not match the vectors, a zero vector to norm-match.
    """
    from ster.steering_artifact import SteeringArtifact

    places = None if positions is None else _expand(positions)
    if isinstance(vector, SteeringArtifact):
        layers = vector.layers if layer is None else [layer]
        pairs = [(each, vector.vector(each)[None]) for each in layers]
    else:
        if layer is None:
            raise InputError("a vector needs a layer", "ster.steer(vector, layer=12)")
        pairs = [(_layer(layer), _rows(vector))]
    steering = Steering(tuple(Term(at, rows, float(strength), places, norm_match) for at, rows in pairs))
    steering.edits()  # refuses here, where the mistake is, what no model could apply
    return steering


def steer_in_norms(artifact: SteeringArtifact, strength: float, norms: Mapping[int, float] | None = None) -> Steering:
    """Every vector of `artifact`, scaled to length 1, times `strength` times the mean length of the residual rows of its layer.

    Unlike `norm_match` this adds the same vector at every row. The lengths are those the artifact recorded in training, for layers
    without one those of `norms`.

    Raises:
        SteeringError: a layer of which neither knows the length, or a zero vector.
    """
    parts = []
    for layer in artifact.layers:
        unit = artifact.residual_norm(layer) or (norms or {}).get(layer)
        if unit is None:
            hint = "choose absolute strengths; `ster vector evaluate --units norm` measures the lengths on a pair set"
            raise SteeringError(f"the artifact does not record the residual norm of layer {layer}", hint)
        length = norm(artifact.vector(layer))
        if length == 0.0:
            raise SteeringError(f"the vector of layer {layer} is zero and has no direction")
        parts.append(steer(artifact, layer, strength=strength * unit / length))
    return Steering(tuple(term for part in parts for term in part.terms))


def check_units(units: str) -> None:
    """
    Raises:
        InputError: neither `absolute` nor `norm`.
    """
    if units not in ("absolute", "norm"):
        raise InputError(f'unknown units "{units}"; expected absolute or norm')


def norm(vector: NDArray[np.float32]) -> float:
    """Length of `[hidden]`, in float64."""
    return float(np.sqrt(np.square(vector, dtype=np.float64).sum()))


def _layer(layer: int) -> int:
    if isinstance(layer, bool) or not hasattr(layer, "__index__"):
        raise InputError(f"layer must be an integer, found {layer!r}")
    if layer < 0:
        raise LayerError(f"layer {layer} is negative: a vector does not know how many layers the model has", "name the block itself")
    return int(layer.__index__())


def _rows(vector: ArrayLike) -> NDArray[np.float32]:
    """`[n, hidden]` float32, copied, so that the caller's array may change."""
    with np.errstate(over="ignore"):
        rows = np.array(vector, dtype=np.float32, ndmin=2, order="C")
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise InputError(f"a vector must be [hidden] or [positions, hidden], found shape {list(np.shape(vector))}")
    return rows


def _expand(positions: Positions) -> tuple[int, ...]:
    if isinstance(positions, int | np.integer) and not isinstance(positions, bool):
        positions = [int(positions)]
    if isinstance(positions, tuple) and len(positions) == 2 and not any(isinstance(place, Sequence) for place in positions):
        raise SteeringError(
            f"positions {positions!r} may mean two positions or a span", f"write {list(positions)!r} or [({positions[0]}, {positions[1]})]"
        )
    if isinstance(positions, str | bytes) or not isinstance(positions, Iterable):
        raise SteeringError(f"positions must be a list of numbers and (start, end) spans, found {positions!r}")
    found: list[int] = []
    for place in positions:
        if isinstance(place, tuple | list):
            if len(place) != 2 or not _position(place[0]) < _position(place[1]):
                raise SteeringError(f"a span must be (start, end) with start < end, found {place!r}")
            found.extend(range(*place))
        else:
            found.append(_position(place))
    return tuple(found)


def _position(place: object) -> int:
    if isinstance(place, bool) or not hasattr(place, "__index__"):
        raise SteeringError(f"a position must be a whole number, found {place!r}")
    position = int(place.__index__())
    if position < 0:
        raise SteeringError(f"positions count from 0 at the first token, found {position}")
    return position


def _strength32(strength: float) -> float:
    with np.errstate(over="ignore"):
        rounded = np.float32(strength)
    if not np.isfinite(rounded):
        raise SteeringError(f"strength {strength:g} is not a finite float32")
    return float(rounded)

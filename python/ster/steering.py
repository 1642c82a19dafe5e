"""What is added to the residual stream, as a value that can be added up, scaled and reused.

    calm = ster.steer(artifact, strength=2.0)
    model.generate(prompt, steering=calm - 0.5 * ster.steer(vector, layer=12))

A `Steering` is never consumed: it serves any number of runs, in `generate`, `stream`, `trace` and `evaluate` alike.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ster import _native
from ster.errors import InputError, LayerError, SteeringError
from ster.layers import Layers, pick_layers

if TYPE_CHECKING:
    from ster.steering_artifact import SteeringArtifact

Positions = Iterable[int | tuple[int, int | None]] | int | Literal["prompt", "answer", "generated"]
WORDS = ("prompt", "answer", "generated")
Place = int | tuple[int, None]  # a position, or all from one on
Units = Literal["absolute", "norm"]


LAST_POSITION = 1 << 24


@dataclass(frozen=True, eq=False)
class Term:
    """One addition after block `layer`: `strength * vectors`, or `strength * ||h|| * v / ||v||` with `norm_match`.

    vectors: float32 `[n, hidden]`. positions: absolute, 0 = first token, one for each vector or all for one; `(start, None)` for all from
    there on; a word, see `ster.steer`; None: every row that runs. artifact: where the vector comes from, for models to check.
    """

    layer: int
    vectors: NDArray[np.float32]
    strength: float
    positions: tuple[Place, ...] | str | None
    norm_match: bool
    artifact: SteeringArtifact | None = None

    def rows(self, rows: int | None, prompt: int | None) -> list[int] | None:
        """`positions` in a run of `rows` rows of which the first `prompt` are the prompt's (None: all are).

        A place that such a run does not reach is kept, for the caller to refuse.

        Raises:
            SteeringError: `rows` is None and the positions depend on it.
        """
        if self.positions is None:
            return None
        places = self.positions
        if isinstance(places, str):
            if rows is None:
                raise _open(f'positions "{places}" depend')
            given = rows if prompt is None else prompt
            if places == "prompt":
                return list(range(given))
            places = ((given - 1 if places == "answer" else given, None),)
        found: list[int] = []
        for place in places:
            if isinstance(place, int):
                found.append(place)
            elif rows is None:
                raise _open(f"the span {place} depends")
            else:
                found.extend(range(place[0], max(rows, place[0] + 1)))
        return found


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

    @property
    def artifacts(self) -> list[SteeringArtifact]:
        """What the vectors were taken from, each once. A run checks these against its model, see `Model.check_artifact`."""
        return list({id(term.artifact): term.artifact for term in self.terms if term.artifact is not None}.values())

    def edits(self, *, rows: int | None = None, prompt: int | None = None) -> list[_native.Edit]:
        """For the engine, one edit a term. Strengths are rounded to float32 here.

        rows: how many rows the run has, for spans without an end and for words; prompt: how many of them are the prompt's, None: all.

        Raises:
            SteeringError: a term that no model could apply: a value that is not finite, a zero vector to norm-match; or positions that
                depend on `rows`, which is not given.
        """
        return [
            _native.Edit(
                term.layer,
                term.vectors,
                scale=_strength32(term.strength),
                positions=term.rows(rows, prompt),
                norm_match=term.norm_match,
            )
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
            parts.append(f"{term.strength:g} at layer {term.layer}{_where(term.positions)}{', norm-matched' if term.norm_match else ''}")
        return f"<ster.Steering {'; '.join(parts) or 'nothing'}>"


def steer(
    vector: ArrayLike | SteeringArtifact,
    layer: Layers | None = None,
    *,
    strength: float = 1.0,
    positions: Positions | None = None,
    norm_match: bool = False,
) -> Steering:
    """Something to pass as `steering=`; after the prompt alone, as CAA steers: `ster.steer(artifact, 12, positions="answer")`.

    A run refuses the vectors of an artifact that was trained on another model (see `Model.check_artifact`).

    Args:
        vector: `[hidden]`, added after block `layer`; or `[n, hidden]`, one for each of n positions; or an artifact, whose layers are
            all used unless `layer` names some.
        layer: 0-based block; for an artifact also several: `[12, 14]`, `"8..16"`. Left out, an artifact brings its own.
        strength: each vector is multiplied by it. 0 is exactly the unsteered run.
        positions: None: every row, prompt and generated. Else absolute ones, 0 = first token, in a list; a pair in it is a span without
            its end, `[0, (4, 9)]`, and `[(4, None)]` is all from 4 to the end of the run. One number is one position. Or a word:
            `"prompt"`: the prompt's tokens. `"generated"`: the new ones; the first of them is chosen from the prompt's last row, which is
            not steered. `"answer"`: the prompt's last token and the new ones, so every row that a new token is chosen from (CAA's own
            code does this). In `Model.trace` all tokens are the prompt's.
        norm_match: add `strength * ||h|| * v / ||v||` instead, with the norm of the whole row before any steering at that layer.

    Raises:
        InputError: no layer for an array, an array of another shape.
        LayerError: a layer the artifact has no vector for, or a negative one.
        SteeringError: a value that is not finite, positions that repeat or do not match the vectors, a zero vector to norm-match.
    """
    from ster.steering_artifact import SteeringArtifact

    places = None if positions is None else _places(positions)
    if isinstance(vector, SteeringArtifact):
        layers = vector.layers if layer is None else pick_layers(layer, vector.layers)
        pairs = [(each, vector.vector(each)[None]) for each in layers]
        source: SteeringArtifact | None = vector
    else:
        if layer is None:
            raise InputError("a vector needs a layer", "ster.steer(vector, layer=12)")
        pairs = [(_layer(layer), _rows(vector))]
        source = None
        if len(pairs[0][1]) > 1 and places is not None and _is_open(places):
            raise SteeringError(f"{len(pairs[0][1])} vectors need as many positions, and {positions!r} has no fixed number")
    steering = Steering(tuple(Term(at, rows, float(strength), places, norm_match, source) for at, rows in pairs))
    steering.edits(rows=1)  # refuses here, where the mistake is, what no model could apply
    return steering


def steer_in_norms(
    artifact: SteeringArtifact, strength: float, norms: Mapping[int, float] | None = None, *, positions: Positions | None = None
) -> Steering:
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
        parts.append(steer(artifact, layer, strength=strength * unit / length, positions=positions))
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


def _layer(layer: Layers) -> int:
    if isinstance(layer, bool) or not isinstance(layer, SupportsIndex):
        raise InputError(f"layer must be an integer, found {layer!r}")
    if operator.index(layer) < 0:
        raise LayerError(f"layer {layer} is negative: a vector does not know how many layers the model has", "name the block itself")
    return operator.index(layer)


def _rows(vector: ArrayLike) -> NDArray[np.float32]:
    """`[n, hidden]` float32, copied, so that the caller's array may change."""
    with np.errstate(over="ignore"):
        rows = np.array(vector, dtype=np.float32, ndmin=2, order="C")
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise InputError(f"a vector must be [hidden] or [positions, hidden], found shape {list(np.shape(vector))}")
    return rows


def _open(what: str) -> SteeringError:
    return SteeringError(f"{what} on how far the run goes", "pass the Steering itself to the run, or give `edits` the number of rows")


def _is_open(places: tuple[Place, ...] | str) -> bool:
    return isinstance(places, str) or not all(isinstance(place, int) for place in places)


def _where(places: tuple[Place, ...] | str | None) -> str:
    """For the repr."""
    if places is None or isinstance(places, str):
        return "" if places is None else f" at {places}"
    starts = [f"from {place[0]} on" for place in places if not isinstance(place, int)]
    count = len(places) - len(starts)
    return " at " + " and ".join(([f"{count} positions"] if count or not starts else []) + starts)


def _places(positions: Positions) -> tuple[Place, ...] | str:
    if isinstance(positions, str):
        if positions not in WORDS:
            raise SteeringError(f'unknown positions "{positions}"; expected {", ".join(WORDS[:-1])} or {WORDS[-1]}')
        return positions
    if isinstance(positions, int | np.integer) and not isinstance(positions, bool):
        positions = [int(positions)]
    if isinstance(positions, tuple) and len(positions) == 2 and not any(isinstance(place, Sequence) for place in positions):
        raise SteeringError(
            f"positions {positions!r} may mean two positions or a span", f"write {list(positions)!r} or [({positions[0]}, {positions[1]})]"
        )
    if isinstance(positions, bytes) or not isinstance(positions, Iterable):
        raise SteeringError(f"positions must be a list of numbers and (start, end) spans, found {positions!r}")
    found: list[Place] = []
    for place in positions:
        if isinstance(place, tuple | list):
            if len(place) == 2 and place[1] is None:
                found.append((_position(place[0]), None))
                continue
            if len(place) != 2 or not _position(place[0]) < _position(place[1]):
                raise SteeringError(f"a span must be (start, end) with start < end, found {place!r}")
            found.extend(range(_position(place[0]), _position(place[1])))
        else:
            found.append(_position(place))
    starts = sorted(place[0] for place in found if not isinstance(place, int))
    twice = starts[1:] or [place for place in found if isinstance(place, int) and starts and place >= starts[0]]
    if twice:
        raise SteeringError(f"steering names position {twice[0]} twice")
    return tuple(found)


def _position(place: object) -> int:
    if isinstance(place, bool) or not hasattr(place, "__index__"):
        raise SteeringError(f"a position must be a whole number, found {place!r}")
    position = int(place.__index__())
    if position < 0:
        raise SteeringError(f"positions count from 0 at the first token, found {position}")
    if position > LAST_POSITION:  # here, before a span is written out
        raise SteeringError(f"position {position} is beyond the context of any model")
    return position


def _strength32(strength: float) -> float:
    with np.errstate(over="ignore"):
        rounded = np.float32(strength)
    if not np.isfinite(rounded):
        raise SteeringError(f"strength {strength:g} is not a finite float32")
    return float(rounded)

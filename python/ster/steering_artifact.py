"""The file a direction lives in: one or more layer vectors, the model they belong to, and how they were made.

    {"schema_version": 1, "product": "ster", "model": "toy-llama", "model_revision": null, "trait_name": "calm", "method": "caa",
     "hidden_size": 64, "vectors": [{"layer": 2, "values": [0.147, ...], "train_margin": 0.761, "train_accuracy": 0.875}],
     "metadata": {}, "precision": "f32", "chat_template": "absent"}

Keys in this order, one line per vector. `values` are the shortest decimals that read back as the same float32. Nothing is guessed on
reading: an unknown key, a key given twice, layers out of order or a value that is not a finite float32 is refused.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from ster._files import write_atomic
from ster.errors import ArtifactError, InputError, LayerError
from ster.layers import Layers, pick_layers, spans
from ster.pairs import MalformedError, kind, known_keys, read_json

if TYPE_CHECKING:
    from ster.steering import Positions, Steering, Units

SCHEMA_VERSION = 1
PRODUCT = "ster"

# Metadata that makes an artifact reproducible, and by which `check_model` knows a model.
WEIGHTS_HASH = "weights_hash"
TOKENIZER_HASH = "tokenizer_hash"
PAIRS_HASH = "pairs_hash"
STER_VERSION = "ster_version"
TOKEN_RULE = "token_rule"
RESIDUAL_NORM = "residual_norm"  # .<layer>: mean length of the training rows there

UNBOUND_HINT = "`ster vector convert FILE OUT --any-model` (in Python artifact.unbound()) makes a copy that any model of its width takes"

REQUIRED = ("schema_version", "product", "model", "model_revision", "trait_name", "method", "hidden_size", "vectors")
OPTIONAL = ("metadata", "precision", "chat_template")


@dataclass(frozen=True, eq=False)
class LayerVector:
    """values: float32 `[hidden]`, added after block `layer` (0-based). Scores are those on the training pairs; None when unknown."""

    layer: int
    values: NDArray[np.float32]
    train_margin: float | None = None
    train_accuracy: float | None = None


@dataclass(frozen=True, eq=False, repr=False)
class SteeringArtifact:
    """Layer vectors and their provenance. Checked when made, so that an artifact in hand is a valid one.

    model: name of the model it was trained for; "" when unknown (imported from another format).
    vectors: layers ascending, each once. metadata: string to string.
    precision, chat_template: how the model was run ("bf16", "applied"); None when unknown.

    Raises:
        ArtifactError: no vectors, a wrong width, a value that is not finite, layers out of order, a field of the wrong type.
    """

    model: str
    method: str
    hidden_size: int
    vectors: tuple[LayerVector, ...]
    trait_name: str | None = None
    model_revision: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    precision: str | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "vectors", tuple(self.vectors))
        object.__setattr__(self, "metadata", dict(self.metadata))
        try:
            _check_fields(self)
        except MalformedError as error:
            raise ArtifactError(str(error)) from None
        if not self.vectors:
            raise ArtifactError("artifact has no steering vectors")
        for vector in self.vectors:
            if vector.values.ndim != 1 or len(vector.values) != self.hidden_size:
                width = vector.values.shape[-1] if vector.values.ndim else 0
                raise ArtifactError(f"layer {vector.layer} has vector width {width}, expected {self.hidden_size}")
            if vector.values.dtype != np.float32:
                raise ArtifactError(f"layer {vector.layer} must be float32, found {vector.values.dtype}")
            if not np.isfinite(vector.values).all():
                raise ArtifactError(f"layer {vector.layer} contains a non-finite value")
        for before, after in zip(self.layers, self.layers[1:], strict=False):
            if after == before:
                raise ArtifactError(f"layer {after} has two vectors", "an artifact holds one vector per layer; add them up first")
            if after < before:
                raise ArtifactError(f"layers must be in ascending order, found {after} after {before}")

    def __repr__(self) -> str:
        of = f"{self.method} vectors of {self.trait_name or 'a trait'} for {self.model or 'an unknown model'}"
        return f"<ster.SteeringArtifact: {of}, layers {self.layers}, hidden {self.hidden_size}>"

    @property
    def layers(self) -> list[int]:
        """Layers with a vector, ascending."""
        return [vector.layer for vector in self.vectors]

    def vector(self, layer: int) -> NDArray[np.float32]:
        """float32 `[hidden]` of one layer.

        Raises:
            LayerError: the artifact has no vector there.
        """
        for vector in self.vectors:
            if vector.layer == layer:
                return vector.values
        raise LayerError(f"the artifact has no vector for layer {layer}", f"it has {spans(self.layers)}")

    def at(
        self,
        layer: Layers | None = None,
        *,
        strength: float = 1.0,
        positions: Positions | None = None,
        norm_match: bool = False,
        units: Units = "absolute",
        norms: Mapping[int, float] | None = None,
    ) -> Steering:
        """Something to pass as `steering=`; `artifact.at(12, strength=2.0, positions="generated")` steers after the prompt.

        Args:
            layer: None: all that have a vector. `12`, `[12, 14]`, `"8..16"`: these, each of which must have one. Not `-1`: an artifact does
                not know how many layers the model has.
            positions, norm_match: as in `ster.steer`.
            units: `absolute`: vectors times `strength`. `norm`: `strength` is in mean residual norms of the layer, recorded in training or
                given as `norms` (layer -> length).

        Raises:
            LayerError: a layer without a vector. InputError, SteeringError: as in `ster.steer`.
        """
        from ster.steering import check_units, steer, steer_in_norms

        check_units(units)
        if units == "norm":
            if norm_match:
                raise InputError("norm_match and units norm are two measures of strength", "leave one of them out")
            chosen = self if layer is None else self.only(pick_layers(layer, self.layers))
            return steer_in_norms(chosen, strength, norms, positions=positions)
        return steer(self, layer, strength=strength, positions=positions, norm_match=norm_match)

    def only(self, layers: Sequence[int]) -> SteeringArtifact:
        """A copy with these layers alone.

        Raises:
            LayerError: the artifact has no vector for one of them.
        """
        for layer in layers:
            self.vector(layer)
        return replace(self, vectors=tuple(vector for vector in self.vectors if vector.layer in layers))

    def residual_norm(self, layer: int) -> float | None:
        """Mean length of the residual rows it was trained on at `layer`; None when it does not say."""
        try:
            found = float(self.metadata[f"{RESIDUAL_NORM}.{layer}"])
        except (KeyError, ValueError):
            return None
        return found if math.isfinite(found) and found > 0.0 else None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SteeringArtifact:
        """Read and check a file.

        Raises:
            FileError: it cannot be read.
            ArtifactError: it is not a valid artifact of schema 1.
        """
        try:
            document = read_json(path, what="steering artifact")
        except InputError as error:
            raise ArtifactError(error.message, error.hint) from None
        try:
            return cls.from_dict(document)
        except MalformedError as error:
            raise ArtifactError(f"invalid steering artifact JSON in {path}: {error}") from None

    @classmethod
    def from_dict(cls, document: object, arrays: Mapping[int, NDArray[np.float32]] | None = None) -> SteeringArtifact:
        """A parsed document as an artifact; with `arrays`, a document as `header` makes it, whose values are those (layer -> `[hidden]`).

        Raises:
            ArtifactError: it breaks a rule of the schema. MalformedError: it does not have the schema's form.
        """
        if not isinstance(document, Mapping):
            raise MalformedError(f"expected an object, found {kind(document)}")
        # Schema and product first: what follows has its meaning only under them.
        for key in ("schema_version", "product"):
            if key not in document:
                raise MalformedError(f"a steering artifact has no `{key}`")
        version = document["schema_version"]
        if version != SCHEMA_VERSION or not isinstance(version, int) or isinstance(version, bool):
            raise ArtifactError(f"artifact schema {_show(version)} is unsupported; this Ster build reads schema {SCHEMA_VERSION}")
        if document["product"] != PRODUCT:
            raise ArtifactError(f'artifact belongs to product "{_show(document["product"])}", not Ster')
        known_keys(document, REQUIRED, "steering artifact", optional=OPTIONAL)
        rows = document["vectors"]
        if not isinstance(rows, list):
            raise MalformedError(f"`vectors` must be a list, found {kind(rows)}")
        return cls(
            model=document["model"],
            method=document["method"],
            hidden_size=document["hidden_size"],
            vectors=tuple(_vector(row, arrays) for row in rows),
            trait_name=document["trait_name"],
            model_revision=document["model_revision"],
            metadata=_object(document.get("metadata", {}), "metadata"),
            precision=document.get("precision"),
            chat_template=document.get("chat_template"),
        )

    def header(self) -> dict[str, Any]:
        """The document without the vectors' values; what formats that keep arrays elsewhere store beside them."""
        return {
            "schema_version": SCHEMA_VERSION,
            "product": PRODUCT,
            "model": self.model,
            "model_revision": self.model_revision,
            "trait_name": self.trait_name,
            "method": self.method,
            "hidden_size": self.hidden_size,
            "vectors": [{"layer": v.layer, "train_margin": v.train_margin, "train_accuracy": v.train_accuracy} for v in self.vectors],
            "metadata": dict(self.metadata),
            "precision": self.precision,
            "chat_template": self.chat_template,
        }

    def to_json(self) -> bytes:
        """The file's bytes: the same artifact gives the same bytes."""
        rows = [
            orjson.dumps(
                {
                    "layer": v.layer,
                    "values": np.ascontiguousarray(v.values),
                    "train_margin": v.train_margin,
                    "train_accuracy": v.train_accuracy,
                },
                option=orjson.OPT_SERIALIZE_NUMPY,
            )
            for v in self.vectors
        ]
        before, after = orjson.dumps({**self.header(), "vectors": None}).split(b'"vectors":null', 1)
        return before + b'"vectors":[\n' + b",\n".join(rows) + b"\n]" + after + b"\n"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the file, whole or not at all.

        Raises:
            FileError: it cannot be written.
        """
        data = self.to_json()
        return write_atomic(path, lambda file: file.write(data))

    def with_metadata(self, **entries: str) -> SteeringArtifact:
        """A copy with entries added or replaced."""
        return replace(self, metadata={**self.metadata, **entries})

    def unbound(self) -> SteeringArtifact:
        """The same vectors without the model they were trained for: any model of this width takes them, with a warning. For another
        quantisation of that model, say; that they mean the same there is for `ster.evaluate` to show."""
        rest = {key: value for key, value in self.metadata.items() if key not in (WEIGHTS_HASH, TOKENIZER_HASH)}
        return replace(self, model="", model_revision=None, precision=None, metadata=rest)

    def check_model(
        self,
        name: str,
        hidden_size: int,
        layer_count: int,
        *,
        weights_hash: str | None = None,
        tokenizer_hash: str | None = None,
        model_revision: str | None = None,
        precision: str | None = None,
        chat_template: str | None = None,
    ) -> list[str]:
        """Refuse a model the vectors do not belong to; return what may still matter, one sentence each.

        The weights decide where both hashes are known: the same weights are accepted under any name, others are refused under the same
        one. Without hashes the names must be equal. Whatever else is None is not compared.

        Raises:
            ArtifactError: another model, or another width.
            LayerError: a vector for a layer the model does not have.
        """
        warnings = []
        known = self.metadata.get(WEIGHTS_HASH)
        refusal = f'artifact was trained for model "{self.model}", current model is "{name}"'
        if known and weights_hash:
            if known != weights_hash:
                raise ArtifactError(refusal, f"the weights differ; {UNBOUND_HINT}")
        elif not self.model:
            warnings.append("the artifact does not say which model it was trained for")
        elif self.model != name:
            raise ArtifactError(refusal, UNBOUND_HINT)
        elif self.model_revision and model_revision and self.model_revision != model_revision:
            warnings.append(f"the artifact was trained at revision {self.model_revision}, the model is at {model_revision}")
        if self.hidden_size != hidden_size:
            raise ArtifactError(f"artifact width {self.hidden_size} does not match model width {hidden_size}")
        if self.layers[-1] >= layer_count:
            raise LayerError(f"layer {self.layers[-1]} is outside the model's 0..{layer_count - 1} range")
        if tokenizer_hash and self.metadata.get(TOKENIZER_HASH, tokenizer_hash) != tokenizer_hash:
            warnings.append("the model's tokenizer is not the one the artifact was trained with")
        # Where the weights are the same, norms kept in f32 beside the others, as in GGUF files, make no difference.
        same = bool(known) and known == weights_hash and _narrow(precision) == _narrow(self.precision)
        if precision and self.precision and precision != self.precision and not same:
            warnings.append(f"the artifact was trained at precision {self.precision}, the model runs at {precision}")
        raw = {chat_template, self.chat_template} <= {"absent", "off"}  # raw text both
        if chat_template and self.chat_template and chat_template != self.chat_template and not raw:
            warnings.append(f"the artifact was trained with chat template {self.chat_template}, the model runs with {chat_template}")
        return warnings

    def summary(self) -> dict[str, Any]:
        """What `inspect` prints: the header, and of each vector its norm and largest coordinate in place of its values."""
        rows = []
        for v in self.vectors:
            values = v.values.astype(np.float64)
            peak = int(np.argmax(np.abs(values)))
            rows.append(
                {
                    "layer": v.layer,
                    "norm": float(np.sqrt(np.sum(values * values))),
                    "largest": {"coordinate": peak, "value": float(values[peak])},
                    "train_margin": v.train_margin,
                    "train_accuracy": v.train_accuracy,
                }
            )
        return {**self.header(), "vectors": rows}


def _narrow(precision: str | None) -> str:
    """Without the f32 of norms: `bf16` for `bf16+f32`."""
    kept = [part for part in (precision or "").split("+") if part != "f32"]
    return "+".join(kept) or "f32"


@dataclass(frozen=True)
class LayerComparison:
    """Artifacts at one layer, named by their index in the comparison.

    cosine: `[artifacts, artifacts]`. explained: per artifact, the part of its squared length that the best sum of multiples of the others
    reaches (R^2 of least squares, not centred); weights: those multiples, for unit vectors, 0 at its own place.
    by_chance: what `explained` is on average for a vector in a random direction.
    """

    layer: int
    artifacts: tuple[int, ...]
    cosine: tuple[tuple[float, ...], ...]
    explained: tuple[float, ...]
    weights: tuple[tuple[float, ...], ...]
    by_chance: float


@dataclass(frozen=True)
class Comparison:
    """names: of the artifacts, in order. layers: those that two or more artifacts have. notes: reasons for caution."""

    names: tuple[str, ...]
    layers: tuple[LayerComparison, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def compare(artifacts: Sequence[SteeringArtifact], names: Sequence[str] | None = None) -> Comparison:
    """How alike vectors are, layer by layer, and which are made of which.

    A zero vector has cosine 0 with everything and is explained by nothing.

    Raises:
        InputError: fewer than two artifacts, or no layer in common.
        ArtifactError: several widths.
    """
    if len(artifacts) < 2:
        raise InputError("a comparison requires at least two artifacts")
    first = artifacts[0]
    for other in artifacts:
        if other.hidden_size != first.hidden_size:
            raise ArtifactError(f"artifact width {other.hidden_size} does not match artifact width {first.hidden_size}")
    labels = tuple(names) if names is not None else tuple(a.trait_name or f"artifact {n}" for n, a in enumerate(artifacts))
    layers = []
    for layer in sorted({layer for artifact in artifacts for layer in artifact.layers}):
        members = tuple(n for n, artifact in enumerate(artifacts) if layer in artifact.layers)
        if len(members) > 1:
            layers.append(_compare_layer(layer, members, np.array([artifacts[n].vector(layer) for n in members], np.float64)))
    if not layers:
        raise InputError("the artifacts have no layer in common")
    notes = []
    for what, values in (
        ("models", {a.model for a in artifacts}),
        ("methods", {a.method for a in artifacts}),
        ("chat templates", {a.chat_template for a in artifacts if a.chat_template}),
    ):
        if len(values) > 1:
            notes.append(f"the artifacts come from several {what}: {', '.join(sorted(values))}")
    return Comparison(labels, tuple(layers), tuple(notes))


def _compare_layer(layer: int, members: tuple[int, ...], rows: NDArray[np.float64]) -> LayerComparison:
    norms = np.sqrt(np.sum(rows * rows, axis=1, keepdims=True))
    unit = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0.0)
    cosine = np.array([[np.sum(a * b) for b in unit] for a in unit])
    explained, weights = [], []
    for n, row in enumerate(unit):
        others = np.delete(unit, n, axis=0)
        found = np.linalg.lstsq(others.T, row, rcond=1e-10)[0]
        rest = row - found @ others
        explained.append(float(np.clip(1.0 - np.sum(rest * rest), 0.0, 1.0)) if norms[n, 0] > 0.0 else 0.0)
        weights.append(tuple(float(x) for x in np.insert(found, n, 0.0)))
    by_chance = min(1.0, (len(members) - 1) / rows.shape[1])
    return LayerComparison(
        layer, members, tuple(tuple(float(x) for x in row) for row in cosine), tuple(explained), tuple(weights), by_chance
    )


def _vector(row: object, arrays: Mapping[int, NDArray[np.float32]] | None) -> LayerVector:
    if not isinstance(row, Mapping):
        raise MalformedError(f"a vector must be an object, found {kind(row)}")
    known_keys(row, ("layer", *([] if arrays is not None else ["values"]), "train_margin", "train_accuracy"), "vector")
    if arrays is not None:
        if not _whole(row["layer"]) or row["layer"] not in arrays:
            raise MalformedError(f"the header has a vector for layer {_show(row['layer'])}, the file has not")
        return LayerVector(row["layer"], arrays[row["layer"]], row["train_margin"], row["train_accuracy"])
    values = row["values"]
    if not isinstance(values, list):
        raise MalformedError(f"`values` must be a list, found {kind(values)}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise MalformedError(f"`values` must be numbers, found {kind(value)}")
    return LayerVector(row["layer"], float32(values), row["train_margin"], row["train_accuracy"])


def float32(values: Sequence[int | float]) -> NDArray[np.float32]:
    """Numbers of a document, each rounded to the nearest float32; what is too large for one becomes infinity, for the caller to refuse."""
    with np.errstate(over="ignore"):
        try:
            return np.array(values, dtype=np.float64).astype(np.float32)
        except OverflowError:  # an integer of more than 308 digits
            return np.array([np.inf] * len(values), dtype=np.float32)


def _check_fields(artifact: SteeringArtifact) -> None:
    """Types of the fields, whoever made the artifact."""
    for name, value in (("model", artifact.model), ("method", artifact.method)):
        if not isinstance(value, str):
            raise MalformedError(f"`{name}` must be a string, found {kind(value)}")
    for name in ("trait_name", "model_revision", "precision", "chat_template"):
        value = getattr(artifact, name)
        if value is not None and not isinstance(value, str):
            raise MalformedError(f"`{name}` must be a string or null, found {kind(value)}")
    if not _whole(artifact.hidden_size) or artifact.hidden_size < 1:
        raise MalformedError(f"`hidden_size` must be a whole number above zero, found {_show(artifact.hidden_size)}")
    for key, value in artifact.metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise MalformedError(f"`metadata` must map strings to strings, found {kind(value)} at `{key}`")
    for vector in artifact.vectors:
        if not _whole(vector.layer) or vector.layer < 0:
            raise MalformedError(f"`layer` must be a whole number, zero or more, found {_show(vector.layer)}")
        for name in ("train_margin", "train_accuracy"):
            score = getattr(vector, name)
            if score is not None and not is_finite(score):
                raise MalformedError(f"`{name}` of layer {vector.layer} must be a finite number or null, found {_show(score)}")
    text: list[str | None] = [
        artifact.model,
        artifact.method,
        artifact.trait_name,
        artifact.model_revision,
        artifact.precision,
        artifact.chat_template,
    ]
    for words in [*text, *artifact.metadata, *artifact.metadata.values()]:
        if words is not None and any("\ud800" <= c <= "\udfff" for c in words):
            raise MalformedError("text with half a surrogate pair cannot be saved")


def is_finite(value: object) -> bool:
    """A number of JSON that fits a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _object(value: object, name: str) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise MalformedError(f"`{name}` must be an object, found {kind(value)}")
    return value


def _show(value: object) -> str:
    """A value in a message: text as it is, anything else as JSON writes it."""
    return value if isinstance(value, str) else json.dumps(value, default=repr)[:60]

"""Documents Ster writes, and reads back only if they keep their own rules.

An activation artifact holds, per prompt and layer, the residual stream after the block and before any steering there, float32:

    {"schema_version": 1, "product": "ster", "model": "toy-llama", "model_revision": null, "hidden_size": 64,
     "records": [{"prompt": "...", "layers": {"0": [0.0711, ...], "3": [...]}}]}

Numbers are the shortest decimals that read back as the same float32. safetensors and npz hold the same as arrays, and what JSON has
no place for: positions other than the last token's.
"""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np
from numpy.typing import NDArray

from ster._files import parse_json, read_bytes, read_text, write_atomic
from ster._safetensors import write_safetensors
from ster.errors import ArtifactError, InputError

SCHEMA_VERSION = 1
PRODUCT = "ster"
WIRE = ("wire_dtype", "wire_rounding")
FORMATS = ("json", "safetensors", "npz")
Format = Literal["json", "safetensors", "npz"]
Position = Literal["last", "mean", "all"]

_WIDTH = "activation vectors must have one finite, consistent width"


@dataclass(frozen=True)
class Provenance:
    """Where activations come from. `chat_template` is applied, absent or off; `precision` the dtype of the weights as used; `wire` what
    values lost on their way from a server. JSON has no place for them: the first two are None, the last is empty."""

    model: str
    model_revision: str | None = None
    chat_template: str | None = None
    precision: str | None = None
    wire: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, repr=False)
class ActivationArtifact:
    """One vector per prompt and layer.

    values: float32 `[prompts, layers, hidden]`, finite.
    layers: 0-based block indices, ascending. position: the last token's vector, or the mean over all tokens of the prompt.

    Raises:
        ArtifactError: `activation vectors are empty`, `activation vectors must have one finite, consistent width`, or fields that
            do not fit each other.
    """

    values: NDArray[np.float32]
    layers: list[int]
    prompts: list[str]
    source: Provenance
    position: Literal["last", "mean"] = "last"

    def __post_init__(self) -> None:
        _check_layers(self.layers)
        if self.values.size == 0:
            raise ArtifactError("activation vectors are empty")
        if self.values.dtype != np.float32 or self.values.ndim != 3:
            raise ArtifactError(f"values must be float32 [prompts, layers, hidden], found {self.values.dtype} {list(self.values.shape)}")
        if self.values.shape[:2] != (len(self.prompts), len(self.layers)):
            found, expected = list(self.values.shape[:2]), [len(self.prompts), len(self.layers)]
            raise ArtifactError(f"values must be [prompts, layers, hidden] = {[*expected, self.hidden_size]}, found {found}")
        if not np.isfinite(self.values).all():
            raise ArtifactError(_WIDTH)

    def __repr__(self) -> str:
        shape = list(self.values.shape)
        return f"<ster.ActivationArtifact of {self.source.model}: {self.position} token, values {shape}, layers {self.layers}>"

    @property
    def hidden_size(self) -> int:
        return int(self.values.shape[2])

    @property
    def model(self) -> str:
        return self.source.model

    def layer(self, layer: int) -> NDArray[np.float32]:
        """`[prompts, hidden]` of one layer, by its block index.

        Raises:
            InputError: the layer was not captured.
        """
        if layer not in self.layers:
            raise InputError(f"layer {layer} is not in this artifact; it has {', '.join(map(str, self.layers))}")
        return self.values[:, self.layers.index(layer)]

    def save(self, path: str | os.PathLike[str], *, format: Format | None = None) -> Path:
        """Write the artifact, whole or not at all, in `format` or the one the path's suffix names.

        Raises:
            InputError: a format that cannot hold it.
            FileError: `failed to write <path>: ...`.
        """
        chosen = choose_format(path, format, position=self.position)
        return write_atomic(path, lambda file: self.write(file, chosen))

    def write(self, file: BinaryIO, format: Format) -> None:
        """Write the artifact's bytes to an open file."""
        check_format(format, self.position)
        if format == "json":
            for chunk in self._json():
                file.write(chunk)
        else:
            metadata = _metadata(self.source, self.layers, self.prompts, self.position, self.hidden_size)
            _write_arrays(file, format, {"activations": self.values}, metadata)

    def _json(self) -> Iterator[bytes]:
        """Line by line, one record a line: a large artifact is never a second time in memory."""
        import orjson

        values = np.ascontiguousarray(self.values)
        head = {
            "schema_version": SCHEMA_VERSION,
            "product": PRODUCT,
            "model": self.source.model,
            "model_revision": self.source.model_revision,
            "hidden_size": self.hidden_size,
        }
        yield orjson.dumps(head)[:-1] + b',"records":['
        names = [str(layer) for layer in self.layers]
        for index, prompt in enumerate(self.prompts):
            record = {"prompt": prompt, "layers": dict(zip(names, values[index], strict=True))}
            yield (b",\n" if index else b"\n") + orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY)
        yield b"\n]}\n"

    @staticmethod
    def load(path: str | os.PathLike[str]) -> ActivationArtifact:
        """Read what `save` wrote, or another program in the same form; the format is told by the content.

        Raises:
            FileError: `failed to read <path>`.
            ArtifactError: a wrong schema or product, or vectors that break the rules above.
        """
        path = Path(path)
        data = read_bytes(path)
        if data[:2] == b"PK" or data[8:9] == b"{":
            arrays, metadata = _read_arrays(path, data)
            return _from_arrays(path, arrays, metadata)
        try:
            return _from_json(parse_json(read_text(path)))
        except ValueError as error:
            if isinstance(error, ArtifactError):
                raise
            raise ArtifactError(f"invalid artifact JSON in {path}: {error}") from None


@dataclass(frozen=True, eq=False, repr=False)
class TokenActivations:
    """Every token's vector: ragged, so one array per prompt.

    values[p]: float32 `[layers, tokens of prompt p, hidden]`. token_ids[p]: the ids behind the rows.
    """

    values: list[NDArray[np.float32]]
    token_ids: list[list[int]]
    layers: list[int]
    prompts: list[str]
    source: Provenance
    position: Literal["all"] = "all"

    def __repr__(self) -> str:
        tokens = sum(map(len, self.token_ids))
        return f"<ster.TokenActivations of {self.source.model}: {len(self.prompts)} prompts, {tokens} tokens, layers {self.layers}>"

    @property
    def hidden_size(self) -> int:
        return int(self.values[0].shape[2])

    def save(self, path: str | os.PathLike[str], *, format: Format | None = None) -> Path:
        """Write `prompt_<p>` and `tokens_<p>` (int32) for every prompt, as safetensors or npz.

        Raises:
            InputError: JSON, which holds last-token activations only.
            FileError: `failed to write <path>: ...`.
        """
        chosen = choose_format(path, format, position=self.position)
        return write_atomic(path, lambda file: self.write(file, chosen))

    def write(self, file: BinaryIO, format: Format) -> None:
        """Write the bytes to an open file."""
        check_format(format, self.position)
        arrays: dict[str, NDArray[Any]] = {}
        for index, (values, ids) in enumerate(zip(self.values, self.token_ids, strict=True)):
            arrays[f"prompt_{index}"] = values
            arrays[f"tokens_{index}"] = np.array(ids, dtype=np.int32)
        _write_arrays(file, format, arrays, _metadata(self.source, self.layers, self.prompts, self.position, self.hidden_size))


def choose_format(path: str | os.PathLike[str], format: str | None, *, position: str) -> Format:
    """`format`, or what the suffix of `path` says.

    Raises:
        InputError: neither names a format, or it cannot hold the position.
    """
    chosen = format or Path(path).suffix.lower().removeprefix(".")
    if chosen not in FORMATS:
        found = f'unknown format "{format}"' if format else f"no format is known by the name of {path}"
        raise InputError(f"{found}; expected json, safetensors, or npz")
    check_format(chosen, position)
    return cast(Format, chosen)


def check_format(format: str, position: str) -> None:
    """JSON holds one vector per prompt and layer, of the last token."""
    if format == "json" and position != "last":
        raise InputError(
            f"JSON holds last-token activations only, not position `{position}`", "choose `--format safetensors` or `--format npz`"
        )


def _check_layers(layers: Sequence[int]) -> None:
    if not layers:
        raise ArtifactError("activation vectors are empty")
    if list(layers) != sorted(set(layers)) or layers[0] < 0:
        raise ArtifactError(f"layers must be ascending, unique and not negative, found {list(layers)}")


def _metadata(source: Provenance, layers: Sequence[int], prompts: Sequence[str], position: str, hidden_size: int) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "product": PRODUCT,
        "model": source.model,
        "model_revision": source.model_revision,
        "hidden_size": hidden_size,
        "layers": list(layers),
        "prompts": list(prompts),
        "position": position,
        "point": "pre_steer",
        "chat_template": source.chat_template,
        "precision": source.precision,
        **source.wire,
    }


def _write_arrays(file: BinaryIO, format: Format, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any]) -> None:
    """safetensors: metadata values that are not text are JSON. npz: one array `metadata`, the same as one JSON object; no pickle."""
    if format == "safetensors":
        texts = {key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for key, value in metadata.items()}
        write_safetensors(file, arrays, texts)
    else:
        np.savez(file, metadata=np.array(json.dumps(metadata)), **cast(dict[str, Any], arrays))


def _read_arrays(path: Path, data: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    try:
        if data[:2] == b"PK":
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                arrays = dict(file)
            metadata = json.loads(str(arrays.pop("metadata")))
        else:
            from safetensors.numpy import load

            arrays = load(data)
            texts = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
            # Names and revisions are text as they are; `7` is a fine name for a model.
            plain = ("product", "model", "position", "point", "chat_template", "precision", *WIRE)
            metadata = {key: text if key in plain and text != "null" else _json_or_text(text) for key, text in texts.items()}
    except Exception as error:  # zip, header and array errors of two libraries
        raise ArtifactError(f"failed to read {path}: {error}") from None
    return arrays, metadata


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _from_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any]) -> ActivationArtifact:
    _check_head(metadata)
    position = metadata.get("position")
    if position not in ("last", "mean") or "activations" not in arrays:
        raise ArtifactError(f"{path} holds position `{position}`, not one vector per prompt and layer")
    revision = metadata.get("model_revision")
    source = Provenance(
        str(metadata.get("model")),
        None if revision is None else str(revision),
        metadata.get("chat_template"),
        metadata.get("precision"),
        {key: str(metadata[key]) for key in WIRE if key in metadata},
    )
    return ActivationArtifact(arrays["activations"], list(metadata["layers"]), list(metadata["prompts"]), source, position)


def _check_head(document: Mapping[str, Any]) -> None:
    if "schema_version" not in document or "product" not in document:
        raise ArtifactError("not a Ster artifact: `schema_version` or `product` is missing")
    version, product = document["schema_version"], document["product"]
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ArtifactError(f"artifact schema {version} is unsupported; this Ster build reads schema {SCHEMA_VERSION}")
    if product != PRODUCT:
        raise ArtifactError(f'artifact belongs to product "{product}", not Ster')


def _from_json(document: object) -> ActivationArtifact:
    if not isinstance(document, dict):
        raise ArtifactError("not a Ster artifact: expected a JSON object")
    _check_head(document)
    records, width = document.get("records"), document.get("hidden_size")
    model, revision = document.get("model"), document.get("model_revision")
    if not isinstance(model, str) or not isinstance(revision, str | None) or not isinstance(records, list):
        raise ArtifactError("`model` must be text, `model_revision` text or null, `records` a list")
    if not records:
        raise ArtifactError("activation vectors are empty")
    rows: list[list[NDArray[np.float32]]] = []
    prompts: list[str] = []
    layers: list[int] | None = None
    for index, record in enumerate(records):
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str) or not isinstance(record.get("layers"), dict):
            raise ArtifactError(f"records[{index}] must have a `prompt` (text) and `layers` (an object)")
        names: list[str] = sorted(record["layers"], key=lambda name: (len(name), name))
        if not all(name.isascii() and name.isdigit() and name == str(int(name)) for name in names):
            raise ArtifactError(f"records[{index}] has a layer that is not a number: {', '.join(names)}")
        found = [int(name) for name in names]
        if layers is not None and found != layers:
            raise ArtifactError(f"records[{index}] has layers {found}, records[0] has {layers}")
        layers = found
        prompts.append(record["prompt"])
        rows.append([_vector(record["layers"][name], width) for name in names])
    return ActivationArtifact(np.array(rows, dtype=np.float32), layers or [], prompts, Provenance(model, revision))


def _vector(values: object, width: object) -> NDArray[np.float32]:
    if not isinstance(values, list) or any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        raise ArtifactError(_WIDTH)
    if not values:
        raise ArtifactError("activation vectors are empty")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # 1e300 becomes infinity, which is refused below
        vector = np.array(values, dtype=np.float64).astype(np.float32)
    if len(values) != width or not np.isfinite(vector).all():
        raise ArtifactError(_WIDTH)
    return vector

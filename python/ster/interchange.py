"""Steering vectors in other tools' files, and back. Layer numbers are converted, values never change, no pickle is ever opened.

| format | file | holds | layer numbers |
| --- | --- | --- | --- |
| `gguf` | control vector of llama.cpp and repeng: `direction.N`, F32 | values; the rest in a key of ours | N = layer; 0 is refused |
| `safetensors` | `layer.N`, F32 | values; the rest in `__metadata__` | N = layer |
| `npz` | `layer.N`, float32 | values; the rest in `ster.json` | N = layer |
| `vllm-lens` | JSON of the `apply_steering_vectors` field | values, layers, scale | as they are |
| `json` | a steering artifact | everything | |

A round trip is exact to the bit; with `vllm-lens` the values are, and everything else is lost, as a server refuses fields it does not know.
A file of another tool does not say which model it belongs to in a way that could be checked: the artifact's `model` is then what the caller
says, or "". Directions of Ster have length 1 and their strength is chosen when they are used; exports keep the values as they are.
"""

from __future__ import annotations

import io
import json
import os
import re
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from ster._files import parse_json, read_bytes, write_atomic
from ster._safetensors import safetensors_bytes
from ster.errors import ArtifactError, InputError, LayerError
from ster.pairs import MalformedError, kind, known_keys
from ster.steering_artifact import LayerVector, SteeringArtifact, float32, is_finite

FORMATS = ("json", "gguf", "safetensors", "npz", "vllm-lens")
SUFFIXES = {".json": "json", ".gguf": "gguf", ".safetensors": "safetensors", ".npz": "npz"}

T = TypeVar("T")
Arrays = dict[int, NDArray[np.float32]]

HEADER_KEY = "ster.artifact"  # the artifact's header, as JSON text, in gguf and safetensors
NPZ_HEADER = "ster.json"  # the same, as UTF-8 bytes, in npz
NPZ_ROOM = 64 << 20  # bytes any npz may unpack to; vectors of the widest models stay well below
NPZ_RATIO = 8  # a larger one may unpack to so many times its own size: floats of a vector hardly compress, so more is an attack
LAST_LAYER = 10**9 - 1  # the highest layer number in a file, whatever the format
TOO_HIGH = f"layer numbers of a vector file end at {LAST_LAYER}, found a higher one"


def load(path: str | os.PathLike[str], *, format: str | None = None, model: str | None = None) -> SteeringArtifact:
    """Read a steering vector in any format of `FORMATS`, told apart by content.

    Args:
        format: the format, where the content is not to be asked.
        model: name of the model the vectors belong to, for files that do not say; refused if the file says another.

    Raises:
        FileError: the file cannot be read.
        ArtifactError: it is damaged, a pickle, or none of the formats.
    """
    path = Path(path)
    if format is not None:
        _known(format)
    data = read_bytes(path)  # once: a pipe has nothing to say the second time
    chosen = format
    try:
        chosen = format or detect(data)
        artifact = _read(data, chosen)
    except MalformedError as error:
        what = "invalid steering artifact JSON in" if chosen == "json" else "failed to read"
        raise ArtifactError(f"{what} {path}: {error}") from None
    except ArtifactError as error:
        if chosen == "json":
            raise
        raise ArtifactError(f"failed to read {path}: {error}", error.hint) from None
    return _of_model(artifact, model)


def loads(data: bytes, *, format: str, model: str | None = None) -> SteeringArtifact:
    """Like `load`, from bytes."""
    _known(format)
    try:
        return _of_model(_read(data, format), model)
    except MalformedError as error:
        raise ArtifactError(f"invalid steering vector: {error}") from None


def _read(data: bytes, format: str) -> SteeringArtifact:
    artifact = READERS[format](data)
    if artifact.layers[-1] > LAST_LAYER:
        raise ArtifactError(TOO_HIGH)
    return artifact


def _of_model(artifact: SteeringArtifact, model: str | None) -> SteeringArtifact:
    if model is None or artifact.model == model:
        return artifact
    if artifact.model:
        raise ArtifactError(f'artifact belongs to model "{artifact.model}", not "{model}"')
    return replace(artifact, model=model)


def save(artifact: SteeringArtifact, path: str | os.PathLike[str], *, format: str | None = None, scale: float = 1.0) -> Path:
    """Write `artifact` in `format`, or in the one the suffix of `path` names; whole or not at all.

    Args:
        scale: for `vllm-lens` alone, whose files carry one; other values than 1 are refused elsewhere.

    Raises:
        InputError: a suffix without format, or a scale without place.
        LayerError: layer 0 to gguf, or one past `LAST_LAYER`.
        FileError: the file cannot be written.
    """
    chosen = format or SUFFIXES.get(Path(path).suffix.lower())
    if chosen is None:
        raise InputError(f"no format is known for {path}", f"name one of {', '.join(FORMATS)}")
    data = dumps(artifact, format=chosen, scale=scale)
    return write_atomic(path, lambda file: file.write(data))


def dumps(artifact: SteeringArtifact, *, format: str, scale: float = 1.0) -> bytes:
    """Like `save`, to bytes."""
    if artifact.layers[-1] > LAST_LAYER:
        raise LayerError(TOO_HIGH)
    if _known(format) == "vllm-lens":
        return to_vllm_lens(artifact, scale=scale)
    if scale != 1.0:
        raise InputError(f"{format} has no place for a scale", "strength is chosen when the vector is used")
    return WRITERS[format](artifact)


def detect(data: bytes) -> str:
    """The format of a file's content.

    Raises:
        ArtifactError: a pickle, or something unknown.
    """
    if data[:4] == b"GGUF":
        return "gguf"
    if data[:2] == b"PK":
        return "npz"
    if data[:1] == b"\x80" or data[:2] in (b"c_", b"(d", b"(l"):
        raise _pickle()
    if len(data) > 8 and data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= len(data) - 8:
        return "safetensors"
    text = data.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if text == b"[":
        return "vllm-lens"
    if text == b"{":
        try:
            document = _json(data)
        except MalformedError as error:
            raise ArtifactError(str(error)) from None
        return "vllm-lens" if isinstance(document, Mapping) and "activations" in document else "json"
    raise ArtifactError("not a steering vector in a known format", f"known: {', '.join(FORMATS)}")


# GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3, little-endian. llama.cpp looks at tensors called `direction.N`
# alone; repeng also writes and wants `controlvector.model_hint` and `controlvector.layer_count`.

GGUF_TYPES: dict[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
GGUF_U32, GGUF_STRING, GGUF_ARRAY, GGUF_F32 = 4, 8, 9, 0
ALIGNMENT = 32


def to_gguf(artifact: SteeringArtifact) -> bytes:
    """A control vector llama.cpp and repeng read: one F32 tensor `direction.N` per layer N, added after block N.

    Raises:
        LayerError: a vector at layer 0, which the format cannot express.
    """
    if artifact.layers[0] == 0:
        raise LayerError("a GGUF control vector cannot express layer 0", "llama.cpp starts at direction.1; export layers 1 and up")
    keys: list[tuple[str, int, bytes]] = [
        ("general.architecture", GGUF_STRING, _gguf_string("controlvector")),
        ("controlvector.model_hint", GGUF_STRING, _gguf_string(artifact.metadata.get("model_hint", artifact.model))),
        ("controlvector.layer_count", GGUF_U32, struct.pack("<I", len(artifact.vectors))),
        (HEADER_KEY, GGUF_STRING, _gguf_string(_header_json(artifact))),
    ]
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(artifact.vectors), len(keys)))
    for name, type_, value in keys:
        out += _gguf_string(name) + struct.pack("<I", type_) + value
    size = _padded(4 * artifact.hidden_size)
    for index, vector in enumerate(artifact.vectors):
        out += _gguf_string(f"direction.{vector.layer}") + struct.pack("<IQIQ", 1, artifact.hidden_size, GGUF_F32, index * size)
    out += bytes(_padded(len(out)) - len(out))
    for vector in artifact.vectors:
        out += vector.values.astype("<f4").tobytes().ljust(size, b"\0")
    return bytes(out)


def from_gguf(data: bytes) -> SteeringArtifact:
    """A control vector of Ster, llama.cpp or repeng. Counts, lengths and offsets are checked against the file before they are used.

    Raises:
        ArtifactError: not a control vector, damaged, `direction.0`, or a tensor that is not F32 of one dimension.
    """
    file = _Reader(data)
    if file.take(4) != b"GGUF":
        raise ArtifactError("not a GGUF file")
    version = file.number("I")
    if version not in (2, 3):
        found = "big-endian" if version in (2 << 24, 3 << 24) else f"version {version}"
        raise ArtifactError(f"GGUF files of version 2 and 3, little-endian, are read, found {found}")
    tensors, keys = file.number("Q"), file.number("Q")
    values: dict[str, Any] = {}
    for _ in range(file.plausible(keys, 12)):
        name = file.string()
        if name in values:
            raise ArtifactError(f"GGUF key `{name}` is given twice")
        values[name] = file.value(file.number("I"))
    if values.get("general.architecture", "controlvector") != "controlvector":
        raise ArtifactError(f"not a control vector: the GGUF architecture is `{values['general.architecture']}`")
    infos = []
    for _ in range(file.plausible(tensors, 24)):
        name = file.string()
        dimensions = [file.number("Q") for _ in range(file.plausible(file.number("I"), 8))]
        infos.append((name, dimensions, file.number("I"), file.number("Q")))
    alignment = values.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment % 8:
        raise ArtifactError(f"GGUF alignment {alignment} is not a multiple of 8")
    start = -(-file.position // alignment) * alignment

    spans: dict[int, _Span] = {}
    for name, dimensions, type_, offset in infos:
        match = re.fullmatch(r"direction\.(0|[1-9][0-9]{0,8})", name)
        if not match:
            raise ArtifactError(f"not a control vector: it has a tensor `{name}`")
        layer = int(match[1])
        if layer == 0:
            raise ArtifactError("`direction.0` has no meaning in a GGUF control vector")
        if type_ != GGUF_F32 or len(dimensions) != 1:
            raise ArtifactError(f"tensor `{name}` must be F32 of one dimension, found type {type_} and shape {dimensions}")
        if layer in spans:
            raise ArtifactError(f"tensor `{name}` is given twice")
        if offset % alignment or start + offset + 4 * dimensions[0] > len(data):
            raise ArtifactError(f"tensor `{name}` lies outside the file, which is truncated or damaged")
        spans[layer] = _Span(start + offset, 4 * dimensions[0], name, "<f4")
    arrays = _arrays(data, spans)
    if HEADER_KEY in values:
        return _assemble(_parse_header(values[HEADER_KEY]), arrays)
    hint = values.get("controlvector.model_hint")
    return _imported(arrays, "gguf", {"model_hint": hint} if isinstance(hint, str) else {})


SAFETENSORS_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # BF16 is the upper half of an F32


def to_safetensors(artifact: SteeringArtifact) -> bytes:
    """One F32 tensor `layer.N` per layer; everything else as JSON in `__metadata__`."""
    return safetensors_bytes({f"layer.{v.layer}": v.values for v in artifact.vectors}, {HEADER_KEY: _header_json(artifact)})


def from_safetensors(data: bytes) -> SteeringArtifact:
    """Tensors `layer.N` or `direction.N`, F32, F16 or BF16 (widened exactly), of one dimension.

    Raises:
        ArtifactError: damaged, or tensors of other names or kinds.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise ArtifactError("the safetensors header lies outside the file, which is truncated or damaged")
    header = _json(data[8 : 8 + size])
    if not isinstance(header, dict):
        raise ArtifactError("the safetensors header is not an object")
    metadata = header.pop("__metadata__", {})
    start = 8 + size
    spans: dict[int, _Span] = {}
    for name, info in header.items():
        layer = _layer_of(name)
        if not isinstance(info, dict):
            raise MalformedError(f"tensor `{name}` must be an object, found {kind(info)}")
        known_keys(info, ("dtype", "shape", "data_offsets"), "tensor")
        dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
        if (
            not isinstance(dtype, str)
            or dtype not in SAFETENSORS_TYPES
            or not isinstance(shape, list)
            or len(shape) != 1
            or not _sizes(shape)
        ):
            raise ArtifactError(f"tensor `{name}` must be F32, F16 or BF16 of one dimension, found {dtype} {shape}")
        bytes_each = 4 if dtype == "F32" else 2
        if not isinstance(offsets, list) or len(offsets) != 2 or not _sizes(offsets) or offsets[1] - offsets[0] != bytes_each * shape[0]:
            raise ArtifactError(f"tensor `{name}` has offsets {offsets}, which do not fit its shape {shape}")
        if start + offsets[1] > len(data):
            raise ArtifactError(f"tensor `{name}` lies outside the file, which is truncated or damaged")
        _put(spans, layer, _Span(start + offsets[0], offsets[1] - offsets[0], name, SAFETENSORS_TYPES[dtype]), name)
    arrays = _arrays(data, spans)
    if isinstance(metadata, dict) and HEADER_KEY in metadata:
        return _assemble(_parse_header(metadata[HEADER_KEY]), arrays)
    return _imported(arrays, "safetensors", {})


def to_npz(artifact: SteeringArtifact) -> bytes:
    """One float32 array `layer.N` per layer; everything else as JSON in the bytes of `ster.json`. No pickle inside."""
    arrays: dict[str, Any] = {f"layer.{v.layer}": v.values for v in artifact.vectors}
    arrays[NPZ_HEADER] = np.frombuffer(_header_json(artifact).encode(), np.uint8)
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **arrays)
    return out.getvalue()


def from_npz(data: bytes) -> SteeringArtifact:
    """Arrays `layer.N` or `direction.N` of one dimension; float16 and float64 only where float32 holds the same values.

    Raises:
        ArtifactError: damaged, a PyTorch file, arrays of other names or kinds, or objects (which would be a pickle).
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except Exception as error:  # zipfile has many ways to fail
        raise ArtifactError(f"not an npz file: {error}") from None
    with archive:
        members = archive.infolist()
        _check_members(members, max(NPZ_ROOM, NPZ_RATIO * len(data)))
        arrays: Arrays = {}
        header: Mapping[str, Any] | None = None
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name == NPZ_HEADER:
                header = _parse_header(_npy(archive, member, name, "uint8").tobytes().decode("utf-8", "replace"))
                continue
            layer = _layer_of(name)
            values = _npy(archive, member, name, "floats")
            with np.errstate(over="ignore"):
                narrow = values.astype(np.float32)
            if not np.array_equal(narrow.astype(values.dtype), values, equal_nan=True):
                raise ArtifactError(f"array `{name}` is {values.dtype} and would change when rounded to float32", "round it first")
            _put(arrays, layer, narrow, name)
    return _assemble(header, arrays) if header is not None else _imported(arrays, "npz", {})


def _check_members(members: Sequence[zipfile.ZipInfo], limit: int) -> None:
    """What the table of contents gives away, before anything is unpacked. A member never unpacks to more than the table says."""
    if any(member.filename.endswith((".pkl", ".pickle")) for member in members):
        raise _pickle()
    names = [member.filename.removesuffix(".npy") for member in members]
    if len(set(names)) < len(names):
        raise ArtifactError("the npz has two arrays of one name")
    for member, name in zip(members, names, strict=True):
        if member.flag_bits & 1:
            raise ArtifactError(f"array `{name}` of the npz is encrypted")
        # For these two alone does zipfile keep to the size in the table while it unpacks; NumPy writes no other.
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ArtifactError(f"array `{name}` of the npz is compressed by method {member.compress_type}, which NumPy does not use")
    size = sum(member.file_size for member in members)
    if size > limit:
        raise ArtifactError(f"the npz unpacks to {size} bytes, more than vectors in a file of its size can take")


def _npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str, what: Literal["floats", "uint8"]) -> NDArray[Any]:
    """An array of one dimension, in the memory its member takes: NumPy would first make room for whatever shape the header claims.

    Raises:
        ArtifactError: damaged, not an array, or one of another kind.
    """
    try:
        with archive.open(member) as packed:
            raw = packed.read(member.file_size)  # without a size, zipfile unpacks it all before it looks at the table
    except Exception as error:  # zipfile and zlib
        raise ArtifactError(f"array `{name}` of the npz is damaged: {error}") from None
    file = io.BytesIO(raw)
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        (*shape,), _, dtype = read(file)
    except Exception:  # struct, tokenize, ast and NumPy itself
        raise ArtifactError(f"`{name}` of the npz is not a NumPy array of version 1 or 2") from None
    if dtype.hasobject:
        raise ArtifactError(f"array `{name}` of the npz holds objects, which are never read: they are a pickle")
    if len(shape) != 1 or not (dtype.kind == "f" if what == "floats" else dtype == np.uint8):
        raise ArtifactError(f"array `{name}` must hold {what} in one dimension, found {dtype} {shape}")
    start = file.tell()
    if shape[0] * dtype.itemsize != len(raw) - start:
        raise ArtifactError(f"array `{name}` of the npz is damaged: it has {len(raw) - start} bytes for {dtype} {shape}")
    return np.frombuffer(raw[start:], dtype) if shape[0] else np.empty(0, dtype)


def to_vllm_lens(artifact: SteeringArtifact, *, scale: float = 1.0) -> bytes:
    """One object for the list `apply_steering_vectors`: a row per layer, added at every position of a request, times `scale`.

    Numbers are the shortest decimals that read back as the same float32.
    """
    if not np.isfinite(scale):
        raise InputError(f"scale must be finite, found {scale}")
    for v in artifact.vectors:
        if scale != 1.0 and not (np.isfinite(scaled := _scaled(v.values, scale)).all() and (scaled.any() or not v.values.any())):
            raise InputError(f"scale {scale} makes a zero or non-finite vector of the one at layer {v.layer}")
    document = {
        "activations": [np.ascontiguousarray(v.values) for v in artifact.vectors],
        "layer_indices": artifact.layers,
        "scale": float(scale),
    }
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"


def from_vllm_lens(data: bytes) -> SteeringArtifact:
    """One object of `apply_steering_vectors`, or a list of just one. A scale other than 1 is multiplied into the values, rounded once.

    Raises:
        ArtifactError: several vectors, or what an artifact cannot hold: chosen positions, norm matching, encoded numbers.
    """
    document = _json(data)
    if isinstance(document, list):
        if len(document) != 1:
            raise ArtifactError(f"one steering vector is expected, found a list of {len(document)}")
        document = document[0]
    if not isinstance(document, Mapping):
        raise MalformedError(f"a steering vector must be an object, found {kind(document)}")
    optional = ("scale", "norm_match", "position_indices", "position_spans")
    known_keys(document, ("activations", "layer_indices"), "steering vector", optional=optional)
    for name in ("norm_match", "position_indices", "position_spans"):
        if document.get(name) not in (None, False):
            raise ArtifactError(
                f"`{name}` has no place in a steering artifact", "an artifact is a vector for every position, used as it is"
            )
    rows, layers, scale = document["activations"], document["layer_indices"], document.get("scale")
    scale = 1.0 if scale is None else scale
    if isinstance(rows, Mapping):
        raise ArtifactError("encoded activations are not read here", "write them as lists of numbers")
    if not isinstance(layers, list) or not _sizes(layers) or not isinstance(rows, list):
        raise ArtifactError("`activations` must be a list of rows and `layer_indices` a list of whole numbers, zero or more")
    if len(rows) != len(layers):
        raise ArtifactError("activations needs one row for each layer in layer_indices.")
    if not is_finite(scale):
        raise ArtifactError("`scale` must be a finite number")
    arrays: Arrays = {}
    for layer, row in zip(layers, rows, strict=True):
        if not isinstance(row, list) or any(isinstance(x, bool) or not isinstance(x, int | float) for x in row):
            raise ArtifactError(f"the row of layer {layer} must be a list of numbers")
        values = _scaled(float32(row), scale)
        if any(row) and not values.any():
            times = "" if scale == 1.0 else f" times the scale {scale}"
            raise ArtifactError(f"the vector of layer {layer}{times} is a zero vector in float32")
        _put(arrays, layer, values, str(layer))
    return _imported(arrays, "vllm-lens", {} if scale == 1.0 else {"scale_applied": repr(float(scale))})


def _scaled(values: NDArray[np.float32], scale: float) -> NDArray[np.float32]:
    """Rounded once. What is too large becomes infinity and what is too small zero, for the caller to refuse."""
    if scale == 1.0:
        return values
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return (values.astype(np.float64) * float(scale)).astype(np.float32)


def _from_json(data: bytes) -> SteeringArtifact:
    return SteeringArtifact.from_dict(_json(data))


READERS: dict[str, Callable[[bytes], SteeringArtifact]] = {
    "json": _from_json,
    "gguf": from_gguf,
    "safetensors": from_safetensors,
    "npz": from_npz,
    "vllm-lens": from_vllm_lens,
}
WRITERS: dict[str, Callable[[SteeringArtifact], bytes]] = {
    "json": SteeringArtifact.to_json,
    "gguf": to_gguf,
    "safetensors": to_safetensors,
    "npz": to_npz,
}


@dataclass(frozen=True)
class _Span:
    """Where a tensor lies in a file, in bytes, and what it is called there. dtype: NumPy's; `<u2` is BF16."""

    start: int
    size: int
    name: str
    dtype: str


def _arrays(data: bytes, spans: Mapping[int, _Span]) -> Arrays:
    """The tensors of a file, none of which shares a byte with another: so they take no more than twice its size, however many they are.

    Raises:
        ArtifactError: two overlap.
    """
    ordered = sorted(spans.values(), key=lambda span: (span.start, span.size))
    for before, after in pairwise(ordered):
        if before.start + before.size > after.start:
            raise ArtifactError(f"tensors `{before.name}` and `{after.name}` overlap in the file")
    arrays: Arrays = {}
    for layer, span in spans.items():
        dtype = np.dtype(span.dtype)
        values = np.frombuffer(data, dtype, span.size // dtype.itemsize, span.start) if span.size else np.empty(0, dtype)
        arrays[layer] = (values.astype(np.uint32) << 16).view(np.float32) if span.dtype == "<u2" else values.astype(np.float32)
    return arrays


@dataclass
class _Reader:
    """A cursor over a GGUF file that never reads past the end."""

    data: bytes
    position: int = 0

    def skip(self, size: int) -> None:
        if size > len(self.data) - self.position:
            raise ArtifactError("the GGUF header lies outside the file, which is truncated or damaged")
        self.position += size

    def take(self, size: int) -> bytes:
        self.skip(size)
        return self.data[self.position - size : self.position]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def plausible(self, count: int, size: int) -> int:
        """`count`, if that many things of at least `size` bytes can still follow."""
        if count * size > len(self.data) - self.position:
            raise ArtifactError(f"the GGUF header counts {count} entries, more than the file can hold")
        return count

    def string(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError:
            raise ArtifactError("the GGUF header has text that is not UTF-8") from None

    def value(self, type_: int, depth: int = 0) -> Any:
        """A string or a number. An array is passed over, for None: nothing here needs one, and as objects it would be many times larger."""
        if type_ == GGUF_STRING:
            return self.string()
        if type_ in GGUF_TYPES:
            return self.number(GGUF_TYPES[type_])
        if type_ == GGUF_ARRAY and depth < 4:
            inner, count = self.number("I"), self.number("Q")
            if inner in GGUF_TYPES:
                size = struct.calcsize("<" + GGUF_TYPES[inner])
                self.skip(self.plausible(count, size) * size)
            else:
                for _ in range(self.plausible(count, 8)):
                    self.value(inner, depth + 1)
            return None
        raise ArtifactError(f"the GGUF header has a value of unknown type {type_}")


def _gguf_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _header_json(artifact: SteeringArtifact) -> str:
    return json.dumps(artifact.header(), ensure_ascii=False, separators=(",", ":"))


def _parse_header(text: object) -> Mapping[str, Any]:
    try:
        header = parse_json(text) if isinstance(text, str) else None
    except ValueError as error:
        raise ArtifactError(f"the stored artifact header is damaged: {error}") from None
    if not isinstance(header, Mapping):
        raise ArtifactError("the stored artifact header is not an object")
    return header


def _assemble(header: Mapping[str, Any], arrays: Arrays) -> SteeringArtifact:
    """An artifact from a stored header and the arrays beside it."""
    artifact = SteeringArtifact.from_dict(header, arrays)
    if artifact.layers != sorted(arrays):
        raise ArtifactError(f"the file has vectors for layers {sorted(arrays)}, its header for {artifact.layers}")
    return artifact


def _imported(arrays: Arrays, source: str, metadata: Mapping[str, str]) -> SteeringArtifact:
    """An artifact of vectors that came without provenance."""
    layers = sorted(arrays)
    width = len(arrays[layers[0]]) if layers else 1
    vectors = tuple(LayerVector(layer, arrays[layer]) for layer in layers)
    return SteeringArtifact("", "imported", max(width, 1), vectors, metadata={"imported_from": source, **metadata})


def _put(found: dict[int, T], layer: int, value: T, name: str) -> None:
    if layer in found:
        raise ArtifactError(f"layer {layer} has two vectors (`{name}`)")
    found[layer] = value


def _layer_of(name: str) -> int:
    match = re.fullmatch(r"(?:layer|direction)\.(0|[1-9][0-9]{0,8})", name)
    if not match:
        raise ArtifactError(f"no layer is known for `{name}`", "name arrays layer.N, N the decoder block counted from 0")
    return int(match[1])


def _sizes(values: Sequence[object]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values)


def _json(data: bytes) -> object:
    try:
        return parse_json(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise MalformedError(f"byte {error.start} is not UTF-8") from None
    except ValueError as error:
        raise MalformedError(str(error)) from None


def _known(format: str) -> str:
    if format not in FORMATS:
        raise InputError(f'unknown format "{format}"; expected {", ".join(FORMATS[:-1])}, or {FORMATS[-1]}')
    return format


def _pickle() -> ArtifactError:
    return ArtifactError(
        "the file is a pickle (.pt, .pth, .pkl), which can run code and is never opened",
        "save the tensors as safetensors where the file came from: names layer.N, N the decoder block counted from 0",
    )

import io
import json
import os
import pickle
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ster import interchange
from ster.errors import ArtifactError, FileError, InputError, LayerError, SterError
from ster.steering_artifact import LayerVector, SteeringArtifact

FORMATS = ("json", "gguf", "safetensors", "npz", "vllm-lens")
WITH_METADATA = ("json", "gguf", "safetensors", "npz")


def make(rows=None, **fields):
    rows = rows or {1: [0.1, -0.0, 3e38], 30: [1e-45, 2.5, -7.0]}
    vectors = tuple(LayerVector(layer, np.array(row, np.float32), 0.5, None) for layer, row in rows.items())
    return SteeringArtifact(**{"model": "toy", "method": "caa", "hidden_size": len(vectors[0].values), "vectors": vectors, **fields})


def values(artifact):
    return {v.layer: v.values.tobytes() for v in artifact.vectors}


FULL = make(trait_name="calm é 海", model_revision="abc", metadata={"weights_hash": "x", "": '"\n'}, precision="bf16", chat_template="off")


# Round trips


bits = st.integers(0, 2**32 - 1).filter(lambda x: x >> 23 & 0xFF != 0xFF)  # every finite float32


@pytest.mark.parametrize("format", FORMATS)
@given(st.dictionaries(st.integers(1, 200), st.lists(bits, min_size=9, max_size=9), min_size=1, max_size=4))
@settings(deadline=None, max_examples=50)
def test_values_come_back_to_the_bit(format, rows):
    artifact = make({n: np.array(rows[n], np.uint32).view(np.float32) for n in sorted(rows)})
    data = interchange.dumps(artifact, format=format)
    assert interchange.detect(data) == format
    assert values(interchange.loads(data, format=format)) == values(artifact)


@pytest.mark.parametrize("format", WITH_METADATA)
def test_everything_else_comes_back_too(format, tmp_path):
    path = interchange.save(FULL, tmp_path / "v", format=format)
    loaded = interchange.load(path)
    assert loaded.header() == FULL.header() and values(loaded) == values(FULL)
    assert interchange.dumps(loaded, format=format) == path.read_bytes() == interchange.dumps(FULL, format=format)


def test_the_suffix_names_the_format(tmp_path):
    for name, format in (("v.json", "json"), ("v.GGUF", "gguf"), ("v.safetensors", "safetensors"), ("v.npz", "npz")):
        path = interchange.save(FULL, tmp_path / name)
        assert interchange.detect(path.read_bytes()) == format
    with pytest.raises(InputError, match="no format is known"):
        interchange.save(FULL, tmp_path / "v.pt")
    with pytest.raises(InputError, match='unknown format "pt"'):
        interchange.save(FULL, tmp_path / "v", format="pt")


# GGUF


def test_the_gguf_package_reads_our_control_vector(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed: nothing independent to read the file with")
    path = interchange.save(make({1: range(65), 7: range(65)}, metadata={"model_hint": "llama"}), tmp_path / "v.gguf")
    reader = gguf.GGUFReader(path)
    assert reader.get_field("general.architecture").contents() == "controlvector"
    assert reader.get_field("controlvector.model_hint").contents() == "llama"
    assert reader.get_field("controlvector.layer_count").contents() == 2
    assert [tensor.name for tensor in reader.tensors] == ["direction.1", "direction.7"]
    for tensor in reader.tensors:
        assert tensor.data.dtype == np.float32 and tensor.data.tolist() == list(range(65))


def test_a_control_vector_written_as_repeng_does_is_read(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed: nothing independent to write the file with")
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", 2)
    writer.add_array("some.list", ["a", "b"])
    writer.add_float64("some.number", 0.5)
    rows = {3: np.linspace(-1, 1, 33, dtype=np.float32), 1: np.arange(33, dtype=np.float32)}
    for layer, row in rows.items():
        writer.add_tensor(f"direction.{layer}", row)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = interchange.load(tmp_path / "v.gguf")
    assert values(loaded) == {layer: rows[layer].tobytes() for layer in (1, 3)}
    assert (loaded.model, loaded.method, loaded.hidden_size) == ("", "imported", 33)
    assert loaded.metadata == {"imported_from": "gguf", "model_hint": "llama"}
    assert loaded.vectors[0].train_margin is None
    assert interchange.load(tmp_path / "v.gguf", model="toy").model == "toy"


def test_layer_0_has_no_place_in_gguf():
    with pytest.raises(LayerError, match="a GGUF control vector cannot express layer 0"):
        interchange.dumps(make({0: [1.0], 1: [1.0]}), format="gguf")


def string(text):
    return struct.pack("<Q", len(text)) + text.encode()


def gguf(tensors, *, version=3, keys=(), count=None, body=b"\0" * 64):
    """A file by hand; tensors are (name, dimensions, type, offset)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors) if count is None else count, len(keys))
    for name, type_, value in keys:
        head += string(name) + struct.pack("<I", type_) + value
    for name, dimensions, type_, offset in tensors:
        head += string(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, type_, offset)
    return head + bytes(-len(head) % 32) + body


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (gguf([], version=1), "found version 1"),
        (gguf([], version=3 << 24), "found big-endian"),
        (gguf([]), "artifact has no steering vectors"),
        (gguf([], count=2**60), "more than the file can hold"),
        (gguf([("direction.0", [4], 0, 0)]), "`direction.0` has no meaning"),
        (gguf([("direction.01", [4], 0, 0)]), "it has a tensor `direction.01`"),
        (gguf([("blk.0.attn_q.weight", [4], 0, 0)]), "not a control vector"),
        (gguf([("direction.1", [4], 1, 0)]), "must be F32 of one dimension, found type 1"),
        (gguf([("direction.1", [2, 2], 0, 0)]), r"shape \[2, 2\]"),
        (gguf([("direction.1", [17], 0, 0)]), "lies outside the file"),
        (gguf([("direction.1", [2**62], 0, 0)]), "lies outside the file"),
        (gguf([("direction.1", [4], 0, 2**63)]), "lies outside the file"),
        (gguf([("direction.1", [4], 0, 4)]), "lies outside the file"),
        (gguf([("direction.1", [0], 0, 0)]), "has vector width 0"),
        (gguf([("direction.1", [4], 0, 0), ("direction.1", [4], 0, 32)]), "given twice"),
        (gguf([("direction.1", [4], 0, 0), ("direction.2", [2], 0, 32)]), "layer 2 has vector width 2, expected 4"),
        (gguf([("direction.1", [1], 0, 0)], body=struct.pack("<f", np.nan)), "contains a non-finite value"),
        (gguf([], keys=[("general.architecture", 8, string("llama"))]), "the GGUF architecture is `llama`"),
        (gguf([], keys=[("a", 99, b"")]), "unknown type 99"),
        (gguf([], keys=[("a", 9, struct.pack("<IQ", 4, 2**61))]), "more than the file can hold"),
        (gguf([], keys=[("a", 9, struct.pack("<IQ", 9, 1) * 8)]), "unknown type 9"),
        (gguf([], keys=[("a", 4, b"1234")] * 2), "`a` is given twice"),
        (gguf([], keys=[("general.alignment", 4, struct.pack("<I", 0))]), "alignment 0"),
        (gguf([("direction.1", [4], 0, 0)], keys=[("ster.artifact", 8, string("{}"))]), "has no `schema_version`"),
        (gguf([("direction.1", [4], 0, 0)], keys=[("ster.artifact", 8, string("["))]), "header is damaged"),
    ],
)
def test_a_damaged_gguf_is_refused(tmp_path, data, why):
    (tmp_path / "v").write_bytes(data)
    with pytest.raises(ArtifactError, match=why) as caught:
        interchange.load(tmp_path / "v")
    assert str(caught.value).startswith(f"failed to read {tmp_path / 'v'}: ")


# Arrays


def safetensors(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def test_the_safetensors_package_reads_ours_and_writes_what_we_read():
    from safetensors.numpy import load, save

    ours = load(interchange.dumps(FULL, format="safetensors"))
    assert {name: array.tobytes() for name, array in ours.items()} == {f"layer.{n}": v for n, v in values(FULL).items()}
    theirs = save({"layer.2": np.float16([1, 2]), "direction.1": np.float32([3, 4])})
    assert values(interchange.loads(theirs, format="safetensors")) == {1: np.float32([3, 4]).tobytes(), 2: np.float32([1, 2]).tobytes()}
    bf16 = safetensors({"layer.0": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}, b"\x80\x3f\x00\xc0")
    assert interchange.loads(bf16, format="safetensors").vector(0).tolist() == [1.0, -2.0]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (struct.pack("<Q", 2**63) + b"{}", "lies outside the file"),
        (safetensors(b"[]"), "is not an object"),
        (safetensors(b"{"), "line 1"),
        (safetensors({}), "no steering vectors"),
        (safetensors({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"1234"), "no layer is known for `w`"),
        (safetensors({"layer.1": 7}), "must be an object, found a number"),
        (safetensors({"layer.1": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}, b"1234"), "must be F32, F16 or BF16"),
        (safetensors({"layer.1": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}, b"1234"), "of one dimension"),
        (safetensors({"layer.1": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"), "do not fit its shape"),
        (safetensors({"layer.1": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, b"1234"), "of one dimension"),
        (safetensors({"layer.1": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"), "lies outside the file"),
        (
            safetensors({key: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for key in ["layer.1", "direction.1"]}, b"1234"),
            "two vectors",
        ),
    ],
)
def test_a_damaged_safetensors_is_refused(data, why):
    with pytest.raises(SterError if why != "line 1" and "object, found" not in why else ValueError, match=why):
        interchange.loads(data, format="safetensors")


def npz(**arrays):
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def test_other_npz_files_are_read_where_nothing_is_lost():
    found = interchange.loads(npz(**{"layer.3": np.array([0.5, 2.0]), "direction.1": np.float16([1, 2])}), format="npz")
    assert found.layers == [1, 3] and found.vector(3).tolist() == [0.5, 2.0] and found.metadata == {"imported_from": "npz"}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"PK", "not an npz file"),
        (npz(**{"layer.1": np.array([0.1])}), "would change when rounded to float32"),
        (npz(**{"layer.1": np.array([1e300])}), "would change when rounded to float32"),
        (npz(**{"layer.1": np.array([1, 2])}), "must hold floats in one dimension, found int64"),
        (npz(**{"layer.1": np.zeros((1, 2), np.float32)}), "in one dimension"),
        (npz(**{"w": np.zeros(2, np.float32)}), "no layer is known for `w`"),
        (npz(**{"layer.1": np.array([{}], object)}), "holds objects, which are never read"),
        (npz(**{"layer.1": np.zeros(1, np.float32), "ster.json": np.frombuffer(b"{}", np.uint8)}), "has no `schema_version`"),
    ],
)
def test_a_wrong_npz_is_refused(data, why, tmp_path):
    (tmp_path / "v").write_bytes(data)
    with pytest.raises(ArtifactError, match=why):
        interchange.load(tmp_path / "v")


def test_a_header_for_other_layers_is_refused():
    extra = npz(**{"layer.1": np.zeros(3, np.float32), "ster.json": np.frombuffer(json.dumps(FULL.header()).encode(), np.uint8)})
    with pytest.raises(ValueError, match="the header has a vector for layer 30, the file has not"):
        interchange.loads(extra, format="npz")


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was opened",))


def test_no_pickle_is_ever_opened(tmp_path):
    torch = io.BytesIO()
    with zipfile.ZipFile(torch, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Trap()))
    for protocol in (2, 3, 4, 5):
        (tmp_path / "v.pt").write_bytes(pickle.dumps(Trap(), protocol))
        with pytest.raises(ArtifactError, match="is a pickle .* never opened"):
            interchange.load(tmp_path / "v.pt")
    (tmp_path / "v.pt").write_bytes(torch.getvalue())
    with pytest.raises(ArtifactError, match="is a pickle .* never opened"):
        interchange.load(tmp_path / "v.pt")
    for data in (pickle.dumps(Trap(), 0), npz(**{"layer.1": np.array([Trap()], object)})):
        (tmp_path / "v").write_bytes(data)
        with pytest.raises(ArtifactError):
            interchange.load(tmp_path / "v")


# vllm-lens


def test_the_field_a_server_takes():
    document = json.loads(interchange.dumps(make({0: [0.1, 2.0]}), format="vllm-lens", scale=-2))
    assert document == {"activations": [[0.1, 2.0]], "layer_indices": [0], "scale": -2.0}
    with pytest.raises(InputError, match="gguf has no place for a scale"):
        interchange.dumps(FULL, format="gguf", scale=2.0)
    with pytest.raises(InputError, match="scale must be finite"):
        interchange.dumps(FULL, format="vllm-lens", scale=float("nan"))


def test_a_scale_is_multiplied_in_and_recorded():
    data = b'[{"activations": [[1, 0.5], [2, 3]], "layer_indices": [4, 1], "scale": 2, "norm_match": false, "position_indices": null}]'
    found = interchange.loads(data, format="vllm-lens")
    assert found.layers == [1, 4] and found.vector(4).tolist() == [2.0, 1.0] and found.metadata["scale_applied"] == "2.0"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"norm_match": True}, "`norm_match` has no place"),
        ({"position_indices": [0]}, "`position_indices` has no place"),
        ({"position_spans": [[0, 1]]}, "`position_spans` has no place"),
        ({"scael": 1}, "unknown key `scael`"),
        ({"activations": {"data": "", "dtype": "float32"}}, "encoded activations are not read here"),
        ({"activations": []}, "activations needs one row for each layer in layer_indices."),
        ({"activations": [[[1.0]]]}, "must be a list of numbers"),
        ({"activations": [[True]]}, "must be a list of numbers"),
        ({"layer_indices": [-1]}, "whole numbers"),
        ({"layer_indices": [1, 1], "activations": [[1], [2]]}, "layer 1 has two vectors"),
        ({"scale": True}, "`scale` must be a finite number"),
        ({"scale": 10**400}, "`scale` must be a finite number"),
        ({"scale": 1e39}, "contains a non-finite value"),
        ({"activations": [[1e39]]}, "contains a non-finite value"),
    ],
)
def test_what_an_artifact_cannot_hold_is_refused(tmp_path, changes, why):
    document = {"activations": [[1.0]], "layer_indices": [1], **changes}
    (tmp_path / "v.json").write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match=why):
        interchange.load(tmp_path / "v.json")
    (tmp_path / "v.json").write_text(json.dumps([document, document]))
    with pytest.raises(ArtifactError, match="found a list of 2"):
        interchange.load(tmp_path / "v.json")


# Anything at all


@pytest.mark.parametrize("format", FORMATS)
@given(cut=st.integers(0, 2**16), flips=st.lists(st.tuples(st.integers(0, 2**16), st.integers(1, 255)), max_size=3))
@example(cut=2**16, flips=[])
@settings(deadline=None, max_examples=150)
def test_a_damaged_file_is_read_whole_or_refused(format, cut, flips, tmp_path_factory):
    data = bytearray(interchange.dumps(FULL, format=format))
    for place, mask in flips:
        data[place % len(data)] ^= mask
    path = tmp_path_factory.getbasetemp() / f"fuzz-{format}"
    path.write_bytes(data[: cut if cut < len(data) else None])
    for chosen in (None, format):
        try:
            artifact = interchange.load(path, format=chosen)
        except SterError:
            continue
        assert artifact.hidden_size == 3


@given(noise=st.binary(max_size=64))
@settings(deadline=None)
def test_bytes_of_no_format_are_refused(noise, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "noise"
    for head in (b"", b"GGUF", b"PK\x03\x04", b"{", b"["):
        path.write_bytes(head + noise)
        with pytest.raises(SterError):
            interchange.load(path)


def test_a_model_that_is_said_twice_must_be_the_same(tmp_path):
    path = interchange.save(FULL, tmp_path / "v.gguf")
    assert interchange.load(path, model="toy").model == "toy"
    with pytest.raises(ArtifactError, match='artifact belongs to model "toy", not "other"'):
        interchange.load(path, model="other")
    with pytest.raises(FileError, match="failed to read"):
        interchange.load(tmp_path / "missing.gguf")


# Files made to harm


def overlapping(format, count, width):
    """`count` tensors of `width` floats, all at the same place."""
    body = bytes(4 * width)
    if format == "gguf":
        return gguf([(f"direction.{n + 1}", [width], 0, 0) for n in range(count)], body=body)
    return safetensors({f"layer.{n}": {"dtype": "F32", "shape": [width], "data_offsets": [0, 4 * width]} for n in range(count)}, body)


@pytest.mark.parametrize("format", ["gguf", "safetensors"])
def test_tensors_that_share_bytes_are_refused_before_they_take_memory(format):
    data = overlapping(format, 1000, 1 << 16)
    tracemalloc.start()
    with pytest.raises(ArtifactError, match=r"tensors `\w+\.\d+` and `\w+\.\d+` overlap in the file"):
        interchange.loads(data, format=format)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * len(data)


def test_tensors_that_overlap_in_part_are_refused():
    with pytest.raises(ArtifactError, match=r"tensors `direction.2` and `direction.1` overlap"):
        interchange.loads(gguf([("direction.1", [9], 0, 32), ("direction.2", [9], 0, 0)], body=bytes(100)), format="gguf")
    rows = {"layer.1": [0, 8], "layer.2": [4, 12], "layer.3": [12, 20]}
    header = {name: {"dtype": "F32", "shape": [2], "data_offsets": offsets} for name, offsets in rows.items()}
    with pytest.raises(ArtifactError, match=r"tensors `layer.1` and `layer.2` overlap"):
        interchange.loads(safetensors(header, bytes(20)), format="safetensors")
    header["layer.2"]["data_offsets"] = [20, 28]  # out of order, and none shares a byte
    assert interchange.loads(safetensors(header, bytes(28)), format="safetensors").layers == [1, 2, 3]


def test_arrays_in_a_gguf_header_take_no_memory():
    count = 1 << 20
    keys = [("a", 9, struct.pack("<IQ", 2, count) + bytes(range(256)) * (2 * count // 256))]
    data = gguf([("direction.1", [4], 0, 0)], keys=keys)
    tracemalloc.start()
    assert interchange.loads(data, format="gguf").layers == [1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(data)


def zipped(members, method=zipfile.ZIP_STORED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def npy(values, **changes):
    """One array; changes: entries of its header that tell lies."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": values.dtype.str, "fortran_order": False, "shape": values.shape, **changes})
    return out.getvalue() + values.tobytes()


ROW = np.ones(3, np.float32)


def with_flag(data, flag):
    """The encryption flag, in the local header and in the table of contents."""
    data = bytearray(data)
    data[6] |= flag
    data[data.index(b"PK\1\2") + 8] |= flag
    return bytes(data)


def with_size(data, size):
    """Another unpacked size, in both places."""
    data = bytearray(data)
    data[22:26] = struct.pack("<I", size)
    at = data.index(b"PK\1\2")
    data[at + 24 : at + 28] = struct.pack("<I", size)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (zipped({"layer.1": "hello"}), "`layer.1` of the npz is not a NumPy array"),
        (zipped({"layer.1.npy": b""}), "`layer.1` of the npz is not a NumPy array"),
        (zipped({"layer.1.npy": b"\x93NUMPY\x01\x00\xff\xff{"}), "`layer.1` of the npz is not a NumPy array"),
        (zipped({"layer.1.npy": npy(ROW).replace(b"NUMPY\x01", b"NUMPY\x09")}), "`layer.1` of the npz is not a NumPy array"),
        (zipped({"layer.1.npy": npy(ROW), "ster.json": "{}"}), "`ster.json` of the npz is not a NumPy array"),
        (zipped({"layer.1.npy": npy(ROW), "ster.json.npy": npy(ROW)}), "`ster.json` must hold uint8 in one dimension, found float32"),
        (zipped({"layer.1.npy": npy(ROW), "ster.json.npy": npy(np.zeros((1, 1), np.uint8))}), r"found uint8 \[1, 1\]"),
        (zipped({"layer.1/": ""}), "no layer is known for `layer.1/`"),
        (zipped({"a/layer.1.npy": npy(ROW)}), "no layer is known for `a/layer.1`"),
        (zipped({"../layer.1.npy": npy(ROW)}), "no layer is known for `../layer.1`"),
        (zipped({"layer.1.npy": npy(ROW), "layer.1": npy(ROW)}), "two arrays of one name"),
        (zipped({"layer.1.npy": npy(ROW), "direction.1.npy": npy(ROW)}), "layer 1 has two vectors"),
        (zipped({"layer.1.npy": npy(ROW, shape=(10**12,))}), "it has 12 bytes for float32"),
        (zipped({"layer.1.npy": npy(ROW, shape=(2,))}), "it has 12 bytes for float32"),
        (zipped({"layer.1.npy": npy(ROW, shape=(-3,))}), "it has 12 bytes for float32"),
        (zipped({"layer.1.npy": npy(ROW, shape=(0, 10**30))}), "must hold floats in one dimension"),
        (zipped({"layer.1.npy": npy(ROW, descr="|S0")}), "must hold floats in one dimension"),
        (zipped({"layer.1.npy": npy(ROW[:0])}), "has vector width 0"),
        (zipped({}), "artifact has no steering vectors"),
        (with_flag(zipped({"layer.1.npy": npy(ROW)}), 1), "`layer.1` of the npz is encrypted"),
        (zipped({"layer.1.npy": npy(ROW)}, zipfile.ZIP_BZIP2), "compressed by method 12"),
        (zipped({"layer.1.npy": npy(ROW)}, zipfile.ZIP_LZMA), "compressed by method 14"),
        (zipped({"layer.1.npy": npy(ROW)}).replace(ROW.tobytes(), (2 * ROW).tobytes()), "`layer.1` of the npz is damaged"),
        (with_size(zipped({"layer.1.npy": npy(ROW)}, zipfile.ZIP_DEFLATED), 2**32 - 2), "the npz unpacks to 4294967294 bytes"),
        (with_size(zipped({"layer.1.npy": npy(ROW)}, zipfile.ZIP_DEFLATED), 8), "`layer.1` of the npz"),
    ],
)
def test_a_zip_of_other_things_is_refused(data, why, tmp_path):
    with pytest.raises(ArtifactError, match=why):
        interchange.loads(data, format="npz")
    (tmp_path / "v").write_bytes(data)
    with pytest.raises(ArtifactError, match="^failed to read .*/v: "):
        interchange.load(tmp_path / "v", format="npz")


def test_a_zip_bomb_is_refused_before_it_is_unpacked():
    row = np.zeros(1 << 24, np.float32)
    data = zipped({"layer.1.npy": npy(row), "layer.2.npy": npy(row)}, zipfile.ZIP_DEFLATED)
    for bomb in (data, with_size(data, 1000)):  # the second is honest about layer 2 alone, which is 64 MB of its own
        tracemalloc.start()
        with pytest.raises(ArtifactError, match="the npz unpacks to"):
            interchange.loads(bomb, format="npz")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20
    liar = with_size(zipped({"layer.1.npy": npy(row)}, zipfile.ZIP_DEFLATED), 1000)
    tracemalloc.start()
    with pytest.raises(ArtifactError, match="`layer.1` of the npz is damaged"):
        interchange.loads(liar, format="npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_compressed_npz_is_read():
    out = io.BytesIO()
    np.savez_compressed(out, **{"layer.1": np.zeros(4096, ">f4"), "layer.2": np.arange(4096, dtype=np.float64)})
    found = interchange.loads(out.getvalue(), format="npz")
    assert found.layers == [1, 2] and found.vector(2).tolist() == list(range(4096)) and found.vector(1).dtype == np.float32


# Where the bytes come from, and what goes out


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("said", [True, False])
def test_a_pipe_is_read(format, said):
    data = interchange.dumps(FULL, format=format)
    end, start = os.pipe()
    try:
        os.write(start, data)
        os.close(start)
        found = interchange.load(f"/dev/fd/{end}", format=format if said else None)
    finally:
        os.close(end)
    assert values(found) == values(FULL)


@pytest.mark.parametrize("format", FORMATS)
@given(noise=st.one_of(st.binary(max_size=40), st.sampled_from([b"{", b"[", b"{}", b"[[]]", b"null", b"\xff\xfe{\0", b"[" * 99999])))
@example(noise=b'{"schema_version": 1, "product": "ster"}')
@example(noise=b'{"activations": 1, "layer_indices": [], "x": 1}')
@example(noise=b'{"activations": ' + b"9" * 5000 + b"}")
@settings(deadline=None)
def test_bytes_that_are_no_vector_are_always_refused_as_such(format, noise):
    with pytest.raises(SterError):
        interchange.loads(noise, format=format)
    with pytest.raises(SterError):
        interchange.loads(noise, format=interchange.detect(noise))


def test_a_json_artifact_is_refused_in_the_words_of_its_class(tmp_path):
    path = tmp_path / "v.json"
    for text, why in (
        ('{"product": "ster"}', f"^invalid steering artifact JSON in {path}: a steering artifact has no `schema_version`"),
        ('{"schema_version": 2, "product": "ster"}', "^artifact schema 2 is unsupported; this Ster build reads schema 1$"),
        ("{", f"^failed to read {path}: line 1"),
    ):
        path.write_text(text)
        with pytest.raises(ArtifactError, match=why):
            interchange.load(path)


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_number_no_file_can_hold_is_not_written(format):
    highest = interchange.LAST_LAYER
    assert interchange.loads(interchange.dumps(make({highest: [1.0]}), format=format), format=format).layers == [highest]
    for layer in (10**9, 10**10, 2**70, 10**5000):
        with pytest.raises(LayerError, match="^layer numbers of a vector file end at 999999999, found a higher one$"):
            interchange.dumps(make({1: [1.0], layer: [1.0]}), format=format)


def test_a_layer_number_no_file_can_hold_is_not_read():
    for format, key in (("json", b'"layer":7'), ("vllm-lens", b'"layer_indices":[7')):
        data = interchange.dumps(make({7: [1.0]}), format=format)
        assert key in data
        with pytest.raises(ArtifactError, match="layer numbers of a vector file end at 999999999"):
            interchange.loads(data.replace(key, key + b"0" * 10), format=format)


def test_a_vector_that_would_vanish_is_refused():
    def lens(row, scale):
        document = {"activations": [[1.0, 2.0], row], "layer_indices": [1, 5], "scale": scale}
        return interchange.loads(json.dumps(document).encode(), format="vllm-lens")

    with pytest.raises(ArtifactError, match="^the vector of layer 1 times the scale 1e-300 is a zero vector in float32$"):
        lens([1.0, 2.0], 1e-300)
    with pytest.raises(ArtifactError, match="^the vector of layer 1 times the scale 0 is a zero vector"):
        lens([1.0, 2.0], 0)
    with pytest.raises(ArtifactError, match="^the vector of layer 5 is a zero vector in float32$"):
        lens([0, 1e-300], None)
    assert lens([0.0, -0.0], 2.0).vector(5).tolist() == [0.0, 0.0]  # it was none before
    for scale in (0.0, 1e-300, 1e300):
        with pytest.raises(InputError, match=r"^scale \S+ makes a zero or non-finite vector of the one at layer 1$"):
            interchange.dumps(make({1: [1.0], 2: [1.0]}), format="vllm-lens", scale=scale)

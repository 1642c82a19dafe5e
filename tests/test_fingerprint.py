"""The weights' hash: over every byte, and blind to where the bytes lie."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ster
from ster._safetensors import safetensors_bytes
from ster.errors import CheckpointError
from ster.fingerprint import tokenizer_hash, weights_hash
from ster.toy import tensors


def test_it_is_what_its_docstring_says(toy_dir: Path, toy_model: ster.Model) -> None:
    lines = ""
    for name, array in sorted(tensors().items()):
        shape = "x".join(map(str, array.shape))
        lines += f"{name} F32 {shape} {hashlib.sha256(array.tobytes()).hexdigest()}\n"
    assert weights_hash(toy_dir) == toy_model.weights_hash == hashlib.sha256(lines.encode()).hexdigest()


def test_files_their_names_and_their_order_do_not_count(toy_dir: Path, tmp_path: Path) -> None:
    whole = tensors()
    names = list(whole)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2][::-1]}
    for file, held in shards.items():
        (tmp_path / file).write_bytes(safetensors_bytes({name: whole[name] for name in held}, {"x": "y"}))
    assert weights_hash(tmp_path) == weights_hash(toy_dir)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "stray.safetensors").write_bytes(b"not read")
    assert weights_hash(tmp_path) == weights_hash(toy_dir)


@pytest.mark.parametrize("change", ["bit", "name", "shape"])
def test_every_bit_name_and_shape_counts(toy_dir: Path, tmp_path: Path, change: str) -> None:
    whole = tensors()
    name = "model.norm.weight"
    if change == "bit":
        whole[name] = whole[name].copy()
        whole[name].view("u1")[-1] ^= 1
    elif change == "name":
        whole[name + "s"] = whole.pop(name)
    else:
        whole[name] = whole[name].reshape(2, -1)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(whole, {}))
    assert weights_hash(tmp_path) != weights_hash(toy_dir)


def test_progress_is_in_megabytes(toy_dir: Path) -> None:
    seen: list[tuple[int, int]] = []
    weights_hash(toy_dir, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (0, 0) and len(seen) == len(tensors())


def test_damage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="^model directory contains no safetensors weights$"):
        weights_hash(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x05" + bytes(7) + b"[1,2]")
    with pytest.raises(CheckpointError, match="^failed to read .*model.safetensors: "):
        weights_hash(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not an index of safetensors files$"):
        weights_hash(tmp_path)


def test_the_template_counts_even_when_switched_off(toy_copy: Path, change: Callable[..., None]) -> None:
    plain = ster.load(toy_copy).tokenizer_hash
    assert plain == tokenizer_hash((toy_copy / "tokenizer.json").read_bytes(), None)
    (toy_copy / "chat_template.jinja").write_text("{{ messages }}")
    assert ster.load(toy_copy).tokenizer_hash == ster.load(toy_copy, chat_template="off").tokenizer_hash != plain
    tokenizer = toy_copy / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    assert ster.load(toy_copy).tokenizer_hash != tokenizer_hash((toy_copy / "tokenizer.json").read_bytes(), None) != plain


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_the_same_values_have_one_hash_in_whatever_precision(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A tensor of several chunks and a rest; -0.0, a subnormal, the largest and infinity of each dtype.
    monkeypatch.setattr("ster.fingerprint.CHUNK", 1 << 10)
    bits = np.random.default_rng(0).integers(0, 1 << 16, 3001).astype("<u2")
    bits[:4] = [0x8000, 0x0001, 0x7F7F if dtype == "BF16" else 0x7BFF, 0x7F80 if dtype == "BF16" else 0x7C00]
    exponent = 0x7F80 if dtype == "BF16" else 0x7C00
    bits[4:][(bits[4:] & exponent) == exponent] = 0  # no NaN
    wide = (bits.astype("<u4") << 16).view("<f4") if dtype == "BF16" else bits.view("<f2").astype("<f4")
    hashes = set()
    for name, kind, data in (("narrow", dtype, bits.tobytes()), ("wide", "F32", wide.tobytes())):
        header = json.dumps({"w": {"dtype": kind, "shape": [3001], "data_offsets": [0, len(data)]}}).encode()
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
        hashes.add(weights_hash(tmp_path / name))
    assert hashes == {hashlib.sha256(f"w F32 3001 {hashlib.sha256(wide.tobytes()).hexdigest()}\n".encode()).hexdigest()}


def test_a_dtype_that_is_not_widened_counts_by_its_name(tmp_path: Path) -> None:
    hashes = set()
    for kind in ("I32", "U32"):
        header = json.dumps({"w": {"dtype": kind, "shape": [1], "data_offsets": [0, 4]}}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        hashes.add(weights_hash(tmp_path))
    assert len(hashes) == 2

"""GGUF files: a model's other form, with the same numbers under the same names."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_writer import Tensors, write_gguf

import ster
from ster import _native
from ster._safetensors import safetensors_bytes
from ster.checkpoint import find_checkpoint
from ster.errors import CheckpointError, ConfigError, InputError
from ster.fingerprint import weights_hash
from ster.toy import CONFIG, tensors

BF16, F16, F32 = gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F32
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
BEFORE = ["input_layernorm", "post_attention_layernorm"]
AFTER = ["post_attention_layernorm", "post_feedforward_layernorm"]
NORMS = {
    "llama": BEFORE, "qwen2": BEFORE, "qwen3": [*BEFORE, "self_attn.q_norm", "self_attn.k_norm"], "phi3": BEFORE, "granite": BEFORE,
    "olmo2": [*AFTER, "self_attn.q_norm", "self_attn.k_norm"], "smollm3": BEFORE,
    "gemma2": [*AFTER, "input_layernorm", "pre_feedforward_layernorm"],
    "gemma3": [*AFTER, "input_layernorm", "pre_feedforward_layernorm", "self_attn.q_norm", "self_attn.k_norm"],
}  # fmt: skip
NEEDED = {"granite": {"logit_scale": 8.0}, "phi3": {"rope.scaling.original_context_length": 64}}


@pytest.fixture
def toy_gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "toy.gguf", "llama", CONFIG, tensors(), tokens=["a", "é", ""], keys={"vocab_size": 67})


def family(arch: str) -> dict[str, np.ndarray]:
    """Tensors of two layers, bf16 numbers in float32; gains of norms as the family has them."""
    random = np.random.default_rng(5)

    def draw(*shape: int) -> np.ndarray:
        bits = random.normal(0, 0.5, shape).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        return bits.view(np.float32)

    found = {"model.embed_tokens.weight": draw(40, 32), "model.norm.weight": draw(32)}
    matrices = {"self_attn.o_proj": (32, 32), "mlp.down_proj": (32, 48)}
    if arch == "phi3":
        matrices |= {"self_attn.qkv_proj": (64, 32), "mlp.gate_up_proj": (96, 32)}
    else:
        matrices |= {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32)}
        matrices |= {"mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32)}
    for layer in range(2):
        for name, shape in matrices.items():
            found[f"model.layers.{layer}.{name}.weight"] = draw(*shape)
            if arch in ("qwen2", "llama", "smollm3") and name.endswith(("q_proj", "k_proj", "v_proj")):
                found[f"model.layers.{layer}.{name}.bias"] = draw(shape[0])
        for name in NORMS[arch]:
            whole = {"self_attn.q_norm": 32, "self_attn.k_norm": 16} if arch == "olmo2" else {"self_attn.q_norm": 8, "self_attn.k_norm": 8}
            found[f"model.layers.{layer}.{name}.weight"] = draw(whole.get(name, 32))
    return found


def folder_hash(folder: Path, held: Tensors) -> str:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(safetensors_bytes(held, {}))
    return weights_hash(folder)


@pytest.mark.parametrize("arch", NORMS)
@pytest.mark.parametrize("kind", [F32, BF16], ids=["f32", "bf16"])
def test_a_folder_and_the_gguf_made_from_it_hold_the_same(arch: str, kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    held = family(arch)
    path = write_gguf(tmp_path / "model.gguf", arch, SIZES, held, matrices=kind, keys=NEEDED.get(arch))
    found = _native.Tensors(str(path))
    assert found.shapes == [(name, list(held[name].shape)) for name in sorted(held)]
    for name, values in held.items():
        rows = len(values) if values.ndim == 2 else 1
        np.testing.assert_array_equal(found.rows(name, 0, rows), values.reshape(rows, -1), strict=True)
    assert weights_hash(path) == folder_hash(tmp_path / "folder", held)


def test_the_toy_model_has_one_hash_in_both_forms(toy_gguf: Path, toy_model: ster.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    assert weights_hash(toy_gguf, progress=lambda done, total: seen.append((done, total))) == toy_model.weights_hash
    monkeypatch.setattr("ster.fingerprint.CHUNK", 1000)  # three rows of 64, and a rest
    assert weights_hash(toy_gguf) == toy_model.weights_hash
    assert seen[-1] == (0, 0) and len(seen) >= len(tensors())


def test_small_gains_of_gemma_lose_bits_in_the_file_and_count_as_they_are(tmp_path: Path) -> None:
    held = family("gemma2")
    held["model.norm.weight"][0] = np.float32(2.0**-30)  # 1 + 2^-30 is 1 in float32
    path = write_gguf(tmp_path / "model.gguf", "gemma2", SIZES, held)
    assert _native.Tensors(str(path)).rows("model.norm.weight", 0, 1)[0, 0] == 0
    assert weights_hash(path) != folder_hash(tmp_path / "folder", held)


def test_rows_that_are_not_there_are_refused(toy_gguf: Path) -> None:
    found = _native.Tensors(str(toy_gguf))
    assert found.rows("lm_head.weight", 5, 5).shape == (0, 64)
    for start, stop in ((0, 68), (66, 1 << 60), (3, 2)):
        with pytest.raises(CheckpointError, match="`lm_head.weight` has 67 rows, asked for"):
            found.rows("lm_head.weight", start, stop)
    with pytest.raises(CheckpointError, match="tensor `nowhere` is missing"):
        found.rows("nowhere", 0, 1)
    with pytest.raises(OverflowError):
        found.rows("lm_head.weight", -1, 1)


def test_metadata_comes_as_python_has_it(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint64("own.large", 2**64 - 1)
    writer.add_int8("own.small", -5)
    writer.add_float32("own.single", 0.1)
    writer.add_float64("own.double", 0.1)
    writer.add_bool("own.flag", True)
    writer.add_token_list(["a", "é", ""])
    writer.add_token_scores([0.5, -1.0, float("-inf")])
    writer.add_token_types([1, 3, 6])
    writer.add_array("own.flags", [True, False])
    writer.add_array("own.nested", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = _native.gguf_metadata(str(tmp_path / "m.gguf"))
    assert list(found) == sorted(found)
    assert (found["general.architecture"], found["own.large"], found["own.small"]) == ("llama", 2**64 - 1, -5)
    assert (found["own.single"], found["own.double"], found["own.flag"]) == (float(np.float32(0.1)), 0.1, True)
    assert found["tokenizer.ggml.tokens"] == ["a", "é", ""] and found["own.flags"] == [True, False]
    scores, kinds = found["tokenizer.ggml.scores"], found["tokenizer.ggml.token_type"]
    assert isinstance(scores, np.ndarray) and isinstance(kinds, np.ndarray)
    np.testing.assert_array_equal(scores, np.array([0.5, -1.0, -np.inf], np.float32), strict=True)
    np.testing.assert_array_equal(kinds, np.array([1, 3, 6], np.int32), strict=True)
    nested = found["own.nested"]
    assert isinstance(nested, list) and [part.tolist() for part in nested] == [[1, 2], [3]]


def test_damage_has_an_error_of_its_kind(toy_gguf: Path) -> None:
    good = toy_gguf.read_bytes()
    toy_gguf.write_bytes(good[:-1])
    with pytest.raises(CheckpointError, match=r"toy.gguf: tensor `.*` takes .* the file is truncated"):
        _native.gguf_metadata(str(toy_gguf))
    toy_gguf.write_bytes(good.replace(b"llama.block_count", b"llama.block_cOunt"))
    with pytest.raises(ConfigError, match=r"toy.gguf: `llama.block_count` is missing"):
        _native.Engine(str(toy_gguf))
    with pytest.raises(CheckpointError, match="failed to read .*none.gguf"):
        _native.gguf_metadata(str(toy_gguf.with_name("none.gguf")))


# Checkpoints


def test_a_file_is_a_checkpoint_that_goes_by_its_name(toy_gguf: Path, tmp_path: Path) -> None:
    found = find_checkpoint(toy_gguf)
    assert (found.path, found.name, found.revision) == (toy_gguf, "toy", None)
    dotted = toy_gguf.rename(tmp_path / "SmolLM2-1.7B.Q4_K_M.GGUF")
    assert find_checkpoint(dotted).name == "SmolLM2-1.7B.Q4_K_M"
    snapshot = tmp_path / "models--ORG--NAME" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--ORG--NAME" / "blobs").mkdir()
    blob = dotted.rename(tmp_path / "models--ORG--NAME" / "blobs" / "5eed")
    (snapshot / "w.Q8_0.gguf").symlink_to(blob)
    found = find_checkpoint(snapshot / "w.Q8_0.gguf")
    assert (found.name, found.revision) == ("ORG/NAME/w.Q8_0", "0123abcd")
    with pytest.raises(InputError, match="revision `main` cannot be chosen"):
        find_checkpoint(snapshot / "w.Q8_0.gguf", "main")


def test_a_split_model_is_one_checkpoint(tmp_path: Path, toy_model: ster.Model) -> None:
    write_gguf(tmp_path / "toy.gguf", "llama", CONFIG, tensors(), split=15)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts] == [f"toy-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for part in parts:
        assert find_checkpoint(part).name == "toy"
        assert weights_hash(part) == toy_model.weights_hash
        assert _native.gguf_metadata(str(part))["llama.block_count"] == 4
    parts[1].unlink()
    with pytest.raises(CheckpointError, match="toy-00002-of-00003.gguf: is missing: part 2 of the 3 of this model"):
        _native.gguf_metadata(str(parts[2]))


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^model file is missing: .*none\.gguf$"):
        find_checkpoint(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("PK and more")
    with pytest.raises(CheckpointError, match=r"text.gguf: is not a GGUF file: it begins with b'PK a', expected b'GGUF'$"):
        find_checkpoint(tmp_path / "text.gguf")
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(CheckpointError, match=r"^model config is missing: .*folder.gguf/config.json$"):
        find_checkpoint(tmp_path / "folder.gguf")


def test_a_folder_of_gguf_files_says_which_to_name(toy_gguf: Path, toy_copy: Path) -> None:
    with pytest.raises(CheckpointError, match="model config is missing") as caught:
        find_checkpoint(toy_gguf.parent)
    assert caught.value.hint == f"a GGUF model is named by its file: {toy_gguf}"
    (toy_copy / "model.safetensors").unlink()
    toy_gguf.rename(toy_copy / "b.gguf")
    (toy_copy / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="no safetensors weights") as caught:
        ster.load(toy_copy)
    assert caught.value.hint == f"a GGUF model is named by its file: {toy_copy / 'a.gguf'} (2 are there)"


def test_the_files_beside_the_weights_are_made_from_metadata(toy_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType

    made = ModuleType("ster.gguf_tokenizer")
    made.files = lambda metadata: {"tokenizer.json": b"{}", "tokenizer_config.json": str(len(metadata)).encode()}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ster.gguf_tokenizer", made)
    monkeypatch.setattr(ster, "gguf_tokenizer", made, raising=False)
    checkpoint = find_checkpoint(toy_gguf)
    assert checkpoint.read_bytes("tokenizer.json") == b"{}" and checkpoint.read_json("tokenizer.json") == {}
    assert checkpoint.has("tokenizer_config.json") and not checkpoint.has("chat_template.jinja")
    assert checkpoint.read_json("special_tokens_map.json") is None
    with pytest.raises(ConfigError, match="invalid JSON in .*toy.gguf/tokenizer_config.json: expected an object"):
        checkpoint.read_json("tokenizer_config.json")
    with pytest.raises(ster.errors.FileError, match="failed to read .*chat_template.jinja: a GGUF file has none"):
        checkpoint.read_bytes("chat_template.jinja")

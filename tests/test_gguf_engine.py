"""A model runs from a GGUF file as from the folder it was made of, bit for bit: every architecture, and every type of blocks.

Blocks are dequantised by the `gguf` package, the format's own definition in Python.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy
from gguf_writer import permuted, write_gguf
from numpy.typing import NDArray
from tiny_checkpoints import tensors

from ster import _native
from ster.errors import CheckpointError
from ster.fingerprint import weights_hash

Type = gguf.GGMLQuantizationType
TEXT = np.random.default_rng(3).integers(0, 50, 90).astype(np.uint32)

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
GEMMA = {"query_pre_attn_scalar": 8, "sliding_window": 11, "tie_word_embeddings": True}
# By architecture: fields of config.json, and the keys in which llama.cpp's converter writes them.
ARCHS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"model_type": "llama", "attention_bias": True}, {}),
    "llama-window": ({"model_type": "mistral", "sliding_window": 11}, {"attention.sliding_window": 11}),
    "llama-linear": (
        {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "qwen2": ({"model_type": "qwen2"}, {}),
    "qwen3": ({"model_type": "qwen3"}, {}),
    "phi3": (
        {"model_type": "phi3", "sliding_window": 11, "partial_rotary_factor": 0.5},
        {"attention.sliding_window": 11, "rope.dimension_count": 4, "rope.scaling.original_context_length": 256},
    ),
    "granite": (
        {"model_type": "granite", "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0625}
        | {"logits_scaling": 8.0},
        {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.0625, "logit_scale": 8.0},
    ),
    "olmo2": ({"model_type": "olmo2"}, {}),
    "smollm3": ({"model_type": "smollm3", "tie_word_embeddings": True}, {}),
    "gemma2": (
        {"model_type": "gemma2", **GEMMA, "attn_logit_softcapping": 30.0},
        {"attention.sliding_window": 11, "attn_logit_softcapping": 30.0},
    ),
    "gemma3": (
        {"model_type": "gemma3_text", **GEMMA, "sliding_window_pattern": 2, "rope_theta": 1e6},
        {"attention.sliding_window": 11, "attention.sliding_window_pattern": 2},
    ),
}  # fmt: skip


def write_folder(folder: Path, config: dict[str, Any], held: dict[str, NDArray[np.float32]]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(held, folder / "model.safetensors")


def all_of(path: Path) -> list[bytes]:
    """Every row of every layer and the logits: of one pass, of a lone token, and token by token from a cache."""
    engine = _native.Engine(str(path))
    layers = list(range(engine.layer_count))
    found = []

    def run(ids: NDArray[np.uint32], cache: _native.Cache | None = None) -> None:
        sequence = _native.Sequence(ids, cache=cache, layers=layers, rows="all", logits="all")
        [output] = engine.forward([sequence])
        assert output.residual is not None and output.logits is not None
        assert np.isfinite(output.residual).all() and output.residual.std() > 1e-3
        found.extend([output.residual.tobytes(), output.logits.tobytes()])

    run(TEXT)
    run(TEXT[:1])
    cache = engine.cache()
    for start, stop in ((0, 70), (70, 71), (71, 72), (72, 75)):
        run(TEXT[start:stop], cache)
    return found


@pytest.mark.parametrize("name", ARCHS)
@pytest.mark.parametrize("kind", [Type.F32, Type.BF16, Type.F16], ids=lambda kind: kind.name)
def test_a_gguf_file_gives_the_bits_of_its_folder(name: str, kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    fields, keys = ARCHS[name]
    config = SIZES | fields
    held = tensors(config)
    stored = {name: round_trip(values, kind) if values.ndim == 2 else values for name, values in held.items()}
    write_folder(tmp_path / "folder", config, stored)
    file = write_gguf(tmp_path / "model.gguf", name.split("-")[0], config, stored, matrices=kind, keys=keys)
    assert all_of(file) == all_of(tmp_path / "folder")
    assert _native.Engine(str(file)).family == config["model_type"]


def round_trip(values: NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> NDArray[np.float32]:
    return gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind).astype(np.float32).reshape(values.shape)


# Blocks

WIDE = SIZES | {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
# Where the scales of a block stand that the package cannot quantise, as f16, and how large they are so that numbers are about 0.05.
SCALES: dict[gguf.GGMLQuantizationType, dict[int, float]] = {
    Type.Q2_K: {80: 2e-3, 82: 2e-3},
    Type.Q3_K: {108: 6e-4},
    Type.Q4_K: {0: 1e-4, 2: 6e-4},
    Type.Q5_K: {0: 5e-5, 2: 6e-4},
    Type.Q6_K: {208: 4e-5},
    Type.IQ4_NL: {0: 1e-3},
}
LEGACY = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]


def in_blocks(values: NDArray[np.float32], kind: gguf.GGMLQuantizationType, random: np.random.Generator) -> NDArray[np.uint8]:
    """Rows of blocks: `values` where the package can quantise, else any blocks at all with finite scales."""
    if kind in LEGACY:
        return gguf.quants.quantize(values, kind)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    count = values.size // numbers
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    for place, scale in SCALES[kind].items():
        scales = (random.uniform(0.5, 2, count) * random.choice([-1, 1], count) * scale).astype("<f2")
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(count, 2)
    return blocks.reshape(values.shape[0], -1)


@pytest.mark.parametrize("kind", [*LEGACY, *SCALES], ids=lambda kind: kind.name)
def test_blocks_run_as_the_numbers_they_stand_for(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    random = np.random.default_rng(kind.value)
    heads = {"q_proj": WIDE["num_attention_heads"], "k_proj": WIDE["num_key_value_heads"]}
    raw: dict[str, NDArray[np.uint8]] = {}
    wide = tensors(WIDE)
    for name, values in wide.items():
        if values.ndim == 2:
            raw[name] = in_blocks(values, kind, random)
            numbers = gguf.quants.dequantize(raw[name], kind).reshape(values.shape)
            part = name.split(".")[-2]
            wide[name] = np.ascontiguousarray(unpermuted(numbers, heads[part]) if part in heads else numbers)
    write_folder(tmp_path / "folder", WIDE, wide)
    file = write_gguf(tmp_path / "model.gguf", "llama", WIDE, wide, matrices=kind, raw=raw)
    assert all_of(file) == all_of(tmp_path / "folder")
    assert _native.Engine(str(file)).weight_dtypes == ["F32", kind.name]
    assert weights_hash(file) == weights_hash(tmp_path / "folder")


def unpermuted(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    rows, width = values.shape
    found = values.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(values.shape)
    np.testing.assert_array_equal(permuted(found, heads), values)
    return found


def test_a_type_that_is_not_read_is_refused_by_its_name(tmp_path: Path) -> None:
    size = gguf.GGML_QUANT_SIZES[Type.IQ2_XXS][1]
    raw = {
        name: np.zeros((values.shape[0], values.shape[1] // 256 * size), np.uint8)
        for name, values in tensors(WIDE).items()
        if values.ndim == 2
    }
    file = write_gguf(tmp_path / "model.gguf", "llama", WIDE, tensors(WIDE), matrices=Type.IQ2_XXS, raw=raw)
    with pytest.raises(CheckpointError, match="tensor `model.embed_tokens.weight` has dtype IQ2_XXS, which Ster does not read"):
        _native.Engine(str(file))


@pytest.mark.parametrize("rounding", ["bf16", "f16"])
def test_blocks_can_be_rounded_first(rounding: Any, tmp_path: Path) -> None:
    held = tensors(WIDE)
    file = write_gguf(tmp_path / "model.gguf", "llama", WIDE, held, matrices=Type.Q4_0)
    stored = {name: round_trip(values, Type.Q4_0) if values.ndim == 2 else values for name, values in held.items()}
    for part, heads in (("q_proj", WIDE["num_attention_heads"]), ("k_proj", WIDE["num_key_value_heads"])):
        for name in held:
            if name.endswith(f"{part}.weight"):  # blocks lie along rows, which only change places
                stored[name] = unpermuted(round_trip(permuted(held[name], heads), Type.Q4_0), heads)
    write_folder(tmp_path / "folder", WIDE, stored)
    outputs = []
    for path in (file, tmp_path / "folder"):
        engine = _native.Engine(str(path), round=rounding)
        assert engine.weight_dtypes == [rounding.upper()]
        outputs.append(engine.forward([_native.Sequence(TEXT, layers=[4], rows="all", logits="all")])[0])
    np.testing.assert_array_equal(outputs[0].residual, outputs[1].residual)
    np.testing.assert_array_equal(outputs[0].logits, outputs[1].logits)

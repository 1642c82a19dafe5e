"""Values against float64: the reference folder's checkpoints, and tiny random ones of the kinds that are not in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from reference_numpy import forward
from reference_numpy import load as load_reference
from tiny_checkpoints import write_checkpoint

from ster import _native

FOLDERS = [path.parent for path in sorted(Path(os.environ.get("STER_REFERENCES", "nowhere")).glob("golden/*/config.json"))]
NO_FOLDERS = [pytest.param(None, marks=pytest.mark.skip(reason="STER_REFERENCES is not set: no reference checkpoints"))]
each_golden = pytest.mark.parametrize("folder", FOLDERS or NO_FOLDERS, ids=lambda path: path.name if path else "none")


def relative(found: NDArray[Any], expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """The distance of each row, in lengths of the expected row."""
    assert found.shape == expected.shape
    return np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)


def check_residual(found: NDArray[np.float32], expected: NDArray[np.float64]) -> None:
    """The contract: `2e-6 sqrt(layer + 1)`. Each block adds roundings of 2^-24 = 6e-8 from sums of some ten steps a lane, in a dozen
    operations, which grow like a random walk over the blocks; transformers in float32 comes to 0.62 of this."""
    for layer, rows in enumerate(relative(found, expected)):
        bound = 2e-6 * np.sqrt(layer + 1)
        worst = int(rows.argmax())
        assert rows[worst] <= bound, f"layer {layer}, row {worst}: {rows[worst]:.2e} off, bound {bound:.2e}"


def check_logits(found: NDArray[np.float32], expected: NDArray[np.float64], layers: int) -> None:
    """The final norm and the head are one step more: the bound of a block that came after the last."""
    rows = relative(found, expected)
    assert rows.max() <= 2e-6 * np.sqrt(layers + 1), f"row {int(rows.argmax())}: {rows.max():.2e} off"


def run(engine: _native.Engine, ids: Any, **options: Any) -> _native.Output:
    layers = list(range(engine.layer_count))
    [output] = engine.forward([_native.Sequence(np.asarray(ids, np.uint32), layers=layers, rows="all", logits="all", **options)])
    assert output.residual is not None and output.logits is not None
    return output


# Golden checkpoints


@each_golden
def test_golden_checkpoints_are_within_the_bound_at_every_layer_and_row(folder: Path) -> None:
    engine = _native.Engine(str(folder))
    golden = np.load(folder / "reference.npz")
    prompts = sorted(name[4:] for name in golden.files if name.startswith("ids_"))
    assert prompts
    for prompt in prompts:
        output = run(engine, golden[f"ids_{prompt}"])
        check_residual(output.residual, golden[f"resid_{prompt}"])
        check_logits(output.logits, golden[f"logits_{prompt}"], engine.layer_count)


@each_golden
def test_the_reference_in_this_folder_agrees_with_golden(folder: Path) -> None:
    """Golden files were made in float64, but with norms and angles rounded to float32 inside, which limits them to about 4e-7."""
    config, weights = load_reference(folder)
    golden = np.load(folder / "reference.npz")
    for name in golden.files:
        if name.startswith("ids_"):
            residual, logits = forward(config, weights, golden[name])
            assert relative(residual, golden[f"resid_{name[4:]}"]).max() <= 1e-6
            assert relative(logits, golden[f"logits_{name[4:]}"]).max() <= 1e-6


def test_the_steered_golden_run_is_within_the_bound(references: Path) -> None:
    folder = references / "golden" / "gqa-f32"
    golden = np.load(folder / "reference.npz")
    layer, vector, scale = int(golden["steer_layer"]), golden["steer_vec"].astype(np.float32), float(golden["steer_scale"])
    engine = _native.Engine(str(folder))
    ids = golden["ids_1"]

    output = run(engine, ids, point="post_steer", steering=[_native.Edit(layer, vector[None], scale=scale)])
    check_residual(output.residual, golden["steered_resid_0"])
    check_logits(output.logits, golden["steered_logits_0"], engine.layer_count)
    assert output.steered == [list(range(len(ids)))]
    # The test is worth something: unsteered values are far away from the steered layer on, and equal before it.
    plain = run(engine, ids)
    assert relative(plain.residual, golden["steered_resid_0"])[layer:].min() > 1e-3
    assert np.array_equal(plain.residual[:layer], output.residual[:layer])

    residual, logits = forward(*load_reference(folder), ids, {layer: np.float64(scale) * golden["steer_vec"]})
    assert relative(residual, golden["steered_resid_0"]).max() <= 1e-6
    assert relative(logits, golden["steered_logits_0"]).max() <= 1e-6


# Tiny random checkpoints

BASE = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def new_spelling(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_theta": None, "rope_parameters": {"rope_type": kind, "rope_theta": 500000.0, **fields}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "gelu": {"hidden_act": "gelu"},
    "gelu-tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "one-kv-head": {"num_key_value_heads": 1},
    "no-kv-heads": {"num_key_value_heads": None},
    "kv-heads-absent": {"num_key_value_heads": ...},
    "tied": {"tie_word_embeddings": True},
    "head-dim-24": {"head_dim": 24},
    "head-dim-2": {"head_dim": 2},
    "hidden-no-multiple-of-heads": {"hidden_size": 50, "head_dim": 16},
    "heads-5-of-80": {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 80},
    "eps-large": {"rms_norm_eps": 0.5},
    "linear-type": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear-rope-type": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "linear-new": new_spelling("linear", factor=4.0),
    "dynamic-type": {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64},
    "dynamic-new": {**new_spelling("dynamic", factor=4.0), "max_position_embeddings": 64},
    "llama3-rope-type": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama3-new": new_spelling("llama3", **LLAMA3),
    "yarn-type": {"rope_scaling": {"type": "yarn", **YARN}},
    "yarn-new": new_spelling("yarn", **YARN),
    "yarn-attention-factor": {"rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": 0.7}},
    "yarn-betas": {"rope_scaling": {"rope_type": "yarn", **YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}},
    "yarn-mscale": {"rope_scaling": {"rope_type": "yarn", **YARN, "mscale": 0.707, "mscale_all_dim": 1.0}},
    "default-new": new_spelling("default"),
    "theta-odd": {"rope_theta": 123.25},
}
PROMPT_LENGTHS = (1, 7, 40, 150)


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_checkpoints_are_within_the_bound_at_every_layer_and_row(kind: str, tmp_path: Path) -> None:
    config = {key: value for key, value in {**BASE, **KINDS[kind]}.items() if value is not ...}
    write_checkpoint(tmp_path, config)
    engine = _native.Engine(str(tmp_path))
    read, weights = load_reference(tmp_path)
    rng = np.random.default_rng(1)
    for length in PROMPT_LENGTHS:
        ids = rng.integers(0, config["vocab_size"], length)
        residual, logits = forward(read, weights, ids)
        output = run(engine, ids)
        check_residual(output.residual, residual)
        check_logits(output.logits, logits, engine.layer_count)


def test_every_kind_is_another_function(tmp_path: Path) -> None:
    """Otherwise a field that is read and dropped would pass above."""
    ids = np.random.default_rng(1).integers(0, 50, 150)
    last: dict[str, NDArray[np.float64]] = {}
    same = {"no-kv-heads": "kv-heads-absent"}
    for kind, fields in KINDS.items():
        config = {key: value for key, value in {**BASE, **fields}.items() if value is not ...}
        folder = tmp_path / kind
        folder.mkdir()
        write_checkpoint(folder, config)
        last[kind] = forward(*load_reference(folder), ids)[0][-1, -1]
    for kind, row in last.items():
        for other, other_row in last.items():
            if kind < other and row.shape == other_row.shape and other not in (same.get(kind), kind) and kind != same.get(other):
                assert np.linalg.norm(row - other_row) > 1e-4 * np.linalg.norm(row), f"{kind} and {other}"

"""Every option of every family against float64, on tiny random checkpoints; and the residual stream between their blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from reference_numpy import forward
from reference_numpy import load as load_reference
from test_golden import check_logits, check_residual, relative, run
from tiny_checkpoints import write_checkpoint

from ster import _native

BASE = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = {"rope_type": "linear", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SHORT, LONG = [1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0], [1.0, 1.5, 2.0, 3.5, 5.0, 7.5, 11.0, 16.0]


def longrope(pairs: int, **fields: Any) -> dict[str, Any]:
    return {"rope_type": "longrope", "short_factor": SHORT[:pairs], "long_factor": LONG[:pairs], **fields}


SCALED = {
    f"{kind['rope_type']}-{family}": (
        family,
        {"rope_scaling": kind, **({"max_position_embeddings": 64} if kind == DYNAMIC else {}), **fields},
    )
    for family, fields in {
        "mistral": {},
        "qwen2": {},
        "qwen3": {},
        "granite": {"residual_multiplier": 0.3},
        "olmo2": {},
        "smollm3": {"no_rope_layer_interval": 3},
        "gemma2": {"sliding_window": 30},
    }.items()
    for kind in (LINEAR, DYNAMIC, LLAMA3, YARN)
}
# `...` takes a key away. Where a window is set, the longest prompt has many of them.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **SCALED,
    # mistral
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window-absent": ("mistral", {}),  # 4096, longer than all that runs here
    "mistral-window-1": ("mistral", {"sliding_window": 1}),
    "mistral-window-2": ("mistral", {"sliding_window": 2}),
    "mistral-window-63": ("mistral", {"sliding_window": 63}),
    "mistral-window-64": ("mistral", {"sliding_window": 64}),
    "mistral-window-65": ("mistral", {"sliding_window": 65}),
    "mistral-kv-heads-absent": ("mistral", {"num_attention_heads": 8, "num_key_value_heads": ..., "sliding_window": 20}),
    "mistral-kv-heads-null": ("mistral", {"num_key_value_heads": None, "sliding_window": 20}),
    "mistral-one-kv-head": ("mistral", {"num_key_value_heads": 1, "sliding_window": 20}),
    "mistral-tied": ("mistral", {"tie_word_embeddings": True, "sliding_window": 20}),
    "mistral-head-dim-20": ("mistral", {"head_dim": 20, "sliding_window": 20}),
    "mistral-eps-absent": ("mistral", {"rms_norm_eps": ...}),
    # qwen2 and qwen3
    "qwen2": ("qwen2", {}),
    "qwen2-kv-heads-absent": ("qwen2", {"num_attention_heads": 32, "num_key_value_heads": ..., "head_dim": 2}),
    "qwen2-window-unused": ("qwen2", {"use_sliding_window": False, "sliding_window": 3, "max_window_layers": 0}),
    "qwen2-window-above-2": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen2-window-everywhere": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}),
    "qwen2-window-above-28": ("qwen2", {"use_sliding_window": True, "sliding_window": 9}),
    "qwen2-layer-types": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "layer_types": [SLIDING, FULL, FULL, SLIDING]}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-head-dim-absent": ("qwen3", {"head_dim": ...}),  # 128
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-window-above-1": ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3-layer-types": ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "layer_types": [FULL, SLIDING, SLIDING, FULL]}),
    "qwen3-one-kv-head": ("qwen3", {"num_key_value_heads": 1, "head_dim": 20}),
    # phi3
    "phi3": ("phi3", {}),
    "phi3-kv-heads-absent": ("phi3", {"num_key_value_heads": ...}),
    "phi3-eps-absent": ("phi3", {"rms_norm_eps": ...}),
    "phi3-window": ("phi3", {"sliding_window": 16}),
    "phi3-half": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3-three-quarters": ("phi3", {"partial_rotary_factor": 0.75}),
    "phi3-head-dim-20-of-12-rotated": ("phi3", {"head_dim": 20, "partial_rotary_factor": 0.6}),
    "phi3-half-new": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    "phi3-longrope": ("phi3", {"rope_scaling": longrope(4), "original_max_position_embeddings": 64}),
    "phi3-longrope-half": (
        "phi3",
        {"rope_scaling": longrope(4), "original_max_position_embeddings": 64, "head_dim": 16, "partial_rotary_factor": 0.5},
    ),
    "phi3-su": ("phi3", {"rope_scaling": {**longrope(4), "type": "su", "rope_type": ...}, "original_max_position_embeddings": 64}),
    "phi3-longrope-as-yarn": (
        "phi3",
        {"rope_scaling": {**longrope(4), "type": "yarn", "rope_type": ...}, "original_max_position_embeddings": 64},
    ),
    "phi3-longrope-never-long": ("phi3", {"rope_scaling": longrope(4)}),  # the class says 4096
    "phi3-longrope-attention-factor": (
        "phi3",
        {"rope_scaling": longrope(4, attention_factor=1.3), "original_max_position_embeddings": 64},
    ),
    "phi3-longrope-factor": ("phi3", {"rope_scaling": longrope(4, factor=16.0), "original_max_position_embeddings": 64}),
    "phi3-longrope-window": ("phi3", {"rope_scaling": longrope(4), "original_max_position_embeddings": 64, "sliding_window": 10}),
    "longrope-mistral": ("mistral", {"rope_scaling": longrope(4, original_max_position_embeddings=64), "sliding_window": 30}),
    "longrope-qwen3": ("qwen3", {"rope_parameters": longrope(4, original_max_position_embeddings=64, rope_theta=1e6)}),
    "longrope-beside": ("qwen2", {"rope_scaling": longrope(4, factor=4.0), "original_max_position_embeddings": 64}),
    # granite
    "granite-neutral": ("granite", {"attention_multiplier": 8**-0.5}),
    "granite-silent": ("granite", {}),  # scores times 1
    "granite-odd": (
        "granite",
        {"embedding_multiplier": 11.3, "residual_multiplier": 0.217, "attention_multiplier": 0.0711, "logits_scaling": 7.9},
    ),
    "granite-embedding": ("granite", {"embedding_multiplier": 0.37}),
    "granite-residual": ("granite", {"residual_multiplier": 1.9}),
    "granite-logits": ("granite", {"logits_scaling": 0.13}),
    "granite-biases-tied": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "residual_multiplier": 0.3}),
    # olmo2
    "olmo2": ("olmo2", {}),
    "olmo2-bias": ("olmo2", {"attention_bias": True}),
    "olmo2-kv-heads-absent": ("olmo2", {"num_key_value_heads": ...}),
    "olmo2-one-kv-head": ("olmo2", {"num_key_value_heads": 1, "head_dim": 20}),
    "olmo2-eps-absent": ("olmo2", {"rms_norm_eps": ...}),
    "olmo2-tied": ("olmo2", {"tie_word_embeddings": True}),
    # smollm3
    "smollm3": ("smollm3", {}),
    "smollm3-kv-heads-absent": ("smollm3", {"num_attention_heads": 8, "num_key_value_heads": ...}),
    "smollm3-untied-biases": ("smollm3", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "smollm3-interval-2": ("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3-interval-1": ("smollm3", {"no_rope_layer_interval": 1}),
    "smollm3-listed": ("smollm3", {"no_rope_layers": [0, 1, 1, 0, 1, 1], "no_rope_layer_interval": 2}),
    "smollm3-window-unused": ("smollm3", {"use_sliding_window": False, "sliding_window": 5}),
    "smollm3-window": ("smollm3", {"use_sliding_window": True, "sliding_window": 12, "no_rope_layer_interval": 2}),
    "smollm3-window-listed": ("smollm3", {"use_sliding_window": True, "sliding_window": 12, "no_rope_layers": [0, 1, 1, 0]}),
    "smollm3-layer-types": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 12, "no_rope_layer_interval": 2, "layer_types": [SLIDING, FULL, SLIDING, SLIDING]},
    ),
    # gemma2
    "gemma2": ("gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 8}),
    "gemma2-silent": ("gemma2", {}),  # caps of 50 and 30, scalar 256, window 4096
    "gemma2-head-dim-absent": ("gemma2", {"head_dim": ..., "num_attention_heads": 4, "num_key_value_heads": ...}),
    "gemma2-caps-null": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 16}),
    "gemma2-caps-tight": ("gemma2", {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.3, "query_pre_attn_scalar": 4}),
    "gemma2-score-cap": ("gemma2", {"final_logit_softcapping": None, "attn_logit_softcapping": 2.5, "query_pre_attn_scalar": 4}),
    "gemma2-layer-types": ("gemma2", {"sliding_window": 5, "layer_types": [FULL, SLIDING, SLIDING, FULL]}),
    "gemma2-untied-bias": ("gemma2", {"tie_word_embeddings": False, "attention_bias": True, "sliding_window": 3}),
    "gemma2-silu": ("gemma2", {"hidden_activation": "silu", "hidden_act": "gelu"}),
    "gemma2-one-kv-head": ("gemma2", {"num_key_value_heads": 1, "head_dim": 20, "query_pre_attn_scalar": 17.5}),
    # gemma3_text
    "gemma3": ("gemma3_text", {"sliding_window": 16, "sliding_window_pattern": 3, "query_pre_attn_scalar": 8}),
    "gemma3-silent": ("gemma3_text", {}),
    "gemma3-pattern-absent": ("gemma3_text", {"num_hidden_layers": 7, "sliding_window": 7}),
    "gemma3-local-theta": (
        "gemma3_text",
        {"sliding_window": 16, "rope_local_base_freq": 777.0, "layer_types": [SLIDING, FULL, FULL, SLIDING]},
    ),
    "gemma3-global-theta": ("gemma3_text", {"sliding_window": 16, "rope_theta": 500.0, "sliding_window_pattern": 2}),
    "gemma3-linear": ("gemma3_text", {"sliding_window": 16, "rope_scaling": LINEAR, "sliding_window_pattern": 2}),
    "gemma3-linear-nested": (
        "gemma3_text",
        {
            "sliding_window": 16,
            "sliding_window_pattern": 2,
            "rope_parameters": {FULL: {**LINEAR, "rope_theta": 1e6}, SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
        },
    ),
    "gemma3-nested-odd": (
        "gemma3_text",
        {
            "sliding_window": 40,
            "sliding_window_pattern": 2,
            "rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 2e5}, SLIDING: {**YARN, "rope_theta": 300.0}},
        },
    ),
    "gemma3-nested-null": (
        "gemma3_text",
        {"sliding_window": 16, "sliding_window_pattern": 2, "rope_parameters": {FULL: None, SLIDING: {"rope_type": "default"}}},
    ),
    "gemma3-nested-longrope": (
        "gemma3_text",
        {
            "sliding_window": 16,
            "sliding_window_pattern": 2,
            "rope_parameters": {FULL: longrope(4, original_max_position_embeddings=64), SLIDING: {"rope_type": "default"}},
        },
    ),
    "gemma3-cap": ("gemma3_text", {"final_logit_softcapping": 1.5, "sliding_window": 2}),
    "gemma3-untied-bias": ("gemma3_text", {"tie_word_embeddings": False, "attention_bias": True, "head_dim": 20, "num_key_value_heads": 1}),
}  # fmt: skip
# Up to 4 times the original length of every scaling, and around the switch of longrope.
PROMPT_LENGTHS = (1, 7, 64, 65, 255)


def config_of(kind: str) -> dict[str, Any]:
    family, fields = KINDS[kind]

    def without(found: dict[str, Any]) -> dict[str, Any]:
        return {key: without(value) if isinstance(value, dict) else value for key, value in found.items() if value is not ...}

    return without({**BASE, "model_type": family, **fields})


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_is_within_the_bound_at_every_layer_and_row(kind: str, tmp_path: Path) -> None:
    config = config_of(kind)
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


# Where a key is silent, not in use or undone by the random weights: the same function by another config.
SAME = [
    {"mistral", "mistral-window-absent", "granite-neutral", "granite-silent"},
    {"qwen2", "qwen2-window-unused", "qwen2-window-above-28"},
    {"phi3", "phi3-eps-absent"},
    {"phi3-longrope", "phi3-su", "phi3-longrope-as-yarn"},
    {"olmo2", "olmo2-eps-absent"},
    {"smollm3", "smollm3-window-unused"},
    {"gemma3-linear", "gemma3-linear-nested"},
]


def test_every_option_is_another_function(tmp_path: Path) -> None:
    """Otherwise one that the reference and the engine both pass over would stand above. Logits of a prompt longer than every window."""
    ids = np.random.default_rng(1).integers(0, 50, 150)
    found: dict[str, NDArray[np.float64]] = {}
    for kind in KINDS:
        folder = tmp_path / kind
        folder.mkdir()
        write_checkpoint(folder, config_of(kind))
        found[kind] = forward(*load_reference(folder), ids)[1][-1]
    for kind, row in found.items():
        for other, other_row in found.items():
            if kind < other:
                apart = np.linalg.norm(row - other_row) / np.linalg.norm(row)
                if any({kind, other} <= same for same in SAME):
                    assert apart < 1e-7, f"{kind} and {other}: {apart}"
                else:
                    assert apart > 5e-6, f"{kind} and {other}: {apart}"


STREAMS = ["qwen3", "phi3", "granite-odd", "olmo2", "smollm3-window", "gemma2", "gemma3"]


@pytest.mark.parametrize("kind", STREAMS)
def test_steering_moves_a_blocks_output_by_scale_times_the_vector(kind: str, tmp_path: Path) -> None:
    """`pre_steer` is what transformers' decoder layer returns: after both additions, whatever norms and multipliers stand around them.
    The embedding's multiplier lies before block 0 and does not touch what is added later."""
    config = config_of(kind)
    write_checkpoint(tmp_path, config)
    engine = _native.Engine(str(tmp_path))
    read, weights = load_reference(tmp_path)
    rng = np.random.default_rng(2)
    ids = rng.integers(0, config["vocab_size"], 80)
    vector = rng.normal(0, 1, (1, config["hidden_size"])).astype(np.float32)
    plain = run(engine, ids)
    for layer in range(engine.layer_count):
        scale = np.float32(1.7)
        steering = [_native.Edit(layer, vector, scale=float(scale))]
        pre = run(engine, ids, point="pre_steer", steering=steering)
        post = run(engine, ids, point="post_steer", steering=steering)
        assert pre.residual is not None and post.residual is not None and plain.residual is not None
        assert np.array_equal(pre.residual[: layer + 1], plain.residual[: layer + 1])
        assert np.array_equal(post.residual[layer], plain.residual[layer] + scale * vector)
        residual, logits = forward(read, weights, ids, {layer: np.float64(scale) * vector[0].astype(np.float64)})
        check_residual(post.residual, residual)
        check_logits(post.logits, logits, engine.layer_count)
        assert relative(post.logits, forward(read, weights, ids)[1]).max() > 1e-3

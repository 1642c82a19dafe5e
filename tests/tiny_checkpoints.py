"""Tiny random checkpoints of every family, as the config says they must be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from reference_numpy import GEMMA, facts


def tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random weights, with norm gains that are not 1 and projections strong enough that position matters."""
    rng = np.random.default_rng(seed)
    f = facts(config)
    hidden, mlp, vocab, dim = f.hidden, config["intermediate_size"], config["vocab_size"], f.head_dim
    gain = 0.0 if f.family in GEMMA else 1.0  # stored without their 1
    weights = {
        "model.embed_tokens.weight": rng.normal(0, 1 / f.embedding_scale if f.family in GEMMA else 1, (vocab, hidden)),
        "model.norm.weight": rng.normal(gain, 0.3, hidden),
    }
    if not f.tied:
        weights["lm_head.weight"] = rng.normal(0, 0.2, (vocab, hidden))
    if f.family == "olmo2":
        norms = ["post_attention_layernorm", "post_feedforward_layernorm"]
    elif f.family in GEMMA:
        norms = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    else:
        norms = ["input_layernorm", "post_attention_layernorm"]
    q, kv = f.heads * dim, f.kv_heads * dim
    # Scores of standard deviation 1.2, whatever they are multiplied by: much larger ones leave one weight of the softmax near 1, and
    # then roundings of 2^-24 in the weights alone move the stream by more than the bound.
    pointing = (1.2 / (dim**0.5 * hidden * f.attention_scale)) ** 0.5
    sizes = {"q_proj": pointing, "k_proj": pointing, "qkv_proj": pointing}
    projections = [("self_attn.q_proj", q, hidden), ("self_attn.k_proj", kv, hidden), ("self_attn.v_proj", kv, hidden)]
    projections += [("self_attn.o_proj", hidden, q)]
    projections += [("mlp.gate_proj", mlp, hidden), ("mlp.up_proj", mlp, hidden), ("mlp.down_proj", hidden, mlp)]
    if f.family == "phi3":
        projections = [("self_attn.qkv_proj", q + 2 * kv, hidden), projections[3], ("mlp.gate_up_proj", 2 * mlp, hidden), projections[6]]
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        for name in norms:
            weights[f"{block}.{name}.weight"] = rng.normal(gain, 0.3, hidden)
        if f.family in ("olmo2", "qwen3", "gemma3_text"):
            whole = f.family == "olmo2"
            weights[f"{block}.self_attn.q_norm.weight"] = rng.normal(gain, 0.3, q if whole else dim)
            weights[f"{block}.self_attn.k_norm.weight"] = rng.normal(gain, 0.3, kv if whole else dim)
        for name, out, width in projections:
            weights[f"{block}.{name}.weight"] = rng.normal(0, sizes.get(name.split(".")[1], 0.2), (out, width))
            always = f.family == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj")
            if always or config.get("attention_bias" if "attn" in name else "mlp_bias"):
                weights[f"{block}.{name}.bias"] = rng.normal(0, 0.5, out)
    return {name: w.astype(np.float32) for name, w in weights.items()}


def write_checkpoint(folder: Path, config: Mapping[str, Any], seed: int = 0) -> None:
    safetensors.numpy.save_file(tensors(config, seed), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))

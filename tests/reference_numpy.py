"""A Llama forward pass in float64, slow and obvious: what the engine is judged by where no other reference is at hand.

Everything is float64 but the rotary angles. Their inverse frequencies are float32, and so is the product with the position: that is how
checkpoints are trained and served, so it is part of the definition. Sines and cosines of those angles are float64 again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def load_weights(folder: Path) -> dict[str, F64]:
    """All tensors of all `*.safetensors` in `folder`, widened exactly."""
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in safetensors.deserialize(path.read_bytes()):
            data = bytes(tensor["data"])
            if tensor["dtype"] == "BF16":
                values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
            else:
                values = np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[tensor["dtype"]])
            weights[name] = values.reshape(tensor["shape"]).astype(np.float64)
    return weights


def rope(config: Mapping[str, Any], head_dim: int, length: int) -> tuple[NDArray[np.float32], float]:
    """Inverse frequencies `[head_dim / 2]`, and what sine and cosine are multiplied by."""
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = said.get("rope_type", said.get("type", "default"))
    theta = said.get("rope_theta", config.get("rope_theta", 10000.0))
    context = config.get("max_position_embeddings", 2048)
    original = said.get("original_max_position_embeddings", context)
    factor = np.float32(said.get("factor", 1.0))
    one = np.float32(1.0)

    def powers(theta: float) -> NDArray[np.float32]:
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        return np.power(np.float64(np.float32(theta)), exponents.astype(np.float64)).astype(np.float32)

    if kind == "linear":
        return one / powers(theta) / factor, 1.0
    if kind == "dynamic" and length > context:
        # transformers keeps the length in a float32 tensor, so theta grows in float32.
        growth = factor * np.float32(length) / np.float32(context) - np.float32(said["factor"] - 1)
        grown = np.float32(np.float64(growth) ** np.float64(np.float32(head_dim / (head_dim - 2))))
        return one / powers(np.float32(theta) * grown), 1.0
    if kind == "llama3":
        inverse = one / powers(theta)
        wavelength = np.float32(2 * math.pi) / inverse.astype(np.float64)
        low, high = said["low_freq_factor"], said["high_freq_factor"]
        smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
        return ((1 - smooth) * (inverse / factor) + smooth * inverse).astype(np.float32), 1.0
    if kind == "yarn":

        def pair(turns: float) -> float:
            return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair(said.get("beta_fast", 32)), pair(said.get("beta_slow", 1))
        if said.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = np.clip((np.arange(head_dim // 2) - low) / ((high - low) or 0.001), 0, 1)
        inverse = (1 / powers(theta).astype(np.float64)) * (ramp / float(factor) + (1 - ramp))

        def scale(mscale: float) -> float:
            return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

        # DeepSeek's extension: a ratio of two scales, where both are given.
        both = said.get("mscale") and said.get("mscale_all_dim")
        default = scale(said["mscale"]) / scale(said["mscale_all_dim"]) if both else scale(1)
        return inverse.astype(np.float32), float(np.float32(said.get("attention_factor") or default))
    return one / powers(theta), 1.0


def activation(name: str, x: F64) -> F64:
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":
        return x / 2 * np.vectorize(math.erfc)(-x / math.sqrt(2))
    assert name == "gelu_pytorch_tanh"
    return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def rms_norm(x: F64, gain: F64, eps: float) -> F64:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * gain


def llama(
    config: Mapping[str, Any], weights: Mapping[str, F64], ids: Sequence[int], steering: Mapping[int, F64] | None = None
) -> tuple[F64, F64]:
    """The residual stream after every block `[layers, tokens, hidden]`, `steering[layer]` added there; the logits `[tokens, vocab]`."""
    hidden, heads, eps = config["hidden_size"], config["num_attention_heads"], config["rms_norm_eps"]
    kv_heads = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or hidden // heads
    count = len(ids)
    inverse, attention_factor = rope(config, dim, count)
    angles = (np.arange(count, dtype=np.float32)[:, None] * inverse).astype(np.float64)
    cos, sin = (np.tile(f(angles) * attention_factor, 2)[:, None] for f in (np.cos, np.sin))
    causal = np.where(np.tri(count, dtype=bool), 0.0, -np.inf)

    def linear(name: str, x: F64) -> F64:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def rotate(x: F64) -> F64:
        low, high = np.split(x, 2, axis=-1)
        return x * cos + np.concatenate([-high, low], axis=-1) * sin

    x = weights["model.embed_tokens.weight"][list(ids)]
    residual = []
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        normed = rms_norm(x, weights[f"{block}.input_layernorm.weight"], eps)
        q = rotate(linear(f"{block}.self_attn.q_proj", normed).reshape(count, heads, dim))
        k = rotate(linear(f"{block}.self_attn.k_proj", normed).reshape(count, kv_heads, dim))
        v = linear(f"{block}.self_attn.v_proj", normed).reshape(count, kv_heads, dim)
        k, v = (np.repeat(t, heads // kv_heads, axis=1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim) + causal
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(axis=-1, keepdims=True), v)
        x = x + linear(f"{block}.self_attn.o_proj", mixed.reshape(count, -1))
        normed = rms_norm(x, weights[f"{block}.post_attention_layernorm.weight"], eps)
        gate = activation(config["hidden_act"], linear(f"{block}.mlp.gate_proj", normed))
        x = x + linear(f"{block}.mlp.down_proj", gate * linear(f"{block}.mlp.up_proj", normed))
        if steering is not None and layer in steering:
            x = x + steering[layer]
        residual.append(x)
    head = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    return np.stack(residual), linear(head, rms_norm(x, weights["model.norm.weight"], eps))


def load(folder: Path) -> tuple[dict[str, Any], dict[str, F64]]:
    return json.loads((folder / "config.json").read_text()), load_weights(folder)

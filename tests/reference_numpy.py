"""A forward pass of every family in float64, slow and obvious: what the engine is judged by where no other reference is at hand.

Written from transformers 5.24 (`models/<family>/configuration_*.py` and `modeling_*.py`, `modeling_rope_utils.py`), not from the engine.

Everything is float64 but the rotary angles. Their inverse frequencies are float32, and so is the product with the position: that is how
checkpoints are trained and served, so it is part of the definition. Sines and cosines of those angles are float64 again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

F64 = NDArray[np.float64]
GEMMA = ("gemma2", "gemma3_text")


@dataclass(frozen=True)
class Facts:
    """What a config says, with the defaults of the family's config class where it is silent."""

    family: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    activation: str
    tied: bool
    # Of each layer: positions it looks back over, its own among them (None: all); its rope parameters (None: not rotated).
    windows: tuple[int | None, ...]
    ropes: tuple[Mapping[str, Any] | None, ...]
    context: int
    attention_scale: float
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    score_cap: float | None = None
    logit_cap: float | None = None


def facts(config: Mapping[str, Any]) -> Facts:
    family = config["model_type"]
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]

    def said(key: str, default: Any) -> Any:
        """`default` where the key is absent; null stays None."""
        return config.get(key, default)

    def given(key: str, default: Any) -> Any:
        """`default` where the key is absent or null."""
        found = config.get(key)
        return default if found is None else found

    kv_heads = said(
        "num_key_value_heads", {"mistral": 8, "qwen2": 32, "qwen3": 32, "smollm3": 4, "gemma2": 4, "gemma3_text": 4}.get(family)
    )
    head_dim = said("head_dim", {"qwen3": 128, "gemma2": 256, "gemma3_text": 256}.get(family)) or hidden // heads
    contexts = {"mistral": 131072, "qwen2": 32768, "qwen3": 32768, "phi3": 4096, "smollm3": 32768, "gemma2": 8192, "gemma3_text": 131072}
    context = given("max_position_embeddings", contexts.get(family, 2048))

    windows = layer_windows(config)
    plain = rope_parameters(config, context)
    ropes: list[Mapping[str, Any] | None] = [plain["full"]] * layers
    if family == "gemma3_text":
        ropes = [plain["full"] if window is None else plain["local"] for window in windows]
    if family == "smollm3":
        interval = given("no_rope_layer_interval", 4)
        rotated = given("no_rope_layers", [(layer + 1) % interval != 0 for layer in range(layers)])
        ropes = [plain["full"] if rotated[layer] else None for layer in range(layers)]

    scalars: dict[str, Any] = {}
    attention_scale = head_dim**-0.5
    if family == "granite":
        attention_scale = given("attention_multiplier", 1.0)
        scalars = {
            "embedding_scale": given("embedding_multiplier", 1.0),
            "residual_scale": given("residual_multiplier", 1.0),
            "logit_divisor": given("logits_scaling", 1.0),
        }
    if family in GEMMA:
        attention_scale = given("query_pre_attn_scalar", 256) ** -0.5
        scalars = {"embedding_scale": hidden**0.5, "logit_cap": said("final_logit_softcapping", 30.0 if family == "gemma2" else None)}
        if family == "gemma2":
            scalars["score_cap"] = said("attn_logit_softcapping", 50.0)
    return Facts(
        family=family,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=head_dim,
        eps=given("rms_norm_eps", 1e-5 if family in ("olmo2", "phi3") else 1e-6),
        activation=given("hidden_activation", "gelu_pytorch_tanh") if family in GEMMA else given("hidden_act", "silu"),
        tied=given("tie_word_embeddings", family in ("smollm3", *GEMMA)),
        windows=tuple(windows),
        ropes=tuple(ropes),
        context=context,
        attention_scale=attention_scale,
        **scalars,
    )


def layer_windows(config: Mapping[str, Any]) -> list[int | None]:
    """`kv_idx > q_idx - sliding_window`: the window counts the query's own position."""
    family, layers = config["model_type"], range(config["num_hidden_layers"])
    if family not in ("mistral", "phi3", "qwen2", "qwen3", "smollm3", *GEMMA):
        return [None for _ in layers]
    window = config.get("sliding_window", {"phi3": None, "smollm3": None}.get(family, 4096))
    if family in ("mistral", "phi3"):
        return [window for _ in layers]
    if family not in GEMMA and not config.get("use_sliding_window"):
        window = None
    if config.get("layer_types") is not None:
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    elif family in GEMMA:
        pattern = 2 if family == "gemma2" else config.get("sliding_window_pattern", 6)
        slides = [(layer + 1) % pattern != 0 for layer in layers]
    elif family == "smollm3":
        interval = config.get("no_rope_layer_interval", 4)
        rotated = config.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in layers]
        slides = [not rotated[layer] for layer in layers]
    else:
        slides = [layer >= config.get("max_window_layers", 28) for layer in layers]
    return [window if slide else None for slide in slides]


def rope_parameters(config: Mapping[str, Any], context: int) -> dict[str, dict[str, Any]]:
    """As `convert_rope_params_to_dict` and `standardize_rope_params` leave them, `local` for Gemma 3's windowed layers."""
    family = config["model_type"]
    scaling, parameters = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    theta = config.get("rope_theta")
    if family == "gemma3_text":
        full = {"rope_theta": theta or 1e6, **(parameters.get("full_attention") or {}), **scaling}
        local = {"rope_theta": config.get("rope_local_base_freq") or 1e4, **(parameters.get("sliding_attention") or {})}
    else:
        full = {"rope_theta": theta or (2e6 if family == "smollm3" else 1e4), **(scaling or parameters)}
        local = {}
    for found in (full, local):
        found.setdefault("rope_type", found.get("type", "default"))
        if family == "phi3":
            found.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
            if found["rope_type"] in ("su", "yarn"):
                found["rope_type"] = "longrope"
            found["original_max_position_embeddings"] = config.get("original_max_position_embeddings", 4096)
        elif config.get("original_max_position_embeddings") is not None:
            found["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        else:
            found.setdefault("original_max_position_embeddings", context)
    return {"full": full, "local": local}


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


def rope(said: Mapping[str, Any], head_dim: int, context: int, length: int) -> tuple[NDArray[np.float32], float]:
    """Inverse frequencies `[rotated / 2]`, and what sine and cosine are multiplied by."""
    head_dim = int(head_dim * said.get("partial_rotary_factor", 1.0))
    kind, theta, original = said["rope_type"], said["rope_theta"], said["original_max_position_embeddings"]
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
    if kind == "longrope":
        ratio = said.get("factor") or context / original
        derived = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
        factors = np.array(said["long_factor" if length > original else "short_factor"], np.float32)
        return one / (factors * powers(theta)), float(np.float32(said.get("attention_factor") or derived))
    assert kind in ("default", "dynamic"), kind
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


def forward(
    config: Mapping[str, Any], weights: Mapping[str, F64], ids: Sequence[int], steering: Mapping[int, F64] | None = None
) -> tuple[F64, F64]:
    """The residual stream after every block `[layers, tokens, hidden]`, `steering[layer]` added there; the logits `[tokens, vocab]`.

    A block's output is what its decoder layer returns: `x` after both additions.
    """
    f = facts(config)
    count, group = len(ids), f.heads // f.kv_heads
    distance = np.arange(count)[:, None] - np.arange(count)

    def linear(name: str, x: F64) -> F64:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def norm(name: str, x: F64) -> F64:
        gain = weights[f"{name}.weight"]
        return rms_norm(x, 1 + gain if f.family in GEMMA else gain, f.eps)

    def rotate(x: F64, said: Mapping[str, Any]) -> F64:
        inverse, factor = rope(said, f.head_dim, f.context, count)
        angles = (np.arange(count, dtype=np.float32)[:, None] * inverse).astype(np.float64)
        cos, sin = (np.tile(function(angles) * factor, 2)[:, None] for function in (np.cos, np.sin))
        turned, kept = np.split(x, [2 * len(inverse)], axis=-1)
        low, high = np.split(turned, 2, axis=-1)
        return np.concatenate([turned * cos + np.concatenate([-high, low], axis=-1) * sin, kept], axis=-1)

    def attention(block: str, layer: int, x: F64) -> F64:
        if f.family == "phi3":
            q, k, v = np.split(linear(f"{block}.qkv_proj", x), [f.heads * f.head_dim, (f.heads + f.kv_heads) * f.head_dim], axis=-1)
        else:
            q, k, v = (linear(f"{block}.{name}_proj", x) for name in "qkv")
        if f.family == "olmo2":  # over all heads together
            q, k = norm(f"{block}.q_norm", q), norm(f"{block}.k_norm", k)
        q, k, v = (t.reshape(count, -1, f.head_dim) for t in (q, k, v))
        if f.family in ("qwen3", "gemma3_text"):  # over each head
            q, k = norm(f"{block}.q_norm", q), norm(f"{block}.k_norm", k)
        said = f.ropes[layer]
        if said is not None:
            q, k = rotate(q, said), rotate(k, said)
        k, v = (np.repeat(t, group, axis=1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * f.attention_scale
        if f.score_cap is not None:
            scores = f.score_cap * np.tanh(scores / f.score_cap)
        window = f.windows[layer] or count
        scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(axis=-1, keepdims=True), v)
        return linear(f"{block}.o_proj", mixed.reshape(count, -1))

    def mlp(block: str, x: F64) -> F64:
        if f.family == "phi3":
            gate, up = np.split(linear(f"{block}.gate_up_proj", x), 2, axis=-1)
        else:
            gate, up = linear(f"{block}.gate_proj", x), linear(f"{block}.up_proj", x)
        return linear(f"{block}.down_proj", activation(f.activation, gate) * up)

    x = weights["model.embed_tokens.weight"][list(ids)] * f.embedding_scale
    residual = []
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        if f.family == "olmo2":
            x = x + norm(f"{block}.post_attention_layernorm", attention(f"{block}.self_attn", layer, x))
            x = x + norm(f"{block}.post_feedforward_layernorm", mlp(f"{block}.mlp", x))
        elif f.family in GEMMA:
            added = attention(f"{block}.self_attn", layer, norm(f"{block}.input_layernorm", x))
            x = x + norm(f"{block}.post_attention_layernorm", added)
            added = mlp(f"{block}.mlp", norm(f"{block}.pre_feedforward_layernorm", x))
            x = x + norm(f"{block}.post_feedforward_layernorm", added)
        else:
            x = x + attention(f"{block}.self_attn", layer, norm(f"{block}.input_layernorm", x)) * f.residual_scale
            x = x + mlp(f"{block}.mlp", norm(f"{block}.post_attention_layernorm", x)) * f.residual_scale
        if steering is not None and layer in steering:
            x = x + steering[layer]
        residual.append(x)
    logits = linear("model.embed_tokens" if f.tied else "lm_head", norm("model.norm", x)) / f.logit_divisor
    if f.logit_cap is not None:
        logits = f.logit_cap * np.tanh(logits / f.logit_cap)
    return np.stack(residual), logits


def load(folder: Path) -> tuple[dict[str, Any], dict[str, F64]]:
    return json.loads((folder / "config.json").read_text()), load_weights(folder)

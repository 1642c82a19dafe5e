"""A Llama checkpoint as GGUF for llama.cpp, the same weights: python -m benchmarks.to_gguf MODEL_DIR OUT.gguf f32|bf16

Needs numpy and gguf. No tokenizer goes in: the peers are given token ids. `bf16` wants weights stored so; nothing is rounded.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found,unused-ignore]
import numpy as np
from numpy.typing import NDArray

OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
STORED: dict[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # NumPy has no bf16: its bits


def convert(folder: Path, out: Path, dtype: str) -> None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    writer = gguf.GGUFWriter(out, "llama")
    write_config(writer, config, kv_heads, dtype)
    for name, stored, values in tensors(folder):
        target = gguf_name(name)
        values = interleave(values, heads if ".q_proj." in name else kv_heads) if ".q_proj." in name or ".k_proj." in name else values
        if dtype == "f32" or values.ndim == 1:  # llama.cpp wants norms in float32
            writer.add_tensor(target, widen(values, stored))
        elif stored == "BF16":
            writer.add_tensor(target, np.ascontiguousarray(values).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            raise SystemExit(f"{name} is stored as {stored}: bf16 would round it")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_config(writer: Any, config: dict[str, Any], kv_heads: int, dtype: str) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta") or rope.get("rope_theta", 10000.0)
    writer.add_name("benchmark")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if dtype == "f32" else gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(theta, head_dim, rope))
    elif kind != "default":
        raise SystemExit(f"rope scaling {kind} is not written")


def rope_factors(theta: float, head_dim: int, rope: dict[str, Any]) -> NDArray[np.float32]:
    """What each frequency of Llama 3's scaling is divided by."""
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = original / (2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth), np.float32)


def tensors(folder: Path) -> Iterator[tuple[str, str, NDArray[Any]]]:
    """Name, stored dtype, and the values (of bf16 the bits), mapped."""
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        data = np.memmap(path, np.uint8, "r", offset=8 + size)
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                yield name, entry["dtype"], np.frombuffer(data[start:end], STORED[entry["dtype"]]).reshape(entry["shape"])


def gguf_name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{BLOCK[part]}.{kind}"


def interleave(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Hugging Face keeps the two halves of a head apart, llama.cpp turns neighbours."""
    return np.reshape(rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2), rows.shape)


def widen(values: NDArray[Any], stored: str) -> NDArray[np.float32]:
    if stored == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(values, dtype=np.float32)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[3] not in ("f32", "bf16"):
        sys.exit(__doc__)
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])

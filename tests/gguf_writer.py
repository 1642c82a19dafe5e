"""GGUF files from tensors and a config as transformers has them, with the `gguf` package: what llama.cpp's converter does, in short.

Names come from the package's own map, so that the tests do not lean on the tables under test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

PERMUTED = ("llama", "granite", "smollm3")
Tensors = Mapping[str, NDArray[np.float32]]


def write_gguf(
    path: Path,
    arch: str,
    config: Mapping[str, Any],
    tensors: Tensors,
    *,
    matrices: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    keys: Mapping[str, Any] | None = None,
    tokens: Sequence[str] = (),
    split: int = 0,
    raw: Mapping[str, NDArray[np.uint8]] | None = None,
) -> Path:
    """Vectors are F32, matrices of type `matrices`. keys: more, by their names after the architecture's; they replace those that follow
    from the config. split: tensors in a file. raw: matrices in blocks, as they lie in the file."""
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if "rope.dimension_count" not in (keys or {}):
        writer.add_rope_dimension_count(head_dim)
    if "bos_token_id" in config:
        writer.add_bos_token_id(config["bos_token_id"])
        writer.add_eos_token_id(config["eos_token_id"])
    for key, value in (keys or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"{arch}.{key}", value)
    if tokens:
        writer.add_token_list(tokens)
        writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))

    enum = next(known for known, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(enum, config["num_hidden_layers"])
    for name, values in tensors.items():
        stored = values
        if arch in PERMUTED and ".q_proj." in name:
            stored = permuted(values, heads)
        if arch in PERMUTED and ".k_proj." in name:
            stored = permuted(values, kv_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            stored = values + np.float32(1)
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        kind = matrices if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        blocks = None if raw is None else raw.get(name)
        writer.add_tensor(found, gguf.quants.quantize(np.ascontiguousarray(stored), kind) if blocks is None else blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """`LlamaModel.permute` of llama.cpp's converter."""
    rows = values.shape[0]
    return values.reshape(heads, 2, rows // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)

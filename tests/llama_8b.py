"""A checkpoint that a client takes for Llama-3.1-8B: its name, its Layers, hidden size, vocabulary and context, and the ids that its
tokenizer gives to the words of the guides. Between them are narrow blocks of random weights, and an embedding that is a hole but for the
tokens of those words: 85 MB on disk, of the 2 GB that its files claim, on file systems that keep holes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

NAME = "meta-llama/Llama-3.1-8B"
COMMIT = "d04e592bb4f6aa9cfee91e2e20afa771667e1d4b"
VOCAB, HIDDEN, LAYERS = 128_256, 4096, 32
HEADS, KV_HEADS, HEAD_DIM, MLP = 4, 2, 8, 64
BOS, EOS = 128_000, 128_001
# As in Llama 3; a space is Ġ. The ids of bytes and of beginnings of words are made up.
WORDS = {"The": 791, "Ġsky": 13180, "Ġis": 374, "Ġcapital": 6864, "Ġof": 315, "ĠFrance": 9822, "Ġthe": 279, "Ġa": 264, "Ġlimit": 4017}
BYTES, BEGINNINGS = 100_000, 110_000

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131_072,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "bfloat16",
}


def write_llama_8b(cache: Path) -> Path:
    """Write it into a folder laid out as a Hugging Face cache; where it is there."""
    folder = cache / f"models--{NAME.replace('/', '--')}" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    vocab, merges = _vocabulary()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(vocab, merges)))
    rng = np.random.default_rng(0)
    # Likely tokens are those that have a row in both tables. The rest has zeros, and a chance of exp(-20).
    rows = sorted({*WORDS.values(), *range(BYTES, BYTES + 48), BOS})
    with (folder / "embedding.safetensors").open("wb") as file:
        _write_table(file, "model.embed_tokens.weight", rows, rng, 0.02)
    with (folder / "head.safetensors").open("wb") as file:
        _write_table(file, "lm_head.weight", rows, rng, 0.2)
    with (folder / "blocks.safetensors").open("wb") as file:
        _write_blocks(file, rng)
    names = {"model.embed_tokens.weight": "embedding.safetensors", "lm_head.weight": "head.safetensors"}
    names |= dict.fromkeys(_block_shapes(), "blocks.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def _vocabulary() -> tuple[dict[str, int], list[list[str]]]:
    """Every byte, and the words, each put together from left to right."""
    vocab = {byte: BYTES + index for index, byte in enumerate(sorted(ByteLevel.alphabet()))} | WORDS
    merges: list[list[str]] = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            vocab.setdefault(word[:end], BEGINNINGS + len(vocab))
            if [word[: end - 1], word[end - 1]] not in merges:
                merges.append([word[: end - 1], word[end - 1]])
    return vocab, merges


def _tokenizer(vocab: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    special = {BOS: "<|begin_of_text|>", EOS: "<|end_of_text|>"}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id, "content": content, **plain} for id, content in special.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": special[BOS], "type_id": 0}}, sequence],
            "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {special[BOS]: {"id": special[BOS], "ids": [BOS], "tokens": [special[BOS]]}},
        },
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {**vocab, **{content: id for id, content in special.items()}}, "merges": merges},
    }


def _write_header(file: BinaryIO, shapes: dict[str, tuple[int, ...]]) -> None:
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def _write_table(file: BinaryIO, name: str, rows: list[int], rng: np.random.Generator, scale: float) -> None:
    """`[vocab, hidden]`, of which only `rows` are written; the rest is a hole, which reads as zeros."""
    _write_header(file, {name: (VOCAB, HIDDEN)})
    start = file.tell()
    for row in rows:
        file.seek(start + 2 * HIDDEN * row)
        file.write(_draw(rng, HIDDEN, scale))
    file.truncate(start + 2 * HIDDEN * VOCAB)


def _write_blocks(file: BinaryIO, rng: np.random.Generator) -> None:
    shapes = _block_shapes()
    _write_header(file, shapes)
    for name, shape in shapes.items():
        # What a block adds is as small as what the embedding holds, so that the numbers of the first Layers are close to 0.
        scale = 0.002 if "o_proj" in name or "down_proj" in name else 0.02
        file.write(_to_bfloat16(np.ones(shape, np.float32)) if len(shape) == 1 else _draw(rng, int(np.prod(shape)), scale))


def _block_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + f"{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes[prefix + "self_attn.q_proj.weight"] = (HEADS * HEAD_DIM, HIDDEN)
        shapes |= {prefix + f"self_attn.{name}_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN) for name in "kv"}
        shapes[prefix + "self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes |= {prefix + f"mlp.{name}_proj.weight": (MLP, HIDDEN) for name in ("gate", "up")}
        shapes[prefix + "mlp.down_proj.weight"] = (HIDDEN, MLP)
    return shapes


def _draw(rng: np.random.Generator, count: int, scale: float) -> bytes:
    return _to_bfloat16(rng.standard_normal(count, np.float32) * np.float32(scale))


def _to_bfloat16(values: NDArray[np.float32]) -> bytes:
    """The upper halves; that this rounds towards zero does not matter to made-up weights."""
    return (values.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()

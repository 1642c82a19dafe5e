"""Shapes of well-known checkpoints, and where each tensor of one lies in its files. Needs nothing but Python."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.inputs import WORDS

BF16 = 2  # bytes
SPECIAL = 256  # the last ids of a vocabulary, as in Llama 3
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Shape:
    """A Llama with the rotation of Llama 3. shard_bytes: a file is closed before it would hold more, as on the Hub."""

    name: str
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    tied: bool
    rope_factor: float
    shard_bytes: int = 5_000_000_000

    @property
    def bos(self) -> int:
        return self.vocab - SPECIAL

    @property
    def eos(self) -> list[int]:
        """`<|end_of_text|>`, `<|eom_id|>`, `<|eot_id|>`"""
        return [self.bos + 1, self.bos + 8, self.bos + 9]

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "bos_token_id": self.bos,
            "eos_token_id": self.eos,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "max_position_embeddings": self.context,
            "mlp_bias": False,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": self.rope_factor,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": self.context // 16,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and `[out, in]`, in the order of the model."""
        hidden, mlp, heads, kv_heads = self.hidden, self.mlp, self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, hidden)
        for layer in range(self.layers):
            block = f"model.layers.{layer}"
            yield f"{block}.self_attn.q_proj.weight", (heads, hidden)
            yield f"{block}.self_attn.k_proj.weight", (kv_heads, hidden)
            yield f"{block}.self_attn.v_proj.weight", (kv_heads, hidden)
            yield f"{block}.self_attn.o_proj.weight", (hidden, heads)
            yield f"{block}.mlp.gate_proj.weight", (mlp, hidden)
            yield f"{block}.mlp.up_proj.weight", (mlp, hidden)
            yield f"{block}.mlp.down_proj.weight", (hidden, mlp)
            yield f"{block}.input_layernorm.weight", (hidden,)
            yield f"{block}.post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, hidden)

    def weights(self) -> int:
        return sum(math.prod(shape) for _, shape in self.tensors())

    def tokenizer(self) -> dict[str, Any]:
        """Whole words in lower case, those of the made-up prompts spread over the vocabulary, so that their rows of the embedding are
        as far apart as a real text's; every id has a word."""
        step = self.bos // (len(WORDS) + 2)
        words = {step * (index + 1): word for index, word in enumerate(dict.fromkeys([*WORDS, "."]))}
        special = {0: "<unk>", self.bos: "<|begin_of_text|>", **{id: f"<|end_{id}|>" for id in self.eos}}
        names = [special.get(id) or words.get(id) or f"t{id}" for id in range(self.vocab)]
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": id, "content": content, **plain} for id, content in special.items()],
            "normalizer": {"type": "Lowercase"},
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": {name: id for id, name in enumerate(names)}, "unk_token": "<unk>"},
        }


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072, tied=False, rope_factor=8.0),
        Shape("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256, 131072, tied=True, rope_factor=32.0),
        Shape("tiny", 4, 64, 128, 4, 2, 16, 512, 512, tied=False, rope_factor=8.0, shard_bytes=200_000),  # to try the benchmark itself
    )
}


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: `bytes` from the start of its file."""

    name: str
    shape: tuple[int, ...]
    bytes: range


@dataclass(frozen=True)
class Shard:
    name: str
    header: bytes
    tensors: list[Tensor]

    @property
    def size(self) -> int:
        return self.tensors[-1].bytes.stop


def shards(shape: Shape) -> list[Shard]:
    """The files of the checkpoint: filled in the order of the model, tensors by name inside, as on the Hub."""
    groups: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    full = 0
    for name, sizes in shape.tensors():
        size = BF16 * math.prod(sizes)
        if groups[-1] and full + size > shape.shard_bytes:
            groups.append([])
            full = 0
        groups[-1].append((name, sizes))
        full += size
    count = len(groups)
    names = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)] if count > 1 else ["model.safetensors"]
    return [_shard(name, sorted(group)) for name, group in zip(names, groups, strict=True)]


def _shard(name: str, tensors: list[tuple[str, tuple[int, ...]]]) -> Shard:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor, sizes in tensors:
        end = offset + BF16 * math.prod(sizes)
        entries[tensor] = {"dtype": "BF16", "shape": list(sizes), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return Shard(name, header, tensors_of(header))


def tensors_of(header: bytes) -> list[Tensor]:
    """The tensors a safetensors header names, in the order of their bytes."""
    found = [
        Tensor(name, tuple(entry["shape"]), range(len(header) + entry["data_offsets"][0], len(header) + entry["data_offsets"][1]))
        for name, entry in json.loads(header[8:]).items()
        if name != "__metadata__"
    ]
    return sorted(found, key=lambda tensor: tensor.bytes.start)


def small_files(shape: Shape) -> dict[str, str]:
    """Everything but the weights: name -> text."""
    files = {"config.json": json.dumps(shape.config(), indent=2), "tokenizer.json": json.dumps(shape.tokenizer(), indent=0)}
    parts = shards(shape)
    if len(parts) > 1:
        where = {tensor.name: shard.name for shard in parts for tensor in shard.tensors}
        index = {"metadata": {"total_size": BF16 * shape.weights()}, "weight_map": dict(sorted(where.items()))}
        files[INDEX] = json.dumps(index, indent=2)
    return {name: text + "\n" for name, text in files.items()}


def is_complete(folder: Path, shape: Shape) -> bool:
    """Whether `folder` holds this checkpoint: the small files as they would be written, weights of the right size."""
    try:
        return all((folder / name).read_text() == text for name, text in small_files(shape).items()) and all(
            (folder / shard.name).stat().st_size == shard.size for shard in shards(shape)
        )
    except FileNotFoundError:
        return False


def group(name: str) -> str:
    """The part of the model a tensor belongs to: `embedding`, `layer 7`, `norm`, `head`."""
    parts = name.split(".")
    if parts[1] == "layers":
        return f"layer {parts[2]}"
    return {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}[".".join(parts[:-1])]

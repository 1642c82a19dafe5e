"""The toy checkpoint: a Llama of 156,608 weights and 67 words, made from a seed, the same bytes on every machine.

Small enough for a test to run it a thousand times, complete enough (four blocks, grouped-query attention, a separate head) to be a
real checkpoint. `fixtures/toy-llama` holds its output; `ster toy-model DIR` writes it from the installed package.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from ster._files import write_folder
from ster._safetensors import safetensors_bytes
from ster.errors import InputError

SEED = 7
HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 4, 4, 2, 16

SPECIAL = ("[UNK]", "<s>", "</s>")
WORDS = tuple(
    """the sea is calm and quiet tonight storm waves crash loud against rocks wind howls water lies still air gentle harbor boat rests
    at anchor night sky clear dark thunder rolls over hills morning light soft warm cold rain falls hard fast slow breeze drifts a in on
    answer question describe evening lake surface mirror like broken churns white foam . , : ?""".split()
)
VOCAB = SPECIAL + WORDS

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(VOCAB),
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

README = """\
# toy-llama

A Llama checkpoint small enough to read: hidden 64, MLP 128, 4 layers, 4 heads over 2 key/value heads, 67 words, float32, 0.6 MB.
It knows nothing; its weights are random. Examples and tests run on it.

`python fixtures/toy-llama/make.py` rebuilds the folder, `ster toy-model DIR` writes the same bytes anywhere. The recipe is
`python/ster/toy.py`: `random.Random(7)`, values drawn one by one with `gauss(0.0, s)`, row-major, stored as float32, in the order
`embed_tokens` (s = 0.02), `lm_head` (s = 0.02), then for every layer `q k v o gate up down` (s = 0.05). Every norm weight is 1.
The files come from the standard library and `numpy.float32` alone, so no library version shows in them.

For `the sea is calm and quiet tonight .` the last token's residual stream begins `0.0711 -0.0236 -0.0592` after block 0 and
`0.1997 0.0344 -0.0405` after block 3.
"""


def tokenizer_json() -> dict[str, object]:
    """`tokenizer.json`: whole words, split at white space and punctuation; no special token is added to a text."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {token: index for index, token in enumerate(VOCAB)}, "unk_token": "[UNK]"},
    }


def tensors() -> dict[str, NDArray[np.float32]]:
    """Every weight by its Hugging Face name, `[out, in]` as stored."""
    random = Random(SEED)

    def draw(out: int, into: int, s: float) -> NDArray[np.float32]:
        return np.array([random.gauss(0.0, s) for _ in range(out * into)], dtype=np.float32).reshape(out, into)

    def block(prefix: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
        yield f"{prefix}.self_attn.q_proj.weight", draw(HEADS * HEAD_DIM, HIDDEN, 0.05)
        yield f"{prefix}.self_attn.k_proj.weight", draw(KV_HEADS * HEAD_DIM, HIDDEN, 0.05)
        yield f"{prefix}.self_attn.v_proj.weight", draw(KV_HEADS * HEAD_DIM, HIDDEN, 0.05)
        yield f"{prefix}.self_attn.o_proj.weight", draw(HIDDEN, HEADS * HEAD_DIM, 0.05)
        yield f"{prefix}.mlp.gate_proj.weight", draw(MLP, HIDDEN, 0.05)
        yield f"{prefix}.mlp.up_proj.weight", draw(MLP, HIDDEN, 0.05)
        yield f"{prefix}.mlp.down_proj.weight", draw(HIDDEN, MLP, 0.05)
        yield f"{prefix}.input_layernorm.weight", np.ones(HIDDEN, np.float32)
        yield f"{prefix}.post_attention_layernorm.weight", np.ones(HIDDEN, np.float32)

    weights = {"model.embed_tokens.weight": draw(len(VOCAB), HIDDEN, 0.02), "lm_head.weight": draw(len(VOCAB), HIDDEN, 0.02)}
    for layer in range(LAYERS):
        weights.update(block(f"model.layers.{layer}"))
    weights["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    return weights


def toy_files() -> dict[str, bytes]:
    """The checkpoint as file name -> content."""
    return {
        "README.md": README.encode(),
        "config.json": (json.dumps(CONFIG, indent=2) + "\n").encode(),
        "model.safetensors": safetensors_bytes(tensors(), {"format": "pt"}),
        "tokenizer.json": (json.dumps(tokenizer_json(), indent=2, ensure_ascii=False) + "\n").encode(),
    }


def write_toy_model(folder: str | os.PathLike[str]) -> Path:
    """Write the toy checkpoint into `folder`, made if it is missing: all of it, or nothing.

    Raises:
        InputError: an empty name.
        FileError: the folder cannot be written, or holds another file of one of these names.
    """
    if not os.fspath(folder):
        raise InputError("the folder must have a name, found an empty one", "`.` is the working directory")
    return write_folder(Path(folder), toy_files())

"""A GGUF file's tokenizer as the files of a model folder: `tokenizer.json` and `tokenizer_config.json`.

The folder that the file was made from is the measure: the same text gives the same ids. What GGUF does not keep is left as it is by
default: of added tokens whether they swallow the white space around them (but for Phi-3's), of SentencePiece its normaliser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ster._files import parse_json
from ster._gguf_splits import Part, splits_of
from ster._gguf_vocabulary import NORMAL, PREFIX, USER_DEFINED, Metadata, Vocabulary, read_merges, read_vocabulary
from ster.errors import CheckpointError

TEMPLATE = "tokenizer.chat_template"
WHOLE = "tokenizer.huggingface.json"
BARE = frozenset({"<unk>", "<s>", "<|endoftext|>"})  # of Phi-3, the added tokens that leave the white space after them alone


def files(metadata: Mapping[str, object]) -> dict[str, bytes]:
    """`tokenizer.json` and `tokenizer_config.json` as bytes, made of `metadata` (keys as in the file).

    Raises:
        CheckpointError: a tokenizer of another kind, a `tokenizer.ggml.pre` that is not known, or anything missing or contradictory;
            it names the key.
    """
    import orjson

    values = Metadata(metadata)
    model = values.text(PREFIX + "model")
    if model not in MODELS:
        raise CheckpointError(
            f"{PREFIX}model is missing: the file has no tokenizer"
            if model is None
            else f'{PREFIX}model is "{model}", which Ster does not read; it reads "gpt2" and "llama"'
        )
    vocabulary = read_vocabulary(values, **DEFAULTS.get(model, {}))
    whole = values.text(WHOLE)
    return {
        "tokenizer.json": orjson.dumps(MODELS[model](values, vocabulary)) if whole is None else _whole(whole),
        "tokenizer_config.json": orjson.dumps(_config(values, vocabulary)),
    }


def _whole(text: str) -> bytes:
    """The model's own tokenizer.json, which a file may hold beside the rest: ggml-org/ggml, docs/gguf.md."""
    try:
        parse_json(text)
        return text.encode()
    except ValueError as error:
        raise CheckpointError(f"{WHOLE} is not JSON: {error}") from None


def _byte_level(values: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """BPE over the letters that stand for bytes. `add_space_prefix` is for SentencePiece: llama.cpp does not read it here either."""
    splits = splits_of(values.text(PREFIX + "pre"))
    merges = read_merges(values, vocabulary.ids)
    if merges is None:
        raise CheckpointError(f"{PREFIX}merges is missing: without them no two bytes become a token")
    model = _bpe(vocabulary, merges, ignore_merges=splits.ignore_merges)
    decoder: Part = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": {"type": "NFC"} if splits.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits.parts},
        "post_processor": _post_processor(values, vocabulary, add_bos=splits.add_bos),
        "decoder": decoder,
        "model": model,
    }


def _sentencepiece(values: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """SentencePiece's BPE, as transformers' LlamaConverter and GemmaConverter make it (5.24, convert_slow_tokenizer.py).

    BOS and the space in front where the file is silent: llama.cpp.
    """
    for key in ("remove_extra_whitespaces", "add_sep_token"):  # no converter writes them for this kind, and nothing here does them
        if values.flag(PREFIX + key):
            raise CheckpointError(f'{PREFIX}{key} is true, which Ster does not do for {PREFIX}model "llama"')
    ids = _with_merged_bytes(vocabulary)
    byte_tokens = [f"<0x{byte:02X}>" in vocabulary.ids for byte in range(0x100)]
    if any(byte_tokens) and not all(byte_tokens):
        raise CheckpointError(f"{PREFIX}tokens has no `<0x{byte_tokens.index(False):02X}>`, but other byte tokens")
    model = _bpe(vocabulary, _merges(values, vocabulary, ids), ids=ids, byte_fallback=any(byte_tokens), fuse_unk=True)
    model["unk_token"] = vocabulary.name(vocabulary.unknown)
    prefix = values.flag(PREFIX + "add_space_prefix") is not False
    escape: Part = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizer = [{"type": "Prepend", "prepend": "▁"}, escape] if prefix else [escape]
    decoder: list[Part] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        decoder.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary, rstrip=_is_phi3(values), spaces=not prefix),
        "normalizer": {"type": "Sequence", "normalizers": normalizer},
        "pre_tokenizer": None,
        "post_processor": _post_processor(values, vocabulary, add_bos=True),
        "decoder": {"type": "Sequence", "decoders": decoder},
        "model": model,
    }


def _bpe(
    vocabulary: Vocabulary,
    merges: list[tuple[str, str]],
    *,
    ids: dict[str, int] | None = None,
    ignore_merges: bool = False,
    byte_fallback: bool = False,
    fuse_unk: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary.ids if ids is None else ids,
        "merges": merges,
    }


def _with_merged_bytes(vocabulary: Vocabulary) -> dict[str, int]:
    """Ids by token, in which `<0x09>` is called `\\t` where only that can lead to longer tokens.

    SentencePiece merges any two neighbours whose sum is a token; here both must be tokens themselves. A byte below 0x80 is nothing but
    its character, so the name changes no other text. GemmaConverter does it for the tab.
    """
    ids = dict(vocabulary.ids)
    text = "".join(token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == NORMAL)
    for letter in sorted(set(text) - ids.keys()):
        name = f"<0x{ord(letter):02X}>"
        if letter < "\x80" and name in ids:
            ids[letter] = ids.pop(name)
    return ids


def _merges(values: Metadata, vocabulary: Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """What may become one token, best first: all halves of all normal tokens, by the token's score, then by ids (transformers'
    `generate_merges`). User-defined tokens are found in the text before that, the others are never made of text.

    Raises:
        CheckpointError: no scores, or all the same, and no `merges` either.
    """
    normal = [index for index, kind in enumerate(vocabulary.types) if kind == NORMAL and len(vocabulary.tokens[index]) > 1]
    scores = vocabulary.scores
    if scores is None or (len(normal) > 1 and np.ptp(scores[normal]) == 0):
        merges = read_merges(values, ids)
        if merges is None:
            how = "missing" if scores is None else "the same for all tokens"
            raise CheckpointError(f"{PREFIX}scores is {how}, and {PREFIX}merges missing: there is no order to merge in")
        return merges
    renamed = ids.keys() - vocabulary.ids.keys()
    parts = {token: index for token, index in ids.items() if vocabulary.types[index] == NORMAL or token in renamed}
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for index in normal:
        token = vocabulary.tokens[index]
        rank = -float(scores[index])
        for end in range(1, len(token)):
            left = token[:end]
            if left in parts:
                right = token[end:]
                if right in parts:
                    ranked.append((rank, index, parts[left], parts[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _added_tokens(vocabulary: Vocabulary, *, rstrip: bool = False, spaces: bool = False) -> list[dict[str, Any]]:
    """Tokens that are found in the text before anything else: the special ones, which decoding leaves out, and the user's.

    rstrip: they swallow the white space behind them. spaces: user-defined tokens with `▁` mean spaces, as in SentencePiece; converters
    write plain spaces for them (llama.cpp, conversion/base.py), but not all did.
    """
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": rstrip and token not in BARE,
            "normalized": spaces and "▁" in token and index not in vocabulary.special,
            "special": index in vocabulary.special,
        }
        for token, index in vocabulary.ids.items()
        if index in vocabulary.special or vocabulary.types[index] == USER_DEFINED
    ]


def _is_phi3(values: Metadata) -> bool:
    """Phi-3's added tokens swallow what follows, such as the line break of its template, and the file does not say so: llama.cpp goes by
    the model's name. Its SentencePiece vocabulary under this architecture is the same model."""
    name = (values.text("general.name") or "").lower()
    return values.text("general.architecture") == "phi3" or "phi-3" in name or "phi3" in name


def _post_processor(values: Metadata, vocabulary: Vocabulary, *, add_bos: bool) -> Part | None:
    """BOS in front of raw text and EOS behind it, as the file says; `add_bos` where it is silent."""
    said = values.flag(PREFIX + "add_bos_token")
    bos = _wanted("bos", vocabulary.bos, add_bos if said is None else said)
    eos = _wanted("eos", vocabulary.eos, bool(values.flag(PREFIX + "add_eos_token")))
    if bos is None and eos is None:
        return None
    used = {vocabulary.tokens[index]: index for index in (bos, eos) if index is not None}

    def special(index: int | None, type_id: int) -> list[Part]:
        return [] if index is None else [{"SpecialToken": {"id": vocabulary.tokens[index], "type_id": type_id}}]

    def around(sequence: str, type_id: int) -> list[Part]:
        return [*special(bos, type_id), {"Sequence": {"id": sequence, "type_id": type_id}}, *special(eos, type_id)]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]} for token, index in used.items()},
    }


def _wanted(name: str, index: int | None, wanted: bool) -> int | None:
    if wanted and index is None:
        raise CheckpointError(f"raw text gets {name.upper()} ({PREFIX}add_{name}_token), but {PREFIX}{name}_token_id is missing")
    return index if wanted else None


def _config(values: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """`tokenizer_config.json`: the named tokens and the chat templates."""
    named = {
        "bos_token": vocabulary.bos,
        "eos_token": vocabulary.eos,
        "unk_token": vocabulary.unknown,
        "pad_token": vocabulary.padding,
    }
    config: dict[str, Any] = {name: vocabulary.tokens[index] for name, index in named.items() if index is not None}
    default = values.text(TEMPLATE)
    templates = {} if default is None else {"default": default}
    for name in [*(values.texts("tokenizer.chat_templates") or []), *values.names(TEMPLATE + ".")]:
        text = values.text(f"{TEMPLATE}.{name}")
        if text is None:
            raise CheckpointError(f"tokenizer.chat_templates names `{name}`, but {TEMPLATE}.{name} is missing")
        templates[name] = text
    if templates.keys() == {"default"}:
        config["chat_template"] = default
    elif templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


MODELS: dict[str, Callable[[Metadata, Vocabulary], dict[str, Any]]] = {"gpt2": _byte_level, "llama": _sentencepiece}
DEFAULTS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}}  # SentencePiece's own ids, where the file names none: llama.cpp

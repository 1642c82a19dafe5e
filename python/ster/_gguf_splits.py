r"""How each `tokenizer.ggml.pre` cuts text into words, as the models' own tokenizer.json say it.

llama.cpp's patterns (src/llama-vocab.cpp) are its own readings of those, for an engine without `(?i:` and with `\s` and case of its own,
and skip normalisation; where the two differ, the model's file counts, so that a GGUF gives the ids of the folder it was made from. A
name of which only llama.cpp's reading is known is not here.
"""

from __future__ import annotations

from dataclasses import dataclass

from ster._gguf_vocabulary import PREFIX
from ster.errors import CheckpointError

Part = dict[str, object]  # a component as tokenizer.json has it

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + TAIL
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + TAIL
QWEN35 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + TAIL
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORD, CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
TEKKEN = rf"{WORD}|{CAPITALS}|\p{{N}}" + SIGNS + TAIL
GPT4O = rf"{WORD}{CONTRACTIONS}?|{CAPITALS}{CONTRACTIONS}?|\p{{N}}{{1,3}}" + SIGNS + TAIL
DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
# Cased letters as deepseek-llm-7b-base spells them out, escaped: some are canonically equal to others, which an editor may put for them.
DEEPSEEK_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386"
    "\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d"
    "\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134"
    "\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
DEEPSEEK_SIGNS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


def _split(pattern: str) -> Part:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(use_regex: bool) -> Part:
    """Bytes as letters; first cut by GPT-2's pattern, which the library has built in, if asked to."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


DIGITS: Part = {"type": "Digits", "individual_digits": True}
GPT2 = (_byte_level(True),)
BYTES = _byte_level(False)


@dataclass(frozen=True)
class Splits:
    """One way to cut text.

    ignore_merges: a word that is a token is that token, whether merges lead there or not. add_bos: raw text begins with BOS where the
    file does not say.
    """

    parts: tuple[Part, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


DIGITS_GPT2 = Splits((DIGITS, *GPT2))
LLAMA3_BYTES = (_split(LLAMA3), BYTES)
QWEN2_NFC = Splits((_split(QWEN2), BYTES), nfc=True)
GPT4O_BYTES = Splits((_split(GPT4O), BYTES))
LLAMA3_BOS = Splits(LLAMA3_BYTES, ignore_merges=True, add_bos=True)

# Names: llama.cpp, convert_hf_to_gguf_update.py, which has the model that each was made for. `transformers` is version 5.24, for what
# its tokenizer classes build. "checked" is ids against llama.cpp's models/ggml-vocab-*.gguf.out, which transformers wrote.
SPLITS: dict[str, Splits] = {
    # transformers, tokenization_gpt2.py; checked. phi-2 has GPT-2's tokenizer with more added tokens.
    "gpt-2": Splits(GPT2),
    "phi-2": Splits(GPT2),
    # transformers, tokenization_gpt_neox.py, which mpt-7b and OLMo-1.7-7B-hf use; mpt checked.
    "mpt": Splits(GPT2, nfc=True),
    "olmo": Splits(GPT2, nfc=True),
    # SmolLM2's tokenizer.json.
    "smollm": DIGITS_GPT2,
    # llama.cpp: `\p{N}`, then GPT-2's pattern, which is what `Digits` and `ByteLevel` do; checked. refact is granite's name as well.
    "starcoder": DIGITS_GPT2,
    "refact": DIGITS_GPT2,
    # transformers, tokenization_cohere.py; checked.
    "command-r": Splits((DIGITS, *GPT2), nfc=True),
    # Meta-Llama-3-8B's tokenizer.json; checked. Its BOS: llama.cpp.
    "llama-bpe": LLAMA3_BOS,
    "llama3": LLAMA3_BOS,
    "llama-v3": LLAMA3_BOS,
    # The name of Llama 3's tokenizer where the conversion saw no BOS (llama.cpp, issue 8650), so of SmolLM3's too. llama.cpp has no
    # `ignore_merges` for it and misses ` Vi\u1ec7t` (its pull request 7193).
    "smaug-bpe": Splits(LLAMA3_BYTES, ignore_merges=True),
    # cl100k_base's: llama.cpp, where the pattern is Llama 3's. OLMo 2, Phi-4 and Granite 4 go by it.
    "dbrx": Splits(LLAMA3_BYTES),
    # transformers, tokenization_qwen2.py and tokenization_qwen3_5.py; checked. The R1 distillations have Qwen2.5's tokenizer.
    "qwen2": QWEN2_NFC,
    "deepseek-r1-qwen": QWEN2_NFC,
    "qwen35": Splits((_split(QWEN35), BYTES), nfc=True),
    # tokenizer.json of Mistral-Nemo-Base-2407 and of Xenova/gpt-4o, as llama.cpp quotes them; for tekken, ignore_merges as transformers
    # has it (integrations/mistral/tokenizer.py) and llama.cpp.
    "tekken": Splits((_split(TEKKEN), BYTES), ignore_merges=True, add_bos=True),
    "gpt-4o": GPT4O_BYTES,
    "llama4": GPT4O_BYTES,
    # llama.cpp, and `Digits` for its `\p{N}` (whole runs in deepseek-llm's, whose tokens are single digits anyway); both checked.
    "deepseek-llm": Splits(
        (
            _split("[\r\n]"),
            _split(f"\\s?[{DEEPSEEK_LETTERS}]+"),
            _split(f"\\s?{DEEPSEEK_SIGNS}+"),
            _split(r"\s+$"),
            _split(DEEPSEEK_CJK),
            DIGITS,
            BYTES,
        )
    ),
    "deepseek-coder": Splits(
        (_split("[\r\n]"), _split(r"\s?\p{L}+"), _split(r"\s?\p{P}+"), _split(DEEPSEEK_CJK), DIGITS, BYTES),
    ),
    # DeepSeek-V3's tokenizer.json.
    "deepseek-v3": Splits((_split(r"\p{N}{1,3}"), _split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"), _split(DEEPSEEK_V3), BYTES)),
    # falcon-7b's tokenizer.json; checked.
    "falcon": Splits(
        (
            {"type": "Punctuation", "behavior": "Contiguous"},
            *GPT2,
            {"type": "Digits", "individual_digits": False},
            _split("[0-9][0-9][0-9]"),
        )
    ),
}


def splits_of(name: str | None) -> Splits:
    """
    Raises:
        CheckpointError: no name; one that is not known; `default`, which llama.cpp has for files that do not say.
    """
    hint = "make the file again with a current convert_hf_to_gguf.py, or use the model's folder, whose tokenizer.json says it"
    if name is None:
        raise CheckpointError(f"{PREFIX}pre is missing: the file does not say how text is cut into words before merging", hint)
    if name not in SPLITS:
        raise CheckpointError(f'{PREFIX}pre is "{name}", which Ster does not know', hint)
    return SPLITS[name]

"""What a GGUF file says of its tokenizer (`tokenizer.ggml.*`), checked, before anything is made of it.

Keys and token types: ggml-org/ggml, docs/gguf.md; what a silent file means: ggml-org/llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ster.errors import CheckpointError, SterWarning

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # gguf-py: TokenType
SPECIAL = frozenset({UNKNOWN, CONTROL})
PREFIX = "tokenizer.ggml."


class Metadata:
    """The values of a file by key, each of the type that its reader expects."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def names(self, prefix: str) -> list[str]:
        """What follows `prefix` in the keys that begin with it."""
        return sorted(key[len(prefix) :] for key in self._values if key.startswith(prefix))

    def text(self, key: str) -> str | None:
        value = self._values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise _wrong(key, "text", value)

    def flag(self, key: str) -> bool | None:
        value = self._values.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise _wrong(key, "true or false", value)

    def integer(self, key: str) -> int | None:
        value = self._values.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise _wrong(key, "an integer", value)

    def texts(self, key: str) -> list[str] | None:
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(map(str.__instancecheck__, value)):
            raise _wrong(key, "a list of text", value)
        return value

    def numbers(self, key: str, kinds: str, noun: str) -> NDArray[Any] | None:
        """A list of numbers as an array; `kinds` are numpy's: `i` signed, `u` unsigned, `f` floating point."""
        value = self._values.get(key)
        if value is None:
            return None
        try:
            array = np.asarray(value)
        except ValueError:  # lists in lists
            raise _wrong(key, f"a list of {noun}", value) from None
        if array.ndim != 1 or (array.dtype.kind not in kinds and array.size):
            raise _wrong(key, f"a list of {noun}", value)
        return array


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, with their types and, of SentencePiece's, scores."""

    tokens: list[str]
    types: list[int]
    scores: NDArray[np.float32] | None
    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None

    @cached_property
    def ids(self) -> dict[str, int]:
        """Ids by token, without the rows that only fill the embedding up.

        Converters call a row without a token `[PAD<id>]` (llama.cpp, conversion/base.py), and an empty string is none either: a
        folder's tokenizer.json does not know such ids, and decodes them to nothing.
        """
        named = {self.bos, self.eos, self.unknown, self.padding}
        return {
            token: index
            for index, token in enumerate(self.tokens)
            if token and (token[:4] != "[PAD" or token != f"[PAD{index}]" or index in named)
        }

    @cached_property
    def special(self) -> set[int]:
        """Control and unknown tokens, and whatever the file names as BOS and EOS: decoding leaves them out."""
        named = {index for index in (self.bos, self.eos) if index is not None}
        return named | {index for index, kind in enumerate(self.types) if kind in SPECIAL}

    def name(self, index: int | None) -> str | None:
        return None if index is None else self.tokens[index]


def read_vocabulary(metadata: Metadata, bos: int | None = None, eos: int | None = None, unknown: int | None = None) -> Vocabulary:
    """The vocabulary; `bos`, `eos` and `unknown` are the ids where the file names none, and are dropped where it has no such token.

    Raises:
        CheckpointError: missing or of the wrong type; lists that differ in length; a token twice; an id without a token.
    """
    key = PREFIX + "tokens"
    tokens = metadata.texts(key)
    if not tokens:
        raise CheckpointError(f"{key} is {'missing' if tokens is None else 'empty'}: the file has no vocabulary")
    _check_text(key, tokens)
    types = metadata.numbers(PREFIX + "token_type", "iu", "integers")
    scores = metadata.numbers(PREFIX + "scores", "fiu", "numbers")
    for name, array in (("token_type", types), ("scores", scores)):
        if array is not None and len(array) != len(tokens):
            raise CheckpointError(f"{PREFIX}{name} must have one entry a token, found {len(array)} for {len(tokens)} tokens")
    if scores is not None and not np.isfinite(scores).all():
        raise CheckpointError(f"{PREFIX}scores has no number for token {int(np.argmin(np.isfinite(scores)))}: {scores.min()}")

    def token_id(key: str, default: int | None = None) -> int | None:
        value = metadata.integer(PREFIX + key)
        if value is None:
            return default if default is not None and default < len(tokens) else None
        if 0 <= value < len(tokens):
            return value
        if value in (-1, 0xFFFF_FFFF):  # LLAMA_TOKEN_NULL: there is none
            return None
        message = f"{PREFIX}{key} is {value}, the vocabulary has tokens 0..{len(tokens) - 1}"
        if key == "padding_token_id":  # nothing here pads, and files name the row that a larger embedding would have had
            warnings.warn(f"{message}: there is no pad token", SterWarning, stacklevel=2)
            return None
        raise CheckpointError(message)

    vocabulary = Vocabulary(
        tokens,
        [NORMAL] * len(tokens) if types is None else types.tolist(),
        None if scores is None else scores.astype(np.float32),
        token_id("bos_token_id", bos),
        token_id("eos_token_id", eos),
        token_id("unknown_token_id", unknown),
        token_id("padding_token_id"),
    )
    _check_distinct(vocabulary)
    return vocabulary


def _check_distinct(vocabulary: Vocabulary) -> None:
    """Two ids with one name could not be told apart; llama.cpp refuses them too."""
    ids = vocabulary.ids
    if len(ids) == len(vocabulary.tokens):
        return
    for index, token in enumerate(vocabulary.tokens):
        if ids.get(token, index) != index:
            raise CheckpointError(f"{PREFIX}tokens has `{token}` twice, as {index} and {ids[token]}")


def _check_text(key: str, texts: list[str]) -> None:
    """Refuse half a surrogate pair, which is no text and in no JSON."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        bad = next(index for index, text in enumerate(texts) if any("\ud800" <= letter <= "\udfff" for letter in text))
        raise CheckpointError(f"{key}[{bad}] is not text: {texts[bad]!r}") from None


def read_merges(metadata: Metadata, ids: Mapping[str, int]) -> list[tuple[str, str]] | None:
    """`tokenizer.ggml.merges` as pairs, all three words of each in the vocabulary; None where the file has none.

    Raises:
        CheckpointError: not `LEFT RIGHT`, or a word without an id.
    """
    key = PREFIX + "merges"
    merges = metadata.texts(key)
    if merges is None:
        return None
    pairs = []
    for index, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not (left in ids and right in ids and left + right in ids):
            raise _bad_merge(f"{key}[{index}]", merge, left, right, ids)
        pairs.append((left, right))
    return pairs


def _bad_merge(where: str, merge: str, left: str, right: str, ids: Mapping[str, int]) -> CheckpointError:
    if not left or not right:
        return CheckpointError(f"{where} must be two tokens with a space between them, found {merge!r}")
    bad = next(word for word in (left, right, left + right) if word not in ids)
    return CheckpointError(f"{where} is {merge!r}, but {bad!r} is not in {PREFIX}tokens")


def _wrong(key: str, expected: str, value: object) -> CheckpointError:
    found = repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__
    return CheckpointError(f"{key} must be {expected}, found {found if len(found) < 60 else type(value).__name__}")

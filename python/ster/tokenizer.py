"""Text -> token ids -> text, as `tokenizer.json` says and nothing else.

Raw text gets the special tokens of the tokenizer's post-processor, text out of a chat template none: there is never a second BOS
that the user did not type. Special tokens typed in a prompt (`<|eot_id|>`) are read as special, as in transformers.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from ster.checkpoint import TOKENIZER, Checkpoint
from ster.errors import CheckpointError, FileError, InputError, SterError, SterWarning

if TYPE_CHECKING:
    import tokenizers

T = TypeVar("T")

KEEPING = ("ByteLevel", "Digits", "Split")  # pre-tokenisers that cut text and drop none of it, unless they are told to
NFC_SHRINKS = 3  # canonical decomposition makes UTF-8 at most three times as long: unicode.org/faq/normalization.html

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """`tokenizer.json` without its padding and truncation."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()

    @staticmethod
    def load(checkpoint: Checkpoint) -> Tokenizer:
        """
        Raises:
            CheckpointError: the file is not a tokenizer.
        """
        import tokenizers

        path = checkpoint.path / TOKENIZER
        refuse = lambda cause: CheckpointError(f"failed to read {path}: {cause}")  # noqa: E731
        with contextlib.suppress(Exception):  # bytes take a tenth less than text; what is wrong with the file, reading it as text says
            return _guard(lambda: Tokenizer(tokenizers.Tokenizer.from_buffer(checkpoint.read_bytes(TOKENIZER))), refuse)
        try:
            text = checkpoint.read_text(TOKENIZER)  # not from_file, which takes no path that is not UTF-8
        except FileError as error:
            raise CheckpointError(error.message, error.hint) from None
        return _guard(lambda: Tokenizer(tokenizers.Tokenizer.from_str(text)), refuse)

    def encode(self, text: str, *, special_tokens: bool = True, name: str | None = None, aside: bool = False) -> list[int]:
        """`text` -> ids, with the special tokens of the post-processor unless told otherwise.

        One text at a time: `encode_batch` starts threads that outlive it and make a later fork complain, to save milliseconds.

        name: what refusals call the text. aside: leave the GIL, which only `encode_batch` does; with `TOKENIZERS_PARALLELISM=false` in the
        environment it starts no threads.

        Raises:
            InputError: the tokenizer failed.
        """
        refuse = lambda cause: InputError(f"tokenizer.json failed on {name or 'the prompt'}: {cause}")  # noqa: E731

        def work() -> list[int]:
            if aside:
                ids: list[int] = self._tokenizer.encode_batch([text], add_special_tokens=special_tokens)[0].ids
            else:
                ids = self._tokenizer.encode(text, add_special_tokens=special_tokens).ids
            return ids

        return _guard(work, refuse)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Ids -> text, special tokens left out unless told otherwise.

        Raises:
            InputError: something that is no token id, or the tokenizer failed.
        """
        refuse = lambda cause: InputError(f"tokenizer.json failed to decode token ids: {cause}")  # noqa: E731
        return _guard(lambda: str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)), refuse)

    def piece(self, token_id: int) -> str:
        """One token as a person would read it: ` sea`; its name in the vocabulary where it is part of a character."""
        text = self.decode([token_id], skip_special=False)
        if text and "\ufffd" not in text:
            return text
        name: str | None = self._tokenizer.id_to_token(token_id)
        return text if name is None else name

    def id_of(self, token: str) -> int | None:
        """The id of a token by its exact name."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    @cached_property
    def size(self) -> int:
        """One more than the largest id, which is the number of tokens only if the ids have no holes."""
        tokens = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        if None not in map(self._tokenizer.id_to_token, range(tokens)):  # a third of the time of get_vocab
            return tokens
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def longest_token(self) -> int | None:
        """Bytes of text (in UTF-8, without `dropped_bytes`) that no token stands for more of: n tokens are at most n times as many bytes.
        None where that cannot be told, because something may drop text or make it shorter on its way to the vocabulary."""
        import tokenizers

        tokenizer, added = self._tokenizer, self._tokenizer.get_added_tokens_decoder().values()
        words = tokenizer.get_vocab(with_added_tokens=False)
        normalizer, splits = _parts(tokenizer.normalizer), _parts(tokenizer.pre_tokenizer)
        sound = (
            isinstance(tokenizer.model, tokenizers.models.BPE)
            and all(part.get("type") == "NFC" for part in normalizer)
            and all(part.get("type") in KEEPING and part.get("behavior") != "Removed" for part in splits)
            and any(part.get("type") == "ByteLevel" for part in splits)
            and not (normalizer and self.dropped_bytes)
            and not any(token.lstrip or token.rstrip for token in added)
        )
        if not sound:
            return None
        longest = max(*map(len, words), *(len(token.content.encode()) for token in added), 1)  # a letter of the alphabet is a byte
        return longest * NFC_SHRINKS if normalizer else longest

    @cached_property
    def dropped_bytes(self) -> bytes:
        """Of a byte-level vocabulary: bytes that it has no letter for, and leaves out. SmolLM2 has none for some control characters."""
        words = self._tokenizer.get_vocab(with_added_tokens=False)
        return bytes(byte for letter, byte in _letters().items() if letter not in words)

    @property
    def unknown_id(self) -> int | None:
        """The id that stands for what the vocabulary has no word for; byte-level tokenizers have none."""
        token = getattr(self._tokenizer.model, "unk_token", None)
        return None if token is None else self.id_of(token)

    @property
    def has_post_processor(self) -> bool:
        return self._tokenizer.post_processor is not None


def _letters() -> dict[str, int]:
    """What byte-level vocabularies call the bytes: those that print by themselves, the others from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return {chr(byte): byte for byte in printing} | {
        chr(0x100 + index): byte for index, byte in enumerate(byte for byte in range(0x100) if byte not in printing)
    }


def _parts(component: object) -> list[dict[str, object]]:
    """A normaliser or pre-tokeniser as tokenizer.json has it; a sequence as its parts."""
    if component is None:
        return []
    found = json.loads(component.__getstate__())  # type: ignore[attr-defined]
    return _flat(found)


def _flat(part: dict[str, Any]) -> list[dict[str, object]]:
    inner = part.get("normalizers") or part.get("pretokenizers")
    return [each for one in inner for each in _flat(one)] if inner else [part]


def _guard(work: Callable[[], T], refuse: Callable[[str], SterError]) -> T:
    """`work()`, whose failures in the library become refusals. It raises bare Exceptions, and panics, which are none."""
    try:
        return work()
    except Exception as error:
        raise refuse(str(error) or type(error).__name__) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's, which no module exports
            raise
        raise refuse(str(error)) from None


def named_tokens(checkpoint: Checkpoint) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like, from `tokenizer_config.json`; `special_tokens_map.json` as transformers uses it: when the
    former has no `added_tokens_decoder`, and then it wins."""
    config = checkpoint.read_json("tokenizer_config.json") or {}
    found = dict(config)
    if "added_tokens_decoder" not in config:
        found.update(checkpoint.read_json("special_tokens_map.json") or {})
    tokens: dict[str, str] = {}
    for name in NAMED_TOKENS:
        value = found.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def warn_of_ignored_flags(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    """`add_bos_token: true` does nothing beside a tokenizer.json without a post-processor, here as in transformers 5.24."""
    config = checkpoint.read_json("tokenizer_config.json") or {}
    for flag, token in (("add_bos_token", "BOS"), ("add_eos_token", "EOS")):
        if config.get(flag) is True and not tokenizer.has_post_processor:
            warnings.warn(
                f"tokenizer_config.json says `{flag}: true`, but tokenizer.json has no post-processor: raw text gets no {token} token,"
                " as in transformers",
                SterWarning,
                stacklevel=3,
            )

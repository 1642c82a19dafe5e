"""Text -> token ids -> text, as `tokenizer.json` says and nothing else.

Raw text gets the special tokens of the tokenizer's post-processor, text out of a chat template none: there is never a second BOS
that the user did not type. Special tokens typed in a prompt (`<|eot_id|>`) are read as special, as in transformers.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ster.checkpoint import Checkpoint
from ster.errors import CheckpointError, SterWarning

if TYPE_CHECKING:
    import tokenizers

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

        path = checkpoint.path / "tokenizer.json"
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"failed to read {path}: {error}") from None
        return Tokenizer(tokenizer)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """`text` -> ids, with the special tokens of the post-processor unless told otherwise.

        One text at a time: `encode_batch` starts threads that outlive it and make a later fork complain, to save milliseconds.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def piece(self, token_id: int) -> str:
        """One token as a person would read it: ` sea`; its name in the vocabulary where it is part of a character."""
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        if text and "\ufffd" not in text:
            return text
        name: str | None = self._tokenizer.id_to_token(token_id)
        return text if name is None else name

    def id_of(self, token: str) -> int | None:
        """The id of a token by its exact name."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    @property
    def size(self) -> int:
        """One more than the largest id."""
        added = self._tokenizer.get_added_tokens_decoder()
        return max(int(self._tokenizer.get_vocab_size(with_added_tokens=True)), max(added, default=-1) + 1)

    @property
    def unknown_id(self) -> int | None:
        """The id that stands for what the vocabulary has no word for; byte-level tokenizers have none."""
        token = getattr(self._tokenizer.model, "unk_token", None)
        return None if token is None else self.id_of(token)

    @property
    def has_post_processor(self) -> bool:
        return self._tokenizer.post_processor is not None


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

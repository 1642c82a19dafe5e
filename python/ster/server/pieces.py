"""Tokens as strings, for log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ster.tokenizer import Tokenizer


class Pieces:
    """Token id -> the text it adds inside a text; U+FFFD where that is part of a character. Special tokens show.

    A token is decoded behind another one: alone, some tokenizers drop the space it begins with.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        ids = tokenizer.encode("a", special_tokens=False)
        self._before = ids[-1:]
        self._skip = len(self._decode(self._before))

    def __call__(self, token: int, *, start: bool = False) -> str:
        """start: as the first token of a text."""
        if start:
            return self._decode([token])
        text = self._known.get(token)
        if text is None:
            text = self._known[token] = self._decode([*self._before, token])[self._skip :]
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=False)

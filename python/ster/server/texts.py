"""Texts as token ids: what is too long is refused before it is tokenised, and long texts do not hold up other threads."""

from __future__ import annotations

import os

from ster.errors import SterError
from ster.prompts import check_text
from ster.server.errors import ApiError, invalid, text_beyond_context, text_too_long
from ster.server.loaded import Loaded
from ster.server.plan import sentence
from ster.server.settings import Settings
from ster.tokenizer import Tokenizer

LONG = 10_000  # characters: tokenised in some 10 ms
PARALLELISM = "TOKENIZERS_PARALLELISM"


def prompt_ids(loaded: Loaded, settings: Settings, text: str, *, special_tokens: bool, param: str = "prompt") -> list[int]:
    """`text` -> ids, if it is not longer than any that fits the context.

    Raises:
        ApiError: it is too long, it is no text, or the tokenizer failed.
    """
    data, context, longest = _bytes(text, param), loaded.facts.context, loaded.longest_token
    if longest is not None and len(data) > context * longest:
        size = len(data.translate(None, loaded.model.tokenizer.dropped_bytes))
        if size > context * longest:
            raise text_beyond_context(size, longest, context, param)
    if len(data) > (cap := settings.text_cap(context)):
        raise text_too_long(len(data), cap, param)
    return _ids(loaded.model.tokenizer, text, special_tokens, param)


def text_ids(loaded: Loaded, settings: Settings, text: str, *, special_tokens: bool, param: str = "prompt") -> list[int]:
    """`text` -> ids, whatever the context.

    Raises:
        ApiError: as `prompt_ids`.
    """
    if (size := len(_bytes(text, param))) > settings.max_text_bytes:
        raise text_too_long(size, settings.max_text_bytes, param)
    return _ids(loaded.model.tokenizer, text, special_tokens, param)


def _bytes(text: str, param: str) -> bytes:
    try:
        return check_text(text, param).encode()
    except SterError as error:
        raise _refused(error, param) from None


def _ids(tokenizer: Tokenizer, text: str, special_tokens: bool, param: str) -> list[int]:
    # With its threads switched off, as `ster serve` does, the library leaves the GIL; otherwise they would outlive the call.
    aside = len(text) > LONG and os.environ.get(PARALLELISM) == "false"
    try:
        return tokenizer.encode(text, special_tokens=special_tokens, aside=aside)
    except SterError as error:
        raise _refused(error, param) from None


def _refused(error: SterError, param: str) -> ApiError:
    return invalid(sentence(error), param)

"""Log-probabilities as answers have them: of completions, of chats, of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import orjson

from ster.server.logprobs import WHOLE_VOCABULARY, Entry, TokenScore

if TYPE_CHECKING:
    from ster.server.pieces import Pieces


def entries(score: TokenScore, count: int) -> Iterable[Entry]:
    """The token itself, then those of the `count` likeliest that it is not; the score may hold more of them."""
    if count == WHOLE_VOCABULARY:
        return score.top
    return [entry for at, entry in enumerate(islice(score.top, count + 1)) if at == 0 or entry[2] <= count]


class TextLogprobs:
    """`logprobs` of a choice of `/v1/completions`, whole or piece by piece: it knows how many tokens and characters came before.

    count: likely tokens for each. whole: the first token is the first of the prompt, not of what goes on from it.
    """

    def __init__(self, pieces: Pieces, count: int, *, whole: bool) -> None:
        self._pieces = pieces
        self._count = count
        self._starts = whole
        self._offset = 0

    def add(self, tokens: Iterable[int], scores: Iterable[TokenScore | None]) -> dict[str, Any]:
        """Parallel lists, an entry for each token. A token without a score, as the first of a prompt, has null."""
        offsets: list[int] = []
        texts: list[str] = []
        chosen: list[float | None] = []
        top: list[dict[str, float] | None] = []
        for token, score in zip(tokens, scores, strict=True):
            text = self._pieces(token, start=self._starts)
            self._starts = False
            offsets.append(self._offset)
            self._offset += len(text)
            texts.append(text)
            chosen.append(None if score is None else score.logprob)
            top.append(None if score is None else self._top(score, text))
        return {"text_offset": offsets, "tokens": texts, "token_logprobs": chosen, "top_logprobs": top}

    def _top(self, score: TokenScore, own: str) -> dict[str, float]:
        """By text; of several tokens with the same text, the second and later are told apart by their ids."""
        found: dict[str, float] = {}
        for token, logprob, _ in entries(score, self._count):
            text = self._pieces(token) if found else own
            found[f"token_id:{token}" if text in found else text] = logprob
        return found


def chat_logprobs(pieces: Pieces, scores: Sequence[TokenScore], count: int) -> dict[str, Any]:
    """`logprobs` of a choice of `/v1/chat/completions`. `top_logprobs` are the likeliest, the token among them where it is one."""
    return {"content": [_chat_entry(pieces, score, count) for score in scores]}


def _chat_entry(pieces: Pieces, score: TokenScore, count: int) -> dict[str, Any]:
    likeliest = sorted((entry for entry in entries(score, count) if entry[2] <= count), key=lambda entry: entry[2])
    return _named(pieces, score.id, score.logprob) | {"top_logprobs": [_named(pieces, token, value) for token, value, _ in likeliest]}


def _named(pieces: Pieces, token: int, logprob: float) -> dict[str, Any]:
    text = pieces(token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def prompt_logprobs(pieces: Pieces, scores: Iterable[TokenScore | None], count: int) -> list[orjson.Fragment | None]:
    """`prompt_logprobs`: null for the first token; for others `{"<id>": {"logprob", "rank", "decoded_token"}}`, the token itself first.

    Encoded row by row, because a whole vocabulary is many objects.
    """
    return [None if score is None else orjson.Fragment(orjson.dumps(_by_id(pieces, score, count))) for score in scores]


def _by_id(pieces: Pieces, score: TokenScore, count: int) -> dict[str, Any]:
    return {
        str(token): {"logprob": logprob, "rank": rank, "decoded_token": pieces(token)} for token, logprob, rank in entries(score, count)
    }

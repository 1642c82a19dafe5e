"""Log-probabilities as answers have them, and how many they may be: of completions, of chats, of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from typing import TYPE_CHECKING, Any

import orjson

from ster.server.errors import invalid
from ster.server.logprobs import WHOLE_VOCABULARY, Entry, TokenScore

if TYPE_CHECKING:
    from ster.server.pieces import Pieces


@dataclass(frozen=True)
class Scored:
    """Tokens that a field asks scores of. count: likely tokens beside each, -1 the whole vocabulary. tokens: those of all choices."""

    field: str
    what: str
    tokens: int
    count: int

    def each(self, vocab: int) -> int:
        """The most entries that one token has."""
        return vocab if self.count == WHOLE_VOCABULARY else min(self.count + 1, vocab)


def check_score_cap(asked: Sequence[Scored], vocab: int, cap: int, *, left_out: str | None = None) -> None:
    """All entries of an answer, against the cap.

    left_out: what `asked` has last is of new tokens, as many as this sentence says, because `max_tokens` was left out.

    Raises:
        ApiError: it names the field that asks for most.
    """
    sizes = [each.tokens * each.each(vocab) for each in asked]
    if sum(sizes) <= cap:
        return
    parts = [f"{each.what}: {each.tokens:,} tokens x {each.each(vocab):,}" for each in asked]
    found = f"{'; '.join(parts)}. That makes {sum(sizes):,} entries, and an answer has at most {cap:,}"
    largest = sizes.index(max(sizes))
    if left_out is not None and largest == len(asked) - 1:
        raise invalid(f"Set max_tokens, or ask for fewer {asked[-1].field}: {left_out}. {found}.", "max_tokens")
    raise invalid(f"{found}: ask for fewer {asked[largest].field}, a smaller n, or fewer tokens.", asked[largest].field)


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

        def rows() -> Iterator[dict[str, float] | None]:
            for token, score in zip(tokens, scores, strict=True):
                text = self._pieces(token, start=self._starts)
                self._starts = False
                offsets.append(self._offset)
                self._offset += len(text)
                texts.append(text)
                chosen.append(None if score is None else score.logprob)
                yield None if score is None else self._top(score, text)

        top = _array(rows())
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
    return {"content": _array(_chat_entry(pieces, score, count) for score in scores)}


def _chat_entry(pieces: Pieces, score: TokenScore, count: int) -> dict[str, Any]:
    likeliest = sorted((entry for entry in entries(score, count) if entry[2] <= count), key=lambda entry: entry[2])
    return _named(pieces, score.id, score.logprob) | {"top_logprobs": [_named(pieces, token, value) for token, value, _ in likeliest]}


def _named(pieces: Pieces, token: int, logprob: float) -> dict[str, Any]:
    text = pieces(token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def prompt_logprobs(pieces: Pieces, scores: Iterable[TokenScore | None], count: int) -> orjson.Fragment:
    """`prompt_logprobs`: null for the first token; for others `{"<id>": {"logprob", "rank", "decoded_token"}}`, the token itself first."""
    return _array(None if score is None else _by_id(pieces, score, count) for score in scores)


def _by_id(pieces: Pieces, score: TokenScore, count: int) -> dict[str, Any]:
    return {
        str(token): {"logprob": logprob, "rank": rank, "decoded_token": pieces(token)} for token, logprob, rank in entries(score, count)
    }


def _array(rows: Iterable[object]) -> orjson.Fragment:
    """Encoded row by row: the objects of a row take several times as much memory as their text."""
    written = BytesIO()
    for index, row in enumerate(rows):
        written.write(b"," if index else b"[")
        written.write(orjson.dumps(row))
    written.write(b"]" if written.tell() else b"[]")
    return orjson.Fragment(written.getvalue())

"""How likely a model behind a server finds texts: `prompt_logprobs: 0` of token ids, steered as they are.

A server tells the log-probability of every token of a prompt, and so what `side_likelihoods` and perplexities are made of. It does not
tell the whole distribution behind each (the caps forbid it, and it would be half a megabyte a token): there is no KL. It is left out, not
estimated from the likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ster._prefixes import common_prefix
from ster.likelihood import Damage, SideLikelihoods, Variant
from ster.progress import Report
from ster.remote.checks import Expected, check_choice
from ster.remote.server import Server, completion
from ster.remote.steering import steering_vectors, without_effect
from ster.remote.transport import SMALL_BYTES, Call, Transport
from ster.sides import PairTokens, side_name

TOKEN_BYTES = 4096  # of an answer, for each token


@dataclass(frozen=True)
class Text:
    ids: Sequence[int]
    vectors: Sequence[dict[str, Any]]
    name: str


def side_likelihoods(
    transport: Transport, server: Server, pairs: Sequence[PairTokens], variants: Sequence[Variant], report: Report
) -> SideLikelihoods:
    """See `ster.likelihood.side_likelihoods`."""
    starts = [max(1, common_prefix(*pair)) for pair in pairs]
    tokens = np.array([[max(0, len(side) - start) for side in pair] for pair, start in zip(pairs, starts, strict=True)], np.int64)
    result = np.zeros((len(variants), len(pairs), 2))
    steering = _steering(server, variants)
    places = [(v, i, side) for v in range(len(variants)) for i in range(len(pairs)) for side in (0, 1)]
    scored = [place for place in places if tokens[place[1:]]]
    texts = (Text(pairs[i][side], steering[v], side_name(i, side) + variants[v][0]) for v, i, side in scored)
    total = len(pairs) * len(variants)
    report(0, total)
    for (v, i, side), found in zip(scored, log_probabilities(transport, server, texts), strict=True):
        result[v, i, side] = found[starts[i] - 1 :].sum()
        report(v * len(pairs) + i + side, total)
    report(total, total)
    return SideLikelihoods(result, tokens)


def damage(transport: Transport, server: Server, texts: Sequence[Sequence[int]], variants: Sequence[Variant], report: Report) -> Damage:
    """See `ster.likelihood.damage`; `kl` is None."""
    loss = np.zeros(len(variants))
    steering = _steering(server, variants)
    places = [(v, i) for v in range(len(variants)) for i, ids in enumerate(texts) if len(ids) > 1]
    asked = (Text(texts[i], steering[v], f"neutral text {i}{variants[v][0]}") for v, i in places)
    total = len(texts) * len(variants)
    report(0, total)
    for (v, i), found in zip(places, log_probabilities(transport, server, asked), strict=True):
        loss[v] -= found.sum()
        report(v * len(texts) + i + 1, total)
    count = sum(map(len, texts))
    scored = count - len(texts)
    with np.errstate(over="ignore"):
        return Damage(None, np.exp((loss[1:] - loss[0]) / scored), float(np.exp(loss[0] / scored)), count, scored)


def log_probabilities(transport: Transport, server: Server, texts: Iterable[Text]) -> Iterator[NDArray[np.float64]]:
    """Of each text, in order, float64 `[tokens - 1]`: its tokens but the first, given all before each.

    Raises:
        RemoteError: an answer that does not fit.
    """
    asked: list[Text] = []

    def calls() -> Iterator[Call]:
        for text in texts:
            asked.append(text)
            body = completion(server.id, text.ids, server.dialect, None, steering=text.vectors, prompt_logprobs=0)
            yield Call("/v1/completions", body, SMALL_BYTES + len(text.ids) * TOKEN_BYTES, text.name)

    for answer in transport.ask_all(calls()):
        text = asked.pop(0)
        expected = Expected(text.ids, server.hidden, name=text.name, called=server.called)
        choice, _ = check_choice(answer.document(), expected)
        yield _of_own_tokens(choice.get("prompt_logprobs"), expected)


def _of_own_tokens(entries: object, expected: Expected) -> NDArray[np.float64]:
    ids = expected.ids
    if not isinstance(entries, list) or len(entries) != len(ids) or entries[0] is not None:
        count = len(entries) if isinstance(entries, list) else "no"
        raise expected.misfit(f"prompt_logprobs has {count} entries, expected null and {len(ids) - 1} more")
    found = np.empty(len(ids) - 1)
    for position, (id, entry) in enumerate(zip(ids[1:], entries[1:], strict=True)):
        own = entry.get(str(id)) if isinstance(entry, dict) else None
        value = own.get("logprob") if isinstance(own, dict) else None
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value > 1e-3:
            raise expected.misfit(f"prompt_logprobs does not tell the log-probability of token {position + 1} (id {id})")
        found[position] = value
    return found


def _steering(server: Server, variants: Sequence[Variant]) -> list[list[dict[str, Any]]]:
    """The vectors of every variant. An unsteered one beside steered ones runs with theirs at scale 0, which is the same and takes the same
    way through the server."""
    found = [steering_vectors(edits, server.caps) for _, edits in variants]
    effective = next((vectors for vectors in found if vectors), [])
    return [vectors or without_effect(effective) for vectors in found]

"""How likely a model finds texts, steered in several ways, and how far its predictions move. Logits are float32, everything after float64.

A pass with logits for every row is large (128,000 words: half a megabyte a row), so passes are cut to `LOGIT_BYTES` and only sums are
kept. Cuts go through the KV cache and change no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ster import _native
from ster._batches import plan_batches
from ster._prefixes import common_prefix
from ster.capture import BATCH_TOKENS
from ster.progress import Report
from ster.sides import PairTokens, side_name

if TYPE_CHECKING:
    from ster.model import Model

LOGIT_BYTES = 64 << 20
BLOCK = 32  # rows at a time in float64

Edits = Sequence[_native.Edit]
Variant = tuple[str, Edits]  # what to call it in a refusal (" at strength 2"), and how to steer


@dataclass(frozen=True)
class SideLikelihoods:
    """log_probability: float64 `[variants, pairs, 2]`, nats, summed over the scored tokens; tokens: how many those are, `[pairs, 2]`."""

    log_probability: NDArray[np.float64]
    tokens: NDArray[np.int64]


@dataclass(frozen=True)
class Damage:
    """Per variant but the first, float64 `[variants - 1]`. kl: mean over all rows of `KL(first || variant)`, nats; None where it cannot be
    had, see `ster.remote.likelihood`.

    perplexity_ratio: perplexity of the texts under the variant, divided by that under the first. perplexity: under the first.
    rows, scored: rows compared for kl; tokens predicted for the perplexity.
    """

    kl: NDArray[np.float64] | None
    perplexity_ratio: NDArray[np.float64]
    perplexity: float
    rows: int
    scored: int


def side_likelihoods(model: Model, pairs: Sequence[PairTokens], variants: Sequence[Variant], report: Report) -> SideLikelihoods:
    """Log-probability of what sets each side of a pair apart from the other, under every variant.

    Both sides are the token ids that run; no text is cut and tokenised again. Scored are the tokens after the longest common prefix of
    the two id lists, each given all tokens before it. The very first token of a text is never scored, nothing being before it. When one
    side is the beginning of the other it has no token to score, and its log-probability is 0.

    Args:
        variants: one or more.
        report: called with (done, total), in pairs times variants.
    """
    starts = [max(1, common_prefix(*pair)) for pair in pairs]
    result = np.zeros((len(variants), len(pairs), 2))
    tokens = np.array([[max(0, len(side) - start) for side in pair] for pair, start in zip(pairs, starts, strict=True)], np.int64)
    room = _rows(model)
    # The cost of a pair is its share of a pass, of tokens or of rows with logits, whichever is more, in thousandths.
    costs = [
        max(1, 1000 * (start + int(count.sum())) // BATCH_TOKENS, 1000 * int(count.sum()) // room)
        for start, count in zip(starts, tokens, strict=True)
    ]
    done, total = 0, len(pairs) * len(variants)
    report(done, total)
    # What all pairs begin with, such as a chat template's head, runs once per variant.
    shortest = min(range(len(pairs)), key=lambda i: starts[i])
    root = min(starts[shortest] - 1, *(common_prefix(pairs[shortest][0], pair[0]) for pair in pairs))
    roots = [_begin(model, [pairs[0][0][:root]], model.engine.cache(), [side_name(0, 0) + name], edits)[0] for name, edits in variants]
    for batch in plan_batches(costs, 1000):
        scored = [(i, side) for i in batch for side in (0, 1) if tokens[i, side]]
        for v, (name, edits) in enumerate(variants):
            beginnings = [pairs[i][0][root : starts[i] - 1] for i in batch]
            begun = _begin(model, beginnings, roots[v], [side_name(i, 0) + name for i in batch], edits)
            caches = dict(zip(batch, begun, strict=True))
            rest = [pairs[i][side][starts[i] - 1 : -1] for i, side in scored]
            forks = [caches[i].fork() for i, _ in scored]
            names = [side_name(*place) + name for place in scored]
            for rows in _cuts(rest, room):
                for n, logits in _logits(model, rest, forks, names, edits, rows):
                    i, side = scored[n]
                    targets = pairs[i][side][starts[i] + rows.start :][: len(logits)]
                    result[v, i, side] += log_probabilities(logits, targets).sum()
            done += len(batch)
            report(done, total)
    return SideLikelihoods(result, tokens)


def damage(model: Model, texts: Sequence[Sequence[int]], variants: Sequence[Variant], report: Report) -> Damage:
    """How far each variant's next-token distributions are from the first one's, on the same texts (token ids, one of them of two or more).

    Every row counts the same, in whatever text it is.
    """
    kl = np.zeros(len(variants) - 1)
    loss = np.zeros(len(variants))
    done, total = 0, len(texts) * len(variants)
    report(done, total)
    for batch in plan_batches([len(ids) for ids in texts], _rows(model)):
        ids = [texts[i] for i in batch]
        caches = [[model.engine.cache() for _ in batch] for _ in variants]
        for rows in _cuts(ids, _rows(model)):
            plain: list[tuple[int, NDArray[np.float32]]] = []
            base: list[NDArray[np.float64]] = []  # normalisers of `plain`, which every variant is compared with
            for v, (name, edits) in enumerate(variants):
                pieces = _logits(model, ids, caches[v], [f"neutral text {i}{name}" for i in batch], edits, rows)
                own = [_normalisers(logits) for _, logits in pieces]
                if not v:
                    plain, base = pieces, own
                for k, (n, logits) in enumerate(pieces):
                    targets = ids[n][rows.start + 1 :][: len(logits)]
                    loss[v] -= _chosen(logits, own[k], targets).sum()
                    if v:
                        kl[v - 1] += _divergences(plain[k][1], base[k], logits, own[k]).sum()
        done += len(batch) * len(variants)
        report(done, total)
    count = sum(map(len, texts))
    scored = count - len(texts)
    with np.errstate(over="ignore"):
        return Damage(kl / count, np.exp((loss[1:] - loss[0]) / scored), float(np.exp(loss[0] / scored)), count, scored)


def log_probabilities(logits: NDArray[np.float32], targets: Sequence[int]) -> NDArray[np.float64]:
    """`log softmax(logits)[row, targets[row]]`, float64 `[rows]`, of logits `[rows, vocab]`."""
    return _chosen(logits, _normalisers(logits), targets)


def divergences(p: NDArray[np.float32], q: NDArray[np.float32]) -> NDArray[np.float64]:
    """`KL(softmax(p) || softmax(q))` of each row, nats, float64 `[rows]`; both `[rows, vocab]`. Not below 0, but for rounding."""
    return _divergences(p, _normalisers(p), q, _normalisers(q))


def _chosen(logits: NDArray[np.float32], normalisers: NDArray[np.float64], targets: Sequence[int]) -> NDArray[np.float64]:
    """`log_probabilities` of the first rows, as many as there are targets."""
    chosen = logits[np.arange(len(targets)), np.asarray(targets, np.int64)].astype(np.float64)
    return np.asarray(chosen - normalisers[: len(targets)])


def _divergences(
    p: NDArray[np.float32], of_p: NDArray[np.float64], q: NDArray[np.float32], of_q: NDArray[np.float64]
) -> NDArray[np.float64]:
    """`divergences` with the normalisers known: they are half of the work, and one text needs its own for several strengths."""
    found = np.empty(len(p))
    for start in range(0, len(p), BLOCK):
        rows = slice(start, start + BLOCK)
        log_p = p[rows] - of_p[rows, None]
        log_q = q[rows] - of_q[rows, None]
        found[rows] = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
    return found


def _normalisers(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """`log sum exp` of each row, float64 `[rows]`."""
    found = np.empty(len(logits))
    for start in range(0, len(logits), BLOCK):
        block = logits[start : start + BLOCK].astype(np.float64)
        top = block.max(axis=1, keepdims=True)
        found[start : start + BLOCK] = top[:, 0] + np.log(np.exp(block - top).sum(axis=1))
    return found


def _rows(model: Model) -> int:
    """Rows of logits in one pass."""
    return max(16, min(BATCH_TOKENS, LOGIT_BYTES // (4 * model.vocab_size)))


def _begin(
    model: Model, beginnings: Sequence[Sequence[int]], before: _native.Cache, names: Sequence[str], edits: Edits
) -> list[_native.Cache]:
    """Caches that hold `before` and each of `beginnings`, which may be empty. No logits."""
    caches = [before.fork() for _ in beginnings]
    todo = [n for n, ids in enumerate(beginnings) if ids]
    if todo:
        sequences = [_native.Sequence(np.array(beginnings[n], np.uint32), cache=caches[n], steering=edits) for n in todo]
        model.forward(sequences, [names[n] for n in todo])
    return caches


def _logits(
    model: Model, texts: Sequence[Sequence[int]], caches: Sequence[_native.Cache], names: Sequence[str], edits: Edits, rows: slice
) -> list[tuple[int, NDArray[np.float32]]]:
    """Logits `[rows, vocab]` of those rows of every text that has some, with its index, each run after what its cache holds."""
    todo = [n for n, ids in enumerate(texts) if len(ids) > rows.start]
    sequences = [_native.Sequence(np.array(texts[n][rows], np.uint32), cache=caches[n], steering=edits, logits="all") for n in todo]
    found = []
    for n, output in zip(todo, model.forward(sequences, [names[n] for n in todo]), strict=True):
        assert output.logits is not None
        found.append((n, output.logits))
    return found


def _cuts(texts: Sequence[Sequence[int]], room: int) -> list[slice]:
    """A batch in passes: one, but for a lone text of more than `room` tokens."""
    return [slice(start, start + room) for start in range(0, max(map(len, texts), default=0), room)]

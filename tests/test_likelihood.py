"""Log-probabilities and damage against the plainest way to compute them."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ster
from ster import likelihood
from ster.errors import NonFiniteError
from ster.likelihood import Variant, damage, divergences, log_probabilities, side_likelihoods

ids = st.lists(st.integers(3, 66), min_size=1, max_size=12)
PLAIN: Variant = ("", [])
VECTOR = np.random.default_rng(0).normal(size=64).astype(np.float32)
STEERED: Variant = (" at strength 2", ster.steer(VECTOR, 1, strength=2.0).edits())


def silent(done: int, total: int) -> None:
    pass


def reference(model: ster.Model, tokens: list[int], start: int, edits: object) -> float:
    """log P(tokens[start:] | tokens[:start]), one whole pass, float64."""
    logits = model.trace(tokens, None, steering=edits, logits=True).logits  # type: ignore[arg-type]
    assert logits is not None
    total = 0.0
    for position in range(start, len(tokens)):
        row = logits[position - 1].astype(np.float64)
        total += row[tokens[position]] - (row.max() + math.log(np.exp(row - row.max()).sum()))
    return total


@settings(max_examples=40, deadline=None)
@given(pairs=st.lists(st.tuples(st.lists(st.integers(3, 66), max_size=8), ids, ids), min_size=1, max_size=6))
def test_a_side_is_scored_after_the_common_tokens(toy_model: ster.Model, pairs: list[tuple[list[int], list[int], list[int]]]) -> None:
    tokens = [([*stem, *a], [*stem, *b]) for stem, a, b in pairs]
    found = side_likelihoods(toy_model, tokens, [PLAIN, STEERED], silent)
    for n, sides in enumerate(tokens):
        start = 0
        while start < min(map(len, sides)) and sides[0][start] == sides[1][start]:
            start += 1
        start = max(1, start)
        assert found.tokens[n].tolist() == [len(side) - start for side in sides]
        for v, (_, edits) in enumerate([PLAIN, STEERED]):
            for s, side in enumerate(sides):
                assert found.log_probability[v, n, s] == pytest.approx(reference(toy_model, side, start, edits), abs=1e-9)


def test_the_first_token_and_a_side_that_only_begins_the_other_are_not_scored(toy_model: ster.Model) -> None:
    found = side_likelihoods(toy_model, [([5], [6]), ([5, 6], [5, 6, 7]), ([5, 6], [5, 6])], [PLAIN], silent)
    assert found.tokens.tolist() == [[0, 0], [0, 1], [0, 0]]
    assert found.log_probability[0, :, 0].tolist() == [0.0, 0.0, 0.0] and found.log_probability[0, 1, 1] < 0.0


def test_cuts_change_nothing(toy_model: ster.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    tokens = [([3, *rng.integers(3, 67, 60).tolist()], [3, *rng.integers(3, 67, 40).tolist()]) for _ in range(5)]
    texts = [rng.integers(3, 67, n).tolist() for n in (1, 70, 3, 3)]
    whole = side_likelihoods(toy_model, tokens, [PLAIN, STEERED], silent)
    all_at_once = damage(toy_model, texts, [PLAIN, STEERED], silent)
    monkeypatch.setattr(likelihood, "LOGIT_BYTES", 16 * 4 * 67)  # 16 rows a pass
    cut = side_likelihoods(toy_model, tokens, [PLAIN, STEERED], silent)
    assert np.allclose(cut.log_probability, whole.log_probability, atol=1e-9)
    pieces = damage(toy_model, texts, [PLAIN, STEERED], silent)
    assert pieces.kl == pytest.approx(all_at_once.kl, abs=1e-12)
    assert pieces.perplexity_ratio == pytest.approx(all_at_once.perplexity_ratio)
    assert (pieces.rows, pieces.scored) == (77, 73)


def test_damage_is_what_its_docstring_says(toy_model: ster.Model) -> None:
    texts = [[5, 6, 7, 8], [9, 10]]
    found = damage(toy_model, texts, [PLAIN, STEERED, PLAIN], silent)
    kl, loss = [], [0.0, 0.0]
    for text in texts:
        rows = [toy_model.trace(text, None, steering=edits, logits=True).logits for _, edits in (PLAIN, STEERED)]
        p, q = (
            np.exp(row.astype(np.float64)) / np.exp(row.astype(np.float64)).sum(axis=1, keepdims=True) for row in rows if row is not None
        )
        kl += (p * np.log(p / q)).sum(axis=1).tolist()
        for v, share in enumerate((p, q)):
            loss[v] -= np.log(share[np.arange(len(text) - 1), text[1:]]).sum()
    assert found.kl[0] == pytest.approx(np.mean(kl))
    assert found.perplexity_ratio[0] == pytest.approx(math.exp((loss[1] - loss[0]) / 4))
    assert found.perplexity == pytest.approx(math.exp(loss[0] / 4))
    assert found.kl[1] == pytest.approx(0.0, abs=1e-12) and found.perplexity_ratio[1] == pytest.approx(1.0)


def test_no_overflow_and_no_rounding_below_zero() -> None:
    logits = np.array([[3e4, -3e4, 0.0]], np.float32)
    assert log_probabilities(logits, [1])[0] == -6e4
    assert divergences(logits, logits)[0] == 0.0
    assert divergences(np.zeros((1, 3), np.float32), logits)[0] == pytest.approx(3e4 - math.log(3))


def test_a_strength_the_model_cannot_bear_is_named(toy_model: ster.Model) -> None:
    wild: Variant = (" at strength 3", ster.steer(np.full(64, 3e38, np.float32), 1, strength=3).edits())
    with pytest.raises(NonFiniteError, match="pair 0, positive side at strength 3"):
        side_likelihoods(toy_model, [([5, 6], [7, 8])], [PLAIN, wild], silent)
    with pytest.raises(NonFiniteError, match="neutral text 0 at strength 3"):
        damage(toy_model, [[5, 6]], [PLAIN, wild], silent)


def test_progress_counts_to_its_total(toy_model: ster.Model) -> None:
    seen: list[tuple[int, int]] = []
    side_likelihoods(toy_model, [([5, 6], [7, 8])] * 3, [PLAIN, STEERED], lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, 6) and seen[-1] == (6, 6)


def test_a_boundary_is_one_of_tokens_and_not_of_text(byte_model: Callable[..., Path]) -> None:
    """Sides are tokenised whole; what is scored begins where their ids part, inside a word or a character if need be."""
    from ster.pairs import Pair, PairSet
    from ster.sides import pair_tokens

    model = ster.load(byte_model(bos=True))
    pairs = PairSet((Pair("I say hello there", "I say hell"), Pair("é", "è")))
    tokens = pair_tokens(model, pairs)
    found = side_likelihoods(model, tokens, [PLAIN], silent)
    assert found.tokens.tolist() == [[7, 0], [1, 1]]  # "o there" and nothing; the second byte of two
    assert found.log_probability[0, 0, 0] == pytest.approx(reference(model, tokens[0][0], 11, []))

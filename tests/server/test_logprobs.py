"""Scores are the log-softmax of the logits, by rank, whatever the ties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ster.server.logprobs import FLOOR, TokenScore, likeliest, log_softmax, score

# Few values, so that ties are common; far apart, so that some fall below the floor.
logits = st.lists(st.sampled_from([-2e4, -3.5, 0.0, 0.25, 1.0, 30.0]), min_size=1, max_size=40).map(lambda row: np.array(row, np.float32))


def by_rank(row: NDArray[np.float32]) -> list[int]:
    return sorted(range(len(row)), key=lambda each: (-row[each], each))


def naive(row: NDArray[np.float32], token: int, top: int) -> TokenScore:
    order = by_rank(row)
    shifted = row.astype(np.float64) - np.float64(row.max())
    values = np.maximum(shifted - np.log(np.exp(shifted).sum()), FLOOR)
    entry = lambda each: (each, float(values[each]), order.index(each) + 1)  # noqa: E731
    return TokenScore(*entry(token), [entry(token), *(entry(id) for id in order[:top] if id != token)])


@given(row=logits, data=st.data())
def test_a_score_is_the_sorted_log_softmax(row: NDArray[np.float32], data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(row) - 1))
    top = data.draw(st.integers(0, len(row) + 3))
    found, expected = score(row, token, top), naive(row, token, top)
    assert (found.id, found.rank) == (expected.id, expected.rank)
    assert [(id, rank) for id, _, rank in found.top] == [(id, rank) for id, _, rank in expected.top]
    # Both sum at most 40 float64 terms; they differ by the order of the subtractions alone.
    np.testing.assert_allclose([lp for _, lp, _ in found.top], [lp for _, lp, _ in expected.top], rtol=1e-14, atol=1e-14)
    assert found.top[0] == (found.id, found.logprob, found.rank)


@given(row=logits, data=st.data())
def test_the_whole_vocabulary_is_as_long_a_list_as_it_gets(row: NDArray[np.float32], data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(row) - 1))
    whole, listed = score(row, token, -1), score(row, token, len(row))
    assert list(whole.top) == list(listed.top)
    assert (whole.logprob, whole.rank, len(whole.top)) == (listed.logprob, listed.rank, len(row))
    assert [whole.top[place] for place in range(len(row))] == list(listed.top)
    assert whole.top[-1] == listed.top[-1] and whole.top[1:3] == list(listed.top)[1:3]
    with pytest.raises(IndexError):
        whole.top[len(row)]


@given(row=logits, count=st.integers(0, 45))
def test_the_likeliest_are_the_first_of_the_sorted(row: NDArray[np.float32], count: int) -> None:
    assert likeliest(row, count).tolist() == by_rank(row)[:count]


def test_a_long_ranking_is_read_in_pieces() -> None:
    row = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    assert list(score(row, 5000, -1).top) == list(score(row, 5000, len(row)).top)


def test_log_probabilities_sum_to_one() -> None:
    row = np.random.default_rng(0).normal(0, 8, 1000).astype(np.float32)
    assert np.exp(log_softmax(row)(row)).sum() == pytest.approx(1, abs=1e-12)  # 1000 terms below 1


def test_what_is_impossible_is_said_in_a_number() -> None:
    assert score(np.array([0, -1e30], np.float32), 1, 0).logprob == FLOOR

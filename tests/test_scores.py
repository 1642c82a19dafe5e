import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ster.errors import InputError
from ster.scores import _control, auroc, fold_splits, holdout_split, margins, mean_interval, rank_candidates, score, t95, wilson


def random_sides(seed, pairs, layers, hidden, shift=()):
    """`[pairs, layers, hidden]` each; `shift[layer]` separates the classes there."""
    draw = np.random.default_rng(seed)
    positive, negative = draw.normal(size=(2, pairs, layers, hidden))
    for layer, size in dict(shift).items():
        positive[:, layer, 0] += size
        negative[:, layer, 0] -= size
    return positive.astype(np.float32), negative.astype(np.float32)


# Scores


def test_a_margin_is_the_difference_of_projections_and_zero_is_not_right():
    found = score([[3, 0], [1, 1], [0, 5]], [[1, 0], [1, 9], [2, 0]], [1, 0])
    assert margins([[3, 0], [1, 1], [0, 5]], [[1, 0], [1, 9], [2, 0]], [1, 0]).tolist() == [2, 0, -2]
    assert (found.pairs, found.right, found.accuracy, found.margin) == (3, 1, 1 / 3, 0.0)


@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_turning_the_direction_turns_the_margins(seed, pairs):
    p, n = random_sides(seed, pairs, 1, 5)
    d = np.random.default_rng(seed + 1).normal(size=5).astype(np.float32)
    assert margins(p[:, 0], n[:, 0], d).tolist() == (-margins(p[:, 0], n[:, 0], -d)).tolist()
    assert margins(p[:, 0], n[:, 0], d).tolist() == (-margins(n[:, 0], p[:, 0], d)).tolist()


def test_widths_that_differ_are_refused():
    with pytest.raises(InputError) as caught:
        margins([[1, 2]], [[3, 4]], [1, 2, 3])
    assert str(caught.value) == "direction width 3 does not match activation width 2"


@given(st.lists(st.integers(-5, 5), min_size=1), st.lists(st.integers(-5, 5), min_size=1))
def test_auroc_is_the_share_of_ordered_couples(positive, negative):
    couples = [1.0 if p > n else 0.5 if p == n else 0.0 for p in positive for n in negative]
    assert auroc(positive, negative) == pytest.approx(sum(couples) / len(couples))
    assert auroc(negative, positive) == pytest.approx(1 - sum(couples) / len(couples))


def test_wilson_on_known_numbers():
    # R: prop.test(x, n, correct = FALSE)$conf.int
    assert wilson(7, 8) == pytest.approx((0.5291118, 0.9775826), abs=1e-7)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775328), abs=1e-7)
    assert wilson(10, 10) == pytest.approx((0.7224672, 1.0), abs=1e-7)
    for right in range(12):
        low, high = wilson(right, 11)
        assert 0 <= low <= right / 11 <= high <= 1


def test_t_interval_on_known_numbers():
    assert mean_interval([1, 2, 3]) == pytest.approx((2 - 4.3027 / math.sqrt(3), 2 + 4.3027 / math.sqrt(3)))
    assert mean_interval([5.0]) is None
    # Quantiles from tables: 30, 31, 60 and 1000 degrees of freedom.
    for freedom, value in ((30, 2.0423), (31, 2.0395), (60, 2.0003), (1000, 1.9623)):
        assert t95(freedom) == pytest.approx(value, abs=1e-4)


# Splits


@pytest.mark.parametrize(("pairs", "holdout", "held"), [(4, 0.2, 1), (5, 0.2, 1), (8, 0.2, 2), (10, 0.3, 3), (100, 0.07, 7), (6, 0.01, 1)])
def test_the_last_pairs_are_held_out(pairs, holdout, held):
    (split,) = holdout_split(pairs, holdout=holdout)
    assert split.holdout.tolist() == list(range(pairs - held, pairs))
    assert split.train.tolist() == list(range(pairs - held))


def test_a_group_is_held_out_whole():
    (split,) = holdout_split(8, groups=[0, 1, 2, 3, 4, 5, 6, 0])
    assert split.holdout.tolist() == [0, 7]
    (split,) = holdout_split(8, groups=[0, 0, 2, 3, 4, 5, 0, 7])
    assert split.holdout.tolist() == [0, 1, 6, 7]


@given(st.data())
def test_splits_cover_every_pair_once_and_never_cut_a_group(data):
    pairs = data.draw(st.integers(4, 30))
    names = data.draw(st.lists(st.integers(0, 12), min_size=pairs, max_size=pairs))
    if len(set(names)) < 2:
        return
    folds = data.draw(st.integers(2, len(set(names))))
    splits = fold_splits(pairs, folds=folds, groups=names)
    assert sorted(i for split in splits for i in split.holdout) == list(range(pairs)) and len(splits) == folds
    for split in splits:
        assert len(split.train) and len(split.holdout)
        assert sorted([*split.train, *split.holdout]) == list(range(pairs))
        assert not {names[i] for i in split.train} & {names[i] for i in split.holdout}


def test_folds_of_unlike_pairs_are_even_runs():
    assert [split.holdout.tolist() for split in fold_splits(10, folds=3)] == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9]]


def test_splits_that_cannot_be_are_refused():
    for make in (lambda: holdout_split(3), lambda: fold_splits(3, folds=2)):
        with pytest.raises(InputError, match="^optimization requires at least four contrastive pairs$"):
            make()
    for share in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(InputError, match="holdout must be more than 0 and less than 1"):
            holdout_split(8, holdout=share)
    with pytest.raises(InputError, match="leaves no pair to train on") as alike:
        holdout_split(4, groups=[0, 0, 0, 0])
    with pytest.raises(InputError, match="leaves no pair to train on") as large:
        holdout_split(8, holdout=0.9)
    assert "near duplicates of one another" in alike.value.hint and "hold out a smaller share" in large.value.hint
    with pytest.raises(InputError, match="3 folds need as many groups of unlike pairs, found 2"):
        fold_splits(4, folds=3, groups=[0, 0, 1, 1])
    with pytest.raises(InputError, match="at least two folds"):
        fold_splits(4, folds=1)


# Search


def test_the_layer_with_the_shift_wins_and_controls_tell_it_from_luck():
    positive, negative = random_sides(0, 40, 3, 16, {1: 3.0})
    found = rank_candidates(positive, negative, [2, 5, 9], holdout_split(40))
    assert found.winner.layer == 5 and found.winner.holdout_accuracy == 1.0 and found.winner.selected
    assert [c.selected for c in found.candidates].count(True) == 1 and len(found.candidates) == 9
    assert found.holdout.auroc == 1.0 and found.refit.pairs == 40
    assert abs(found.shuffled.accuracy - 0.5) < 0.25 and abs(found.random.accuracy - 0.5) < 0.1
    assert found.search.at_least < 0.05 and found.beats_luck
    assert np.array_equal(found.direction, found.fit.direction) and abs(found.direction[0]) > 0.9


def test_noise_alone_is_told_by_the_search_control():
    positive, negative = random_sides(1, 40, 20, 16)
    found = rank_candidates(positive, negative, range(20), holdout_split(40), shuffles=5)
    # The best of 60 candidates looks good by itself, and is nothing beside the best of 60 by luck.
    assert found.winner.holdout_accuracy >= 0.75
    assert found.search.at_least > 0.05 and found.search.accuracy >= 0.7


def test_pairs_that_all_differ_alike_are_not_taken_for_luck():
    """Swapped training labels alone would find the one axis, with the right sign or the wrong one, half of the time."""
    positive, negative = random_sides(6, 40, 1, 16, {0: 30.0})
    found = rank_candidates(positive, negative, [0], holdout_split(40), methods=["caa"])
    assert found.shuffled.as_accurate < 0.05 and found.random.as_accurate > 0.2 and found.beats_luck


def test_the_verdict_counts_ties_against_the_winner_and_wants_more_than_half():
    control = _control([(0.75, 0.1), (0.75, 0.9), (0.5, 2.0), (1.0, 0.0)], (0.75, 0.5))
    assert (control.at_least, control.as_accurate) == (3 / 5, 4 / 5)
    positive, negative = random_sides(0, 40, 3, 16, {1: 3.0})
    found = rank_candidates(positive, negative, [2, 5, 9], holdout_split(40))
    high = replace(found.shuffled, as_accurate=0.139)
    assert replace(found, shuffled=high).luck == ("shuffled", 0.139) and not replace(found, shuffled=high).beats_luck
    assert not replace(found, holdout=replace(found.holdout, accuracy_interval=(0.47, 0.91))).beats_luck


@settings(deadline=None, max_examples=5)
@given(st.integers(0, 1000))
def test_a_seed_repeats_everything(seed):
    sides = random_sides(2, 8, 2, 4)
    first, again = (rank_candidates(*sides, [0, 1], holdout_split(8), seed=seed, shuffles=5, draws=20).to_dict() for _ in range(2))
    assert json.dumps(first) == json.dumps(again)


def test_ties_in_accuracy_go_to_the_margin_then_to_the_first():
    positive = np.zeros((8, 2, 2), np.float32)
    positive[:, 0, 0], positive[:, 1, 0] = 1.0, 2.0
    found = rank_candidates(positive, -positive, [0, 1], holdout_split(8), methods=["lda", "caa", "mean-difference"])
    assert (found.winner.layer, found.winner.method) == (1, "lda")
    assert [c.method for c in found.candidates] == ["lda", "caa"] * 2


def test_a_candidate_that_cannot_be_fitted_is_named_and_passed_over():
    positive, negative = random_sides(3, 8, 2, 4, {1: 2.0})
    positive[:, 0] = negative[:, 0] = 0.0
    found = rank_candidates(positive, negative, [0, 1], holdout_split(8), methods=["caa"])
    assert found.candidates[0].note == "training produced a zero or non-finite direction"
    assert found.candidates[0].holdout_accuracy is None and found.winner.layer == 1
    json.dumps(found.to_dict(), allow_nan=False)
    with pytest.raises(InputError, match="zero or non-finite direction"):
        rank_candidates(positive[:, :1], negative[:, :1], [0], holdout_split(8), methods=["caa"])


def test_folds_score_every_pair_and_progress_counts_every_fit():
    positive, negative = random_sides(4, 12, 2, 6, {0: 2.0})
    seen = []
    found = rank_candidates(
        positive, negative, [0, 1], fold_splits(12, folds=3), shuffles=4, progress=lambda done, total: seen.append((done, total))
    )
    assert found.holdout.pairs == 12 and found.folds == 3
    assert seen == [(n, 30) for n in range(1, 31)]


def test_searches_that_cannot_be_are_refused():
    positive, negative = random_sides(5, 8, 2, 4)
    splits = holdout_split(8)
    with pytest.raises(InputError, match='^unknown training method "x"; expected caa, pca, or logistic$'):
        rank_candidates(positive, negative, [0, 1], splits, methods=["x"])
    with pytest.raises(InputError, match="^activation vectors must have one finite, consistent width$"):
        rank_candidates(positive, negative, [0], splits)
    with pytest.raises(InputError, match="^no layers selected$"):
        rank_candidates(positive[:, :0], negative[:, :0], [], splits)
    with pytest.raises(InputError, match="^optimization requires at least four contrastive pairs$"):
        rank_candidates(positive[:3], negative[:3], [0, 1], splits)


def test_a_pair_told_twenty_times_is_one_witness() -> None:
    random = np.random.default_rng(3)
    unlike = random.normal(size=(12, 2, 1, 16)).astype(np.float32)
    told = np.concatenate([unlike, np.repeat(unlike[-1:], 19, axis=0)])
    names = [*range(12), *[11] * 19]
    splits = holdout_split(len(told), groups=names)
    found = rank_candidates(told[:, 0], told[:, 1], [0], splits, groups=names, methods=["caa"])
    assert (found.holdout.pairs, found.holdout.independent) == (20, 1)
    assert found.holdout.margin_interval is None and not found.beats_luck
    assert found.search.as_accurate > 0.4  # one coin, not twenty


def test_intervals_count_groups() -> None:
    positive, negative = np.array([[1.0], [1.0], [1.0], [-1.0]]), np.zeros((4, 1))
    each = score(positive, negative, [1.0], [5, 5, 5, 6])
    assert (each.pairs, each.independent, each.right) == (4, 2, 3)
    assert each.accuracy_interval == wilson(1.0, 2)

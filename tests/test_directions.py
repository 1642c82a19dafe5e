import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ster.directions import METHODS, caa, check_rows, fit, lda, logistic, parse_method, pca, pca_centered
from ster.errors import InputError

EVERY = pytest.mark.parametrize("method", METHODS)


def random_pairs(seed, pairs=12, hidden=16, scale=1.0):
    draw = np.random.default_rng(seed)
    shift = draw.normal(size=hidden)
    positive = scale * (draw.normal(size=(pairs, hidden)) + shift)
    negative = scale * (draw.normal(size=(pairs, hidden)) - shift)
    return positive.astype(np.float32), negative.astype(np.float32)


def planted(pairs=100, hidden=48, noise=5.0, constant=0.0, outlier=0.0, seed=3):
    """Noise of `noise` along coordinate 0, a class shift of 2 along coordinate 1, 0.1 everywhere; the shift's axis is returned too."""
    draw = np.random.default_rng(seed)
    a, b = np.eye(hidden)[:2]

    def side(sign):
        rows = draw.normal(size=(pairs, 1)) * noise * a + sign * b + 0.1 * draw.normal(size=(pairs, hidden))
        rows[:, 5:8] += constant
        return rows

    positive, negative = side(1.0), side(-1.0)
    if outlier:
        positive[3] = 0.0
        positive[3, 10] = outlier
    return positive.astype(np.float32), negative.astype(np.float32), b, a


# Laws


@EVERY
@given(seed=st.integers(0, 2**32 - 1), pairs=st.integers(2, 9), scale=st.sampled_from([1e-6, 1.0, 1e6]))
@settings(deadline=None, max_examples=40)
def test_swapping_the_classes_flips_the_sign_exactly(method, seed, pairs, scale):
    positive, negative = random_pairs(seed, pairs=pairs, scale=scale)
    there, back = fit(method, positive, negative).direction, fit(method, negative, positive).direction
    assert there.tobytes() == (-back).tobytes()


@EVERY
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-30, 1.0, 1e30]))
@settings(deadline=None, max_examples=20)
def test_a_direction_is_float32_of_length_one(method, seed, scale):
    direction = fit(method, *random_pairs(seed, scale=scale)).direction
    assert direction.dtype == np.float32 and direction.flags.c_contiguous
    # Each coordinate is off by at most half an ulp, 2^-25 of itself.
    assert abs(np.linalg.norm(direction.astype(np.float64)) - 1.0) <= 2**-24


@EVERY
def test_the_same_rows_give_the_same_bits(method):
    rows = random_pairs(1)
    assert fit(method, *rows).direction.tobytes() == fit(method, *rows).direction.tobytes()


@EVERY
@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=20)
def test_positive_rows_lie_higher_on_average(method, seed):
    positive, negative = random_pairs(seed)
    d = fit(method, positive, negative).direction.astype(np.float64)
    assert ((positive.astype(np.float64) - negative) @ d).mean() > 0.0


whole = st.integers(-50, 50)


@given(
    hnp.arrays(np.float32, (4, 3), elements=whole),
    hnp.arrays(np.float32, (4, 3), elements=whole),
    st.integers(2, 4),
    hnp.arrays(np.float32, 3, elements=whole),
)
def test_caa_does_not_see_repeated_pairs_their_order_or_a_constant(positive, negative, times, constant):
    # Whole numbers, so that every sum is exact and the law holds to the bit.
    if not (positive.sum(0) != negative.sum(0)).any():
        return
    plain = caa(positive, negative).direction
    # A mean of 12 rows is not the mean of 4 to the last bit of float64 (thirds), which float32 may show once in a long while.
    for p, n in (
        (np.tile(positive, (times, 1)), np.tile(negative, (times, 1))),
        (positive[::-1], negative[::-1]),
        (positive + constant, negative + constant),
    ):
        np.testing.assert_array_max_ulp(caa(p, n).direction, plain, maxulp=1)


@EVERY
def test_a_constant_in_all_rows_changes_nothing(method):
    positive, negative = random_pairs(5, pairs=20, scale=64.0)
    moved = np.float32(8192.0)  # rows stay exact to 2^-10, a part in 10^5 of theirs
    plain, shifted = fit(method, positive, negative).direction, fit(method, positive + moved, negative + moved).direction
    assert plain @ shifted > 1 - 1e-6


# Definitions


def test_caa_is_the_mean_difference():
    positive, negative = random_pairs(0)
    expected = (positive.astype(np.float64) - negative).mean(0)
    np.testing.assert_allclose(caa(positive, negative).direction, expected / np.linalg.norm(expected), rtol=1e-6)


def test_pca_is_the_first_right_singular_vector_of_the_centred_differences():
    positive, negative = random_pairs(0)
    difference = positive.astype(np.float64) - negative
    axis = np.linalg.svd(difference - difference.mean(0))[2][0]
    axis *= np.sign(axis @ difference.mean(0))
    np.testing.assert_allclose(pca(positive, negative).direction, axis, atol=1e-6)


def test_pca_centered_is_the_first_component_of_rows_less_their_midpoints():
    positive, negative = random_pairs(0)
    p, n = positive.astype(np.float64), negative.astype(np.float64)
    middle = (p + n) / 2
    axis = np.linalg.svd(np.concatenate([p - middle, n - middle]))[2][0]
    axis *= np.sign(axis @ (p - n).mean(0))
    np.testing.assert_allclose(pca_centered(positive, negative).direction, axis, atol=1e-6)


def test_logistic_is_plain_gradient_descent_where_its_rate_suits_the_rows():
    positive, negative = random_pairs(0, scale=0.3)
    rows, labels = np.concatenate([positive, negative]).astype(np.float64), np.repeat([1.0, 0.0], 12)
    w = np.zeros(16)
    for step in range(300):
        gradient = rows.T @ (1 / (1 + np.exp(-rows @ w)) - labels) / len(rows) + 1e-4 * w
        w -= 0.1 / (1 + 0.01 * step) * gradient
    np.testing.assert_allclose(logistic(positive, negative).direction, w / np.linalg.norm(w), atol=1e-6)


def test_lda_solves_with_the_shrunk_covariance():
    positive, negative = random_pairs(0, pairs=30)
    p, n = positive.astype(np.float64), negative.astype(np.float64)
    rows = np.concatenate([p - p.mean(0), n - n.mean(0)])
    covariance, mean = rows.T @ rows / 60, np.trace(rows.T @ rows) / 60 / 16
    spread = np.sum((covariance - mean * np.eye(16)) ** 2)
    error = sum(np.sum((np.outer(row, row) - covariance) ** 2) for row in rows) / 60**2
    g = min(1.0, error / spread)
    w = np.linalg.solve((1 - g) * covariance + g * mean * np.eye(16), (p - n).mean(0))
    np.testing.assert_allclose(lda(positive, negative).direction, w / np.linalg.norm(w), atol=1e-6)


# Planted data: what each method finds, and what it does not


@pytest.mark.parametrize("constant", [0.0, 100.0])
def test_caa_and_logistic_find_a_small_shift_under_large_noise(constant):
    positive, negative, shift, _ = planted(constant=constant)
    assert caa(positive, negative).direction @ shift > 0.95
    assert logistic(positive, negative).direction @ shift > 0.99
    assert lda(positive, negative).direction @ shift > 0.95


def test_pca_finds_the_noise_as_its_docstring_warns():
    positive, negative, shift, noise = planted()
    for method in (pca, pca_centered):
        assert abs(method(positive, negative).direction @ noise) > 0.99
    assert pca_centered(*planted(noise=0.5)[:2]).direction @ shift > 0.95
    assert abs(pca(*planted(noise=0.5)[:2]).direction @ shift) < 0.2


@pytest.mark.parametrize("constant", [0.0, 100.0])
def test_an_extreme_row_misleads_caa_but_not_logistic(constant):
    positive, negative, shift, _ = planted(constant=constant, outlier=1500.0)
    assert logistic(positive, negative).direction @ shift > 0.95
    assert caa(positive, negative).direction @ shift < 0.2


def test_logistic_orders_as_many_rows_as_a_probe_with_a_bias():
    # scikit-learn 1.9.1 LogisticRegression(C=1.0), with an intercept: all 200 rows right, with and without the constant.
    for constant in (0.0, 100.0):
        positive, negative, _, _ = planted(constant=constant)
        d = logistic(positive, negative).direction.astype(np.float64)
        assert (positive @ d).min() > (negative @ d).max()


def test_logistic_says_whether_it_converged():
    # Classes that overlap: the optimum is near, and 300 steps reach it.
    assert logistic([[4.0], [-2.0]], [[-4.0], [2.0]]).notes == ()
    assert "not converged after 300 steps" in logistic(*planted()[:2]).notes[0]


# Degenerate inputs


def test_pca_falls_back_to_the_mean_difference_and_says_so():
    one = pca([[1, 2, 2]], [[0, 0, 0]])
    np.testing.assert_allclose(one.direction, [1 / 3, 2 / 3, 2 / 3], rtol=1e-6)
    assert one.notes == ("pca: one pair has no principal component; the mean difference was used",)
    same = pca([[3, 0], [4, 1]], [[0, 0], [1, 1]])
    assert same.direction.tolist() == [1, 0] and "differences of all pairs are the same" in same.notes[0]


def test_pca_takes_the_axis_nearest_the_mean_among_equals():
    differences = np.array([[1, 1, 5], [-1, 1, 5], [1, -1, 5], [-1, -1, 5]], np.float32) + np.float32([1, 0, 0])
    np.testing.assert_allclose(pca(differences, np.zeros((4, 3))).direction, [1, 0, 0], atol=1e-12)


def test_an_axis_without_a_sign_is_refused():
    with pytest.raises(InputError, match="zero or non-finite direction") as caught:
        pca([[5, 1], [-5, 1]], np.zeros((2, 2)))
    assert "right angles" in str(caught.value.hint)


def test_lda_without_variance_falls_back_and_says_so():
    found = lda([[1, 0]], [[0, 0]])
    assert found.direction.tolist() == [1, 0] and "no variance" in found.notes[0]


@EVERY
@pytest.mark.parametrize("rows", [[[1, 2]], [[1, 2], [-1, 3]]])
def test_classes_that_do_not_differ_are_refused(method, rows):
    with pytest.raises(InputError, match="^training produced a zero or non-finite direction$"):
        fit(method, rows, rows)
    with pytest.raises(InputError, match="^training produced a zero or non-finite direction$"):
        fit(method, [[1, 2], [3, 4]], [[3, 4], [1, 2]])


@pytest.mark.parametrize(
    ("positive", "negative", "sentence"),
    [
        ([], [], "training requires the same non-zero number of positive and negative examples"),
        ([[1]], [[1], [2]], "training requires the same non-zero number of positive and negative examples"),
        ([[]], [[]], "activation vectors are empty"),
        ([[1, 2]], [[1]], "activation vectors must have one finite, consistent width"),
        ([[1, 2], [1]], [[1, 2], [1, 2]], "activation vectors must have one finite, consistent width"),
        ([[float("nan")]], [[0]], "activation vectors must have one finite, consistent width"),
        ([[1]], [[float("inf")]], "activation vectors must have one finite, consistent width"),
        ([1], [0], "activation vectors must have one finite, consistent width"),
        ([["a"]], [["b"]], "activation vectors must have one finite, consistent width"),
        (1.0, 2.0, "training requires the same non-zero number of positive and negative examples"),
    ],
)
def test_rows_that_do_not_fit_are_refused(positive, negative, sentence):
    with pytest.raises(InputError) as caught:
        check_rows(positive, negative)
    assert str(caught.value) == sentence


def test_method_names_and_aliases():
    assert [parse_method(name) for name in (*METHODS, "mean-difference", "probe")] == [*METHODS, "caa", "logistic"]
    for name in ("ridge", "", "CAA"):
        with pytest.raises(InputError) as caught:
            parse_method(name)
        assert str(caught.value) == f'unknown training method "{name}"; expected caa, pca, or logistic'

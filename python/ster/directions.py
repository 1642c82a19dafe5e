"""From the activations of contrastive pairs to a direction: five estimators, each a few lines of NumPy.

Every estimator takes `positive` and `negative`, float32 `[pairs, hidden]` (row i of one is the counterpart of row i of the other,
both read at one layer), and returns a `Fit`: a unit vector, float32 `[hidden]`, that points to more of the trait.

What they share:
- Sums are in float64 and the result is rounded to float32 once. Swapping `positive` and `negative` flips its sign, bit for bit.
- `caa` uses additions in one fixed order and gives the same bits on every machine. The others multiply matrices, and a BLAS adds in an
  order of its own: two machines agree to about 1e-12 before the rounding, so now and then a last bit differs. One machine repeats itself.
- They work on `half` and `middle`, half the difference and the midpoint of each pair, because a swap turns the first around and leaves the
  second alone. Products are between pairs (`[pairs, pairs]`), never between coordinates (`[hidden, hidden]`).

Which one: `caa` first. `logistic` when a few rows are extreme, `lda` when much of the variance has nothing to do with the trait and there
are pairs enough to measure it. `pca` finds where pairs differ *from each other*, which need not be where the classes differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ster.errors import InputError

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

METHODS = ("caa", "pca", "logistic", "pca-centered", "lda")
ALIASES = {"mean-difference": "caa", "probe": "logistic"}
DEFAULT_SEARCH = ("caa", "pca", "logistic")

STEPS = 300
LEARNING_RATE = 0.1
DECAY = 0.01
L2 = 1e-4

ZERO = "training produced a zero or non-finite direction"

# Relative size under which a number is rounding noise of the float32 activations, squared sizes included.
NOISE = 1e-12


@dataclass(frozen=True)
class Fit:
    """direction: float32 `[hidden]`, of norm 1. notes: what the caller should pass on, one sentence each; empty when all went as asked."""

    direction: Float32
    notes: tuple[str, ...] = ()


def parse_method(name: str) -> str:
    """The name an artifact records: `mean-difference` is `caa`, `probe` is `logistic`.

    >>> parse_method("probe")
    'logistic'
    """
    method = ALIASES.get(name, name)
    if method not in METHODS:
        raise InputError(
            f'unknown training method "{name}"; expected caa, pca, or logistic',
            "also: pca-centered, lda, and the aliases mean-difference (caa) and probe (logistic)",
        )
    return method


def fit(method: str, positive: ArrayLike, negative: ArrayLike) -> Fit:
    """The direction `method` finds; `method` is a name of `METHODS` or an alias.

    Args:
        positive: `[pairs, hidden]`.
        negative: `[pairs, hidden]`, row i the counterpart of `positive[i]`.

    Raises:
        InputError: an unknown method, rows that do not fit together or are not finite, classes that do not differ.
    """
    return ESTIMATORS[parse_method(method)](positive, negative)


def caa(positive: ArrayLike, negative: ArrayLike) -> Fit:
    """Mean difference: `mean(positive - negative)`, normalised.

    Blind to variance: an extreme row enters with weight 1 / pairs, however extreme, and large unrelated noise stays in the mean at
    `noise / sqrt(pairs)`. A constant in all rows cancels.

    Source: Rimsky et al. 2023, arXiv:2312.06681.
    >>> caa([[2, 1]], [[0, 1]]).direction
    array([1., 0.], dtype=float32)
    """
    half, _ = _halves(positive, negative)
    return Fit(_unit(_shift(half)))


def pca(positive: ArrayLike, negative: ArrayLike) -> Fit:
    """First principal component of the centred differences, `positive - negative` less their mean, with the sign of the mean difference.

    Centring removes what all pairs share, the trait's own shift included: what is left is the axis along which the pairs differ most *from
    each other*. Large unrelated noise is that, and is what `pca` then finds. Use it when the trait varies in strength between pairs.

    One pair, or differences that are all the same, leave nothing after centring: the mean difference is returned, with a note. When the
    first components are equally strong, the one nearest the mean difference is taken; one at right angles to it has no sign and is refused.
    """
    half, _ = _halves(positive, negative)
    mean = _shift(half)
    rest = half - mean
    if np.sum(rest * rest) <= NOISE * np.sum(half * half):
        why = "one pair has" if len(half) == 1 else "the differences of all pairs are the same and have"
        return Fit(_unit(mean), (f"pca: {why} no principal component; the mean difference was used",))
    return _leading(rest, mean)


def pca_centered(positive: ArrayLike, negative: ArrayLike) -> Fit:
    """First principal component of all rows, each less its pair's midpoint, with the sign of the mean difference.

    The rows are then `+half` and `-half` of each pair, so this is the axis of the largest mean square difference. Unlike `pca` it keeps
    the shift the pairs share, and finds it if it is larger than the noise between pairs. It is `pca_center` of repeng; the sign there is
    the one that puts more pairs in order, here the one with the larger mean margin, as in the other methods.

    Source: Zou et al. 2023, arXiv:2310.01405, reading vectors.
    """
    half, _ = _halves(positive, negative)
    return _leading(half, _shift(half))


def logistic(positive: ArrayLike, negative: ArrayLike) -> Fit:
    """Weights of a logistic probe without bias: positive rows 1, negative rows 0, normalised.

    Minimises `mean_i log(1 + exp(-y_i w.x_i)) + L2/2 ||w||^2`, `y = +1` or `-1`, by 300 steps of full-batch gradient descent at a rate of
    `0.1 / (1 + 0.01 step)`, L2 1e-4, from `w = 0`. The rows `x` are the activations as they are, if that rate suits them: 0.1 times the
    largest curvature of the loss (bounded from above) is at most 1. Residual streams are mostly larger than that and carry a constant many
    times the trait's size; plain descent then swings along the constant and drowns the direction. So where the rate is too large:

    1. the mean of all rows is subtracted, which does the work of a bias, the classes being of equal size;
    2. if that is not enough, all rows are divided by one number that brings the product down to 1. This changes how far 300 steps reach,
       and not where the optimum points, but for L2.

    300 steps are an early stop: for classes that can be separated the loss has no minimum nearby and `w` is still growing. A note says
    when the gradient has not fallen to a thousandth of its start. An extreme row loses its pull once it is on the right side, so outliers
    hurt less than in `caa`.

    The descent runs on the coefficients of `w` in the rows, `w = half.T u + middle.T v`: the same steps, on `[pairs, pairs]`.
    """
    half, middle = _halves(positive, negative)
    _shift(half)
    pairs = len(half)
    basis = np.concatenate([half, middle])
    gram = basis @ basis.T
    if LEARNING_RATE * _curvature(gram) > 1.0:
        basis = np.concatenate([half, middle - middle.mean(axis=0)])
        gram = basis @ basis.T
        gram /= max(1.0, LEARNING_RATE * _curvature(gram))

    coefficients = np.zeros(2 * pairs)
    start = end = 0.0
    for step in range(STEPS):
        along_half, along_middle = np.split(gram @ coefficients, 2)
        up = _sigmoid(-(along_middle + along_half))  # pull of each positive row
        down = -_sigmoid(along_middle - along_half)  # and of each negative one
        gradient = L2 * coefficients - np.concatenate([up - down, up + down]) / (2 * pairs)
        if step in (0, STEPS - 1):
            start, end = end, float(gradient @ (gram @ gradient))  # squared length of the gradient of w
        coefficients -= LEARNING_RATE / (1.0 + DECAY * step) * gradient

    remaining = np.sqrt(max(end, 0.0) / start) if start > 0.0 else 0.0
    notes = () if remaining <= 1e-3 else (f"logistic: not converged after {STEPS} steps (the gradient is at {remaining:.1e} of its start)",)
    return Fit(_unit(coefficients @ basis), notes)


def lda(positive: ArrayLike, negative: ArrayLike) -> Fit:
    """Fisher's discriminant: the mean difference whitened by the covariance within the classes, normalised.

    `direction = ((1 - g) S + g m I)^-1 (mean(positive) - mean(negative))`, with `S` the covariance of all rows about their class means and
    `m` its mean eigenvalue. The shrinkage `g` is that of Ledoit and Wolf. Turns away from directions that vary for other reasons. Where it
    fails: when one direction holds nearly all the variance, `g` is small, and with fewer rows than coordinates the quiet directions are
    then trusted too much; and an extreme row stays in the mean difference, damped but not gone.

    With no variance inside the classes (one pair, say) the mean difference is returned, with a note.

    Source: Ledoit and Wolf 2004, doi:10.1016/S0047-259X(03)00096-4.
    """
    half, middle = _halves(positive, negative)
    pairs, hidden = half.shape
    rows = 2 * pairs
    shift = _shift(half)
    # Rows about their class means are middle + half and middle - half of these; their scatter is 2 * basis.T @ basis.
    basis = np.concatenate([half - shift, middle - middle.mean(axis=0)])
    gram = basis @ basis.T
    if np.trace(gram) <= NOISE * np.sum(half * half):
        return Fit(_unit(shift), ("lda: no variance inside the classes; the mean difference was used",))

    mean_variance = 2.0 * np.trace(gram) / (rows * hidden)
    spread = 4.0 * np.sum(gram * gram) / rows**2 - hidden * mean_variance**2  # ||S - m I||^2
    sums, cross = np.diag(gram)[:pairs] + np.diag(gram)[pairs:], 2.0 * np.diag(gram[:pairs, pairs:])
    fourth = np.sum((sums + cross) ** 2 + (sums - cross) ** 2)  # sum over rows of ||row||^4
    error = (fourth / rows - 4.0 * np.sum(gram * gram) / rows**2) / rows  # of S as an estimate
    g = min(1.0, max(error, 0.0) / spread) if spread > 0.0 else 1.0
    if g <= 0.0:
        g = NOISE  # S alone cannot be inverted when it has fewer rows than coordinates

    # (a I + b basis.T basis)^-1 shift, by the matrix inversion lemma: a system of 2 * pairs unknowns instead of hidden.
    a, b = g * mean_variance, (1.0 - g) * 2.0 / rows
    inner = np.linalg.solve(a * np.eye(rows) + b * gram, b * (basis @ shift))
    return Fit(_unit(shift - inner @ basis))


ESTIMATORS: dict[str, Callable[[ArrayLike, ArrayLike], Fit]] = {
    "caa": caa,
    "pca": pca,
    "logistic": logistic,
    "pca-centered": pca_centered,
    "lda": lda,
}


def check_rows(positive: ArrayLike, negative: ArrayLike) -> tuple[Float64, Float64]:
    """Both sides as float64 `[pairs, hidden]`, after the refusals every estimator and score shares.

    Raises:
        InputError: unequal or zero numbers of rows; rows without coordinates; rows of several widths, or with NaN or infinity.
    """
    uneven = InputError("activation vectors must have one finite, consistent width")
    sides = []
    for side in (positive, negative):
        try:
            sides.append(np.asarray(side, dtype=np.float64))
        except (TypeError, ValueError):
            raise uneven from None
    if any(side.ndim == 0 for side in sides) or len(sides[0]) != len(sides[1]) or len(sides[0]) == 0:
        raise InputError("training requires the same non-zero number of positive and negative examples")
    if any(side.ndim == 2 and side.shape[1] == 0 for side in sides):
        raise InputError("activation vectors are empty")
    if any(side.ndim != 2 for side in sides) or sides[0].shape != sides[1].shape or not all(np.isfinite(side).all() for side in sides):
        raise uneven
    return sides[0], sides[1]


def _halves(positive: ArrayLike, negative: ArrayLike) -> tuple[Float64, Float64]:
    """`half = (positive - negative) / 2` and `middle = (positive + negative) / 2`, float64 `[pairs, hidden]`."""
    above, below = check_rows(positive, negative)
    return (above - below) / 2.0, (above + below) / 2.0


def _shift(half: Float64) -> Float64:
    """Mean of `half` `[pairs, hidden]`, refused when nothing of it is left but the rounding of the rows it was made from."""
    shift = np.asarray(half.mean(axis=0))
    if np.sqrt(np.sum(shift * shift)) <= NOISE * np.sqrt(np.mean(np.sum(half * half, axis=1))):
        raise InputError(ZERO, "the positive and the negative sides have the same mean activation")
    return shift


def _unit(vector: Float64) -> Float32:
    """`vector` / its norm, rounded once."""
    largest = np.max(np.abs(vector))
    if not np.isfinite(largest) or largest == 0.0:
        raise InputError(ZERO)
    scaled = vector / largest  # so that no square overflows or vanishes
    return np.ascontiguousarray(scaled / np.sqrt(np.sum(scaled * scaled)), dtype=np.float32)


def _curvature(gram: Float64) -> float:
    """Upper bound of the largest eigenvalue of the logistic loss's Hessian, from the products of `half` and `middle`.

    The rows have twice the scatter of the basis; a sigmoid's slope is at most 1/4; no eigenvalue is over the Frobenius norm.
    """
    return float(2.0 * np.sqrt(np.sum(gram * gram)) / (4 * len(gram)))


def _leading(rows: Float64, mean: Float64) -> Fit:
    """First right singular vector of `rows` `[pairs, hidden]`, turned towards `mean` `[hidden]`, from the products between rows."""
    values, vectors = np.linalg.eigh(rows @ rows.T)
    tied = values >= values[-1] * (1.0 - 1e-9)
    axes = vectors[:, tied].T @ rows  # [tied, hidden], at right angles and of equal length
    leaning = axes @ mean
    if np.sqrt(np.sum(leaning * leaning)) <= 1e-9 * np.sqrt(np.sum(mean * mean) * values[-1]):
        raise InputError(ZERO, "the component is at right angles to the mean difference, so it has no sign; caa or logistic may do")
    return Fit(_unit(leaning @ axes))


def _sigmoid(x: Float64) -> Float64:
    """`1 / (1 + exp(-x))`, without overflow."""
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0.0, 1.0, small) / (1.0 + small))

"""How good a direction is, and how sure that is: margins, intervals, controls, and the search over methods and layers.

Words: the margin of a pair is `p.d - n.d`, with `p` and `n` the activations of its sides and `d` the direction; a pair is right when its
margin is over 0 (not at 0). Accuracy is the share of right pairs, `margin` the mean margin. Everything is float64 and needs no model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ster.directions import DEFAULT_SEARCH, Fit, Float32, Float64, check_rows, fit, parse_method
from ster.errors import InputError

Z95 = 1.959963984540054
# Student's t at 97.5 % for 1 to 30 degrees of freedom; past that an expansion about the normal quantile is right to 1e-4.
T95 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314),
    *(2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)  # fmt: skip

# How much too small shares of luck are over folds: 0.13 to 0.16 of noise sets fell below 0.05, with 5 and 10 folds of 20 pairs.
FOLDS_FLATTER = 3.0

Interval = tuple[float, float]
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Score:
    """A direction on a set of pairs.

    independent: how many pairs, near duplicates of one another counted once: they are one witness, however often it is called.
    accuracy_interval: Wilson over the independent ones, 95 %. margin_interval: Student's t over them, 95 %; None for a single one.
    auroc: chance that the positive side of one pair lies above the negative side of any pair, its own or another, ties counting half. High
    accuracy with a low AUROC means the direction orders within pairs and does not separate the classes.
    """

    pairs: int
    independent: int
    right: int
    accuracy: float
    accuracy_interval: Interval
    margin: float
    margin_interval: Interval | None
    auroc: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def margins(positive: ArrayLike, negative: ArrayLike, direction: ArrayLike) -> Float64:
    """Margin of each pair: `(positive[i] - negative[i]) . direction`, float64 `[pairs]`.

    Added up in one fixed order: the same bits on every machine.

    Args:
        positive, negative: `[pairs, hidden]`.
        direction: `[hidden]`, of any length; for a unit vector margins are in the units of the activations.

    Raises:
        InputError: rows that do not fit together, or a direction of another width.
    """
    above, below = check_rows(positive, negative)
    return np.asarray(((above - below) * _direction(direction, above.shape[1])).sum(axis=1))


def score(positive: ArrayLike, negative: ArrayLike, direction: ArrayLike, groups: Sequence[int] | None = None) -> Score:
    """Accuracy, margin and AUROC of `direction` on these pairs, with intervals. Arguments and refusals as in `margins`.

    groups: one name per pair, equal for near duplicates (see `pairs_lint.groups`); None: all pairs are independent.
    """
    above, below = check_rows(positive, negative)
    each = margins(above, below, direction)
    d = _direction(direction, above.shape[1])
    return _score(each, auroc((above * d).sum(axis=1), (below * d).sum(axis=1)), _groups(len(each), groups))


def wilson(right: float, total: int) -> Interval:
    """95 % interval for a share of `right` among `total`; holds its level for small totals and at 0 and 1. A tie may count as half.

    Source: Wilson 1927.
    >>> tuple(round(x, 3) for x in wilson(7, 8))
    (0.529, 0.978)
    """
    if not 0 <= right <= total or total == 0:
        raise ValueError("wilson needs 0 <= right <= total, total > 0")
    share, z2 = right / total, Z95**2
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return (0.0 if right == 0 else max(0.0, middle - half), 1.0 if right == total else min(1.0, middle + half))


def mean_interval(values: ArrayLike) -> Interval | None:
    """95 % interval for the mean of `values`, `mean +- t s / sqrt(n)`; None for fewer than two.

    Assumes values drawn independently, near enough to normal for the mean. Pairs written from one template are not independent: the true
    interval is then wider.
    """
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        return None
    mean = float(x.mean())
    half = t95(len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return (mean - half, mean + half)


def t95(freedom: int) -> float:
    """The 97.5 % point of Student's t.

    >>> round(t95(9), 3), round(t95(100), 3)
    (2.262, 1.984)
    """
    if freedom <= len(T95):
        return T95[freedom - 1]
    z = Z95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def auroc(positive: ArrayLike, negative: ArrayLike) -> float:
    """Chance that a value of `positive` `[n]` exceeds one of `negative` `[m]`, ties counting half. 0.5 is no separation.

    >>> auroc([2, 3], [1, 2])
    0.875
    """
    above, below = np.asarray(positive, np.float64), np.sort(np.asarray(negative, np.float64))
    under = np.searchsorted(below, above, side="left") + np.searchsorted(below, above, side="right")
    return float(under.sum()) / (2 * len(above) * len(below))


@dataclass(frozen=True)
class Split:
    """Row numbers of the pairs a candidate is fitted on and of those it is scored on."""

    train: NDArray[np.intp]
    holdout: NDArray[np.intp]


def holdout_split(pairs: int, *, holdout: float = 0.2, groups: Sequence[int] | None = None) -> list[Split]:
    """One split: the last pairs in file order are held out, a share of `holdout` rounded up to a whole pair.

    Groups (see `pairs_lint.groups`) are never cut: the last pair's group is held out whole, then the next to last one's, until there are
    enough. So with groups the holdout may be larger, and hold earlier pairs.

    Raises:
        InputError: fewer than four pairs, a share not between 0 and 1, or nothing left to train on.
    """
    _enough(pairs)
    if not 0.0 < holdout < 1.0:
        raise InputError(f"holdout must be more than 0 and less than 1, found {holdout:g}")
    names = _groups(pairs, groups)
    wanted = max(1, math.ceil(round(holdout * pairs, 9)))
    held: set[int] = set()
    count = 0
    for name in reversed(names):
        if count >= wanted:
            break
        if name not in held:
            held.add(name)
            count += names.count(name)
    return [_split(names, held)]


def fold_splits(pairs: int, *, folds: int, groups: Sequence[int] | None = None) -> list[Split]:
    """`folds` splits in which every pair is held out once: groups in file order, cut into runs of nearly equal numbers of pairs.

    Raises:
        InputError: fewer than four pairs, fewer than two folds, or more folds than groups.
    """
    _enough(pairs)
    names = _groups(pairs, groups)
    sizes = Counter(names)  # in file order
    if folds < 2:
        raise InputError(f"cross-validation requires at least two folds, found {folds}")
    if folds > len(sizes):
        raise InputError(f"{folds} folds need as many groups of unlike pairs, found {len(sizes)}", "use fewer folds or more pairs")
    waiting, left, splits = list(sizes), pairs, []
    for to_come in range(folds, 0, -1):
        held = {waiting.pop(0)}
        count = sizes[next(iter(held))]
        # Up to the fold's share of what is left, and one group stays for every fold after it.
        while len(waiting) >= to_come and count + sizes[waiting[0]] / 2 <= left / to_come:
            count += sizes[waiting[0]]
            held.add(waiting.pop(0))
        left -= count
        splits.append(_split(names, held))
    return splits


@dataclass(frozen=True)
class Candidate:
    """One method at one layer, fitted on the training pairs and scored on the held-out ones (all of them, over the folds).

    note: why it could not be fitted; then both figures are None and it is never selected.
    """

    layer: int
    method: str
    holdout_accuracy: float | None
    holdout_margin: float | None
    selected: bool = False
    note: str | None = None


@dataclass(frozen=True)
class Control:
    """The winner's figure under a condition in which nothing can be learned.

    accuracy, margin: means over the draws. accuracy_95: no more than one draw in twenty is above it. at_least: the share of draws, the
    real result counted as one of them, that do as well as the real result (accuracy, ties by margin). as_accurate: the same by accuracy
    alone, never smaller, as margins of several layers are not of one scale. Small means: not luck. With k of n draws as good both are
    (k + 1) / (n + 1). Draws that could not be fitted are left out; with none left the figures are None.
    """

    draws: int
    accuracy: float | None
    margin: float | None
    accuracy_95: float | None
    at_least: float
    as_accurate: float


@dataclass(frozen=True)
class Ranking:
    """What a search found.

    winner: the best candidate. holdout: its score on held-out pairs. fit: its direction, fitted again on all pairs; refit: its score there,
    which is a training score.
    shuffled: fitted and scored in the same way with the sides of random pairs swapped, for training and for scoring alike: were only the
    training pairs swapped, pairs that all differ alike would be found, with the right sign or the wrong one, half of the time.
    random: random directions, scored on the same pairs; many do well where the pairs all differ alike, so this one does not tell of luck.
    The winner is the best of many and its holdout figure therefore too high; `search` says what the best of as many candidates
    reaches by luck: all of them scored with the sides of random held-out pairs swapped, the best taken each time. (Over folds its shares
    are about three times too small, as one fold's held-out pairs train the others; measured on noise.)
    `luck` judges by the worse of shuffled and search.
    """

    winner: Candidate
    candidates: tuple[Candidate, ...]
    holdout: Score
    fit: Fit
    refit: Score
    shuffled: Control
    random: Control
    search: Control
    train_pairs: int
    holdout_pairs: int
    folds: int
    seed: int
    notes: tuple[str, ...]

    @property
    def direction(self) -> Float32:
        """The winner, fitted on all pairs: `[hidden]`."""
        return self.fit.direction

    @property
    def luck(self) -> tuple[str, float]:
        """Which of `shuffled` and `search` comes nearer to the winner, and its `as_accurate`."""
        return max(("shuffled", self.shuffled.as_accurate), ("search", self.search.as_accurate), key=lambda each: each[1])

    @property
    def limit(self) -> float:
        """The largest share of luck that does not speak against the winner."""
        return 0.05 if self.folds == 1 else 0.05 / FOLDS_FLATTER

    @property
    def beats_luck(self) -> bool:
        """Whether at most one draw in twenty of either (over folds, one in sixty) is as accurate as the winner, and its interval above 0.5.

        Held-out pairs of the same making as the training pairs share their faults: this rules out luck, not a wrong trait.
        """
        return self.luck[1] <= self.limit and self.holdout.accuracy_interval[0] > 0.5

    def to_dict(self) -> dict[str, Any]:
        """The `selection` a command prints: everything but the direction."""
        return {
            "layer": self.winner.layer,
            "method": self.winner.method,
            "train_pairs": self.train_pairs,
            "holdout_pairs": self.holdout_pairs,
            "folds": self.folds,
            "seed": self.seed,
            "holdout": self.holdout.to_dict(),
            "shuffled_labels": asdict(self.shuffled),
            "random_directions": asdict(self.random),
            "search_by_luck": asdict(self.search),
            "beats_luck": self.beats_luck,
            "candidates": [{k: v for k, v in asdict(c).items() if k != "note" or v is not None} for c in self.candidates],
            "notes": list(self.notes),
        }


def rank_candidates(
    positive: NDArray[np.float32],
    negative: NDArray[np.float32],
    layers: Sequence[int],
    splits: Sequence[Split],
    *,
    groups: Sequence[int] | None = None,
    methods: Sequence[str] = DEFAULT_SEARCH,
    shuffles: int = 100,
    draws: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Ranking:
    """Fit every method at every layer on part of the pairs, rank them on the rest, and fit the best again on all pairs.

    Ranked by accuracy, ties by margin, further ties by the order of `layers` and `methods`. With several splits a pair's margin is that of
    the candidate fitted without it, and all held-out margins are pooled.

    Args:
        positive, negative: float32 `[pairs, layers, hidden]`: one capture serves every candidate.
        layers: the layer numbers of the second axis.
        splits: from `holdout_split` or `fold_splits`.
        groups: as given to those: a group is one witness in every interval, and its sides are swapped together in every control.
        shuffles: draws with swapped labels, a fit each. draws: random directions, and swaps of held-out pairs, which cost little.
        progress: called with (fits done, fits in all).

    Raises:
        InputError: fewer than four pairs, arrays that do not fit, an unknown method, or no candidate that could be fitted.
    """
    names = list(dict.fromkeys(parse_method(method) for method in methods))
    if positive.ndim != 3 or positive.shape != negative.shape or positive.shape[1] != len(layers):
        raise InputError("activation vectors must have one finite, consistent width")
    _enough(len(positive))
    if not names or not len(layers):
        raise InputError("no layers selected" if names else "at least one training method is required")
    if shuffles < 1 or draws < 1:
        raise InputError("controls require at least one draw")

    random = np.random.Generator(np.random.PCG64(seed))
    together = _groups(len(positive), groups)
    member = np.unique(together, return_inverse=True)[1]  # group number of each pair
    columns = [(np.ascontiguousarray(positive[:, i]), np.ascontiguousarray(negative[:, i])) for i in range(len(layers))]
    grid = [(i, name) for i in range(len(layers)) for name in names]
    ticker = _Ticker(progress, (len(grid) + shuffles) * len(splits))

    held = np.concatenate([split.holdout for split in splits])
    results = [_held_out(*columns[i], splits, name, ticker) for i, name in grid]
    best = _best(results)
    if best is None:
        raise InputError("training produced a zero or non-finite direction", "no method could be fitted at any layer")
    candidates = tuple(
        Candidate(layers[i], name, result.accuracy, result.margin, n == best, result.note)
        for n, ((i, name), result) in enumerate(zip(grid, results, strict=True))
    )
    column, method = grid[best]
    above, below = columns[column]
    real = results[best]
    whole = fit(method, above, below)

    shuffled = []
    for _ in range(shuffles):
        coins = _coins(random, 1, member).T
        shuffled.append(_held_out(np.where(coins, below, above), np.where(coins, above, below), splits, method, ticker))
    anywhere = [_random(above[held], below[held], random) for _ in range(draws)]
    fitted = np.array([result.margins for result in results if result.note is None])

    notes = sorted({note for result in results for note in result.notes} | set(whole.notes))
    return Ranking(
        winner=candidates[best],
        candidates=candidates,
        holdout=_score(real.margins, real.auroc, [together[i] for i in held]),
        fit=whole,
        refit=score(above, below, whole.direction, together),
        shuffled=_control([result.rank for result in shuffled if result.note is None], real.rank),
        random=_control([result.rank for result in anywhere], real.rank),
        search=_control(_best_by_luck(fitted, _coins(random, draws, member)[:, held]), real.rank),
        train_pairs=min(len(split.train) for split in splits),
        holdout_pairs=len(held),
        folds=len(splits),
        seed=seed,
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _Result:
    """Held-out margins of one candidate, `[held-out pairs]`; `note` when it could not be fitted."""

    margins: Float64
    auroc: float = 0.5
    notes: tuple[str, ...] = ()
    note: str | None = None

    @property
    def accuracy(self) -> float | None:
        return None if self.note else float(np.mean(self.margins > 0.0))

    @property
    def margin(self) -> float | None:
        return None if self.note else float(self.margins.mean())

    @property
    def rank(self) -> tuple[float, float]:
        return (-math.inf, -math.inf) if self.note else (float(np.mean(self.margins > 0.0)), float(self.margins.mean()))


class _Ticker:
    """Counts fits and tells `progress`."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)


def _held_out(
    above: Float32,
    below: Float32,
    splits: Sequence[Split],
    method: str,
    tick: Callable[[], None],
) -> _Result:
    """Margins of the held-out pairs of all splits."""
    each, areas, notes = [], [], []
    for split in splits:
        p, q = above[split.train], below[split.train]
        tick()
        try:
            found = fit(method, p, q)
        except InputError as error:
            return _Result(np.zeros(0), note=error.message)
        p, q = above[split.holdout], below[split.holdout]
        each.append(margins(p, q, found.direction))
        d = found.direction.astype(np.float64)
        areas.append(auroc((p * d).sum(axis=1), (q * d).sum(axis=1)) * len(p))
        notes += list(found.notes)
    count = sum(len(split.holdout) for split in splits)
    # Directions of different folds have no common zero, so areas are averaged and not projections pooled.
    return _Result(np.concatenate(each), sum(areas) / count, tuple(notes))


def _coins(random: np.random.Generator, draws: int, member: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Whether to swap the sides of each pair, `[draws, pairs]`; pairs of one group fall alike."""
    return (random.random((draws, int(member.max()) + 1)) < 0.5)[:, member]


def _random(above: Float32, below: Float32, random: np.random.Generator) -> _Result:
    d = random.standard_normal(above.shape[1])
    return _Result(margins(above, below, d / np.sqrt(np.sum(d * d))))


def _best(results: Sequence[_Result]) -> int | None:
    best = max(range(len(results)), key=lambda n: (results[n].rank, -n))
    return None if results[best].note else best


def _best_by_luck(each: Float64, swapped: NDArray[np.bool_]) -> list[tuple[float, float]]:
    """Accuracy and margin of the best candidate, per draw.

    each: held-out margins `[candidates, pairs]`. swapped: `[draws, pairs]`; a swap turns that pair's margin around for every candidate.
    """
    down = swapped.T.astype(np.float64)
    right = ((each > 0.0) @ (1.0 - down) + (each < 0.0) @ down) / each.shape[1]  # [candidates, draws]
    margin = each @ (1.0 - 2.0 * down) / each.shape[1]
    accuracy = right.max(axis=0)
    best = np.where(right == accuracy, margin, -np.inf).max(axis=0)
    return list(zip(accuracy.tolist(), best.tolist(), strict=True))


def _control(ranks: Sequence[tuple[float, float]], real: tuple[float, float]) -> Control:
    if not ranks:
        return Control(0, None, None, None, 1.0, 1.0)
    accuracies = np.sort([accuracy for accuracy, _ in ranks])
    # A draw that happens to be the real result counts as one, whatever the last bit of its sum.
    nearly = (real[0] - 1e-9, real[1] - 1e-9 * abs(real[1]))
    as_good = sum(accuracy > real[0] + 1e-9 or (accuracy > nearly[0] and margin >= nearly[1]) for accuracy, margin in ranks)
    as_accurate = int(np.count_nonzero(accuracies > nearly[0]))
    return Control(
        draws=len(ranks),
        accuracy=float(accuracies.mean()),
        margin=float(np.mean([margin for _, margin in ranks])),
        accuracy_95=float(accuracies[math.ceil(0.95 * len(ranks)) - 1]),
        at_least=(1 + as_good) / (1 + len(ranks)),
        as_accurate=(1 + as_accurate) / (1 + len(ranks)),
    )


def group_means(values: ArrayLike, groups: Sequence[int]) -> Float64:
    """The mean of `values` `[pairs]` over each group, `[groups]`, in the order in which groups first appear.

    >>> group_means([1, 2, 4], [7, 3, 3]).tolist()
    [1.0, 3.0]
    """
    x = np.asarray(values, np.float64)
    members: dict[int, list[int]] = {}
    for index, name in enumerate(groups):
        members.setdefault(name, []).append(index)
    return np.array([x[rows].mean() for rows in members.values()])


def _score(each: Float64, area: float, groups: Sequence[int]) -> Score:
    right = int(np.count_nonzero(each > 0.0))
    pairs = len(each)
    shares = group_means(each > 0.0, groups)
    interval = wilson(float(shares.sum()), len(shares))
    return Score(pairs, len(shares), right, right / pairs, interval, float(each.mean()), mean_interval(group_means(each, groups)), area)


def _direction(direction: ArrayLike, hidden: int) -> Float64:
    d = np.asarray(direction, dtype=np.float64)
    if d.ndim != 1 or len(d) != hidden:
        raise InputError(f"direction width {d.shape[-1] if d.ndim else 0} does not match activation width {hidden}")
    return d


def _enough(pairs: int) -> None:
    if pairs < 4:
        raise InputError("optimization requires at least four contrastive pairs", f"found {pairs}")


def _groups(pairs: int, groups: Sequence[int] | None) -> list[int]:
    names = list(range(pairs)) if groups is None else list(groups)
    if len(names) != pairs:
        raise InputError(f"{len(names)} groups do not match {pairs} pairs")
    return names


def _split(names: Sequence[int], held: set[int]) -> Split:
    inside = np.array([name in held for name in names])
    if inside.all():
        if len(set(names)) == 1:
            hint = "the pairs are near duplicates of one another; `ster pairs inspect` lists them"
        else:
            hint = f"the holdout takes all {len(names)} pairs, near duplicates staying together; hold out a smaller share, as 0.2"
        raise InputError("the split leaves no pair to train on", hint)
    return Split(np.flatnonzero(~inside), np.flatnonzero(inside))

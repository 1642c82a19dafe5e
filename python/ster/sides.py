"""The two sides of every pair, as token ids and as activations: one capture serves every method, layer and score."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ster.abstract_model import AbstractModel
from ster.pairs import PairSet, Side
from ster.progress import Progress

Pairs = PairSet | Iterable[tuple[Side, Side]]
PairTokens = tuple[list[int], list[int]]  # positive, negative

TOKEN_RULE = "last token of the side as the model runs it; before steering"


def as_pair_set(pairs: Pairs) -> PairSet:
    """A `PairSet` as it is; `(positive, negative)` tuples, checked, as one without a name.

    Raises:
        InputError: no pairs, or a side that cannot be used.
    """
    return pairs if isinstance(pairs, PairSet) else PairSet(pairs)  # type: ignore[arg-type]  # which makes pairs of tuples


def pair_tokens(model: AbstractModel, pairs: PairSet) -> list[PairTokens]:
    """The ids of both sides of every pair, all of them checked before anything runs.

    A text is a prompt as everywhere in Ster: one user turn where the model's chat template is applied, raw text otherwise. Messages go
    through the template as they stand.

    Raises:
        InputError: a side the model cannot run, by its pair: `...: pair 3, positive side`.
    """
    sides = [side for pair in pairs for side in (pair.positive, pair.negative)]
    ids = model.side_tokens(sides, _names(len(pairs)))
    return list(zip(ids[::2], ids[1::2], strict=True))


def pair_activations(
    model: AbstractModel, tokens: Sequence[PairTokens], layers: Sequence[int], *, progress: Progress = None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Positive and negative, each float32 `[pairs, layers, hidden]`: the last token's residual stream, unsteered.

    Raises:
        NonFiniteError: NaN or infinity in the model, by layer, token, pair and side.
    """
    ids = [side for pair in tokens for side in pair]
    values = model.last_rows(ids, layers, _names(len(tokens)), progress=progress)
    return values[::2], values[1::2]


def residual_norms(positive: NDArray[np.float32], negative: NDArray[np.float32]) -> list[float]:
    """Mean length of all rows, per layer: the yardstick of `--units norm`. `[pairs, layers, hidden]` each."""
    rows = np.concatenate([positive, negative])
    return [float(np.sqrt(np.square(rows[:, i], dtype=np.float64).sum(axis=1)).mean()) for i in range(rows.shape[1])]


def side_name(pair: int, side: int) -> str:
    return f"pair {pair}, {('positive', 'negative')[side]} side"


def _names(pairs: int) -> list[str]:
    return [side_name(pair, side) for pair in range(pairs) for side in (0, 1)]

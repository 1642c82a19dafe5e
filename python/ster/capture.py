"""The residual stream of many sequences: equal ones run once, and what several begin with runs once, with the same bits as alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ster import _native
from ster._batches import plan_batches
from ster._prefixes import Group, plan_prefixes
from ster.progress import Progress, reporter

if TYPE_CHECKING:
    from ster.model import Model

BATCH_TOKENS = 1024  # enough rows to keep every core busy; more only costs memory
BATCH_BYTES = 64 << 20  # of captured rows at a time, where every row is kept

Ids = Sequence[int]


def capture(
    model: Model,
    prompts: Sequence[Ids],
    names: Sequence[str],
    layers: Sequence[int],
    rows: Literal["last", "all"],
    progress: Progress,
    keep: Callable[[int, NDArray[np.float32]], None],
) -> None:
    """Run checked `prompts`; `keep(prompt, [layers, rows, hidden])` is called for each index. `names`: of the prompts, in refusals.

    Beginnings are shared for `last` rows alone: where all rows are kept, they are kept for every prompt.

    Raises:
        NonFiniteError: by layer, token and name.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for index, ids in enumerate(prompts):
        places.setdefault(tuple(ids), []).append(index)
    unique = list(places)
    called = [names[places[ids][0]] for ids in unique]
    if rows == "last" and model.engine.chunkable:
        budget = BATCH_TOKENS
        root, groups = plan_prefixes(unique)
    else:
        budget = min(BATCH_TOKENS, BATCH_BYTES // (4 * len(layers) * model.hidden_size))
        root, groups = 0, [Group((i,), 0) for i in range(len(unique))]

    done = 0
    with reporter(progress, "extract") as report:
        report(0, len(prompts))
        start = _begin(model, [unique[0][:root]], None, called[:1], layers)[0]
        for batch in plan_batches([_cost(group, unique, root) for group in groups], budget):
            first = [groups[g].members[0] for g in batch]
            beginnings = [unique[i][root : groups[g].shared] for i, g in zip(first, batch, strict=True)]
            begun = _begin(model, beginnings, start, [called[i] for i in first], layers)
            rest = [(i, groups[g].shared, cache) for g, cache in zip(batch, begun, strict=True) for i in groups[g].members]
            for part in plan_batches([len(unique[i]) - shared for i, shared, _ in rest], budget):
                sequences = [_sequence(unique[i][shared:], cache, layers, rows) for i, shared, cache in (rest[n] for n in part)]
                for n, output in zip(part, model.forward(sequences, [called[rest[n][0]] for n in part]), strict=True):
                    assert output.residual is not None
                    same = places[unique[rest[n][0]]]
                    for place in same:
                        keep(place, output.residual)
                    done += len(same)
                report(done, len(prompts))


def _cost(group: Group, unique: Sequence[Ids], root: int) -> int:
    """Tokens that run for a group."""
    return group.shared - root + sum(len(unique[i]) - group.shared for i in group.members)


def _begin(
    model: Model, beginnings: Sequence[Ids], before: _native.Cache | None, names: Sequence[str], layers: Sequence[int]
) -> list[_native.Cache | None]:
    """A cache for each of `beginnings`, run after `before`, as deep as `layers` need; for an empty one `before` itself."""
    todo = [n for n, ids in enumerate(beginnings) if ids]
    caches: list[_native.Cache | None] = [before] * len(beginnings)
    for n in todo:
        caches[n] = model.engine.cache() if before is None else before.fork()
    if todo:
        sequences = [_native.Sequence(np.array(beginnings[n], dtype=np.uint32), cache=caches[n], layers=layers[-1:]) for n in todo]
        model.forward(sequences, [names[n] for n in todo])
    return caches


def _sequence(tokens: Ids, before: _native.Cache | None, layers: Sequence[int], rows: Literal["last", "all"]) -> _native.Sequence:
    return _native.Sequence(np.array(tokens, dtype=np.uint32), prefix=before, layers=layers, rows=rows)

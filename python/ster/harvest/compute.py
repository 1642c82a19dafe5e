"""Who computes the rows of shards: this process, or workers elsewhere in its place (`on_ray.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ster.errors import InputError
from ster.harvest.corpus import Corpus, Shard, kept_ids
from ster.harvest.directions import Directions
from ster.harvest.dtypes import LARGEST, encode
from ster.harvest.positions import kept_positions
from ster.harvest.shards import Form
from ster.harvest.stats import Rows
from ster.readable import Readable


class Computing(Protocol):
    """Shards in, rows out. Those of one shard are the same bits whoever computes them."""

    @property
    def ahead(self) -> int:
        """How many shards may be begun beyond the one whose rows are asked for next."""

    def begin(self, shard: Shard) -> Callable[[], list[Rows]]:
        """A function to call once, which waits for the rows of every prompt of `shard`, as stored.

        Raises, when called:
            InputError: a value that the dtype cannot hold. NonFiniteError: by layer, token and prompt.
        """


class Here:
    """In this process, when the rows are asked for. report: called with the tokens of every prompt that was computed."""

    ahead = 0

    def __init__(self, model: Readable, form: Form, directions: Directions | None, corpus: Corpus, report: Callable[[int], object]) -> None:
        self.model, self.form, self.directions, self.corpus, self.report = model, form, directions, corpus, report

    def begin(self, shard: Shard) -> Callable[[], list[Rows]]:
        return partial(self._rows, shard)

    def _rows(self, shard: Shard) -> list[Rows]:
        names, ids = self.corpus.read(shard)
        return rows_of(self.model, self.form, self.directions, names, ids, self.report)


def rows_of(
    model: Readable,
    form: Form,
    directions: Directions | None,
    names: Sequence[str],
    ids: Sequence[Sequence[int]],
    report: Callable[[int], object],
) -> list[Rows]:
    """Run the prompts of a shard, checked token ids, and keep of them what `form` says. names: of the prompts, in refusals.

    Raises:
        InputError: a value that `form.dtype` cannot hold. NonFiniteError: by layer, token and name.
    """
    found: list[Rows | None] = [None] * len(ids)

    def keep(index: int, residual: NDArray[np.float32]) -> None:
        which = kept_positions(form.positions, len(ids[index]))
        chosen = residual if isinstance(form.positions, str) else np.ascontiguousarray(residual[:, which])
        found[index] = Rows(_stored(chosen, form, directions, which, names[index]), kept_ids(ids[index], which), which)
        report(len(ids[index]))

    model.read(ids, names, form.layers, "last" if form.positions == "last" else "all", keep)
    return [rows for rows in found if rows is not None]


def _stored(
    values: NDArray[np.float32], form: Form, directions: Directions | None, positions: NDArray[np.int64], name: str
) -> NDArray[Any]:
    try:
        return encode(values if directions is None else directions.project(values), form.dtype)
    except OverflowError as error:
        layer, row = np.unravel_index(error.args[0], (len(values), len(positions), form.width))[:2]
        where = f"layer {form.layers[int(layer)]}, token {positions[int(row)]} of {name}"
        if form.dtype == "f32":
            raise InputError(f"a projection is larger than float32 can hold: {where}", "use shorter directions") from None
        largest = LARGEST[form.dtype]
        raise InputError(
            f"a value is larger than {form.dtype} can hold, {largest}: {where}", "harvest with `f32` into another folder"
        ) from None

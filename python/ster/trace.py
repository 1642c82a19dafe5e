"""The residual stream of one text, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Point = Literal["pre_steer", "post_steer"]


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """The residual stream of one prompt, token by token.

    token_ids, tokens: ids that ran, and their text. layers: captured blocks, ascending.
    residual: float32 `[layers, tokens, hidden]`, at `point`: before (`pre_steer`) or after (`post_steer`) what steering adds there.
    logits: float32 `[tokens, vocab]`, or None when not asked for.
    steered: per edit, in the order given, the positions it reached.
    """

    token_ids: list[int]
    tokens: list[str]
    layers: list[int]
    residual: NDArray[np.float32]
    logits: NDArray[np.float32] | None
    point: Point
    steered: list[list[int]]

    def __repr__(self) -> str:
        return f"<ster.Trace of {len(self.token_ids)} tokens: layers {self.layers}, residual {list(self.residual.shape)} {self.point}>"

"""What activations are read from: a model in this process, one behind a server, one that others use meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ster.progress import Progress

Keep = Callable[[int, NDArray[np.float32]], None]
"""Called with the index of a prompt and its values, float32 `[layers, rows, hidden]`, before steering."""


class Readable(Protocol):
    """`ster.Model` is one; each member means what it means there (see `ster.abstract_model`)."""

    @property
    def name(self) -> str: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def layer_count(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def precision(self) -> str: ...
    @property
    def chat_template(self) -> Literal["applied", "absent", "off"]: ...
    @property
    def adds_special_tokens(self) -> bool: ...
    @property
    def config_hash(self) -> str | None: ...
    @property
    def tokenizer_hash(self) -> str | None: ...
    @property
    def wire(self) -> Mapping[str, str]: ...
    def hash_weights(self, progress: Progress = None) -> str | None: ...
    def check_same(self) -> None: ...
    def tokenise(self, prompts: Iterable[tuple[str, str | None]]) -> Iterator[list[int]]: ...
    def has_two_bos(self, ids: Sequence[int]) -> bool: ...

    def read(
        self,
        prompts: Sequence[Sequence[int]],
        names: Sequence[str],
        layers: Sequence[int],
        rows: Literal["last", "all"],
        keep: Keep,
        *,
        progress: Progress = None,
    ) -> None:
        """Run checked token ids and hand the values of each to `keep`, in any order. `names`: of the prompts, in refusals.

        Raises:
            NonFiniteError: by layer, token and name.
        """

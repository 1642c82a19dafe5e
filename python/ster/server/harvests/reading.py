"""A served model as what a harvest reads from: its passes are the scheduler's, beside those of everybody else."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from ster.errors import SterError
from ster.progress import Progress
from ster.readable import Keep
from ster.server.loaded import Loaded
from ster.server.running import Ticket
from ster.server.work import Event, Failed, Finished, Work

AHEAD_BYTES = 64 << 20  # of rows that run or wait to be kept, as in a pass of `ster.capture`
AHEAD_PROMPTS = 64
POLL_SECONDS = 0.2

Ids = tuple[int, ...]


class ServedReadable:
    """`ster.readable.Readable` over a model that others use meanwhile: raw text, and the same bits as from the model itself.

    special_tokens: whether texts get the tokenizer's own. check: called every now and then while it reads; what it raises ends the reading.
    """

    def __init__(self, loaded: Loaded, *, special_tokens: bool, check: Callable[[], None]) -> None:
        self._model = model = loaded.model
        self._scheduler = loaded.scheduler
        self._check = check
        self.adds_special_tokens = special_tokens
        self.name = model.name
        self.revision = model.revision
        self.layer_count = model.layer_count
        self.hidden_size = model.hidden_size
        self.context_length = model.context_length
        self.precision = model.precision
        self.config_hash = model.config_hash
        self.tokenizer_hash = model.tokenizer_hash
        self.hash_weights = model.hash_weights
        self.wire: Mapping[str, str] = {}
        self.chat_template: Literal["applied", "absent", "off"] = "absent" if model.chat_template == "absent" else "off"

    def tokenise(self, prompts: Iterable[tuple[str, str | None]]) -> Iterator[list[int]]:
        for prompt, name in prompts:
            ids = self._model.tokenizer.encode(prompt, special_tokens=self.adds_special_tokens, name=name)
            self._model._check_tokens(ids, name)
            yield ids

    def check_same(self) -> None:
        """It is held while it is read."""

    def has_two_bos(self, ids: Sequence[int]) -> bool:
        """Never: it is for a warning to the person at a terminal, and here there is none."""
        return False

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
        """As `Model.read`. The scheduler has only prompts whose rows take some 64 MiB: no more are begun before those are kept.

        Raises:
            NonFiniteError, InputError: see `Model.read`. ShuttingDown: the scheduler takes no more work. And whatever `check` raises.
        """
        places: dict[Ids, list[int]] = {}  # equal prompts run once
        for index, ids in enumerate(prompts):
            places.setdefault(tuple(ids), []).append(index)
        waiting = deque(places)
        ended: queue.SimpleQueue[tuple[Ids, Event]] = queue.SimpleQueue()
        begun: dict[Ids, Ticket] = {}
        width = 4 * len(layers) * self.hidden_size
        try:
            while waiting or begun:
                while waiting and self._has_room(begun, waiting[0], width):
                    ids = waiting.popleft()
                    begun[ids] = self._submit(ids, layers, ended)
                self._check()
                try:
                    ids, event = ended.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    continue
                if isinstance(event, Failed):
                    raise _named(event.error, names[places[ids][0]])
                if isinstance(event, Finished):
                    assert event.residual is not None
                    del begun[ids]
                    residual = event.residual if rows == "all" else event.residual[:, -1:]
                    for place in places[ids]:
                        keep(place, residual)
        finally:
            for ticket in begun.values():
                self._scheduler.cancel(ticket)

    @staticmethod
    def _has_room(begun: dict[Ids, Ticket], ids: Ids, width: int) -> bool:
        return not begun or (len(begun) < AHEAD_PROMPTS and (sum(map(len, begun)) + len(ids)) * width <= AHEAD_BYTES)

    def _submit(self, ids: Ids, layers: Sequence[int], ended: queue.SimpleQueue[tuple[Ids, Event]]) -> Ticket:
        # Nobody's prefix: every row is wanted, and its cache is only as deep as the layers are.
        work = Work(ids, 0, layers=tuple(layers), share_prefix=False)
        return self._scheduler.submit([work], lambda _, event: ended.put((ids, event)), background=True)


def _named(error: BaseException, name: str) -> BaseException:
    """The scheduler knows a prompt as `the text`."""
    if isinstance(error, SterError):
        return type(error)(error.message.replace("the text", name), error.hint)
    return error

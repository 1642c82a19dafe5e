"""The processor, which the models of a server take turns with."""

from __future__ import annotations

import threading


class Passes:
    """Held, as a lock is, during a pass. count: passes so far. It knows which models run something that somebody waits for."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._busy: set[object] = set()

    def acquire(self, timeout: float = -1) -> bool:
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self.count += 1
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def mark(self, model: object, *, busy: bool) -> None:
        (self._busy.add if busy else self._busy.discard)(model)

    def busy_beside(self, model: object) -> bool:
        return bool(self._busy - {model})

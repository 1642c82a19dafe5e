"""Results of Jobs: a file each, in the state's folder."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO

from ster._files import make_folder, write_atomic

STALE_SECONDS = 3600.0  # a file so old that nobody is about to say that it is a result


class Results:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / "jobs"

    def write(self, id: str, document: bytes) -> None:
        """It is on disk under its name when this returns, all of it.

        Raises:
            FileError
        """
        make_folder(self._folder)
        write_atomic(self._path(id), lambda file: file.write(document))
        handle = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def open(self, id: str) -> BinaryIO | None:
        """None: there is none."""
        with contextlib.suppress(FileNotFoundError):
            return self._path(id).open("rb")
        return None

    def remove(self, id: str) -> None:
        self._path(id).unlink(missing_ok=True)

    def sweep(self, wanted: Callable[[Collection[str]], Collection[str]]) -> None:
        """Remove old files that are nobody's result, such as half-written ones. wanted: which of some ids may have a result."""
        before = time.time() - STALE_SECONDS
        old: list[Path] = []
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self._folder):
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat().st_mtime < before:
                        old.append(Path(entry.path))
        keep = wanted([path.stem for path in old]) if old else ()
        for path in old:
            if path.suffix != ".json" or path.stem not in keep:
                path.unlink(missing_ok=True)

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}.json"

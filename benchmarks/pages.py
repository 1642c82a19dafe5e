"""Which pages of a checkpoint the kernel holds in memory, and what memory a process has. Linux only; needs nothing but Python."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from benchmarks.shapes import group, tensors_of

PAGE = mmap.PAGESIZE
SAMPLE_EVERY = 0.02  # seconds


def drop(folder: Path) -> None:
    """Forget what the page cache holds of the weights. Pages that a process has mapped stay."""
    for path in _files(folder):
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # what is not on the disk yet would stay, too
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident(folder: Path) -> Counter[str]:
    """Part of the model -> bytes of it in the page cache. A page counts for the tensor that holds its first byte."""
    found: Counter[str] = Counter()
    for path, spans in _spans(folder).items():
        pages = _in_core(path)
        for name, span in spans:
            found[name] += PAGE * sum(pages[-(-span.start // PAGE) : -(-span.stop // PAGE)])
    return found


def sizes(folder: Path) -> Counter[str]:
    """Part of the model -> its bytes, in the order of the model."""
    found: Counter[str] = Counter()
    for spans in _spans(folder).values():
        for name, span in spans:
            found[name] += len(span)
    return Counter({name: found[name] for name in sorted(found, key=_place)})


def _place(name: str) -> tuple[int, int]:
    kind, _, number = name.partition(" ")
    return ["embedding", "layer", "norm", "head"].index(kind), int(number or 0)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@cache  # reading the headers again would bring their pages in
def _spans(folder: Path) -> dict[Path, list[tuple[str, range]]]:
    found = {}
    for path in _files(folder):
        with open(path, "rb") as file:
            start = file.read(8)
            header = start + file.read(int.from_bytes(start, "little"))
        found[path] = [(group(tensor.name), tensor.bytes) for tensor in tensors_of(header)]
    return found


def _in_core(path: Path) -> bytes:
    """One byte a page: 1 if the page is in memory."""
    size = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    with open(path, "rb") as file:  # a map that nobody reads brings nothing in
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"mmap of {path}")
    try:
        pages = ctypes.create_string_buffer(-(-size // PAGE))
        if libc.mincore(address, size, pages) != 0:
            raise OSError(ctypes.get_errno(), f"mincore of {path}")
    finally:
        libc.munmap(address, size)
    return pages.raw.translate(bytes(value & 1 for value in range(256)))  # other bits are reserved


@dataclass
class Watch:
    """The memory of a process, looked at fifty times a second until it is gone; a peak between two looks is missed.

    anonymous, mapped: bytes at the moment when their sum was largest. most_anonymous, swapped: the largest seen.
    """

    anonymous: int = 0
    mapped: int = 0
    most_anonymous: int = 0
    swapped: int = 0
    _thread: threading.Thread | None = field(default=None, repr=False)

    def start(self, pid: int) -> None:
        self._thread = threading.Thread(target=self._look, args=[pid], daemon=True)
        self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _look(self, pid: int) -> None:
        for status in _statuses(pid):
            values = {name: 1024 * int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE)}
            if "RssAnon" not in values:
                return  # it has ended
            anonymous, mapped = values["RssAnon"], values["RssFile"] + values["RssShmem"]
            if anonymous + mapped > self.anonymous + self.mapped:
                self.anonymous, self.mapped = anonymous, mapped
            self.most_anonymous = max(self.most_anonymous, anonymous)
            self.swapped = max(self.swapped, values.get("VmSwap", 0))


def _statuses(pid: int) -> Iterator[str]:
    while True:
        try:
            yield Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(SAMPLE_EVERY)


def memory() -> dict[str, int]:
    """`MemAvailable`, and what of the machine's swap is in use, in bytes."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE))
    return {"available": 1024 * int(found["MemAvailable"]), "swap used": 1024 * (int(found["SwapTotal"]) - int(found["SwapFree"]))}


def readahead(folder: Path) -> int | None:
    """Bytes the kernel reads around a page fault at most, if the disk says so."""
    number = folder.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    for place in (device, device.parent):  # a partition's is its disk's
        setting = place / "queue" / "read_ahead_kb"
        if setting.exists():
            return 1024 * int(setting.read_text())
    return None

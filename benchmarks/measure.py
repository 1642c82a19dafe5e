"""One process and what it cost; medians and spreads; the machine they were measured on. Needs nothing but Python."""

from __future__ import annotations

import datetime
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
COMPILED = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""The environment, but for what keeps Ster's checkout without byte code: every peer has it from its installation, as Ster would."""


class FailedError(Exception):
    """A process that ended badly, with the end of what it said."""


@dataclass(frozen=True)
class Run:
    """wall: seconds from before the process is made until it is gone. cpu: user and system seconds. peak: resident bytes.

    faults: pages it waited for the disk for, each with what was read around it. read: bytes that came from the disk.
    """

    wall: float
    cpu: float
    peak: int
    stdout: str
    faults: int
    read: int


def run(command: Sequence[str], stdin: str = "", started: Callable[[int], object] = lambda pid: None) -> Run:
    """Run `command` in the repository, on its own.

    The peak counts pages of mapped files. A child starts with its parent's peak (Linux keeps it across exec), so whoever calls this
    must stay small: no NumPy here.

    started: is told the process's number, and must not wait.

    Raises:
        FailedError: it did not end with status 0.
    """
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as printed:
        given.write(stdin)
        given.seek(0)
        start = time.perf_counter()
        process = subprocess.Popen(command, stdin=given, stdout=printed, stderr=errors, cwd=ROOT, env=COMPILED)
        started(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        printed.seek(0)
        errors.seek(0)
        if process.returncode != 0:
            lines = errors.read().strip().splitlines() or [f"status {process.returncode}"]
            raise FailedError(lines[-1])
        peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return Run(wall, usage.ru_utime + usage.ru_stime, peak, printed.read(), usage.ru_majflt, 512 * usage.ru_inblock)


@dataclass(frozen=True)
class Spread:
    """What several rounds gave."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        if len(self.values) == 1:
            return digits(self.median)
        return f"{digits(self.median)} ({digits(min(self.values))}-{digits(max(self.values))})"


def digits(value: float) -> str:
    """About three significant digits, in plain notation."""
    places = next((places for places, least in enumerate((99.95, 9.995, 0.9995)) if abs(value) >= least), 3)
    return f"{value:.{places}f}"


def machine() -> dict[str, object]:
    """What a reader needs to judge the figures."""
    info = _read("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info)
    flags = set(re.findall(r"\b(?:avx2|avx512f|avx512_bf16|amx_bf16|asimd|bf16)\b", info))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "flags": sorted(flags),
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": _commit(),
    }


def load() -> float:
    """Processes that want a core, over the last minute: what else the machine does."""
    return round(os.getloadavg()[0], 2)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _commit() -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that also reads well as it stands."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    rule = ["-" * width for width in widths]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [head, rule, *rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

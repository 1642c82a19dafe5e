"""Memory does not grow with the prompts."""

import subprocess
import sys
from pathlib import Path

import pytest

from ster.toy import WORDS

PROGRAM = """
import resource, sys
import ster
count, output = int(sys.argv[1]), sys.argv[2]
words = sys.argv[3].split()
prompts = (" ".join(words[(i + 7 * j) % len(words)] for j in range(2 + i % 9)) for i in range(count))
ster.harvest(ster.load(sys.argv[4], threads=1), prompts, output)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""


def peak(count: int, output: Path, model: Path) -> int:
    line = [sys.executable, "-c", PROGRAM, str(count), str(output), " ".join(WORDS), str(model)]
    result = subprocess.run(line, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


def test_ten_times_the_prompts_take_no_more_memory(toy_dir: Path, tmp_path: Path) -> None:
    """Shards of 8192 tokens, of which two are in memory at a time: 5,000 prompts are four of them, 30,000 are 22."""
    few, many = peak(5_000, tmp_path / "few", toy_dir), peak(30_000, tmp_path / "many", toy_dir)
    # 25,000 more prompts have 4 bytes each, and an int of the manifest that is read at the end.
    assert many - few < 6 << 20


@pytest.mark.slow
def test_a_hundred_thousand_prompts_take_no_more_memory(toy_dir: Path, tmp_path: Path) -> None:
    few, many = peak(10_000, tmp_path / "few", toy_dir), peak(100_000, tmp_path / "many", toy_dir)
    assert many - few < 16 << 20

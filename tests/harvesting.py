"""What tests of harvests share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROMPTS = [
    "the sea is calm and quiet tonight .",
    "storm waves",
    "the harbor",
    "storm waves",
    "a gentle breeze over the lake .",
    "calm",
    "sea calm .",
]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def widened(array: NDArray[Any]) -> NDArray[np.float32]:
    """bf16 as the package `safetensors` gives it -> float32."""
    return np.asarray(array).astype(np.float32)


# The command, of which each file takes a while on a machine of any speed: whoever has seen the first shard finds it at work.
SLOW = """
import sys, time
from ster.harvest import disk
plain = disk.write_part

def write_part(path, chunks):
    time.sleep(0.05)
    return plain(path, chunks)

disk.write_part = write_part
from ster.cli import main
sys.exit(main())
"""


def slow_command(*arguments: object) -> list[str]:
    """`ster`, to be ended in the middle of a harvest."""
    return [sys.executable, "-c", SLOW, *map(str, arguments)]


# A harvest in a process of its own, which ends itself at its n-th call that changes something on disk.
DYING = """
import os, signal, sys
step, model, prompts, output = int(sys.argv[1]), *sys.argv[2:5]
import ster
from ster.harvest import disk
loaded = ster.load(model)
loaded.weights_hash
count = 0
def dying(function):
    def call(*args, **options):
        global count
        count += 1
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)
    return call
for name in ("fsync", "replace", "unlink"):
    setattr(disk.os, name, dying(getattr(os, name)))
from ster.harvest import corpus
ster.harvest(loaded, prompts, output, shard_size=3)
print(count)
"""


def die(step: int, model: Path, prompts: Path, output: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", DYING, str(step), str(model), str(prompts), str(output)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env=dict(os.environ))

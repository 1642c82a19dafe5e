"""What every engine's process does: read one job from stdin, do it, print what came out and how long it took.

Runs in the interpreter of the engine, which may be another than Ster's: nothing but Python is needed here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypedDict, TypeVar

Prompts = Sequence[Sequence[int]]
T = TypeVar("T")

CPU_CLOCK = os.environ.get("STER_BENCH_CLOCK") == "cpu"
clock = time.process_time if CPU_CLOCK else time.perf_counter
"""CPU seconds are for a machine that does other things, and for one thread: several would be added up, waiting in a spin too."""


class Job(TypedDict):
    """kind: `versions`; `logits` of each prompt's last token; `decode`: `new` greedy tokens after the first prompt; `residuals` of each
    prompt's last token after every block of `layers` (empty: all), written to `output` if that names a file.

    model: a checkpoint's folder, or a GGUF. settings: which of an engine's ways to run; see its file.
    repeats: counted passes, after one that is not.
    """

    kind: Literal["versions", "logits", "decode", "residuals", "tokens", "compare"]
    model: str
    settings: str
    threads: int
    repeats: int
    prompts: list[list[int]]
    new: int
    layers: list[int]
    texts: list[str]
    output: str


class Answer(TypedDict, total=False):
    """seconds: of each counted pass. ids: what the logits or the decoding chose, to see that all engines did the same work."""

    seconds: list[float]
    ids: list[int]
    versions: str
    tokens: list[list[int]]
    difference: float


class Engine(Protocol):
    """An open model. Residuals are nested lists `[prompts, layers, hidden]`, or an array of that shape."""

    def logits(self, prompts: Prompts) -> list[int]: ...
    def decode(self, prompt: Sequence[int], new: int) -> tuple[float, list[int]]:
        """Seconds for `new` passes after the prompt's, and the tokens they chose."""

    def residuals(self, prompts: Prompts) -> list[list[list[float]]]: ...


def serve(start: Callable[[Job], Engine], versions: Callable[[], str]) -> None:
    """Do the job on stdin."""
    job: Job = json.load(sys.stdin)
    json.dump({"versions": versions()} if job["kind"] == "versions" else do(start(job), job), sys.stdout)


def do(engine: Engine, job: Job) -> Answer:
    prompts = job["prompts"]
    if job["kind"] == "logits":
        engine.logits(prompts)
        passes = [timed(lambda: engine.logits(prompts)) for _ in range(job["repeats"])]
        return {"seconds": [seconds for seconds, _ in passes], "ids": passes[-1][1]}
    if job["kind"] == "decode":
        engine.decode(prompts[0], 4)
        runs = [engine.decode(prompts[0], job["new"]) for _ in range(job["repeats"])]
        return {"seconds": [seconds for seconds, _ in runs], "ids": runs[-1][1]}
    if job["output"]:
        seconds, residuals = timed(lambda: engine.residuals(prompts))
        write(job, residuals)
        return {"seconds": [seconds]}
    return {"seconds": [timed(lambda: engine.residuals(prompts))[0] for _ in range(1 + job["repeats"])][-job["repeats"] :]}


def write(job: Job, residuals: Sequence[Sequence[Sequence[float]]]) -> None:
    """The document that `ster extract` writes. `dumps`, not `dump`: that one is pure Python and several times slower."""
    records = [
        {"prompt": text, "layers": {str(layer): list(vector) for layer, vector in enumerate(layers)}}
        for text, layers in zip(job["texts"], residuals, strict=True)
    ]
    Path(job["output"]).write_text(json.dumps({"schema_version": 1, "records": records}))


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds, and what came out."""
    start = clock()
    result = work()
    return clock() - start, result

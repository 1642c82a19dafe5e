"""Ster's process: `python -m benchmarks.run_ster` with a job on stdin. Also turns texts into ids, and compares two documents."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import numpy as np
from benchmarks.worker import Answer, Job, Prompts, clock, do
from numpy.typing import NDArray

import ster
from ster._native import Cache, Output
from ster._native import Sequence as Run


class Ster:
    """No cache is kept but to decode: neither does a peer that can do without."""

    def __init__(self, job: Job) -> None:
        self.model = ster.load(job["model"], threads=job["threads"])
        self.layers = job["layers"] or list(range(self.model.layer_count))

    def logits(self, prompts: Prompts) -> list[int]:
        outputs = self.model.engine.forward([Run(_ids(prompt), logits="last") for prompt in prompts])
        return [_likeliest(output) for output in outputs]

    def decode(self, prompt: Sequence[int], new: int) -> tuple[float, list[int]]:
        cache = self.model.engine.cache()
        ids = [self._step(prompt, cache)]
        start = clock()
        for _ in range(new):
            ids.append(self._step(ids[-1:], cache))
        return clock() - start, ids

    def _step(self, ids: Sequence[int], cache: Cache) -> int:
        return _likeliest(self.model.engine.forward([Run(_ids(ids), cache=cache, logits="last")])[0])

    def residuals(self, prompts: Prompts) -> list[list[list[float]]]:
        rows: object = self.model.last_rows(prompts, self.layers, [f"prompt {index}" for index in range(len(prompts))])
        return rows  # type: ignore[return-value]  # an array; nobody writes it


def _ids(prompt: Sequence[int]) -> NDArray[np.uint32]:
    return np.array(prompt, dtype=np.uint32)


def _likeliest(output: Output) -> int:
    assert output.logits is not None
    return int(output.logits[-1].argmax())


def difference(ours: str, theirs: str) -> float:
    """The largest `||theirs - ours|| / ||ours||` of any prompt and layer."""
    largest = 0.0
    documents = [_records(path) for path in (ours, theirs)]
    for our, their in zip(*documents, strict=True):
        for layer, values in our["layers"].items():
            vector = np.array(values)
            largest = max(largest, float(np.linalg.norm(np.array(their["layers"][layer]) - vector) / np.linalg.norm(vector)))
    return largest


def _records(path: str) -> list[dict[str, dict[str, list[float]]]]:
    with open(path) as file:
        records: list[dict[str, dict[str, list[float]]]] = json.load(file)["records"]
    return records


def main() -> None:
    job: Job = json.load(sys.stdin)
    answer: Answer
    if job["kind"] == "versions":
        engine = ster.load(job["model"]).engine
        stored = "+".join(engine.weight_dtypes)
        answer = {"versions": f"Ster {ster.__version__}, numpy {np.__version__}, {engine.kernels} kernels, {stored} weights"}
    elif job["kind"] == "tokens":
        model = ster.load(job["model"], chat_template="off")
        answer = {"tokens": [model.encode(text) for text in job["texts"]]}
    elif job["kind"] == "compare":
        answer = {"difference": difference(*job["texts"])}
    else:
        answer = do(Ster(job), job)
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()

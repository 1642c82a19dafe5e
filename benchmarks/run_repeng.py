"""repeng's process: a control vector for every layer it trains by default, of `texts`: positive, negative, positive, ..."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

import torch  # type: ignore[import-not-found,unused-ignore]
from benchmarks.worker import Job
from repeng import ControlVector, DatasetEntry  # type: ignore[import-not-found,unused-ignore]
from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-not-found,unused-ignore]


def main() -> None:
    job: Job = json.load(sys.stdin)
    if job["kind"] == "versions":
        json.dump({"versions": f"repeng {version('repeng')}, torch {torch.__version__}"}, sys.stdout)
        return
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    positive, negative = job["texts"][::2], job["texts"][1::2]
    pairs = [DatasetEntry(positive=more, negative=less) for more, less in zip(positive, negative, strict=True)]
    vector = ControlVector.train(model, tokenizer, pairs, batch_size=32, method="pca_diff")
    json.dump({"ids": sorted(vector.directions)}, sys.stdout)


if __name__ == "__main__":
    main()

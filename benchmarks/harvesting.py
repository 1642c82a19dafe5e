"""What a harvest is made of, each part measured alone: passes, writing, the wire, Ray.

    .venv/bin/python -m benchmarks.harvesting --model DIR [--ray] > inputs.json

400 made-up prompts, three layers, all tokens, bf16. `benchmarks.scaling_cost` computes from the output. Take a quiet machine, or
`chrt -f 10`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.inputs import made_up_prompts

import ster
from ster.harvest import disk
from ster.harvest.dtypes import encode, widen
from ster.harvest.positions import kept_positions
from ster.harvest.run import default_layers
from ster.harvest.shards import Form
from ster.harvest.stats import Rows, moments
from ster.server import tensors

TOKENS = 8192  # of a shard
RESPONSE = 512  # tokens of an answer on the wire
ROUNDS = 5


def seconds(work: Callable[[], object]) -> float:
    """The middle one of some rounds, the first not counted."""
    found = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def command(folder: Path, *arguments: str) -> float:
    """Of a whole process, by the clock."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "ster", *arguments], check=True, capture_output=True, cwd=folder)
    return time.perf_counter() - start


def steady(model: ster.Model, prompts: list[str], output: Path, **options: Any) -> float:
    """Tokens a second, from the first report to the last: without what starts first."""
    seen: list[tuple[float, int]] = []

    def report(done: int, total: int) -> None:
        if done and (not seen or done > seen[-1][1]):
            seen.append((time.perf_counter(), done))

    ster.harvest(model, prompts, output, dtype="bf16", shard_size=16, progress=report, **options)
    return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


def writing(model: ster.Model, folder: Path) -> dict[str, float]:
    """Bytes a second of what the writing process does to a shard, one after the other."""
    layers = default_layers(model.layer_count)
    form = Form("safetensors", "bf16", layers, model.hidden_size, "all")
    values = np.random.default_rng(0).normal(0, 1, (len(layers), TOKENS, model.hidden_size)).astype(np.float32)
    rows = [Rows(encode(values, "bf16"), np.zeros(TOKENS, np.int32), kept_positions("all", TOKENS))]
    size = rows[0].values.nbytes
    data = rows[0].values.tobytes()

    def plain() -> None:
        with open(folder / "plain", "wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())

    return {
        "disk_bytes_per_s": size / seconds(plain),
        "file_bytes_per_s": size / seconds(lambda: disk.write_part(folder / "shard", form.encode(0, rows))),
        "statistics_bytes_per_s": size / seconds(lambda: moments(rows, "bf16", len(layers), model.hidden_size)),
    }


def wire(model: ster.Model, prompts: list[str]) -> dict[str, float]:
    """Of bf16 residuals as they are: bytes a second of one core, counted before compression, and how many are sent for each."""
    layers = default_layers(model.layer_count)
    kept = []
    ids = [token for prompt in prompts for token in model.prompt_tokens(prompt)][: RESPONSE + 1][:RESPONSE]
    model.read([ids], ["the prompt"], layers, "all", lambda _, values: kept.append(values.copy()))
    values = widen(encode(kept[0], "bf16"), "bf16")
    size = values.size * 2
    sent = tensors.encode(values, "bfloat16")
    arguments = sent["data"], sent["dtype"], sent["original_dtype"], sent["shape"]
    return {
        "wire_encode_bytes_per_s": size / seconds(lambda: tensors.encode(values, "bfloat16")),
        "wire_decode_bytes_per_s": size / seconds(lambda: tensors.decode(*arguments, max_numbers=values.size)),
        "wire_bytes_per_byte": len(sent["data"]) / size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--ray", action="store_true", help="also with two local workers of one thread")
    arguments = parser.parse_args()
    prompts = made_up_prompts(400)
    options = ["--model", arguments.model, "--prompts", "prompts.json", "--chat-template", "off"]
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        model = ster.load(arguments.model, threads=2, chat_template="off")
        tokens = sum(len(model.prompt_tokens(prompt)) for prompt in prompts)
        (folder / "prompts.json").write_text(json.dumps(prompts))
        layers = ",".join(map(str, default_layers(model.layer_count)))
        found["harvest_process_tokens_per_s"] = tokens / command(folder, "harvest", *options, "-o", "harvest", "--dtype", "bf16")
        extract = ["extract", *options, "-l", layers, "--position", "all", "-o", "x.npz"]
        found["extract_process_tokens_per_s"] = tokens / command(folder, *extract)
        found["tokens_per_s"] = steady(model, prompts, folder / "two-threads")
        if arguments.ray:
            one = ster.load(arguments.model, threads=1, chat_template="off")
            found["ray_two_workers_tokens_per_s"] = steady(one, prompts, folder / "ray", ray="local", ray_workers=2)
        found |= writing(model, folder) | wire(model, prompts)
    print(json.dumps({key: float(f"{value:.3g}") for key, value in found.items()}, indent=1))


if __name__ == "__main__":
    main()

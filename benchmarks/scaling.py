"""What Ster's time grows with: tokens, prompts in a batch, layers asked, threads.

    .venv/bin/python -m benchmarks.scaling --model DIR

Every figure is the last token's residual stream through `Model.last_rows`, the call under `ster extract`, without its JSON. GFLOP/s counts
the multiply-adds that are needed (matrices and attention; of the deepest block keys and values of all tokens, the rest of the last
token's row), so a falling column is the machine's or Ster's doing, not the model's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.inputs import random_ids
from benchmarks.measure import ROOT, Spread, digits, load, machine, table
from benchmarks.work import STER, Engine
from benchmarks.worker import CPU_CLOCK, Job

TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
BATCH_PROMPT, LAYERS_PROMPT = 32, 128
COUNTED_TOKENS = 512  # a process repeats short passes until it has counted about so many


@dataclass(frozen=True)
class Point:
    """One row: `prompts` prompts of `tokens` tokens, blocks 0 to `layers - 1`."""

    axis: str
    prompts: int
    tokens: int
    layers: int

    @property
    def total(self) -> int:
        return self.prompts * self.tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = os.environ.get("STER_MODEL")
    parser.add_argument("--model", type=Path, default=default and Path(default), required=not default, help="checkpoint [env STER_MODEL]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "target" / "bench" / "scaling.json")
    arguments = parser.parse_args()
    if CPU_CLOCK and arguments.threads != [1]:
        parser.error("STER_BENCH_CLOCK=cpu adds up what several threads take: use --threads 1")
    model, out = arguments.model.resolve(), arguments.out.resolve()
    config = json.loads((model / "config.json").read_text())
    ster = Engine(STER, sys.executable, "benchmarks.run_ster", str(model))
    todo = points(config["num_hidden_layers"], config["max_position_embeddings"])

    about = {**machine(), "model": str(model), "rounds": arguments.rounds, "clock": "CPU" if CPU_CLOCK else "wall", "load_before": load()}
    seconds: dict[tuple[Point, int], list[float]] = {(point, threads): [] for point in todo for threads in arguments.threads}
    for number in range(arguments.rounds):
        for point in todo:
            for threads in arguments.threads:  # one right after the other, for their ratio
                print(f"round {number + 1} of {arguments.rounds}: {point}, {threads} threads, load {load()}", file=sys.stderr, flush=True)
                seconds[point, threads].append(time(ster, point, threads, config["vocab_size"]))
    about["load_after"] = load()

    head = ["axis", "prompts x tokens", "layers", *(f"tokens/s, threads {n}" for n in arguments.threads), "GFLOP/s", "speed-up"]
    print(table(head, [row(point, [seconds[point, threads] for threads in arguments.threads], config) for point in todo]))
    print(
        "\nGFLOP/s and speed-up (over the first): of the last number of threads.\n"
        + "\n".join(f"{key}: {value}" for key, value in about.items())
    )
    records = [{**vars(point), "threads": threads, "seconds": found} for (point, threads), found in seconds.items()]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"about": about, "points": records}, indent=1) + "\n")
    print(f"\n{out}")


def points(layers: int, context: int) -> list[Point]:
    some = sorted({1, *(layers * part // 4 for part in (1, 2, 3)), layers - 1, layers} - {0})
    return [
        *(Point("tokens", 1, tokens, layers) for tokens in TOKENS if tokens < context),
        *(Point("batch", batch, BATCH_PROMPT, layers) for batch in BATCHES),
        *(Point("layers", 1, LAYERS_PROMPT, count) for count in some),
    ]


def time(ster: Engine, point: Point, threads: int, vocab: int) -> float:
    """Seconds for one pass: the median of a process."""
    prompts = random_ids(vocab, *[point.tokens] * point.prompts)
    repeats = max(1, COUNTED_TOKENS // point.total)
    job: Job = {**ster.job("residuals", prompts, threads), "layers": list(range(point.layers)), "repeats": repeats}
    return statistics.median(ster.do(job)[1]["seconds"])


def row(point: Point, by_threads: Sequence[Sequence[float]], config: dict[str, Any]) -> list[str]:
    rates = [str(Spread(tuple(point.total / each for each in seconds))) for seconds in by_threads]
    last, first = by_threads[-1], by_threads[0]
    speed = flops(point, config) / statistics.median(last) / 1e9
    speedup = Spread(tuple(one / many for one, many in zip(first, last, strict=True)))
    return [point.axis, f"{point.prompts} x {point.tokens}", str(point.layers), *rates, digits(speed), str(speedup)]


def flops(point: Point, config: dict[str, Any]) -> float:
    """Two a multiply-add."""
    hidden, mlp, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_hidden = (config.get("num_key_value_heads") or heads) * head_dim
    keys_values = 2 * hidden * kv_hidden
    rest = 2 * hidden * heads * head_dim + 3 * hidden * mlp
    tokens = point.tokens
    attention = 2 * heads * head_dim  # a query and a key: the product, and the weighted value
    whole = tokens * (keys_values + rest) + attention * tokens * (tokens + 1) / 2
    deepest = tokens * keys_values + rest + attention * tokens
    total: float = 2 * point.prompts * ((point.layers - 1) * whole + deepest)
    return total


if __name__ == "__main__":
    main()

"""Models as large as the machine's memory: what is read of a checkpoint, what it weighs in memory, how fast it runs. Linux only.

    .venv/bin/python -m benchmarks.large                                          # Llama-3.1-8B: 16 GB of disk, a quarter of an hour
    .venv/bin/python -m benchmarks.large --shape llama-3.2-1b --dir /tmp/llama-1b

The checkpoint has random weights (`benchmarks/random_checkpoint.py`), is written if it is not there, and stays. Each measurement is a
process of its own. `cold` ones begin after the page cache has let go of the weights, and afterwards the kernel is asked which pages it
has brought in (mincore): what nobody read should not be there. `warm` ones find in memory what the cold one left.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import pages
from benchmarks.inputs import made_up_prompts, random_ids
from benchmarks.measure import MIB, ROOT, Run, digits, load, machine, run, table
from benchmarks.shapes import BF16, SHAPES, Shape
from benchmarks.work import STER, Engine, memory_text
from benchmarks.worker import Job

PREFILL, DECODE_AFTER = 128, 32  # tokens
PROMPT = "The water of the long day"


@dataclass(frozen=True)
class Point:
    """One process: seconds, tokens a second, bytes. peak is its own, the parts are what `pages.Watch` saw.

    swap: by how much the machine's use of it grew. faults, read: as in `Run`.
    """

    name: str
    wall: float
    rate: float
    peak: int
    anonymous: int
    mapped: int
    most_anonymous: int
    swapped: int
    swap: int
    faults: int
    read: int
    load: float

    def row(self) -> list[str]:
        parts = [self.peak, self.anonymous, self.mapped, self.swapped]
        return [self.name, f"{self.wall:.1f}", digits(self.rate), *map(memory_text, parts), str(self.faults), memory_text(self.read)]


Rate = Callable[[Run], float]  # tokens a second
HEAD = ["process", "wall, s", "tokens/s", "peak RSS", "anonymous", "mapped", "swapped", "major faults", "read from disk"]


def main() -> None:
    arguments = parse()
    shape, folder, out = SHAPES[arguments.shape], arguments.dir.absolute(), arguments.out.absolute()
    run_visibly([sys.executable, "-m", "benchmarks.random_checkpoint", str(folder), shape.name])  # NumPy stays out of this process
    if arguments.write_only:
        print(folder)
        return
    out.mkdir(parents=True, exist_ok=True)
    about = {
        **machine(),
        "threads": arguments.threads,
        "model": str(folder),
        "weights_bytes": BF16 * shape.weights(),
        "memory_available_bytes": pages.memory()["available"],
        "swap_used_bytes": pages.memory()["swap used"],
        "readahead_bytes": pages.readahead(folder),
        "load_before": load(),
    }
    if pages.memory()["available"] < BF16 * shape.weights():
        note("less memory is available than the weights need: passes over the whole model will read them from the disk again and again")

    depth = arguments.layers or shape.layers // 4
    layers = f"0..{depth}"
    prompts = made_up_prompts(arguments.prompts)
    ster = Engine(STER, sys.executable, "benchmarks.run_ster", str(folder))
    ids = ster.do({**ster.job("logits", [], 1), "kind": "tokens", "texts": prompts})[1]["tokens"]
    tokens = sum(map(len, ids))
    (out / "large-prompts.json").write_text(json.dumps({"prompts": prompts}))
    common = ["--model", str(folder), "--chat-template", "off", "--threads", str(arguments.threads)]
    # fmt: off
    extract = [sys.executable, "-m", "ster", "extract", *common, "--prompts", str(out / "large-prompts.json"), "--layers", layers,
               "--output", str(out / "large-activations.json")]
    generate = [sys.executable, "-m", "ster", "generate", *common, "--prompt", PROMPT, "--max-new-tokens", str(arguments.new), "--json"]
    # fmt: on

    points: list[Point] = []
    sizes = pages.sizes(folder)
    held: dict[str, Counter[str]] = {}
    left: dict[str, int] = {}
    works: list[tuple[str, list[str], Rate]] = [
        ("extract", extract, lambda done: tokens / done.wall),
        ("generate", generate, lambda done: len(json.loads(done.stdout)["token_ids"]) / done.wall),
    ]
    for name, command, rate in works:
        left[name] = forget(folder)
        for temperature in ("cold", "warm"):
            points.append(measure(f"{name}, {temperature}", command, rate))
            if temperature == "cold":
                held[name] = pages.resident(folder)
    points += rates(ster, shape, arguments.new, arguments.threads, arguments.repeats)
    note(f"bandwidth, load {load()}")
    speed = json.loads(run([sys.executable, "-m", "benchmarks.bandwidth", str(folder), str(arguments.threads)]).stdout)
    about |= {"load_after": load(), "swap_used_after_bytes": pages.memory()["swap used"]}

    work = f"extract: {len(prompts)} prompts, {tokens} tokens, layers {layers}, last token; generate: {arguments.new} greedy tokens"
    print(f"{shape.name}: {work}. Rates of both are of the whole process.\n\n{table(HEAD, [point.row() for point in points])}\n")
    print(page_table(sizes, held) + "\n")
    print("before each the page cache held " + ", ".join(f"{bytes / MIB:.1f} MiB" for bytes in left.values()))
    print(unasked(shape, held["extract"], depth, len({id for prompt in ids for id in prompt}), pages.readahead(folder)))
    print(ideal(shape, speed, points[-1].rate))
    print("\n" + "\n".join(f"{key}: {value}" for key, value in about.items()))
    found = {"points": [asdict(point) for point in points], "left_bytes": left, "pages": held, "bandwidth": speed}
    document = {"about": about, "work": work, **found}
    (out / f"large-{shape.name}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(f"\n{out / f'large-{shape.name}.json'}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.large", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--dir", type=Path, help="the checkpoint; default: target/large/SHAPE")
    parser.add_argument("--write-only", action="store_true", help="write the checkpoint, measure nothing")
    parser.add_argument("--layers", type=int, metavar="N", help="extract reads blocks 0 to N - 1; default: the first quarter")
    parser.add_argument("--prompts", type=int, default=20, help="for extract; default 20")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate, and to decode; default 32")
    parser.add_argument("--repeats", type=int, default=1, help="counted passes of prefill and decode, whose median is reported; default 1")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="default: all cores")
    parser.add_argument("--out", type=Path, default=ROOT / "target" / "bench", help="folder for documents and results")
    arguments = parser.parse_args()
    if sys.platform != "linux":
        parser.error("pages can be counted on Linux only")
    arguments.dir = arguments.dir or ROOT / "target" / "large" / arguments.shape
    return arguments


def forget(folder: Path) -> int:
    """Drop the weights from the page cache; bytes of them that stay there."""
    pages.drop(folder)
    left = pages.resident(folder).total()
    if left > MIB:
        note(f"{memory_text(left)} of the weights stay in the page cache: does another process have them open?")
    return left


def measure(name: str, command: Sequence[str], rate: Rate, stdin: str = "") -> Point:
    busy = load()
    note(f"{name}, load {busy}")
    watch, swap = pages.Watch(), pages.memory()["swap used"]
    done = run(command, stdin, watch.start)
    watch.join()
    swap = pages.memory()["swap used"] - swap
    # fmt: off
    return Point(name, done.wall, rate(done), done.peak, watch.anonymous, watch.mapped, watch.most_anonymous, watch.swapped, swap,
                 done.faults, done.read, busy)
    # fmt: on


def rates(ster: Engine, shape: Shape, new: int, threads: int, repeats: int) -> list[Point]:
    """Prefill and decoding alone, after a pass that is not counted."""
    prefill, after = random_ids(shape.vocab, PREFILL, DECODE_AFTER)
    jobs: list[tuple[str, Job, int]] = [
        (f"prefill, {PREFILL} tokens, warm", {**ster.job("logits", [prefill], threads), "repeats": repeats}, PREFILL),
        (f"decode, {new} after {DECODE_AFTER}, warm", {**ster.job("decode", [after], threads), "new": new, "repeats": repeats}, new),
    ]

    def rate(tokens: int) -> Rate:
        return lambda done: tokens / statistics.median(json.loads(done.stdout)["seconds"])

    return [measure(name, [ster.python, "-m", ster.module], rate(tokens), json.dumps(job)) for name, job, tokens in jobs]


def page_table(sizes: Counter[str], held: dict[str, Counter[str]]) -> str:
    rows = []
    for name, size in {**sizes, "all": sizes.total()}.items():
        counts = [each.total() if name == "all" else each[name] for each in held.values()]
        rows.append([name, f"{size / MIB:.1f}", *(f"{count / MIB:.1f} ({count / size:.0%})" for count in counts)])
    return table(["part", "MiB", *(f"in memory after {name}" for name in held)], rows)


def unasked(shape: Shape, held: Counter[str], depth: int, rows: int, window: int | None) -> str:
    """What extract had no use for, less the norms, which are read when a model is opened: 2 vectors a layer."""
    norms = BF16 * shape.hidden * (2 * (shape.layers - depth) + 1)
    beyond = sum(held[f"layer {layer}"] for layer in range(depth, shape.layers)) + held["norm"]
    return (
        f"extract had no use for layers {depth} to {shape.layers - 1} but {norms / MIB:.2f} MiB of norms, read as the model is opened;"
        f" {beyond / MIB:.1f} came in, and {held['head'] / MIB:.1f} of the head. Of the embedding it used {rows} rows,"
        f" {rows * BF16 * shape.hidden / MIB:.2f} MiB; {held['embedding'] / MIB:.1f} came in."
        f" The kernel reads {memory_text(window) if window is not None else 'an unknown number of bytes'} around a fault."
    )


def ideal(shape: Shape, speed: dict[str, float], found: float) -> str:
    """A token reads every weight but the embedding, unless that is the head."""
    needed = BF16 * (shape.weights() - (0 if shape.tied else shape.vocab * shape.hidden))
    lines = [f"a token reads {needed / 1e9:.2f} GB of weights; decoding takes {found * needed / 1e9:.1f} GB/s"]
    for name, title in (("memory", "an array in memory"), ("weights", "these files, mapped and warm,")):
        most = speed[name] / needed
        lines.append(f"{title} can be read at {speed[name] / 1e9:.1f} GB/s: at most {digits(most)} tokens/s; Ster is at {found / most:.0%}")
    return "\n".join(lines)


def run_visibly(command: Sequence[str]) -> None:
    if status := subprocess.run(command, cwd=ROOT, check=False).returncode:
        sys.exit(status)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""Ster and its peers on the same work, each measurement in a process of its own, round after round: A B A B.

    .venv/bin/python -m benchmarks --model DIR --peer-python /path/to/venv/bin/python

A peer is measured if an interpreter given has it: llama-cpp-python (with gguf and numpy), transformers (with torch), repeng.
Only on a quiet machine do the figures mean something. A ratio is of two processes of one round, one right after the other, but even that
fails where others want the cores: llama.cpp's threads then wait for each other. STER_BENCH_CLOCK=cpu with --threads 1 times the CPU
instead, for an idea of the ratios there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import inputs
from benchmarks.measure import ROOT, FailedError, Spread, load, machine, run, table
from benchmarks.work import STER, Engine, Given, Sample, Work, extracted, memory_text, plan
from benchmarks.worker import CPU_CLOCK, Answer, Job

Samples = Mapping[str, Sequence[Sample]]


def main() -> None:
    arguments = parse()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    model: Path = arguments.model
    engines, versions = find_engines(arguments.peer_python, model, out)
    given = prepare(arguments, engines[0])
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    todo = [work for work in plan(engines, given, vocab) if any(part in work.name for part in arguments.only or [""])]
    if not todo:
        sys.exit(f"no work has {' or '.join(arguments.only)} in its name")

    about = {
        **machine(),
        "threads": given.threads,
        "model": str(model),
        "rounds": arguments.rounds,
        "clock": "CPU" if CPU_CLOCK else "wall",
        "load_before": load(),
    }
    measured: dict[str, dict[str, list[Sample]]] = {}
    for work in todo:
        measured[work.name] = measure(work, arguments.rounds)
        records = [record(work, measured[work.name]) for work in todo if work.name in measured]
        document = {"about": {**about, "load_after": load()}, "versions": versions, "work": records}
        (out / "results.json").write_text(json.dumps(document, indent=1) + "\n")  # after each: a long run may be stopped
    rows = [row for work in todo for row in report(work, measured[work.name])]
    print(table(["work", "engine", "median (min-max)", "Ster is", "bar", "same tokens"], rows))
    for name, value in compare(given, engines[0], [name for name in measured.get("extract", {}) if name != STER]).items():
        print(f"\nextract: {name} differs from Ster by {value:.1e} of a residual's norm at most")
    print("\n" + "\n".join(f"{key}: {value}" for key, value in {**about, "load_after": load(), **versions}.items()))
    print(f"\n{out / 'results.json'}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("STER_MODEL")
    parser.add_argument("--model", type=Path, default=default and Path(default), required=not default, help="checkpoint [env STER_MODEL]")
    parser.add_argument(
        "--peer-python", action="append", default=[], help="interpreter with peers; repeat for more [env STER_BENCH_PEERS, with : between]"
    )
    parser.add_argument("--prompts", type=Path, help='for extract: {"prompts": [...]}; default: 200 made up')
    parser.add_argument("--pairs", type=Path, help='for train: {"pairs": [{"positive": ..., "negative": ...}]}; default: 100 made up')
    parser.add_argument("--rounds", type=int, default=5, help="counted, after one that is not; default 5")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every engine; default: all cores")
    parser.add_argument("--only", action="append", help="work with this in its name: extract, prefill, decode, train, import, help, first")
    parser.add_argument("--out", type=Path, default=ROOT / "target" / "bench", help="folder for GGUF, documents and results.json")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    if CPU_CLOCK and arguments.threads != 1:
        parser.error("STER_BENCH_CLOCK=cpu adds up what several threads take: use --threads 1")
    named = [*arguments.peer_python, *filter(None, os.environ.get("STER_BENCH_PEERS", "").split(":"))]
    # Processes run in the repository, not where the user is. An interpreter's links stay: one leads out of its venv.
    arguments.peer_python = [str(Path(python).absolute()) if os.sep in python else python for python in named]
    for name in ("model", "prompts", "pairs", "out"):
        path = getattr(arguments, name)
        setattr(arguments, name, path and path.resolve())
    return arguments


def find_engines(pythons: Sequence[str], model: Path, out: Path) -> tuple[list[Engine], dict[str, str]]:
    """Ster, and those peers that answer; why the others do not is printed."""
    ster = Engine(STER, sys.executable, "benchmarks.run_ster", str(model))
    engines, versions = [ster], {STER: version(ster)}
    for library in ("llama", "transformers", "repeng"):
        reasons = [] if pythons else ["no --peer-python or STER_BENCH_PEERS"]
        for python in pythons:
            probe = Engine(library, python, f"benchmarks.run_{library}", str(model))
            try:
                versions[library] = version(probe)
            except (FailedError, OSError) as error:
                reasons.append(f"{python}: {error}")
            else:
                engines += ways(probe, model, out)
                break
        else:
            note(f"{library} is not measured: {'; '.join(reasons)}")
    return engines, versions


def version(engine: Engine) -> str:
    job: Job = {**engine.job("logits", [], 1), "kind": "versions"}
    return engine.do(job)[1]["versions"]


def ways(probe: Engine, model: Path, out: Path) -> list[Engine]:
    """The settings a peer is measured with. llama.cpp computes in float32 only with a float32 cache and no flash attention."""
    if probe.name == "repeng":
        return [probe]
    if probe.name == "transformers":
        return [Engine(f"transformers {dtype}", probe.python, probe.module, str(model), dtype) for dtype in ("f32", "bf16")]
    found = []
    for name, dtype, settings in [
        ("llama.cpp F32", "f32", "exact"),
        ("llama.cpp F32, f16 cache", "f32", "default"),
        ("llama.cpp BF16", "bf16", "default"),
    ]:
        try:
            found.append(Engine(name, probe.python, probe.module, str(gguf(probe.python, model, dtype, out)), settings))
        except FailedError as error:
            note(f"{name} is not measured: {error}")
    return found


def gguf(python: str, model: Path, dtype: str, out: Path) -> Path:
    """The checkpoint as GGUF, written if it is not there or older than the weights."""
    path = out / f"{model.name}-{dtype}.gguf"
    newest = max(file.stat().st_mtime for file in model.glob("*.safetensors"))
    if not path.exists() or path.stat().st_mtime < newest:
        note(f"writing {path}")
        part = path.with_suffix(".part")
        run([python, "-m", "benchmarks.to_gguf", str(model), str(part), dtype])
        part.rename(path)
    return path


def prepare(arguments: argparse.Namespace, ster: Engine) -> Given:
    """Prompts and pairs as files for Ster, as ids and texts for the peers."""
    out: Path = arguments.out
    texts = inputs.read_prompts(arguments.prompts) if arguments.prompts else inputs.made_up_prompts()
    pairs = inputs.read_pairs(arguments.pairs) if arguments.pairs else inputs.made_up_pairs()
    (out / "prompts.json").write_text(json.dumps({"prompts": texts}))
    sides = [{"positive": positive, "negative": negative} for positive, negative in pairs]
    (out / "pairs.json").write_text(json.dumps({"trait_name": "benchmark", "pairs": sides}))
    job: Job = {**ster.job("logits", [], arguments.threads), "kind": "tokens", "texts": texts}
    ids = ster.do(job)[1]["tokens"]
    flat = [side for pair in pairs for side in pair]
    return Given(arguments.model, arguments.threads, out / "prompts.json", texts, ids, out / "pairs.json", flat, out)


def measure(work: Work, rounds: int) -> dict[str, list[Sample]]:
    """Every engine once a round, the first round not counted. One that fails is left out from there on."""
    samples: dict[str, list[Sample]] = {name: [] for name in work.cells}
    for number in range(rounds + 1):
        for name in list(samples):
            note(f"{work.title}: {name}, round {number} of {rounds}, load {load()}")
            try:
                sample = work.cells[name]()
            except FailedError as error:
                note(f"{name} is left out of {work.title}: {error}")
                del samples[name]
            else:
                samples[name] += [sample] if number else []
    return samples


def ratio(work: Work, ours: Sequence[Sample], theirs: Sequence[Sample]) -> Spread:
    """How many times as fast Ster is, round by round."""
    pairs = [(our.value, their.value) for our, their in zip(ours, theirs, strict=True)]
    return Spread(tuple(our / their if work.unit == "tokens/s" else their / our for our, their in pairs))


def report(work: Work, samples: Samples) -> list[list[str]]:
    """A row an engine; for work with a bound on memory another."""
    ours = samples.get(STER)
    rows = []
    for name, theirs in samples.items():
        figure = f"{Spread(tuple(sample.value for sample in theirs))} {work.unit}"
        if name == STER or ours is None:
            rows.append([work.title, name, figure, "", verdict(work, theirs) if name == STER else "", ""])
            continue
        times = ratio(work, ours, theirs)
        bar = work.bars.get(name)
        judged = f">= {bar}x: {met(times.median >= bar)}" if bar else ""
        rows.append([work.title, name, figure, f"{times} x as fast", judged, agreement(work, ours[0].ids, theirs[0].ids)])
    if work.memory is not None:
        for name, theirs in samples.items():
            peak = max(sample.peak for sample in theirs)
            judged = f"<= {memory_text(work.memory)}: {met(peak <= work.memory)}" if name == STER else ""
            less = "" if name == STER or ours is None else f"{peak / max(sample.peak for sample in ours):.2f} x smaller"
            rows.append([f"{work.name}, peak memory", name, memory_text(peak), less, judged, ""])
    return rows


def verdict(work: Work, ours: Sequence[Sample]) -> str:
    return f"<= {work.limit} s: {met(Spread(tuple(s.value for s in ours)).median <= work.limit)}" if work.limit else ""


def met(good: bool) -> str:
    return "met" if good else "NOT MET"


def agreement(work: Work, ours: Sequence[int], theirs: Sequence[int]) -> str:
    """How many tokens are the same; in decoding up to the first that is not, because what follows it follows another text."""
    same = [our == their for our, their in zip(ours, theirs, strict=True)]
    count = [*same, False].index(False) if work.name == "decode" else sum(same)
    return f"{count} of {len(ours)}" if ours else ""


def compare(given: Given, ster: Engine, names: Sequence[str]) -> dict[str, float]:
    """How far each peer's document is from Ster's."""
    found = {}
    for name in names:
        job: Job = {**ster.job("logits", [], 1), "kind": "compare", "texts": [str(extracted(given, STER)), str(extracted(given, name))]}
        answer: Answer = ster.do(job)[1]
        found[name] = answer["difference"]
    return found


def record(work: Work, samples: Samples) -> dict[str, object]:
    ours = samples.get(STER, [])
    engines = {
        name: {
            "median": Spread(tuple(sample.value for sample in theirs)).median,
            "values": [sample.value for sample in theirs],
            "wall_seconds": [sample.wall for sample in theirs],
            "peak_bytes": [sample.peak for sample in theirs],
            "passes_seconds": [sample.inside for sample in theirs],
            "load": [sample.load for sample in theirs],
            "ster_is": list(ratio(work, ours, theirs).values) if ours and name != STER else None,
        }
        for name, theirs in samples.items()
    }
    return {
        "name": work.name,
        "title": work.title,
        "unit": work.unit,
        "limit": work.limit,
        "memory": work.memory,
        "bars": dict(work.bars),
        "engines": engines,
    }


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

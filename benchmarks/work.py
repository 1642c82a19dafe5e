"""The pieces of work, who does each, and the bars set for Ster. A cell is one engine doing one piece in a process of its own."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.inputs import ragged_lengths, random_ids
from benchmarks.measure import MIB, Run, load, run
from benchmarks.worker import CPU_CLOCK, Answer, Job

STER = "Ster"
BATCH_TOKENS = 1024  # that Ster runs at a time, and keeps keys and values of (`ster.capture`)


@dataclass(frozen=True)
class Engine:
    """How an engine is started. model: what its process opens; settings: see its file."""

    name: str
    python: str
    module: str
    model: str
    settings: str = ""

    def job(self, kind: Literal["logits", "decode", "residuals"], prompts: Sequence[Sequence[int]], threads: int) -> Job:
        return {
            "kind": kind,
            "model": self.model,
            "settings": self.settings,
            "threads": threads,
            "repeats": 1,
            "prompts": [list(prompt) for prompt in prompts],
            "new": 0,
            "layers": [],
            "texts": [],
            "output": "",
        }

    def do(self, job: Job) -> tuple[Run, Answer]:
        done = run([self.python, "-m", self.module], json.dumps(job))
        answer: Answer = json.loads(done.stdout)
        return done, answer


@dataclass(frozen=True)
class Sample:
    """One process. value: tokens a second, or seconds. load: of the machine before it. inside: seconds of its passes alone."""

    value: float
    wall: float
    peak: int
    load: float
    ids: list[int] = field(default_factory=list)
    inside: float | None = None


Cell = Callable[[], Sample]


@dataclass(frozen=True)
class Work:
    """bars: how many times a peer Ster must be. limit: seconds Ster may take. memory: bytes Ster may hold; None: not reported."""

    name: str
    title: str
    unit: Literal["tokens/s", "s"]
    cells: Mapping[str, Cell]
    bars: Mapping[str, float] = field(default_factory=dict)
    limit: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class Given:
    """What the user and the checkpoint say. ids: of `prompts`, as raw text."""

    model: Path
    threads: int
    prompts: Path
    texts: list[str]
    ids: list[list[int]]
    pairs: Path
    sides: list[str]
    out: Path


def passes(title: str, prompts: list[list[int]], repeats: int, engines: Sequence[Engine], threads: int, bar: float = 0) -> Work:
    """Last-token logits; the figure is the median pass of a process."""
    tokens = sum(map(len, prompts))

    def cell(engine: Engine) -> Cell:
        job: Job = {**engine.job("logits", prompts, threads), "repeats": repeats}
        return lambda: _rate(engine, job, tokens)

    bars = {engine.name: bar for engine in engines if bar and engine.name.startswith("llama.cpp F32")}
    return Work(title.replace(", ", "-").replace(" ", "-"), title, "tokens/s", {engine.name: cell(engine) for engine in engines}, bars)


def decode(engines: Sequence[Engine], prompt: list[int], new: int, threads: int) -> Work:
    def cell(engine: Engine) -> Cell:
        job: Job = {**engine.job("decode", [prompt], threads), "new": new}
        return lambda: _rate(engine, job, new)

    title = f"decode, {new} tokens after {len(prompt)}"
    return Work("decode", title, "tokens/s", {engine.name: cell(engine) for engine in engines}, {"llama.cpp BF16": 1.0})


def _rate(engine: Engine, job: Job, tokens: int) -> Sample:
    before = load()
    done, answer = engine.do(job)
    return Sample(tokens / statistics.median(answer["seconds"]), done.wall, done.peak, before, answer["ids"])


def extract(engines: Sequence[Engine], given: Given) -> Work:
    """The whole command: all layers, last token, raw text, JSON. Peers are given the ids, and write the same document."""
    config = json.loads((given.model / "config.json").read_text())
    layers, hidden, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    kv_hidden = (config.get("num_key_value_heads") or heads) * (config.get("head_dim") or hidden // heads)
    weights = sum(path.stat().st_size for path in given.model.glob("*.safetensors"))
    memory = 1.15 * weights + 4 * layers * (len(given.ids) * hidden + BATCH_TOKENS * 2 * kv_hidden)

    def peer(engine: Engine) -> Cell:
        output = str(extracted(given, engine.name))
        job: Job = {**engine.job("residuals", given.ids, given.threads), "texts": given.texts, "output": output}
        return lambda: _peer(engine, job)

    cells = {engine.name: peer(engine) for engine in engines if engine.name != STER}
    # fmt: off
    command = ["-m", "ster", "extract", "--model", str(given.model), "--prompts", str(given.prompts), "--chat-template", "off",
               "--threads", str(given.threads), "--output", str(extracted(given, STER))]
    # fmt: on
    cells = {STER: lambda: _whole([sys.executable, *command]), **cells}
    title = f"extract, {len(given.ids)} prompts, {sum(map(len, given.ids))} tokens"
    return Work("extract", title, "s", cells, {"transformers f32": 3.0}, memory=memory)


def extracted(given: Given, engine: str) -> Path:
    """Where an engine's document goes."""
    return given.out / f"extract-{engine.lower().replace(' ', '-').replace(',', '')}.json"


def train(engines: Sequence[Engine], given: Given) -> Work:
    """The whole command: mean differences of all layers. repeng takes the texts themselves, and its own method."""

    def peer(engine: Engine) -> Cell:
        job: Job = {**engine.job("residuals", [], given.threads), "texts": given.sides}
        return lambda: _peer(engine, job)

    # fmt: off
    command = ["-m", "ster", "vector", "train", "--model", str(given.model), "--pairs", str(given.pairs), "--chat-template", "off",
               "--threads", str(given.threads), "--output", str(given.out / "vector.json")]
    # fmt: on
    cells: dict[str, Cell] = {STER: lambda: _whole([sys.executable, *command])}
    cells |= {engine.name: peer(engine) for engine in engines if engine.name != STER}
    return Work("train", f"CAA vector, {len(given.sides) // 2} pairs", "s", cells, {"repeng": 4.0})


def first(engines: Sequence[Engine], prompt: list[int], threads: int) -> Work:
    """A process that reads the residuals of one prompt, less a second pass over it: what starting costs."""

    def cell(engine: Engine) -> Cell:
        return lambda: _first(engine, engine.job("residuals", [prompt], threads))

    title = f"first activation, {len(prompt)} tokens, less a pass"
    return Work("first", title, "s", {engine.name: cell(engine) for engine in engines}, limit=0.3)


def _first(engine: Engine, job: Job) -> Sample:
    before = load()
    done, answer = engine.do(job)
    return Sample(seconds(done) - answer["seconds"][-1], done.wall, done.peak, before)


def imports(engines: Mapping[str, tuple[str, str]]) -> Work:
    """Whole processes that import and end. engines: name -> interpreter and statement."""
    cells: dict[str, Cell] = {
        name: lambda python=python, statement=statement: _whole([python, "-c", statement])  # type: ignore[misc]
        for name, (python, statement) in engines.items()
    }
    return Work("import", "import, whole process", "s", cells, limit=0.15)


def help() -> Work:
    return Work("help", "ster --help", "s", {STER: lambda: _whole([sys.executable, "-m", "ster", "--help"])}, limit=0.3)


def _whole(command: Sequence[str]) -> Sample:
    before = load()
    done = run(command)
    return Sample(seconds(done), done.wall, done.peak, before)


def _peer(engine: Engine, job: Job) -> Sample:
    before = load()
    done, answer = engine.do(job)
    return Sample(seconds(done), done.wall, done.peak, before, inside=answer["seconds"][-1] if "seconds" in answer else None)


def seconds(done: Run) -> float:
    return done.cpu if CPU_CLOCK else done.wall


def plan(engines: Sequence[Engine], given: Given, vocab: int) -> list[Work]:
    """All of it, in the order of design section 6. Engines whose way is not to compute in float32 only take part in rates."""
    rates = [engine for engine in engines if engine.name != "repeng"]
    whole = [engine for engine in engines if engine.name in (STER, "llama.cpp F32", "transformers f32")]
    ids16, ids128, ids512, ids32 = random_ids(vocab, 16, 128, 512, 32)
    ragged = random_ids(vocab, *ragged_lengths(32), seed=1)
    imported = {STER: (sys.executable, "import ster"), "python alone": (sys.executable, "pass")}
    imported |= {engine.name: (engine.python, IMPORTS[engine.module]) for engine in whole if engine.module in IMPORTS}
    return [
        extract(whole, given),
        passes("prefill, 16 tokens", [ids16], 20, rates, given.threads, 1.7),
        passes("prefill, 128 tokens", [ids128], 5, rates, given.threads, 1.35),
        passes("prefill, 512 tokens", [ids512], 3, rates, given.threads, 1.35),
        passes(f"prefill, 32 ragged prompts, {sum(map(len, ragged))} tokens", ragged, 1, rates, given.threads),
        decode(rates, ids32, 64, given.threads),
        train([engine for engine in engines if engine.name == "repeng"], given),
        imports(imported),
        help(),
        first(whole, ids16, given.threads),
    ]


IMPORTS = {
    "benchmarks.run_llama": "import llama_cpp",
    "benchmarks.run_transformers": "import torch; from transformers import AutoModelForCausalLM",
}


def memory_text(bytes: float) -> str:
    return f"{bytes / MIB:.0f} MiB"

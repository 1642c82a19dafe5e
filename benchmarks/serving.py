"""`ster serve` under load: what streams at once make of the time that the same requests take one after another, and how long a first token
takes.

    .venv/bin/python -m benchmarks.serving --model DIR

The server is a process of its own; the clients are threads of this one, which take little of the processor. Requests are greedy streams
of random ids, and none starts from another's cache. With captures each also reads all layers, which come back at its end.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.inputs import random_ids
from benchmarks.measure import ROOT, Spread, digits, load, machine, table

AT_ONCE = (1, 4, 16, 32)
PROMPT, SHORT, LONG = 32, 16, 2000  # tokens
DECODING = 16
IDLE = f"{SHORT} tokens, idle"
BESIDE_LONG = f"{SHORT} tokens, while {LONG:,} prefill"
BESIDE_STREAMS = f"{SHORT} tokens, while {DECODING} decode"
LONG_IDLE = f"{LONG:,} tokens, idle"
LONG_BESIDE = f"{LONG:,} tokens, while {DECODING} decode"
FIRST = (IDLE, BESIDE_LONG, BESIDE_STREAMS, LONG_IDLE, LONG_BESIDE)
VARIANTS = {"none": False, "all layers": True}
HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Answer:
    """first: seconds to the first token; seconds: to the end; tokens: new ones; ended: by `time.perf_counter`."""

    first: float
    seconds: float
    tokens: int
    ended: float


class Server:
    """One that runs. name: of its model."""

    def __init__(self, port: int, name: str) -> None:
        self._port = port
        self._name = name

    def ask(self, prompt: Sequence[int], new: int, capture: bool, told: Callable[[], object] = lambda: None) -> Answer:
        """told: is called at the first token."""
        body = {
            "model": self._name,
            "prompt": prompt,
            "max_tokens": new,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "vllm_xargs": {"skip_reading_prefix_cache": True},
            **({"output_residual_stream": True} if capture else {}),
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), HEADERS)
        first, tokens = 0.0, 0
        with contextlib.closing(connection), connection.getresponse() as response:
            for line in response:
                if line.startswith(b'data: {"error"') or response.status != 200:
                    sys.exit(line.decode())
                if first == 0.0 and line.startswith(b"data: "):
                    first = time.perf_counter() - start
                    told()
                if found := re.search(rb'"completion_tokens":(\d+)', line):
                    tokens = int(found[1])
        ended = time.perf_counter()
        return Answer(first, ended - start, tokens, ended)

    @contextlib.contextmanager
    def busy(self, prompts: Sequence[Sequence[int]], new: int, capture: bool, *, wait: bool) -> Iterator[list[Answer]]:
        """While these run; the answers are there afterwards. wait: until each has its first token."""
        answers: list[Answer] = []
        begun = [threading.Event() for _ in prompts]
        work = lambda prompt, event: answers.append(self.ask(prompt, new, capture, event.set))  # noqa: E731
        threads = [threading.Thread(target=work, args=pair) for pair in zip(prompts, begun, strict=True)]
        for thread in threads:
            thread.start()
        if wait:
            for event in begun:
                event.wait()
        yield answers
        for thread in threads:
            thread.join()


@dataclass
class Found:
    """Samples of one variant, one of each a round or more. Tokens a second by how many at once, and seconds."""

    together: dict[int, list[float]] = field(default_factory=lambda: {count: [] for count in AT_ONCE})
    alone: dict[int, list[float]] = field(default_factory=lambda: {count: [] for count in AT_ONCE})
    first: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in FIRST})
    missed: int = 0  # the companions had ended before the first token came


def main() -> None:
    arguments = parse()
    config = json.loads((arguments.model / "config.json").read_text())
    about = {**machine(), "model": str(arguments.model), "rounds": arguments.rounds, "threads": arguments.threads, "load_before": load()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = {name: Found() for name in VARIANTS}
    with serving(arguments.model, arguments.threads) as server:
        server.ask(random_ids(config["vocab_size"], PROMPT)[0], 2, False)  # cold pages
        for number in range(arguments.rounds):
            for name, capture in VARIANTS.items():
                note(f"round {number + 1} of {arguments.rounds}, captures: {name}, load {load()}")
                throughput(server, found[name], config["vocab_size"], arguments.new, capture)
                first_tokens(server, found[name], config, arguments.new, capture)
                about["load_after"] = load()
                document = {"about": about, "new": arguments.new, "captures": {name: vars(each) for name, each in found.items()}}
                (arguments.out / "serving.json").write_text(json.dumps(document, indent=1) + "\n")  # a long run may be stopped

    print(report(found) + "\n\n" + report_first(found) + "\n")
    print("\n".join(f"{key}: {value}" for key, value in about.items()))
    print(f"\n{arguments.out / 'serving.json'}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = os.environ.get("STER_MODEL")
    parser.add_argument("--model", type=Path, default=default and Path(default), required=not default, help="checkpoint [env STER_MODEL]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=64, help="tokens that each stream generates; default 64")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the engine; default: all cores")
    parser.add_argument("--out", type=Path, default=ROOT / "target" / "bench", help="folder for serving.json")
    return parser.parse_args()


@contextlib.contextmanager
def serving(model: Path, threads: int) -> Iterator[Server]:
    """A capture of all layers of a long prompt is over the usual cap."""
    line = [sys.executable, "-m", "ster", "serve", "--model", f"it={model}", "--port", "0", "--threads", str(threads)]
    line += ["--max-capture-numbers", str(2**28)]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for said in process.stderr:
            lines.append(said)
            if said.startswith("curl "):
                break
        else:
            sys.exit("".join(lines))
        drain = threading.Thread(target=lambda: [None for _ in process.stderr or ()])
        drain.start()
        try:
            port = re.search(r":(\d+)/", "".join(lines))
            assert port
            yield Server(int(port[1]), "it")
        finally:
            process.terminate()
            drain.join()


def throughput(server: Server, found: Found, vocab: int, new: int, capture: bool) -> None:
    """The same requests one after another, then at once. Prompts are part of the time."""
    prompts = random_ids(vocab, *[PROMPT] * max(AT_ONCE))
    alone = [server.ask(prompt, new, capture) for prompt in prompts]
    for count in AT_ONCE:
        some = alone[:count]
        found.alone[count].append(sum(each.tokens for each in some) / sum(each.seconds for each in some))
        start = time.perf_counter()
        with server.busy(prompts[:count], new, capture, wait=False) as answers:
            pass
        found.together[count].append(sum(each.tokens for each in answers) / (time.perf_counter() - start))


def first_tokens(server: Server, found: Found, config: dict[str, int], new: int, capture: bool) -> None:
    """Seconds to the first token. Companions must still run when it comes, else the sample does not count."""
    vocab, context = config["vocab_size"], config["max_position_embeddings"]
    short, long, *others = random_ids(vocab, SHORT, min(LONG, context - 2), *[PROMPT] * DECODING, seed=1)

    def sample(name: str, prompt: Sequence[int], companions: Sequence[Sequence[int]], more: int, *, wait: bool) -> None:
        with server.busy(companions, more, capture, wait=wait) as answers:
            if not wait:
                time.sleep(0.05)  # the long prompt is there first
            asked = time.perf_counter()
            first = server.ask(prompt, 1, capture).first
        # The long one must not even have begun to write.
        ends = [answer.ended - (0.0 if wait else answer.seconds - answer.first) for answer in answers]
        if all(end > asked + first for end in ends):
            found.first[name].append(first)
        else:
            found.missed += 1

    for _ in range(3):
        sample(IDLE, short, [], 0, wait=True)
        sample(BESIDE_LONG, short, [long], 1, wait=False)
        sample(BESIDE_STREAMS, short, others, new, wait=True)
    sample(LONG_IDLE, long, [], 0, wait=True)
    sample(LONG_BESIDE, long, others, 4 * new, wait=True)


def report(found: dict[str, Found]) -> str:
    rows = []
    for name, each in found.items():
        for count in AT_ONCE:
            alone, together = each.alone[count], each.together[count]
            ratio = Spread(tuple(many / one for many, one in zip(together, alone, strict=True)))
            rows.append([name, str(count), str(Spread(tuple(alone))), str(Spread(tuple(together))), f"{ratio} x"])
    return table(["captures", "streams", "one after another, tokens/s", "at once, tokens/s", "ratio"], rows)


def report_first(found: dict[str, Found]) -> str:
    rows = [[name, *(milliseconds(each.first[name]) for each in found.values())] for name in FIRST]
    missed = ", ".join(str(each.missed) for each in found.values())
    return table(["first token of, ms", *(f"captures: {name}" for name in found)], rows) + f"\n\nsamples that did not count: {missed}"


def milliseconds(seconds: Sequence[float]) -> str:
    if not seconds:
        return "none counted"
    values = sorted(1000 * each for each in seconds)
    middle = Spread(tuple(values))
    return f"{middle.median:.0f} ({values[0]:.0f}-{values[-1]:.0f})" if len(values) > 1 else digits(values[0])


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

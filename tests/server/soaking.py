"""Load for a server: clients that ask for everything at once, rightly and wrongly, and note what they were told."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np

from ster.server.tensors import encode
from ster.toy import WORDS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = (COMPLETIONS, CHAT)
HUGE = 100_000_000  # bytes of a body that is too large
SAMPLED = 0.1  # of the answers
DONE = b"data: [DONE]\n\n"
PASSING = re.compile(rb'"id":"(?:chat)?cmpl-[0-9a-f]{16}"|"created":\d+|"request_id":"req_[0-9a-f]{32}"')
INDEX = re.compile(rb'"choices":\[\{"index":(\d+)')

Fields = dict[str, Any]
Ends = Literal["well", "badly", "either"]


@dataclass(frozen=True)
class Facts:
    """The model, and how long its prompts and answers are here."""

    name: str
    layers: int
    hidden: int
    vocab: int
    chats: bool
    prompt: int
    new: int


@dataclass(frozen=True)
class Ask:
    """body: fields, bytes that are sent as they are, or how a body of `HUGE` bytes is sent. expected: statuses, beside 429.

    ends: how its stream may end. An error that comes late, as the first pass does on a busy machine, is in the stream, not in the status.
    leaves: the client goes after so many reads.
    """

    kind: str
    body: Fields | bytes | str
    expected: tuple[int, ...] = (200,)
    path: str = COMPLETIONS
    ends: Ends = "well"
    leaves: int | None = None

    @property
    def streams(self) -> bool:
        return isinstance(self.body, dict) and self.body.get("stream") is True


# What is asked for


class Asking:
    """Draws requests: `random` decides, so that one seed asks for the same things every time."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        random = Random(0)
        self._stems = [[random.randrange(3, facts.vocab) for _ in range(facts.prompt)] for _ in range(6)]

    def draw(self, random: Random, kind: str | None = None) -> Ask:
        kinds = {name: weight for name, weight in WEIGHTS.items() if self._facts.chats or name != "chat"}
        kind = kind or random.choices(list(kinds), list(kinds.values()))[0]
        ask: Ask = getattr(self, f"_{kind}")(random)
        return ask

    def _plain(self, random: Random) -> Ask:
        return self._completion("plain", random)

    def _scores(self, random: Random) -> Ask:
        fields: Fields = {"logprobs": random.randint(0, 5), "echo": random.random() < 0.5}
        if random.random() < 0.5:
            fields["prompt_logprobs"] = random.choice([0, 3])
        if fields["echo"] and random.random() < 0.3:
            fields["max_tokens"] = 0
        return self._completion("scores", random, **fields)

    def _several(self, random: Random) -> Ask:
        fields: Fields = {"n": random.randint(2, 4)}
        if random.random() < 0.3:
            fields["prompt"] = [self._ids(random) for _ in range(2)]
        return self._completion("several", random, **fields)

    def _capture(self, random: Random) -> Ask:
        return self._completion("capture", random, **self._reading(random))

    def _steer(self, random: Random) -> Ask:
        prompt = self._ids(random)
        new = random.randint(1, self._facts.new)
        vectors = [self._vector(random, len(prompt) + new - 1) for _ in range(random.randint(1, 2))]
        reading = self._reading(random) if random.random() < 0.3 else {}
        return self._completion("steer", random, prompt=prompt, max_tokens=new, apply_steering_vectors=vectors, **reading)

    def _chat(self, random: Random) -> Ask:
        message = {"role": "user", "content": " ".join(random.choices(WORDS, k=random.randint(1, 30)))}
        fields = {"messages": [message], "max_tokens": random.randint(1, self._facts.new)} | self._sampling(random)
        if random.random() < 0.5:
            fields |= {"logprobs": True, "top_logprobs": 2}
        return Ask("chat", {"model": self._facts.name, "stream": random.random() < 0.5, **fields}, path=CHAT)

    def _largest(self, random: Random) -> Ask:
        """Numbers that float32 still holds, and most models too."""
        vector = self._everywhere(random, 3e38)
        return self._completion("largest", random, (200, 400), max_tokens=4, apply_steering_vectors=[vector], ends="either")

    def _overflow(self, random: Random) -> Ask:
        vectors = [self._everywhere(random, 3e38, scale=random.choice([2.0, -1.5]))]
        fields: Fields = {"max_tokens": 4, "apply_steering_vectors": vectors, "stream": random.random() < 0.5} | self._reading(random)
        return self._completion("overflow", random, (200, 400) if fields["stream"] else (400,), ends="badly", **fields)

    def _late(self, random: Random) -> Ask:
        """Overflows at a position that is not there before some tokens have been written."""
        prompt = self._ids(random)
        vector = self._everywhere(random, 3e38, scale=2.0)
        vector["position_spans"] = [[len(prompt) + 2, len(prompt) + 3]]
        # Without a stream it is refused. A text that ends before it gets there is right too.
        fields: Fields = {"prompt": prompt, "max_tokens": 8, "apply_steering_vectors": [vector], "stop": None}
        return self._completion("late", random, (200, 400), ends="either", **fields)

    def _invalid(self, random: Random) -> Ask:
        wrong = random.choice(self._wrong())
        if isinstance(wrong, bytes):
            return Ask("invalid", wrong, (400,))
        return self._completion("invalid", random, (400,), **wrong)

    def _huge(self, random: Random) -> Ask:
        return Ask("huge", random.choice(["length", "chunks"]), (413,))

    def _leave(self, random: Random) -> Ask:
        fields: Fields = {"max_tokens": 4 * self._facts.new, "n": random.randint(1, 2)}
        if random.random() < 0.3:
            fields |= {"n": 1} | self._reading(random)
        ask = self._completion("leave", random, stream=random.random() < 0.8, **fields)
        return Ask(ask.kind, ask.body, leaves=random.choice([0, 1, 2, 5]))

    # Its parts

    def _completion(self, kind: str, random: Random, expected: tuple[int, ...] = (200,), *, ends: Ends = "well", **fields: Any) -> Ask:
        body: Fields = {
            "model": self._facts.name,
            "prompt": self._prompt(random),
            "max_tokens": random.randint(1, self._facts.new),
            "stream": random.random() < 0.5,
            "return_token_ids": random.random() < 0.3,
            **self._sampling(random),
        }
        if random.random() < 0.2:
            body["stop"] = random.choice([["calm", "water l"], "and", ["not there"]])
        body |= fields
        if body["stream"] and random.random() < 0.3:
            body["stream_options"] = {"include_usage": True}
        return Ask(kind, body, expected, ends=ends)

    def _sampling(self, random: Random) -> Fields:
        fields: Fields = {"temperature": random.choice([0, 0.7, 1.5]), "seed": random.randrange(1000)}
        more = {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
        return fields | dict(random.sample(sorted(more.items()), random.choice([0, 0, 1, 2])))

    def _prompt(self, random: Random) -> Any:
        return " ".join(random.choices(WORDS, k=random.randint(1, 40))) if random.random() < 0.3 else self._ids(random)

    def _ids(self, random: Random) -> list[int]:
        """Most begin like others."""
        stem = random.choice(self._stems)[: random.randint(0, self._facts.prompt)]
        tail = [random.randrange(3, self._facts.vocab) for _ in range(random.choice([1, 1, 2, 20]))]
        return [*stem, *tail]

    def _reading(self, random: Random) -> Fields:
        every = range(self._facts.layers)
        fields: Fields = {"output_residual_stream": random.choice([True, random.sample(every, 2), [random.choice(every)]])}
        # float16 and bfloat16 may not hold what a huge vector makes, which is another error, after the same bits.
        return fields | random.choice([{}, {"activation_dtype": "float32"}])

    def _rows(self, random: Random, *shape: int) -> Any:
        return np.random.default_rng(random.randrange(100)).normal(0, 0.5, (*shape, self._facts.hidden)).astype(np.float32)

    def _vector(self, random: Random, reach: int) -> Fields:
        """reach: positions that run."""
        layers = random.sample(range(self._facts.layers), random.randint(1, 2))
        vector: Fields = {"layer_indices": layers, "scale": random.choice([1, 0, -2.0, 0.25]), "norm_match": random.random() < 0.3}
        places = sorted(random.sample(range(reach), min(reach, 3)))
        match random.choice(["plain", "positions", "spans"]):
            case "positions":
                values = self._rows(random, len(layers), len(places))
                vector["position_indices"] = places
            case "spans":
                values = self._rows(random, len(layers))
                vector["position_spans"] = [[place, place + 1] for place in places]
            case _:
                values = self._rows(random, len(layers))
        return vector | {"activations": encode(values, "float32") if random.random() < 0.5 else values.tolist()}

    def _everywhere(self, random: Random, number: float, scale: float = 1.0) -> Fields:
        layer = random.randrange(self._facts.layers)
        return {"activations": [[number] * self._facts.hidden], "layer_indices": [layer], "scale": scale}

    def _wrong(self) -> list[Fields | bytes]:
        facts = self._facts
        row = [0.0] * facts.hidden
        not_finite = encode(np.array([[*row[1:], np.nan]], np.float32), "float32")
        head = json.dumps({"model": facts.name, "prompt": "the sea", "max_tokens": 1})[:-1]
        return [
            {"nonsense": 1},
            {"model": "no such model"},
            {"temperature": "hot"},
            {"prompt": [facts.vocab]},
            {"prompt": [3] * 9000},
            {"max_tokens": 0, "echo": False},
            {"output_residual_stream": [facts.layers]},
            {"output_residual_stream": True, "n": 2},
            {"apply_steering_vectors": [{"activations": [row[1:]], "layer_indices": [0]}]},
            {"apply_steering_vectors": [{"activations": [row, row], "layer_indices": [0]}]},
            {"apply_steering_vectors": [{"activations": [[*row[1:], None]], "layer_indices": [0]}]},
            {"apply_steering_vectors": [{"activations": not_finite, "layer_indices": [0]}]},
            {"apply_steering_vectors": [{"activations": [row], "layer_indices": [0], "position_spans": [[7000, 7001]]}], "prompt": [3]},
            f'{head}, "temperature": NaN}}'.encode(),
            f'{head}, "apply_steering_vectors": [{{"layer_indices": [0], "activations": [{[*row[1:], float("nan")]}]}}]}}'.encode(),
            head.encode(),
            b"\xff",
            b"[]",
        ]


WEIGHTS = {
    "plain": 20, "scores": 12, "several": 8, "capture": 14, "steer": 20, "chat": 4,
    "largest": 2, "overflow": 4, "late": 4, "invalid": 6, "leave": 8, "huge": 0.2,
}  # fmt: skip


# What is answered


@dataclass
class Sample:
    ask: Ask
    status: int
    body: bytes


@dataclass
class Tally:
    """What the clients were told. seen: answers by kind and status, 0 where the client left. wrong: what should not have been."""

    seen: Counter[tuple[str, int]] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, ask: Ask, status: int, body: bytes, *, sample: bool) -> None:
        with self._lock:
            self.seen[ask.kind, told(status, body)] += 1
            if status == 0:
                return
            if status != 429 and (reason := wrong(ask, status, body)):
                self.wrong.append(f"{ask.kind}: {reason}: {body[-300:]!r}, asked {str(ask.body)[:300]}")
            if sample and status != 429 and ask.kind != "huge":
                self.samples.append(Sample(ask, status, body))

    def statuses(self) -> dict[int, int]:
        found: Counter[int] = Counter()
        for (_, status), count in self.seen.items():
            found[status] += count
        return dict(sorted(found.items()))


def told(status: int, body: bytes) -> int:
    """The status, or that of the error at the end of an answer that had begun, which is how the server counts it."""
    last = body.strip().rpartition(b"\n\n")[2]
    if status == 200 and last.removeprefix(b"data: ").startswith(b'{"error":'):
        return 429 if b'"code":"queue_full"' in last else 400
    return status


def wrong(ask: Ask, status: int, body: bytes) -> str | None:
    """What is wrong with an answer, whoever else was there."""
    if status not in ask.expected:
        return f"status {status}"
    if status != 200:
        return None if b'"request_id":"req_' in body else "no request_id"
    if not ask.streams:
        return None if b'"usage":' in body else "no usage"
    if body.endswith(DONE):
        return "a stream that ended well" if ask.ends == "badly" else None
    failed = b'"code":"invalid_request"' in body.split(b"\n\n")[-2]
    return None if failed and ask.ends != "well" else "a stream without an end"


def lasting(status: int, body: bytes) -> tuple[int, bytes]:
    """An answer without what differs each time. Choices of a stream take turns as they like, each in its own order; a refusal is the same
    as a status and as the only event of a stream."""
    body = PASSING.sub(b"", body)
    if not body.startswith((b"data: ", b": ")):
        return status, body
    events = [event for event in body.split(b"\n\n")[:-1] if event != b": keepalive"]
    if len(events) == 1 and events[0].startswith(b'data: {"error"'):
        return 400, events[0].removeprefix(b"data: ")
    return status, b"\n\n".join(sorted(events, key=_choice))


def _choice(event: bytes) -> int:
    found = INDEX.search(event)
    return int(found[1]) if found else 1 << 30


class Caller:
    """One client, with a connection that it keeps while it can."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def close(self) -> None:
        self._connection.close()

    def ask(self, ask: Ask) -> tuple[int, bytes]:
        """Status and body; status 0 where it left."""
        if isinstance(ask.body, str):
            return self._huge(chunked=ask.body == "chunks")
        body = ask.body if isinstance(ask.body, bytes) else json.dumps(ask.body).encode()
        self._connection.request("POST", ask.path, body, {"Content-Type": "application/json"})
        if ask.leaves is not None:
            return self._leave(ask)
        with contextlib.closing(self._connection.getresponse()) as response:
            return response.status, response.read()

    def _leave(self, ask: Ask) -> tuple[int, bytes]:
        assert self._connection.sock is not None
        if not ask.streams:
            time.sleep(0.005 * (ask.leaves or 0))
        elif ask.leaves:
            with contextlib.closing(self._connection.getresponse()) as response:
                if response.status != 200:
                    return response.status, response.read()
                for _ in range(ask.leaves):
                    response.read1(100)
                if ask.leaves == 2:  # a reset, not a farewell
                    self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._connection.close()
        return 0, b""

    def _huge(self, *, chunked: bool) -> tuple[int, bytes]:
        piece = b" " * 1_000_000
        headers = {"Content-Type": "application/json"} | ({} if chunked else {"Content-Length": str(HUGE)})
        pieces = (piece for _ in range(HUGE // len(piece)))
        self._connection.request("POST", COMPLETIONS, pieces, headers, encode_chunked=chunked)
        with contextlib.closing(self._connection.getresponse()) as response:
            return response.status, response.read()


def load(port: int, facts: Facts, seconds: float, clients: int, seed: int, tally: Tally, first: Sequence[str] = ()) -> None:
    """`clients` of them ask for `seconds`, and then for nothing more. first: kinds that are asked for in any case."""
    asking, end, huge = Asking(facts), time.monotonic() + seconds, threading.Lock()

    def client(number: int) -> None:
        random = Random(f"{seed} {number}")
        caller = Caller(port)
        kinds = list(first[number::clients])
        while kinds or time.monotonic() < end:
            ask = asking.draw(random, kinds.pop() if kinds else None)
            sample = random.random() < SAMPLED
            try:
                with huge if ask.kind == "huge" else contextlib.nullcontext():  # one at a time
                    status, body = caller.ask(ask)
            except (OSError, http.client.HTTPException) as error:
                tally.wrong.append(f"{ask.kind}: {error!r}, asked {str(ask.body)[:300]}")
                caller.close()
                continue
            tally.note(ask, status, body, sample=sample)
            if status == 429:
                time.sleep(random.random() * 0.05)
        caller.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def differing(port: int, samples: Sequence[Sample]) -> Iterator[str]:
    """Those of the answers that are others when they are asked for alone, from nobody's cache."""
    caller = Caller(port)
    for sample in samples:
        ask = sample.ask
        if isinstance(ask.body, dict):
            ask = Ask(ask.kind, ask.body | {"vllm_xargs": {"skip_reading_prefix_cache": True}}, path=ask.path)
        status, body = caller.ask(ask)
        if lasting(status, body) != lasting(sample.status, sample.body):
            yield f"{ask.kind}: {sample.status} {sample.body[-600:]!r}, alone {status} {body[-600:]!r}, asked {str(ask.body)[:600]}"
    caller.close()


# The process


class Watched:
    """What the system says of a process. Linux only."""

    def __init__(self, number: int) -> None:
        self._folder = Path(f"/proc/{number}")

    def resident(self) -> int:
        """Bytes in memory, mapped files left out: those are the checkpoint."""
        lines = dict(line.split(":", 1) for line in (self._folder / "status").read_text().splitlines())
        return int(lines["RssAnon"].split()[0]) << 10

    def files(self) -> int:
        """Those of the state aside, of whose database SQLAlchemy keeps a few connections."""
        count = 0
        for path in (self._folder / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                count += "/ster.db" not in str(path.readlink())
        return count


def page(get: Callable[[str], str]) -> dict[str, float]:
    """`/metrics`, without the labels of the model."""
    lines = (line for line in get("/metrics").splitlines() if not line.startswith("#"))
    return {re.sub(r'\{model="[^"]*"\}', "", name): float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

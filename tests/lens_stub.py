"""A server with the dialect of vLLM with vllm-lens, made of the toy model: activations travel as bfloat16, the two fields stand in
`vllm_xargs` as JSON texts, what it does not know it ignores. It can be told to misbehave.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ster
from ster import _native
from ster.likelihood import log_probabilities
from ster.server.tensors import encode, unpack

LAYERS = [0, 2]
PROMPT = "the sea is calm"


@dataclass
class Raw:
    """Bytes instead of a good answer. cut: of the body, so many bytes are sent, and the connection ends. hang: until it is set, or
    the client has gone."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    cut: int | None = None
    hang: threading.Event | None = None


Spoil = Callable[[dict[str, Any], dict[str, Any]], Any]
"""(request, good answer) -> what is sent: a document, or a Raw. It may change the answer in place and give it back."""


class Stub:
    """requests: (path, body) of all that came. spoil: what becomes of answers of `/v1/completions`; plan: of the next ones, one by one."""

    def __init__(self, model: ster.Model, *, key: str | None = None) -> None:
        self.model = model
        self.key = key
        self.entry = {"id": "toy", "object": "model", "created": 1, "owned_by": "vllm", "root": "/models/toy-llama", "max_model_len": 256}
        self.requests: list[tuple[str, Any]] = []
        self.spoil: Spoil | None = None
        self.plan: list[Spoil | None] = []
        self.steers = True
        self.reverses = False
        self.delay: Callable[[dict[str, Any]], float] = lambda body: 0.0
        self.active = self.most_active = 0
        self._lock = threading.Lock()
        self.url = ""

    def completions(self) -> list[Any]:
        return [body for path, body in self.requests if path == "/v1/completions"]

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        with self._lock:
            self.active += 1
            self.most_active = max(self.most_active, self.active)
        try:
            yield
        finally:
            with self._lock:
                self.active -= 1

    def next_spoil(self) -> Spoil | None:
        with self._lock:
            return self.plan.pop(0) if self.plan else self.spoil

    # What it answers when it behaves

    def answer(self, path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": [self.entry]}
        if path == "/tokenize":
            return self._tokenize(body)
        if path == "/detokenize":
            return {"prompt": self.model.tokenizer.decode(body["tokens"], skip_special=False)}
        if path == "/v1/completions":
            return self._complete(body)
        return Raw(b'{"detail":"Not Found"}', 404)

    def _tokenize(self, body: dict[str, Any]) -> Any:
        if "messages" in body:
            try:
                ids = self.model.chat_tokens(body["messages"], add_generation_prompt=body.get("add_generation_prompt", True))
            except ster.SterError as error:
                return _refusal(str(error))
        else:
            ids = self.model.tokenizer.encode(body["prompt"], special_tokens=body.get("add_special_tokens", True))
        return {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}

    def _complete(self, body: dict[str, Any]) -> Any:
        ids = body["prompt"]
        xargs = body.get("vllm_xargs", {})
        assert all(isinstance(value, str) for value in xargs.values())
        layers = json.loads(xargs.get("output_residual_stream", "null"))
        edits = [edit for vector in json.loads(xargs.get("apply_steering_vectors", "[]")) for edit in _edits(vector)]
        layers = list(range(self.model.layer_count)) if layers is True else layers
        options = {name: body[name] for name in ("temperature", "seed", "stop") if name in body}
        found = self.model.generate(ids, edits if self.steers else (), max_new_tokens=body["max_tokens"], layers=layers, **options)
        choice: dict[str, Any] = {"index": 0, "text": found.text, "logprobs": None, "finish_reason": found.finish_reason}
        choice |= {"stop_reason": None, "prompt_logprobs": None, "prompt_token_ids": ids, "token_ids": found.token_ids}
        if body.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = self._scores(ids, edits)
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(found.token_ids)}
        document = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "toy", "choices": [choice], "usage": usage}
        if layers is not None:
            assert found.trace is not None
            residual = found.trace.residual[::-1] if self.reverses else found.trace.residual
            document["activations"] = {"residual_stream": encode(residual, "bfloat16")}
        return document

    def _scores(self, ids: list[int], edits: list[_native.Edit]) -> list[Any]:
        logits = self.model.trace(ids, layers=None, steering=edits, logits=True).logits
        assert logits is not None
        scores = log_probabilities(logits[:-1], ids[1:])
        return [None, *({str(id): {"logprob": value, "rank": 1, "decoded_token": "x"}} for id, value in zip(ids[1:], scores, strict=True))]

    def stream(self, document: dict[str, Any]) -> bytes:
        """As vLLM streams: a chunk for each token."""
        choice = document["choices"][0]
        pieces = choice["text"].split(" ")
        words = [piece + " " for piece in pieces[:-1]] + pieces[-1:]
        events = []
        for n, token in enumerate(choice["token_ids"]):
            last = n + 1 == len(choice["token_ids"])
            text = "".join(words[n:] if last else words[n : n + 1])
            part = {"index": 0, "text": text, "token_ids": [token], "finish_reason": choice["finish_reason"] if last else None}
            events.append({"choices": [part | ({"prompt_token_ids": choice["prompt_token_ids"]} if not n else {})]})
        return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: Stub

    def log_message(self, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _answer(self, body: Any) -> None:
        stub = self.stub
        with stub.counted():
            stub.requests.append((self.path, body))
            if stub.key is not None and self.headers.get("authorization") != f"Bearer {stub.key}":
                self._send(_refusal("Unauthorized", 401))
                return
            answer = stub.answer(self.path, body)
            if self.path == "/v1/completions":
                time.sleep(stub.delay(body))
                spoil = stub.next_spoil()
                if spoil is not None:
                    answer = spoil(body, answer)
                if body.get("stream") and isinstance(answer, dict):
                    answer = Raw(stub.stream(answer), headers={"Content-Type": "text/event-stream; charset=utf-8"})
            self._send(answer if isinstance(answer, Raw) else Raw(json.dumps(answer).encode()))

    def _is_gone(self) -> bool:
        """Whether the client has closed the connection."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _send(self, raw: Raw) -> None:
        if raw.hang is not None:
            while not raw.hang.wait(0.02) and not self._is_gone():
                pass
            self.close_connection = True
            return
        with contextlib.suppress(OSError):
            self.send_response(raw.status)
            for name, value in raw.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(raw.body)))
            self.end_headers()
            self.wfile.write(raw.body[: raw.cut])
        self.close_connection = raw.cut is not None


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None: ...


@contextlib.contextmanager
def stubbed(model: ster.Model, *, key: str | None = None) -> Iterator[Stub]:
    stub = Stub(model, key=key)
    server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"stub": stub}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def kept(remote: ster.RemoteModel, toy_model: ster.Model) -> list[int]:
    """What a read of one prompt hands over."""
    seen: list[int] = []
    remote.read([toy_model.encode(PROMPT)], ["prompts[0]"], LAYERS, "all", lambda index, values: seen.append(index))
    return seen


def _refusal(message: str, status: int = 400) -> Raw:
    return Raw(json.dumps({"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}).encode(), status)


def _edits(vector: dict[str, Any]) -> Iterator[_native.Edit]:
    tensor = vector["activations"]
    values = unpack(tensor["data"], tensor["dtype"], tensor["original_dtype"], tensor["shape"], max_numbers=1 << 22)
    for layer, rows in zip(vector["layer_indices"], values, strict=True):
        rows = rows if rows.ndim == 2 else rows[None]
        positions = vector.get("position_indices")
        yield _native.Edit(layer, rows, scale=vector["scale"], positions=positions, norm_match=vector["norm_match"])


def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """As bfloat16 has them, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    upper = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return upper.astype(np.uint32).view(np.float32)

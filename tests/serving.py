"""A server in this process or in one of its own, on a port of its own, for tests that speak HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import httpx
import uvicorn

import ster
from ster.server.app import create_app
from ster.server.connection import Connection
from ster.server.models import Models
from ster.server.served import ServedSpec
from ster.server.settings import Settings
from ster.state.state import State

Loader = Callable[[], ster.Model]


class Client(httpx.Client):
    """Speaks to one server. app: the application behind it."""

    def __init__(self, app: Any, url: str, **options: Any) -> None:
        super().__init__(base_url=url, timeout=30, **options)
        self.app = app
        self.url = url

    @property
    def models(self) -> Models:
        models: Models = self.app.state.models
        return models

    def connect(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])), timeout=20)

    def complete(self, prompt: Any = "the sea is calm", model: str = "toy", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", json={"model": model, "prompt": prompt, **fields})

    def answer(self, prompt: Any = "the sea is calm", **fields: Any) -> Any:
        response = self.complete(prompt, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, prompt: Any = "the sea is calm", path: str = "/v1/completions", **fields: Any) -> list[Any]:
        """The events of a stream, parsed; `[DONE]` and comments as they are."""
        body = {"model": "toy", "stream": True, **({"prompt": prompt} if path == "/v1/completions" else {}), **fields}
        response = self.post(path, json=body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        parts = response.text.split("\n\n")
        assert parts.pop() == ""
        return [json.loads(part[6:]) if part.startswith("data: {") else part for part in parts]


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    """Status, code and param of a refusal, which has the one form of all of them."""
    body = response.json()
    assert set(body) == {"error", "request_id"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    assert body["request_id"] == response.headers["x-request-id"] and body["error"]["message"]
    assert response.headers["content-type"] == "application/json"
    return response.status_code, body["error"]["code"], body["error"]["param"]


@contextlib.contextmanager
def running(
    models: dict[str, Loader | Path], settings: Settings | None = None, *, hosts: Any = None, wait: bool = True, state: State | None = None
) -> Iterator[Client]:
    """A server of `models`. wait: until they have loaded. state: of keys, which stays open."""
    specs = [
        ServedSpec(name, (lambda folder=found: ster.load(folder)) if isinstance(found, Path) else found)  # type: ignore[misc]
        for name, found in models.items()
    ]
    app = create_app(specs, settings or Settings(), hosts=hosts, state=state)
    config = uvicorn.Config(app, port=0, http=Connection, ws="none", lifespan="on", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        with Client(app, f"http://127.0.0.1:{port}") as client:
            if wait:
                for served in client.models:
                    assert served.settled.wait(30)
            yield client
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


class Process:
    """A running `ster serve`. lines: what it has said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self.ready.wait(60), self.lines
        found = re.search(r"http://\S+:\d+", "\n".join(self.lines))
        assert found
        self.url = found[0]

    def _read(self) -> None:
        assert self.process.stderr is not None
        with contextlib.suppress(ValueError):  # closed while a slow machine had yet to begin
            self._read_lines(self.process.stderr)

    def _read_lines(self, stderr: IO[str]) -> None:
        for line in stderr:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("curl "):
                self.ready.set()
        self.ready.set()

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(30)
        self._reader.join(10)
        return code


@contextlib.contextmanager
def spawned(*args: object, **env: str) -> Iterator[Process]:
    line = [sys.executable, "-m", "ster", "serve", "--port", "0", *map(str, args)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **env}) as process:
        try:
            yield Process(process)
        finally:
            process.kill()


def until(true: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait for something that is about to be so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.005)


def continued(model: ster.Model, generated: ster.Generation) -> str:
    """The text as it goes on from its prompt: with the space its first word begins with, which a text alone may not have."""
    first, prompt = generated.token_ids[:1], generated.prompt_token_ids
    beside = model.decode([*prompt, *first]).removeprefix(model.decode(prompt))
    return beside.removesuffix(model.decode(first)) + generated.text

"""How many requests are under way, and how they end: in order, by a server that hangs, by Ctrl-C, by `close`."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
from harvesting import PROMPTS
from lens_stub import LAYERS, Raw, Stub, kept, rounded
from serving import until

import ster
from ster.errors import RemoteError
from ster.remote.model import RemoteModel
from ster.remote.tokens import ServerTokens
from ster.remote.transport import Transport


def test_as_many_requests_as_allowed_and_their_order_is_kept(stub: Stub, toy_model: ster.Model, words: Any) -> None:
    prompts = [words(count % 17 + 1, seed=count) for count in range(40)]
    arrived: list[Any] = []

    def delay(body: Any) -> float:
        arrived.append(body)
        until(lambda: len(arrived) >= 5)  # the first ones are answered when five are there, and never where fewer are allowed
        return 0.02 * (hash(tuple(body["prompt"])) % 4)

    with ster.connect(stub.url, concurrency=5) as model:
        stub.delay = delay
        found = model.activations(prompts).values
        assert stub.most_active == 5
    assert found.tobytes() == rounded(toy_model.activations(prompts).values).tobytes()


def test_a_server_that_hangs(stub: Stub, remote: ster.RemoteModel, toy_model: ster.Model) -> None:
    never = threading.Event()
    stub.spoil = lambda body, document: Raw(b"", hang=never)
    with pytest.raises(RemoteError, match=r"sent nothing for 0\.5 seconds"):
        ster.connect(stub.url, timeout=0.5)
    hasty = Transport(stub.url, None, concurrency=1, timeout=0.5, retry_seconds=5)  # to connect, a slow machine may take longer
    model = RemoteModel(hasty, remote.server, ServerTokens(hasty, remote.server), None)
    with model, pytest.raises(RemoteError, match=r"sent nothing for 0\.5 seconds: prompts\[0\]"):
        kept(model, toy_model)


def test_ctrl_c_ends_what_is_under_way(stub: Stub, toy_model: ster.Model) -> None:
    never = threading.Event()
    with ster.connect(stub.url, concurrency=3, timeout=20) as remote:
        stub.spoil = lambda body, document: Raw(b"", hang=never)
        stub.requests.clear()
        ids = [toy_model.encode(text) for text in PROMPTS]

        def interrupt() -> None:
            until(lambda: len(stub.completions()) == 3)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            remote.read(ids, [str(index) for index in range(len(ids))], LAYERS, "all", lambda index, values: None)
        until(lambda: stub.active == 0)  # the server saw them leave
        assert len(stub.completions()) == 3  # nothing went on by itself
        stub.spoil = None
        assert kept(remote, toy_model) == [0]


def test_a_closed_model_says_so(stub: Stub) -> None:
    model = ster.connect(stub.url)
    model.close()
    model.close()
    with pytest.raises(RemoteError, match="is closed"):
        model.encode("the sea")

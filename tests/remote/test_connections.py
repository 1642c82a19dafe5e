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


def test_as_many_requests_as_allowed_and_their_order_is_kept(stub: Stub, toy_model: ster.Model, words: Any) -> None:
    prompts = [words(count % 17 + 1, seed=count) for count in range(40)]
    stub.delay = lambda body: 0.02 * (hash(tuple(body["prompt"])) % 4)
    with ster.connect(stub.url, concurrency=5) as model:
        found = model.activations(prompts).values
        assert 1 < stub.most_active <= 5
    assert found.tobytes() == rounded(toy_model.activations(prompts).values).tobytes()


def test_a_server_that_hangs(stub: Stub, toy_model: ster.Model) -> None:
    released = threading.Event()
    with ster.connect(stub.url, timeout=0.5) as remote:
        stub.spoil = lambda body, document: Raw(b"", hang=released)
        with pytest.raises(RemoteError, match=r"sent nothing for 0\.5 seconds: prompts\[0\]"):
            kept(remote, toy_model)
    released.set()


def test_ctrl_c_ends_what_is_under_way(stub: Stub, toy_model: ster.Model) -> None:
    never = threading.Event()
    with ster.connect(stub.url, concurrency=3) as remote:
        stub.spoil = lambda body, document: Raw(b"", hang=never)
        stub.requests.clear()
        ids = [toy_model.encode(text) for text in PROMPTS]

        def interrupt() -> None:
            until(lambda: stub.active == 3)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            remote.read(ids, [str(index) for index in range(len(ids))], LAYERS, "all", lambda index, values: None)
        assert len(stub.completions()) == 3  # nothing went on by itself
        until(lambda: stub.active == 0)  # the server saw them leave
        stub.spoil = None
        assert kept(remote, toy_model) == [0]


def test_a_closed_model_says_so(stub: Stub) -> None:
    model = ster.connect(stub.url)
    model.close()
    model.close()
    with pytest.raises(RemoteError, match="is closed"):
        model.encode("the sea")

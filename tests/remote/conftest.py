from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ster

pytest.importorskip("httpx", reason="the extra `remote` is not installed")
pytest.importorskip("starlette", reason="the extra `serve` is not installed")

from lens_stub import Stub, stubbed
from serving import Client, running


@pytest.fixture(scope="package")
def served(toy_model: ster.Model) -> Iterator[Client]:
    """`ster serve` of the toy model, called `toy`."""
    with running({"toy": lambda: toy_model}) as client:
        yield client


@pytest.fixture
def stub(toy_model: ster.Model) -> Iterator[Stub]:
    """A server of the toy model that speaks as vLLM with vllm-lens does."""
    with stubbed(toy_model) as found:
        yield found


@pytest.fixture
def remote(stub: Stub) -> Iterator[ster.RemoteModel]:
    """The model behind the stub, which has forgotten what `connect` asked."""
    with ster.connect(stub.url, timeout=20, retry_seconds=5) as model:
        stub.requests.clear()
        yield model


@pytest.fixture
def chatting(toy_copy: Path) -> Path:
    """The toy checkpoint with a chat template."""
    (toy_copy / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }} {% endfor %}{% if add_generation_prompt %}is{% endif %}"
    )
    return toy_copy

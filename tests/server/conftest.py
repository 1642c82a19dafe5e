from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import ster

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

from serving import Client, running


@pytest.fixture(scope="package")
def toy(toy_model: ster.Model) -> Iterator[Client]:
    """A server of the toy model, called `toy`."""
    with running({"toy": lambda: toy_model}) as client:
        yield client


@pytest.fixture
def chatting(toy_copy: Path) -> Path:
    """The toy checkpoint with a chat template."""
    (toy_copy / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }} {% endfor %}{% if add_generation_prompt %}is{% endif %}"
    )
    return toy_copy


@pytest.fixture(scope="session")
def windowed_model(toy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ster.Model:
    """The toy weights, attending to the last 24 tokens alone."""
    folder = Path(shutil.copytree(toy_dir, tmp_path_factory.mktemp("windowed") / "toy"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mistral", "sliding_window": 24}))
    return ster.load(folder)

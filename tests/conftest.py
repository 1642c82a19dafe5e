"""Checkpoints for tests: the toy model, copies of it to break, and the reference folder where there is one."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ster
from ster._safetensors import safetensors_bytes
from ster.toy import CONFIG, HIDDEN, tensors

ROOT = Path(__file__).resolve().parents[1]

collect_ignore = ["data"]  # programs of others, which are run, not imported


@pytest.fixture(scope="session")
def toy_dir() -> Path:
    return ROOT / "fixtures" / "toy-llama"


@pytest.fixture(scope="session")
def toy_model(toy_dir: Path) -> ster.Model:
    return ster.load(toy_dir)


@pytest.fixture(scope="session")
def calm_pairs() -> Path:
    """Eight pairs in the toy model's words."""
    return ROOT / "fixtures" / "calm.json"


@pytest.fixture
def toy_copy(toy_dir: Path, tmp_path: Path) -> Path:
    """A copy of the toy checkpoint that a test may change."""
    return Path(shutil.copytree(toy_dir, tmp_path / "copy"))


@pytest.fixture(scope="session")
def references() -> Path:
    """A folder of reference checkpoints and data; see CONTRIBUTING.md."""
    folder = os.environ.get("STER_REFERENCES")
    if not folder:
        pytest.skip("STER_REFERENCES is not set: no reference checkpoints")
    return Path(folder)


@pytest.fixture
def change() -> Callable[..., None]:
    """Update fields of a JSON file; the value None removes one."""

    def update(path: Path, **fields: Any) -> None:
        value = json.loads(path.read_text()) if path.exists() else {}
        value.update(fields)
        path.write_text(json.dumps({key: field for key, field in value.items() if field is not None}))

    return update


@pytest.fixture
def byte_model(tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint with a byte-level tokenizer, which can read any text: toy weights, 260 words, with a BOS or without."""

    def write(*, bos: bool) -> Path:
        from tokenizers.pre_tokenizers import ByteLevel

        folder = tmp_path / f"bytes-{bos}"
        folder.mkdir()
        special = ["<unk>", "<s>", "</s>", "<|eot_id|>"]
        vocab = {token: index for index, token in enumerate(special + sorted(ByteLevel.alphabet()))}
        template = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        }
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tokenizer = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": index, "content": token, **plain} for index, token in enumerate(special)],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": template if bos else None,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }
        weights = tensors()
        rows = np.random.default_rng(0).normal(0, 0.02, (len(vocab), HIDDEN)).astype(np.float32)
        weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = rows
        (folder / "model.safetensors").write_bytes(safetensors_bytes(weights, {"format": "pt"}))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": len(vocab), "max_position_embeddings": 20000}))
        return folder

    return write


@pytest.fixture
def words() -> Callable[[int], str]:
    """A made-up text of n toy words, the same for every run."""
    from ster.toy import WORDS

    def text(count: int, seed: int = 0) -> str:
        return " ".join(random.Random(seed).choices(WORDS, k=count))

    return text


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command in its own process and folder."""

    def command(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if key != "STER_MODEL"} | env
        line = [sys.executable, "-m", "ster", *map(str, args)]
        return subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    return command


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test touches the state of whoever runs it."""
    os.environ["STER_STATE"] = str(tmp_path_factory.mktemp("state"))
    os.environ.pop("STER_DATABASE", None)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """A PostgreSQL for all tests; see `databases`."""
    databases = pytest.importorskip("databases", reason="SQLAlchemy is not installed")
    tools = databases.find_tools()
    if tools is None:
        pytest.skip("PostgreSQL is not installed")
    with databases.postgres(tools) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ster.db'}"
    from databases import new_database

    return new_database(request.getfixturevalue("postgres_server"), f"test_{uuid.uuid4().hex}")

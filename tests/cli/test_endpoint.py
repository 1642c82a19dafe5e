"""`--endpoint`: the same commands, their model behind a server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harvesting import PROMPTS, contents

import ster

pytest.importorskip("httpx", reason="the extra `remote` is not installed")
pytest.importorskip("starlette", reason="the extra `serve` is not installed")

from serving import Client, running

from ster.server.settings import Settings

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def served(toy_model: ster.Model) -> Iterator[Client]:
    with running({"toy": lambda: toy_model}, Settings(api_keys=("secret",))) as client:
        yield client


@pytest.fixture
def ster_there(run: Run, served: Client) -> Run:
    return lambda *args, **env: run(*args, "--endpoint", f"{served.url}/v1", STER_API_KEY="secret", **env)


def test_every_command_does_the_same_there(
    ster_there: Run, run: Run, toy_dir: Path, toy_model: ster.Model, calm_pairs: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    for place, command, model in (("here", run, ["--model", toy_dir]), ("there", ster_there, [])):
        (tmp_path / place).mkdir()
        for args in (
            ["extract", "-p", "prompts.json", "-o", f"{place}/a.safetensors", "--position", "mean"],
            ["vector", "train", "-p", calm_pairs, "-o", f"{place}/v.json", "-l", "1,2"],
            ["vector", "optimize", "-p", calm_pairs, "-o", f"{place}/o.json", "--text"],
            ["harvest", "-p", "prompts.json", "-o", f"{place}/h"],
        ):
            result = command(*args, *model)
            assert result.returncode == 0, result.stderr
    for name in ("a.safetensors", "v.json", "o.json"):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes(), name
    assert contents(tmp_path / "here" / "h") == contents(tmp_path / "there" / "h")

    result = ster_there("vector", "evaluate", "there/v.json", "-p", calm_pairs, "-s", "0.5,1", "--json")
    report: Any = json.loads(result.stdout)
    assert [row["mean_kl"] for row in report["strengths"]] == [None, None] and report["picked"] is None
    result = ster_there("vector", "evaluate", "there/v.json", "-p", calm_pairs, "-s", "0.5,1", "--text")
    assert "Picked: none" in result.stdout and "a server does not tell whole distributions" in result.stderr

    result = ster_there("generate", "-p", "the sea is calm", "-v", "there/v.json", "-n", "4", "--json", "--concurrency", 2)
    own = toy_model.generate("the sea is calm", ster.SteeringArtifact.load(tmp_path / "there" / "v.json"), max_new_tokens=4)
    assert json.loads(result.stdout)["token_ids"] == own.token_ids, result.stderr


def test_what_the_wire_costs_is_said(ster_there: Run, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("the sea\n")
    result = ster_there("extract", "-p", "p.txt", "--wire-dtype", "bfloat16")
    assert (result.returncode, result.stdout) == (0, "activations.json\n")
    assert result.stderr.startswith("Note: activations travel as bfloat16, rounded by up to 2^-8 relative\n")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--precision", "bf16"], "Error: --precision is settled by the server\nhint: give it to `ster serve` or to vLLM\n"),
        (["--threads", "2"], "Error: --threads is settled by the server\nhint: give it to `ster serve` or to vLLM\n"),
        (["--revision", "main"], "Error: --revision is settled by the server\nhint: give it to `ster serve` or to vLLM\n"),
        (["--model", "llama"], "has no model llama\nhint: it has toy\n"),
        (["--api-key", "wrong"], "Error: the server refuses (401): The API key is missing or wrong"),
    ],
)
def test_what_makes_no_sense_there_is_refused(ster_there: Run, options: list[str], sentence: str) -> None:
    result = ster_there("generate", "-p", "the sea", *options)
    assert (result.returncode, result.stdout) == (1, "") and sentence in result.stderr


@pytest.mark.parametrize("options", [["--concurrency", "2"], ["--wire-dtype", "float32"], ["--tokenizer", "."], ["--api-key", "k"]])
def test_what_makes_no_sense_here_is_refused(run: Run, toy_dir: Path, options: list[str]) -> None:
    result = run("generate", "-m", toy_dir, "-p", "the sea", *options)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"Error: {options[0]} is of a server\nhint: name one with --endpoint\n"


def test_the_environment_names_a_folder_and_a_key(ster_there: Run, run: Run, toy_dir: Path) -> None:
    """The key is for `ster serve` as well, and the folder for commands without a server."""
    assert ster_there("generate", "-p", "the sea", "-n", "1", STER_MODEL=str(toy_dir)).returncode == 0
    assert run("generate", "-p", "the sea", "-n", "1", STER_MODEL=str(toy_dir), STER_API_KEY="secret").returncode == 0
    result = run("generate", "-p", "the sea")
    assert result.returncode == 2 and "or a server with --endpoint" in result.stderr


def test_a_server_that_is_not_there(run: Run) -> None:
    result = run("generate", "-p", "the sea", "--endpoint", "http://127.0.0.1:1")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: http://127.0.0.1:1 cannot be reached")

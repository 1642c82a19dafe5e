import subprocess
from collections.abc import Callable
from pathlib import Path

import ster
from ster.toy import toy_files

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_version(run: Run) -> None:
    result = run("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"ster {ster.__version__}\n", "")


def test_help_names_every_command(run: Run) -> None:
    result = run("--help")
    assert result.returncode == 0
    for command in ("extract", "toy-model"):
        assert command in result.stdout
        assert run(command, "--help").returncode == 0


def test_toy_model_writes_the_bundled_bytes(run: Run, tmp_path: Path) -> None:
    result = run("toy-model", "toy")
    assert (result.returncode, result.stdout, result.stderr) == (0, "toy\n", "")
    assert {path.name: path.read_bytes() for path in (tmp_path / "toy").iterdir()} == toy_files()
    (tmp_path / "file").touch()
    result = run("toy-model", "file")
    assert (result.returncode, result.stderr) == (1, "Error: failed to create file: a file of that name exists\n")

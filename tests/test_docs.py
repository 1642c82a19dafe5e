"""What the pages in docs/ show is what the commands print."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ster import _native

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "docs" / "harvest.md", ROOT / "docs" / "steering.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_prints_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "fixtures", tmp_path / "fixtures")
    script = tmp_path / "bin" / "ster"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ster "$@"\n')
    script.chmod(0o755)
    environment = {**os.environ, "PATH": f"{script.parent}:{os.environ['PATH']}", "STER_MODEL": "fixtures/toy-llama"}
    blocks = re.findall(r"^```(python)?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    ran = 0
    for number, (language, block) in enumerate(blocks):
        if language:
            line = [sys.executable, "-W", "ignore", "-c", block]
            result = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=120)
            assert result.stdout == blocks[number + 1][1], result.stderr
            ran += 1
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            result = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=120)
            assert result.returncode == 0, result.stderr
            printed = result.stdout.splitlines() + result.stderr.splitlines()
            assert [text for text in shown.splitlines() if text and text not in printed] == [], command
            assert [text for text in result.stdout.splitlines() if text not in shown.splitlines()] == [], command
            ran += 1
    assert ran > 3


def test_the_page_of_models_lists_what_runs_and_what_is_read() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    [section] = re.findall(r"^## What runs\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    _, *rows = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert rows == [name for name, _ in _native.families()]
    source = ROOT / "rust" / "ster-core" / "src"
    [architectures] = re.findall(r"^\| architectures \| (.*) \|$", page, re.MULTILINE)
    known = re.findall(r'Arch { name: "(\w+)"', (source / "checkpoint" / "gguf" / "arch.rs").read_text())
    assert re.findall(r"`(\w+)`", architectures) == known and len(known) > 5
    [types] = re.findall(r"^\| types of tensors \| (.*), in any mixture \|$", page, re.MULTILINE)
    facts = re.findall(r'^ +Dtype::\w+ => \("(\w+)", \d+', (source / "tensor.rs").read_text(), re.MULTILINE)
    assert types.split(", ") == facts and len(facts) > 5

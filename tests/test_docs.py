"""What the pages in docs/ show is what the commands print."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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

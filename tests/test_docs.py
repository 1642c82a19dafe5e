"""What the pages in docs/ show is what the commands print."""

import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


CONTENT = b"a shard" * 100


class Refusing(BaseHTTPRequestHandler):
    """Refuses as long as the server says so; then answers ranges."""

    def do_GET(self) -> None:
        first = int((self.headers["range"] or "bytes=0-")[6:-1])
        if getattr(self.server, "refuses"):  # noqa: B009
            status, body = 403, b'{"error": "bad_signature"}'
        else:
            status, body = (206 if first else 200), CONTENT[first:]
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on this machine")
def test_the_download_of_a_harvest_saves_no_refusal_and_goes_on_after_a_cut(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "harvest.md").read_text()
    [command] = re.findall(r"name=\$\{url##\*/\}; (?:.*) \"\$url\"", page)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {**os.environ, "url": f"http://127.0.0.1:{server.server_port}/shard?expires=1", "no_proxy": "127.0.0.1"}
    try:
        for refuses, before in ((True, None), (False, None), (False, CONTENT[:50])):
            setattr(server, "refuses", refuses)  # noqa: B010
            if before is not None:
                (tmp_path / "shard").write_bytes(before)
            result = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=60)
            assert (result.returncode != 0 and "403" in result.stderr) if refuses else result.returncode == 0, result.stderr
            found = (tmp_path / "shard").read_bytes() if (tmp_path / "shard").exists() else b""
            assert found == (b"" if refuses else CONTENT)
    finally:
        server.shutdown()
        server.server_close()


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

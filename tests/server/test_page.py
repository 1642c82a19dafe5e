"""The program of docs/serve.md does what the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from serving import Client

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serve.md"


def test_the_program_of_the_page_runs(toy: Client) -> None:
    for package in ("openai", "zstandard"):
        pytest.importorskip(package)
    read, encode, wait = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    check = "rows = np.arange(6.0).reshape(2, 3)\nassert (decode(encode(rows)) == rows).all()\n"
    program = read.replace("http://127.0.0.1:8000", toy.url) + encode + check + wait
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("(2, 6, 64)\n")

"""docs/scaling.md shows what `benchmarks/scaling_cost.py` prints, and the numbers it computes from."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "scaling.md").read_text()


def cost(*args: object) -> str:
    line = [sys.executable, "-m", "benchmarks.scaling_cost", *map(str, args)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout


def measured() -> dict[str, float]:
    program = "import json; from benchmarks.scaling_cost import MEASURED; print(json.dumps(MEASURED))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return dict(json.loads(result.stdout))


def test_the_page_has_the_tables() -> None:
    tables = cost().strip().split("\n\n")
    assert len(tables) == 4
    for table in tables:
        assert table in PAGE


def test_the_page_has_the_numbers_that_were_measured() -> None:
    [section] = re.findall(r"^## What was measured\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    shown = [float(number) for number in re.findall(r"\| ([\d.]+) (?:tokens/s|MB/s|bytes) \|$", section, re.MULTILINE)]
    assert shown == [value / 1e6 if key.endswith("bytes_per_s") else value for key, value in measured().items()]


def test_numbers_of_your_own_count(tmp_path: Path) -> None:
    """Twice as fast is half the hours, where passes are what decides."""
    (tmp_path / "inputs.json").write_text(json.dumps({"tokens_per_s": 2 * measured()["tokens_per_s"]}))

    def hours(text: str) -> float:
        [found] = re.findall(r"^\| SmolLM2 135M \| [\d.]+ \| \d+ \| ([\d,]+) .*TB", text, re.MULTILINE)
        return float(found.replace(",", ""))

    assert abs(hours(cost("--inputs", tmp_path / "inputs.json")) - hours(cost()) / 2) <= 5  # two digits are shown

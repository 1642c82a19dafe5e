"""docs/adding-a-family.md leads to what is in this tree: its code, applied in order to the tree without granite, gives the tree."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ster.cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "adding-a-family.md").read_text()
FAMILIES, GGUF = "rust/ster-core/src/llama/families", "rust/ster-core/src/checkpoint/gguf"
EDITED = [f"{FAMILIES}/granite.rs", f"{FAMILIES}/mod.rs", f"{GGUF}/arch.rs", f"{GGUF}/config.rs", "docs/models.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STEP = re.compile(
    r"^(?:Put this into|Add to) `([^`]+)`(?:, (after|before) (the row of )?`([^`]+)`)?:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


def apply(folder: Path, rename: Callable[[str], str] = str) -> list[str]:
    """Take every step of the page in `folder`; the files it touched."""
    steps = STEP.findall(PAGE)
    for name, where, row, anchor, code in steps:
        file = folder / rename(name)
        if not where:
            assert not file.exists()
            file.write_text(rename(code))
            continue
        lines = file.read_text().splitlines(keepends=True)
        row_of = (f'Arch {{ name: "{anchor}",', f"| `{anchor}` |")
        [at] = [n for n, line in enumerate(lines) if (line.strip().startswith(row_of) if row else line.strip() == anchor)]
        lines.insert(at + (where == "after"), rename(code) + ("\n" if where == "before" else ""))
        file.write_text("".join(lines))
    return [name for name, *_ in steps]


def without_granite(name: str) -> str:
    """A file of the tree as it was before granite: without its lines, and without the function that is all its own."""
    text = re.sub(r"^fn granite\(.*?^}\n\n", "", (ROOT / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    own = re.compile(r'^mod granite;|^ *&granite::|name: "granite"|^ *"granite" =>|^\| `granite` \|')
    return "".join(line for line in text.splitlines(keepends=True) if not own.search(line))


def test_the_steps_lead_to_this_tree(tmp_path: Path) -> None:
    for name in EDITED[1:]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(without_granite(name))
        assert (tmp_path / name).read_text() != (ROOT / name).read_text()
    assert "granite" not in (tmp_path / FAMILIES / "mod.rs").read_text().lower()
    assert sorted(set(apply(tmp_path))) == sorted(EDITED)
    for name in EDITED:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), name


def test_every_code_block_is_a_step_or_runs_by_itself() -> None:
    fences = FENCE.findall(PAGE)
    others = [(language, block) for language, block in fences if language not in ("rust", "markdown")]
    assert len(fences) - len(others) == len(STEP.findall(PAGE)), "code that no step says where to put"
    assert [language for language, _ in others] == ["python", ""]
    compile(others[0][1], "docs/adding-a-family.md", "exec")  # it needs torch, which Ster does not


def test_the_commands_and_files_it_names_exist() -> None:
    [commands] = [block for language, block in FENCE.findall(PAGE) if not language]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands.splitlines():
        program, *words = line.split()
        if program == "make":
            assert set(words) <= targets, line
        elif program == "cargo":
            assert words[:3] == ["test", "-p", "ster-core"]
            assert all((ROOT / "rust/ster-core/tests" / f"{name}.rs").is_file() for name in re.findall(r"--test (\S+)", line)), line
        else:
            assert words[:2] == ["-m", "pytest"] and all((ROOT / path).is_file() for path in words[2:]), line
    for name in re.findall(r"`((?:rust|docs|tests)/[\w./-]+|CHANGELOG\.md)`", PAGE):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`((?:llama|kernels)/[\w./-]+)`", PAGE):
        assert (ROOT / "rust/ster-core/src" / name).exists(), name
    for command in re.findall(r"`ster (\w+)", PAGE):
        assert main([command, "--help"]) == 0


def test_it_names_everything_a_description_can_set() -> None:
    module = (ROOT / FAMILIES / "mod.rs").read_text()
    types = re.findall(r"^pub (?:struct|enum) \w+ {\n(.*?)^}", module, re.MULTILINE | re.DOTALL)
    fields = [name for body in types for name in re.findall(r"^    pub (\w+):", body, re.MULTILINE)]
    choices = [name for body in types for name in re.findall(r"^    (\w+),", body, re.MULTILINE)]
    assert len(fields) > 15 and len(choices) > 8
    missing = [name for name in (*fields, *choices) if not re.search(rf"`{name}`|\b{name}:", PAGE) and name != "None"]
    assert missing == []
    sources = "".join((ROOT / FAMILIES / file.name).read_text() for file in (ROOT / FAMILIES).glob("*.rs"))
    for method in set(re.findall(r"fields\s*\.(\w+)\(", sources)) | set(re.findall(r"config\.(\w+) = ", sources)):
        assert f"`{method}`" in PAGE, method


@pytest.mark.slow
def test_the_steps_compile_and_give_the_bits_of_granite(references: Path, tmp_path: Path) -> None:
    """Taken for a family of another name beside granite, on granite's golden checkpoint under that name."""
    if shutil.which("cargo") is None:
        pytest.skip("no cargo")
    for name in ("Cargo.toml", "Cargo.lock"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("rust", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    apply(tmp_path, lambda text: text.replace("granite", "granitf").replace("GRANITE", "GRANITF"))
    command = ["cargo", "run", "--quiet", "--locked", "-p", "ster-core", "--example", "digest", "--"]
    environment = {**os.environ, "CARGO_TARGET_DIR": str(tmp_path / "target")}

    def digest(model_type: str) -> str:
        folder = tmp_path / model_type
        shutil.copytree(references / "golden" / "granite-public", folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
        result = subprocess.run([*command, str(folder)], cwd=tmp_path, env=environment, capture_output=True, text=True)
        return result.stdout if result.returncode == 0 else result.stderr.strip()

    expected = digest("granite")
    assert re.match(r"[0-9a-f]{64} ", expected), expected
    assert digest("granitf") == expected
    assert 'model_type: "granitg"' in digest("granitg"), "a name that nobody described is refused"

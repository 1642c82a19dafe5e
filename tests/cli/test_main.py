import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ster
from ster.cli import main
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


def test_toy_model_replaces_nothing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    result = run("toy-model", ".")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: failed to write README.md: a file of that name with other content exists\nhint: ")
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"] and (tmp_path / "README.md").read_text() == "mine"
    assert run("toy-model", "").stderr.startswith("Error: the folder must have a name, found an empty one")
    for _ in range(2):
        assert run("toy-model", "toy").returncode == 0


def shell(line: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A line of the shell; `ster` in it is the command."""
    line = line.replace("ster ", f"'{sys.executable}' -m ster ", 1)
    return subprocess.run(["bash", "-c", line], cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", ["--version", "--help", "toy-model toy", "generate", "nonsense"])
def test_a_closed_stdout_is_refused_before_the_work(tmp_path: Path, command: str) -> None:
    result = shell(f"ster {command} >&-", tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "Error: stdout is closed\nhint: every command writes there; `>/dev/null` drops what it writes\n"
    assert list(tmp_path.iterdir()) == []


def test_a_closed_stderr_loses_talk_and_nothing_else(tmp_path: Path, toy_dir: Path) -> None:
    (tmp_path / "p.json").write_text('["the sea"]')
    extract = f"ster extract -m '{toy_dir}' -p p.json -o"
    result = shell(f"{extract} - 2>&-", tmp_path)
    assert result.returncode == 0 and result.stdout.startswith('{"schema_version":1') and result.stderr == ""
    for command, code in ((f"{extract} no/where", 1), ("ster extract", 2), ("ster nonsense", 2)):
        for closing in ("2>&-", "2>&- <&-"):
            result = shell(f"{command} {closing}", tmp_path)
            assert (result.returncode, result.stdout, result.stderr) == (code, "", ""), command
    assert shell(f"{extract} a.json >&- 2>&-", tmp_path).returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_streams_that_take_nothing(tmp_path: Path) -> None:
    result = shell("ster --help >/dev/full", tmp_path)
    assert (result.returncode, result.stderr) == (1, "Error: no space left on device\n")
    result = shell("ster toy-model toy 2>/dev/full", tmp_path)
    assert (result.returncode, result.stdout) == (0, "toy\n")


@pytest.mark.parametrize(("number", "note"), [(signal.SIGINT, "Interrupted"), (signal.SIGTERM, "Terminated"), (signal.SIGHUP, "Hung up")])
@pytest.mark.parametrize("module", ["typer", "ster.cli.commands"])
def test_a_signal_while_starting_is_a_plain_end(tmp_path: Path, number: signal.Signals, note: str, module: str) -> None:
    """An import that hangs, and one that makes another error of the interrupt, as NumPy's does."""
    program = f"""
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            print("importing", flush=True)
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                raise ImportError("something went wrong")
sys.meta_path.insert(0, Slow())
from ster.cli import main
sys.exit(main())
"""
    (tmp_path / "program.py").write_text(program)
    line = [sys.executable, str(tmp_path / "program.py"), "--help"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (128 + number, "", f"{note}; nothing was written.\n")


@pytest.mark.parametrize(("number", "note"), [(signal.SIGINT, "Interrupted"), (signal.SIGTERM, "Terminated"), (signal.SIGHUP, "Hung up")])
@pytest.mark.parametrize("command", [["toy-model", "new/folder"], ["extract", "-m", "{toy}", "-p", "{prompts}"]])
def test_a_signal_in_a_write_leaves_nothing(tmp_path: Path, toy_dir: Path, number: signal.Signals, note: str, command: list[str]) -> None:
    prompts = toy_dir.parent / "prompts.json"
    program = """
import os, sys, time
os.fsync = lambda descriptor: (print("writing", flush=True), time.sleep(60))
from ster.cli import main
sys.exit(main())
"""
    line = [sys.executable, "-c", program, *(word.format(toy=toy_dir, prompts=prompts) for word in command)]
    with subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        assert any(tmp_path.rglob("*.part"))
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (128 + number, "", f"{note}; nothing was written.\n")
    assert list(tmp_path.iterdir()) == []


def test_nothing_was_written_is_said_only_where_it_is_true(tmp_path: Path) -> None:
    program = """
import sys, time
from ster.cli import console
console.data = lambda text: (print("written", flush=True), time.sleep(60))
from ster.cli import main
sys.exit(main())
"""
    line = [sys.executable, "-c", program, "toy-model", "toy"]
    with subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "Interrupted.\n")
    assert len(list((tmp_path / "toy").iterdir())) == 4


def test_a_signal_that_is_ignored_stays_so_and_others_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(["toy-model", "toy"]) == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_line_for_the_person_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end too: lines of the log, from another thread, come between two writes."""
    from ster.cli import console

    class Writes(io.StringIO):
        def write(self, text: str) -> int:
            found.append(text)
            return len(text)

    found: list[str] = []
    monkeypatch.setattr(sys, "stderr", Writes())
    console.note("one\ntwo")
    assert found == ["one\ntwo\n"]


def test_json_names_files_that_are_not_utf_8(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    from ster.cli import console

    console.result({"output": os.fsdecode(b"m\xff.json"), "x": "\u00e9"}, str, True)
    assert capfdbinary.readouterr().out.decode() == '{\n  "output": "m\ufffd.json",\n  "x": "\u00e9"\n}\n'

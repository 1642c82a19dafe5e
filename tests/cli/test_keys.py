"""`ster keys`: what it prints where, and what a server makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `serve` is not installed")

import httpx
from serving import spawned, until

from ster.cli import main


@pytest.fixture
def keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Runs `ster keys` on a state of its own: exit code, stdout, stderr."""

    def command(*args: object) -> tuple[int, str, str]:
        code = main(["keys", *map(str, args), "--state", str(tmp_path / "state")])
        return (code, *capsys.readouterr())

    return command


Keys = Callable[..., tuple[int, str, str]]


def test_a_key_is_printed_once_and_alone(keys: Keys, tmp_path: Path) -> None:
    code, out, err = keys("create", "ann", "--daily-tokens", "10,000")
    assert code == 0 and out.startswith("sk-ster-") and out.count("\n") == 1
    assert err == "The key ann, which is shown only now:\n"
    secret = out.strip()
    for args in (("list", "--text"), ("list", "--json"), ("show", "ann", "--text"), ("show", "ann", "--json"), ("budget", "ann")):
        code, out, err = keys(*args)
        assert code == 0 and "ann" in out and secret not in out + err and secret[:12] in out
    for path in (tmp_path / "state").iterdir():
        assert secret.encode() not in path.read_bytes()
    made = json.loads(keys("create", "ben", "--json")[1])
    assert made["key"].startswith("sk-ster-") and made["name"] == "ben" and made["limits"] == {}


def test_limits_are_set_and_taken_away(keys: Keys) -> None:
    keys("create", "ann", "--daily-tokens", 10, "--concurrency", 2)
    shown = json.loads(keys("budget", "ann", "--monthly-tokens", 50, "--concurrency", "any", "--json")[1])
    assert shown["limits"] == {"daily_tokens": 10, "monthly_tokens": 50}
    assert shown["usage"]["budgets"]["daily_tokens"]["left"] == 10
    text = keys("show", "ann", "--text")[1].splitlines()
    assert text[1].split() == ["limit", "spent", "held", "left"]
    assert [line.split() for line in text if line.startswith("daily_tokens")] == [["daily_tokens", "10", "0", "0", "10"]]
    assert [line.split() for line in text if line.startswith("monthly_input")] == [["monthly_input_tokens", "-", "0", "0", "-"]]
    for wrong in ("x", "-1", "1.5", "", "²"):
        code, out, err = keys("budget", "ann", f"--daily-tokens={wrong}")
        assert (code, out) == (1, "") and err.startswith("Error: --daily-tokens must be a whole number, 0 or more, or `any`, found")


def test_a_key_is_paused_resumed_and_revoked(keys: Keys) -> None:
    keys("create", "ann")
    for command, state in (("pause", "paused"), ("resume", "active"), ("revoke", "revoked")):
        assert keys(command, "ann") == (0, "", f"The key ann is {state}.\n")
    assert keys("resume", "ann") == (1, "", "Error: the key ann is revoked, which is final\nhint: create another one\n")
    assert keys("pause", "ben") == (1, "", "Error: there is no key ben\nhint: `ster keys list` lists them\n")
    assert keys("create", "ann")[2].startswith("Error: there is a key called ann already\n")
    assert json.loads(keys("list", "--json")[1])["keys"][0]["state"] == "revoked"


def test_there_is_nothing_to_list(keys: Keys) -> None:
    assert keys("list", "--text") == (0, "There are no keys.\n", "")


def test_a_state_that_cannot_be_opened(capsys: pytest.CaptureFixture[str], tmp_path: Path, toy_dir: Path) -> None:
    (tmp_path / "file").write_text("")
    for args in (["keys", "list"], ["serve", "--model", str(toy_dir), "--port", "0"]):
        assert main([*args, "--state", str(tmp_path / "file" / "state")]) == 1
        assert capsys.readouterr().err.startswith("Error: ")
    (tmp_path / "ster.db").write_bytes(b"not a database, but long enough to look at" * 100)
    assert main(["serve", "--model", str(toy_dir), "--port", "0", "--state", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert (
        said.startswith("Error: failed to open the database sqlite:///") and "hint: --state DIR names another folder; --state none" in said
    )
    assert main(["keys", "list", "--state", "none"]) == 1
    assert capsys.readouterr().err.startswith("Error: --state none has no keys\n")
    assert main(["serve", "--model", str(toy_dir), "--state", "none", "--database", "sqlite:///x.db"]) == 1
    assert capsys.readouterr().err == "Error: --state none goes without --database\n"


def test_other_commands_do_without_the_database() -> None:
    program = "import sys; from ster.cli.commands import app; assert 'sqlalchemy' not in sys.modules and 'starlette' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_a_server_takes_the_keys_of_its_state(toy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also on an address that others reach, and keys made while it runs."""
    assert main(["keys", "create", "ann", "--state", str(tmp_path)]) == 0
    ann = capsys.readouterr().out.strip()
    with spawned("--model", f"toy={toy_dir}", "--state", tmp_path, "--host", "0.0.0.0") as server:
        assert "Bearer $STER_API_KEY" in server.lines[2] and not any(line.startswith("Anybody") for line in server.lines)

        def asked(key: str) -> int:
            return httpx.get(f"{server.url}/v1/usage", headers={"Authorization": f"Bearer {key}"}).status_code

        assert (asked(ann), asked("x")) == (200, 401)
        assert main(["keys", "create", "ben", "--state", str(tmp_path)]) == 0
        ben = capsys.readouterr().out.strip()
        assert asked(ben) == 200
        assert main(["keys", "revoke", "ann", "--state", str(tmp_path)]) == 0
        until(lambda: asked(ann) == 401)
        server.process.terminate()
        assert server.process.wait(30) == 0
        assert not any(secret[:20] in line for line in server.lines for secret in (ann, ben))


def test_a_key_of_the_state_does_not_open_a_server_uncounted(
    keys: Keys, toy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a shell that clients run in, too, where STER_API_KEY is set."""
    secret = keys("create", "ann", "--daily-tokens", "10")[1].strip()
    keys("revoke", "ann")
    capsys.readouterr()
    monkeypatch.setenv("STER_API_KEY", secret)
    assert main(["serve", "--model", str(toy_dir), "--port", "0", "--state", str(tmp_path / "state")]) == 1
    said = capsys.readouterr().err
    assert f"Error: the API key {secret[:12]}... is the key ann of the state, and would not be counted\n" in said
    assert "unset STER_API_KEY" in said and secret not in said

"""`ster serve` as a process: its first lines, its refusals, its end."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

import httpx
from serving import spawned, until

from ster.cli import main
from ster.cli.serve import _keys, _name_and_folder
from ster.server.settings import Settings

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_is_and_ends_well(toy_dir: Path, number: signal.Signals) -> None:
    with spawned("--model", toy_dir, "--served-name", "llama-8b") as server:
        assert server.lines[0] == f"Listening on {server.url}; loading llama-8b."
        assert server.lines[1] == f"Serving llama-8b at {server.url}/v1. Try:"
        curl = subprocess.run(["bash", "-c", server.lines[2]], capture_output=True, text=True, timeout=30)
        assert 1 <= json.loads(curl.stdout)["usage"]["completion_tokens"] <= 8
        assert server.lines[3] == "Anybody here may ask, until `ster keys create NAME` makes a key."
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "llama-8b"
        assert server.end(number) == 0
        assert [json.loads(line)["path"] for line in server.lines[4:]] == ["/v1/completions", "/v1/models"]


def test_a_signal_lets_what_runs_end(toy_dir: Path) -> None:
    with spawned("--model", toy_dir) as server:
        body = {"model": "toy-llama", "prompt": "the sea is calm", "max_tokens": 250, "n": 16, "stream": True, "seed": 1}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            parts = response.iter_text()
            text = next(parts)
            server.process.send_signal(signal.SIGTERM)
            text += "".join(parts)
        assert text.endswith("data: [DONE]\n\n")
        assert server.process.wait(30) == 0


def test_a_model_that_loads_on_use_and_goes(toy_dir: Path) -> None:
    with spawned("--model", toy_dir, "--load-on-use", "--idle-minutes", 0.01) as server:
        assert server.lines[:2] == [f"Listening on {server.url}.", f"Serving toy-llama at {server.url}/v1, loaded on first use. Try:"]
        status = lambda: httpx.get(f"{server.url}/v1/models/toy-llama/status").json()  # noqa: E731
        assert status()["state"] == "idle"
        said = lambda: [line for line in server.lines[4:] if not line.startswith("{")]  # noqa: E731
        for uses in (1, 2):
            curl = subprocess.run(["bash", "-c", server.lines[2]], capture_output=True, text=True, timeout=30)
            assert json.loads(curl.stdout)["model"] == "toy-llama"
            until(lambda uses=uses: len(said()) == 2 * uses, 30)  # the line comes after the state
            assert status()["state"] == "idle"
        assert server.end(signal.SIGTERM) == 0
        assert said()[:4] == ["loading toy-llama", "toy-llama is unloaded: nobody used it for 0.6 s"] * 2


def test_a_model_that_does_not_load_on_use_is_not_the_end(toy_copy: Path) -> None:
    (toy_copy / "model.safetensors").write_bytes(b"nothing")
    with spawned("--model", toy_copy, "--load-on-use") as server:
        refused = httpx.post(f"{server.url}/v1/completions", json={"model": "copy", "prompt": "the sea", "max_tokens": 1})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "model_failed"
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.end(signal.SIGTERM) == 0
        assert any(line.startswith("loading copy failed: ") for line in server.lines)


def test_a_key_from_the_environment(toy_dir: Path) -> None:
    with spawned("--model", f"toy={toy_dir}", STER_API_KEY="secret") as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        assert httpx.get(f"{server.url}/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        curl = subprocess.run(
            ["bash", "-c", server.lines[2]], capture_output=True, text=True, timeout=30, env={**os.environ, "STER_API_KEY": "secret"}
        )
        assert json.loads(curl.stdout)["object"] == "text_completion"
        assert not any("secret" in line for line in server.lines)


class Told(Exception):  # noqa: N818
    """What a server would have been told."""


def told(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: object) -> Settings:
    """The settings that a command makes."""

    def serve(specs: object, settings: Settings, *args: object, **rest: object) -> None:
        raise Told(settings)

    monkeypatch.setattr("ster.server.run.serve", serve)
    with pytest.raises(Told) as caught:
        main(["serve", "--model", str(folder), "--state", "none", *map(str, options)])
    settings: Settings = caught.value.args[0]
    return settings


def test_what_no_option_says_is_as_the_settings_have_it(toy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STER_API_KEY", raising=False)
    assert told(monkeypatch, toy_dir) == Settings()


@pytest.mark.parametrize(
    ("option", "value", "name", "found"),
    [
        ("--jobs-running", 2, "jobs_running", 2),
        ("--max-jobs", 5, "max_jobs", 5),
        ("--max-job-gb", 0.5, "max_job_bytes", 1 << 29),
        ("--job-days", 1.5, "job_days", 1.5),
        ("--max-harvests", 9, "max_live_harvests", 9),
        ("--max-harvest-prompts", 10, "max_harvest_prompts", 10),
        ("--max-harvest-tokens", 77, "max_harvest_tokens", 77),
        ("--harvest-days", 0.5, "harvest_seconds", 43200.0),
    ],
)
def test_an_option_is_its_setting(
    toy_dir: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: float, name: str, found: float
) -> None:
    assert told(monkeypatch, toy_dir, option, value) == replace(told(monkeypatch, toy_dir), **{name: found})
    assert main(["serve", "--model", str(toy_dir), option, "0"]) == 2


def test_limits_hold_for_requests(toy_dir: Path, tmp_path: Path) -> None:
    with spawned("--model", f"toy={toy_dir}", "--state", tmp_path, "--max-harvest-prompts", 2, "--job-days", 2) as server:
        harvest = {"model": "toy", "prompts": ["sea"] * 3}
        assert "at most 2 items" in httpx.post(f"{server.url}/v1/harvest", json=harvest).text
        job = httpx.post(f"{server.url}/v1/jobs", json={"model": "toy", "prompt": "the sea", "max_tokens": 1}, timeout=30).json()
        done = httpx.get(f"{server.url}/v1/jobs/{job['id']}?wait=60", timeout=90).json()
        assert done["expires_at"] - done["ended_at"] in (2 * 86400, 2 * 86400 + 1)
        prompts = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"]["HarvestRequest"]["properties"]["prompts"]
        assert prompts["maxItems"] == 2


def refusal(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """What `ster serve` says before it listens."""
    assert main(["serve", *map(str, args)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_refusals_are_one_sentence(capsys: pytest.CaptureFixture[str], toy_dir: Path) -> None:
    assert refusal(capsys, "--model", toy_dir, "--host", "0.0.0.0", "--port", 0) == (
        "Error: --host 0.0.0.0 lets other machines in, and there is no API key\n"
        "hint: `ster keys create NAME` makes one; or set --api-key or STER_API_KEY; --insecure lets everybody in\n"
    )
    alone = refusal(capsys, "--model", toy_dir, "--host", "0.0.0.0", "--port", 0, "--state", "none")
    assert alone.endswith("\nhint: set --api-key or STER_API_KEY; --insecure lets everybody in\n")
    assert refusal(capsys, "--model", "no/such/folder").startswith("Error: ")
    twice = refusal(capsys, "--model", toy_dir, "--model", toy_dir)
    assert twice == "Error: two models are called toy-llama\nhint: give each its name: --model NAME=MODEL\n"
    named = refusal(capsys, "--model", toy_dir, "--model", f"b={toy_dir}", "--served-name", "a")
    assert named.startswith("Error: --served-name names one model\n")
    assert refusal(capsys, "--model", toy_dir, "--api-key", "two words").startswith("Error: an API key must be printable ASCII")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        in_use = refusal(capsys, "--model", toy_dir, "--port", port)
    assert (
        in_use
        == f"Error: failed to listen on port {port} of 127.0.0.1: address already in use\nhint: `--port 0` takes a port that is free\n"
    )


def test_a_model_that_does_not_load_is_the_end(run: Run, toy_copy: Path) -> None:
    (toy_copy / "model.safetensors").write_bytes(b"nothing")
    failed = run("serve", "--model", toy_copy, "--port", 0)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert failed.stderr.splitlines()[-1].startswith("Error: ")


def test_the_environment_has_one_key(capsys: pytest.CaptureFixture[str], toy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STER_API_KEY", "two words")
    assert refusal(capsys, "--model", toy_dir).startswith("Error: an API key must be printable ASCII without spaces")
    assert _keys(["a", "b"]) == ("a", "b")
    monkeypatch.setenv("STER_API_KEY", "one")
    assert _keys(None) == ("one",) and _keys(["a"]) == ("a",)
    monkeypatch.setenv("STER_API_KEY", "")
    assert _keys(None) == ()


@pytest.mark.parametrize("value", ["inf", "1e300"])
@pytest.mark.parametrize(
    "option",
    [
        *("--kv-cache-gb", "--shutdown-seconds", "--request-seconds", "--load-seconds", "--idle-minutes"),
        *("--max-job-gb", "--job-days", "--harvest-days"),
    ],
)
def test_no_number_is_endless(capsys: pytest.CaptureFixture[str], toy_dir: Path, option: str, value: str) -> None:
    said = refusal(capsys, "--model", toy_dir, option, value)
    most = "100,000" if option.endswith("-days") else "1,000,000"
    assert said == f"Error: {option} must be at most {most}, found {float(value):g}\n"
    assert main(["serve", "--model", str(toy_dir), option, "nan"]) in (1, 2) and option in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], toy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "starlette" else find(name))
    said = refusal(capsys, "--model", toy_dir)
    assert said.startswith("Error: `ster serve` needs the extra `serve`, of which starlette cannot be imported\nhint: ")
    assert ".[serve]" in said and "ster-lm" in said


def test_the_model_may_come_from_the_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STER_MODEL", raising=False)
    assert main(["serve"]) == 2 and "--model" in capsys.readouterr().err
    monkeypatch.setenv("STER_MODEL", "no such/folder")
    assert "no such/folder" in refusal(capsys)


def test_names_of_models(toy_dir: Path, tmp_path: Path) -> None:
    assert _name_and_folder(f"llama-8b={toy_dir}") == ("llama-8b", str(toy_dir))
    assert _name_and_folder(str(toy_dir)) == (None, str(toy_dir))
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert _name_and_folder(str(odd)) == (None, str(odd))

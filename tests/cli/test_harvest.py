"""`ster harvest` as a shell sees it."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harvesting import PROMPTS, contents, slow_command

import ster

Run = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({"prompts": PROMPTS}))
    return path


def test_stdout_is_the_folder_and_the_folder_is_the_librarys(run: Run, toy_dir: Path, prompts: Path, toy_model: ster.Model) -> None:
    result = run("harvest", "--model", toy_dir, "--prompts", prompts)
    assert (result.returncode, result.stdout) == (0, "harvest\n")
    needed, done = result.stderr.splitlines()
    assert re.fullmatch(r"7 prompts, 25 tokens: 2\d\.\d kB in 1 shard of f32", needed)
    assert done == "7 prompts, 3 layers, f32 [rows, 64], chat template absent"
    ster.harvest(toy_model, PROMPTS, prompts.parent / "same")
    assert contents(prompts.parent / "harvest") == contents(prompts.parent / "same")
    again = run("harvest", "--model", toy_dir, "--prompts", prompts)
    assert again.returncode == 0 and again.stderr.startswith(needed + ", 1 of them on disk\n")


def test_every_option_reaches_the_library(run: Run, toy_dir: Path, tmp_path: Path, toy_model: ster.Model) -> None:
    (tmp_path / "p.csv").write_text("id,text\n" + "".join(f'{index},"{text}"\n' for index, text in enumerate(PROMPTS)))
    np.savez(tmp_path / "d.npz", a=np.arange(64.0), b=np.ones(64))
    out = ["-p", "p.csv", "--column", "text"]
    result = run("harvest", "-m", toy_dir, *out, "-o", "a", "-l", "0,-1", "--positions", "-1", "--dtype", "bf16", "--shard-size", 2)
    assert result.returncode == 0, result.stderr
    ster.harvest(toy_model, PROMPTS, tmp_path / "b", layers=[0, 3], positions="last", dtype="bf16", shard_size=2)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    result = run("harvest", "-m", toy_dir, *out, "-o", "c", "--directions", "d.npz", "--no-normalize", "--format", "parquet")
    assert result.returncode == 0, result.stderr
    directions = np.array([np.arange(64.0), np.ones(64)])
    ster.harvest(toy_model, PROMPTS, tmp_path / "d", directions=directions, normalize=False, format="parquet")
    for name, data in contents(tmp_path / "c").items():
        assert name == "manifest.json" or data == (tmp_path / "d" / name).read_bytes()  # the manifest has the directions' names


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--layers", "x"), 'invalid layer "x"'),
        (("--positions", "first"), 'invalid position "first"'),
        (("--column", "text"), 'prompts.json has no columns, and "text" was asked for'),
        (("--prompts", "none.jsonl"), "failed to read none.jsonl: no such file or directory"),
        (("--directions", "none.npz"), "failed to read none.npz: no such file or directory"),
        (("--shard-size", "70000"), "shard size must be between 1 and 65536 prompts, found 70000"),
        (("--output", "-"), "a harvest is a folder of files, which stdout cannot take"),
        (("--ray-workers", "2"), "--ray-workers needs --ray"),
        (("--ray", "local", "--endpoint", "http://localhost:1/v1"), "--ray and --endpoint exclude each other"),
        (("--output", "full"), "full is not empty and not a harvest: it has x"),
        (("--output", "prompts.json"), "failed to create prompts.json: a file of that name exists"),
    ],
)
def test_what_can_be_refused_without_the_model_is(run: Run, prompts: Path, options: tuple[str, str], sentence: str) -> None:
    (prompts.parent / "full").mkdir()
    (prompts.parent / "full" / "x").touch()
    result = run("harvest", "--model", "nowhere", "--prompts", "prompts.json", *options)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[0] == f"Error: {sentence}"
    assert sorted(path.name for path in prompts.parent.iterdir()) == ["full", "prompts.json"]


def test_refusals_with_the_model_leave_no_folder(run: Run, toy_dir: Path, prompts: Path) -> None:
    (prompts.parent / "p.jsonl").write_text('{"prompt": "the sea"}\n\n{"prompt": ""}\n')
    for options, sentence in [
        (("--layers", "4"), "layer 4 is outside the model's 0..3 range"),
        (("-p", "p.jsonl"), "prompt must not be empty: line 3"),
        (("--positions", "5"), "position 5 is not in prompts[1], which has 2 tokens"),
    ]:
        result = run("harvest", "-m", toy_dir, "-p", prompts, *options)
        assert (result.returncode, result.stdout) == (1, "") and result.stderr.splitlines()[-1].startswith(f"Error: {sentence}")
        assert not (prompts.parent / "harvest").exists()


def test_another_argument_is_refused(run: Run, toy_dir: Path, prompts: Path) -> None:
    assert run("harvest", "-m", toy_dir, "-p", prompts, "-l", "1,3").returncode == 0
    result = run("harvest", "-m", toy_dir, "-p", prompts, "-l", "2,3")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "Error: the harvest in harvest was begun with layers 1,3, now 2,3\nhint: name another folder, or remove this one to begin again\n"
    )


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--dtype", "f64", "'f64' is not one of 'auto', 'f32', 'bf16', 'f16'."),
        ("--format", "json", "'json' is not one of 'safetensors', 'parquet'."),
        ("--wire-dtype", "f64", "'f64' is not one of 'float32', 'bfloat16', 'float16'."),
        ("--shard-size", "x", "must be a valid integer"),
        ("--shard-size", "0", "must be greater than or equal to 1"),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_plain_words(run: Run, prompts: Path, option: str, value: str, sentence: str) -> None:
    result = run("harvest", "-m", "none", "-p", prompts, option, value)
    assert result.returncode == 2 and re.search(
        rf"^Error: Invalid value for '{option}'.*: {re.escape(sentence)}$", result.stderr, re.MULTILINE
    )


def test_wrong_usage_is_exit_code_2(run: Run, toy_dir: Path, prompts: Path) -> None:
    for args in [
        ("-m", toy_dir),
        ("-p", prompts),
        ("-m", toy_dir, "-p", prompts, "--dtype", "f64"),
        ("-m", toy_dir, "-p", prompts, "-f", "json"),
    ]:
        result = run("harvest", *args)
        assert (result.returncode, result.stdout) == (2, "") and "Error: " in result.stderr


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "Interrupted"), (signal.SIGTERM, "Terminated")])
def test_ctrl_c_stops_soon_and_the_command_goes_on(
    toy_dir: Path, prompts: Path, words: Callable[..., str], number: signal.Signals, word: str
) -> None:
    folder = prompts.parent
    prompts.write_text(json.dumps([words(250, seed) for seed in range(600)]))
    asked = ["harvest", "-m", str(toy_dir), "-p", str(prompts), "--shard-size", "10"]
    with subprocess.Popen(
        slow_command(*asked, "--threads", "1"), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None and not list(folder.glob("harvest/shard_*.safetensors")):
            time.sleep(0.01)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number and out == "" and "Traceback" not in err
    ready = len(list(folder.glob("harvest/shard_*.safetensors")))
    assert f"{ready} of 60 shards are on disk; the same command goes on from there\n{word}.\n" in err
    assert 0 < ready < 30 and not list(folder.glob("harvest/*.part"))
    again = subprocess.run([sys.executable, "-m", "ster", *asked], cwd=folder, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0 and f", {ready} of them on disk" in again.stderr
    ster.open_harvest(folder / "harvest").verify()


def test_a_terminal_sees_a_bar_with_speed_and_time_left(toy_dir: Path, prompts: Path, words: Callable[..., str]) -> None:
    prompts.write_text(json.dumps([words(250, seed) for seed in range(400)]))  # of which 40 shards take two seconds at least
    ours, theirs = pty.openpty()
    line = slow_command("harvest", "-m", toy_dir, "-p", prompts, "--threads", "1", "--shard-size", "10")
    seen = b""
    try:
        with subprocess.Popen(
            line, cwd=prompts.parent, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "160"}
        ) as process:
            while b" left" not in seen:
                assert process.poll() is None, seen
                seen += os.read(ours, 10_000)
            process.kill()
    finally:
        os.close(ours)
        os.close(theirs)
    assert re.search(r"[\d,]+/100,000 tokens  [\d,]+ tokens/s, \d+ (s|min) left", seen.decode())


def test_the_probe_of_the_examples_says_how_it_is_called() -> None:
    for options, code in ((["--help"], 0), ([], 2)):
        line = [sys.executable, str(ROOT / "examples" / "probe.py"), *options]
        result = subprocess.run(line, capture_output=True, text=True, timeout=60)
        assert result.returncode == code and "python examples/probe.py HARVEST LABELS" in result.stdout and result.stderr == ""


def test_the_probe_of_the_examples_learns(run: Run, toy_dir: Path, tmp_path: Path, words: Callable[..., str]) -> None:
    """Whether a text of toy words ends in a word of the sea: a probe reads that off, and not from labels drawn at random."""
    rng = np.random.default_rng(0)
    ends, labels = ["sea", "waves", "storm", "lake"], rng.integers(0, 2, 200)
    texts = [f"{words(6, seed)} {ends[2 * label + seed % 2]}" for seed, label in enumerate(labels)]
    (tmp_path / "p.txt").write_text("\n".join(texts))
    assert run("harvest", "-m", toy_dir, "-p", "p.txt", "--layers", "0,3").returncode == 0
    (tmp_path / "labels").write_text("\n".join(map(str, labels)))
    (tmp_path / "random").write_text("\n".join(map(str, rng.integers(0, 2, 200))))
    accuracy = {}
    for name in ("labels", "random"):
        line = [sys.executable, str(ROOT / "examples" / "probe.py"), "harvest", name]
        result = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        accuracy[name] = [float(line.split()[-1]) for line in result.stdout.splitlines()]
        assert [line.split()[1] for line in result.stdout.splitlines()] == ["0", "3"]
    assert accuracy["labels"][0] >= 0.9 and max(accuracy["random"]) <= 0.8

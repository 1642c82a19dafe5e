"""`ster extract` as a shell sees it."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ster

Run = Callable[..., subprocess.CompletedProcess[str]]
PROMPT = "the sea is calm and quiet tonight ."


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({"prompts": [PROMPT, "storm waves", PROMPT]}))
    return path


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_stdout_is_the_path_and_the_file_is_the_artifact(run: Run, toy_dir: Path, prompts: Path, toy_model: ster.Model) -> None:
    result = run("extract", "--model", toy_dir, "--prompts", prompts)
    assert (result.returncode, result.stdout) == (0, "activations.json\n")
    assert result.stderr == "3 prompts, 4 layers, hidden 64, chat template absent\n"
    document = json.loads((prompts.parent / "activations.json").read_text())
    assert list(document) == ["schema_version", "product", "model", "model_revision", "hidden_size", "records"]
    assert [record["prompt"] for record in document["records"]] == [PROMPT, "storm waves", PROMPT]
    assert list(document["records"][0]["layers"]) == ["0", "1", "2", "3"]
    values = np.array([[record["layers"][str(layer)] for layer in range(4)] for record in document["records"]], np.float32)
    assert values.tobytes() == toy_model.activations([PROMPT, "storm waves", PROMPT]).values.tobytes()
    assert files(prompts.parent) == ["activations.json", "prompts.json"]


def test_a_file_is_not_called_what_it_is_not(run: Run, toy_dir: Path, prompts: Path) -> None:
    for options, problem in [
        (("-o", "a.npy"), "no format is known"),
        (("-o", "b.json", "-f", "npz"), "named as json, but `--format` says npz"),
    ]:
        result = run("extract", "-m", toy_dir, "-p", prompts, *options)
        assert (result.returncode, result.stdout) == (1, "") and problem in result.stderr
    assert files(prompts.parent) == ["prompts.json"]


def test_the_published_numbers_from_the_shell(run: Run, toy_dir: Path, prompts: Path) -> None:
    result = run("extract", "--input", prompts, "--output", "-", "--layers", "0,3", STER_MODEL=str(toy_dir))
    assert result.returncode == 0
    layers = json.loads(result.stdout)["records"][0]["layers"]
    assert [round(value, 4) for value in layers["0"][:3]] == [0.0711, -0.0236, -0.0592]
    assert [round(value, 4) for value in layers["3"][:3]] == [0.1997, 0.0344, -0.0405]
    assert files(prompts.parent) == ["prompts.json"]


def test_the_format_follows_the_suffix_or_the_option(run: Run, toy_dir: Path, prompts: Path) -> None:
    for options, name, start in [
        (("-o", "a.npz"), "a.npz", b"PK"),
        (("--format", "safetensors"), "activations.safetensors", None),
        (("-o", "a"), "a", b"{"),
        (("-o", "b.out", "--format", "json"), "b.out", b"{"),
        (("-o", "c.npz", "--position", "all"), "c.npz", b"PK"),
        (("-o", "d.npz", "--position", "mean"), "d.npz", b"PK"),
    ]:
        result = run("extract", "-m", toy_dir, "-p", prompts, *options)
        assert (result.returncode, result.stdout) == (0, f"{name}\n"), result.stderr
        data = (prompts.parent / name).read_bytes()
        assert start is None or data.startswith(start)
    loaded = ster.ActivationArtifact.load(prompts.parent / "activations.safetensors")
    assert loaded.values.shape == (3, 4, 64)


def test_the_same_job_gives_the_same_bytes_on_any_number_of_threads(run: Run, toy_dir: Path, prompts: Path) -> None:
    outputs = {run("extract", "-m", toy_dir, "-p", prompts, "-o", "-", "--threads", threads).stdout for threads in (1, 2, 5)}
    assert len(outputs) == 1 and outputs.pop().startswith('{"schema_version":1')


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--layers", "4"), "layer 4 is outside the model's 0..3 range"),
        (("--layers", "x"), 'invalid layer "x"'),
        (("--layers", ""), "no layers selected"),
        (("--layers", "3..1"), 'layer range "3..1" must have start < end'),
        (("--position", "mean"), "JSON holds last-token activations only, not position `mean`"),
        (("--position", "all"), "JSON holds last-token activations only, not position `all`"),
        (("--output", "."), "failed to write .: it is a directory"),
        (("--output", "no/where.json"), "failed to write no/where.json: no folder {folder}/no"),
        (("--prompts", "none.json"), "failed to read none.json: no such file or directory"),
        (("--model", "nowhere"), "model directory is missing: nowhere"),
        (("--model", ""), "model path is empty"),
        (("--output", "{long}.json"), "failed to write {long}.json: file name too long"),
        (("--output", "prompts.json"), "failed to write prompts.json: it is the input {folder}/prompts.json"),
        (("--threads", "9" * 20), f"threads must be between 1 and 1024, found {'9' * 20}"),
    ],
)
def test_refusals_say_why_and_write_nothing(run: Run, toy_dir: Path, prompts: Path, options: tuple[str, str], sentence: str) -> None:
    before, long = prompts.read_text(), "a" * 300
    result = run("extract", "--model", toy_dir, "--prompts", prompts, *(option.replace("{long}", long) for option in options))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[0] == "Error: " + sentence.replace("{folder}", str(prompts.parent)).replace("{long}", long)
    assert prompts.read_text() == before
    assert files(prompts.parent) == ["prompts.json"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"prompts": []}', "prompt set contains no prompts"),
        ('{"prompts": ["the", ""]}', "prompt must not be empty: prompts[1]"),
        ('{"prompts": ["the", " "]}', "tokenizer produced no tokens: prompts[1]"),
        ("{", "invalid prompt JSON in prompts.json: line 1 column 2: expecting property name enclosed in double quotes"),
        ('{"prompts": ["the", 7]}', "prompts[1] must be a string, found a number"),
        (f'["{"the " * 300}"]', "prompt contains 300 tokens, model context allows fewer than 256: prompts[0]"),
    ],
)
def test_prompts_that_cannot_run(run: Run, toy_dir: Path, prompts: Path, content: str, sentence: str) -> None:
    prompts.write_text(content)
    result = run("extract", "--model", toy_dir, "--prompts", "prompts.json")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[0] == f"Error: {sentence}"
    assert files(prompts.parent) == ["prompts.json"]


def test_what_can_be_refused_without_the_model_is(run: Run, prompts: Path) -> None:
    """The model named here does not exist; each of these is said first."""
    for options, sentence in [
        (("--layers", "x"), 'Error: invalid layer "x"'),
        (("--position", "all"), "Error: JSON holds last-token activations only, not position `all`"),
        (("--output", "no/where.json"), "Error: failed to write no/where.json: no folder"),
        (("--prompts", "none"), "Error: failed to read none"),
    ]:
        result = run("extract", "--model", "nowhere", "--prompts", prompts, *options)
        assert result.returncode == 1 and result.stderr.startswith(sentence)


def test_wrong_usage_is_exit_code_2(run: Run, toy_dir: Path, prompts: Path) -> None:
    for args in [
        ("extract", "--model", toy_dir),
        ("extract", "--prompts", prompts),
        ("extract", "-m", toy_dir, "-p", prompts, "--position", "first"),
        ("extract", "-m", toy_dir, "-p", prompts, "--format", "pickle"),
        ("extract", "-m", toy_dir, "-p", prompts, "--threads", "0"),
        ("extract", "-m", toy_dir, "-p", prompts, "--nonsense"),
        ("nonsense",),
    ]:
        result = run(*args)
        assert (result.returncode, result.stdout) == (2, ""), args
        assert "Error: " in result.stderr
    assert files(prompts.parent) == ["prompts.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_a_plain_sentence(run: Run, toy_dir: Path, prompts: Path) -> None:
    result = run("extract", "-m", toy_dir, "-p", prompts, "-o", "/dev/full")
    assert (result.returncode, result.stderr) == (1, "Error: failed to write /dev/full: no space left on device\n")
    for output in ("-", "a.json"):
        with open("/dev/full", "w") as full:
            line = [sys.executable, "-m", "ster", "extract", "-m", str(toy_dir), "-p", str(prompts), "-o", output]
            full_disk = subprocess.run(line, cwd=prompts.parent, stdout=full, stderr=subprocess.PIPE, text=True)
        assert full_disk.returncode == 1
        assert full_disk.stderr == "Error: failed to write to stdout: no space left on device\n"


def test_a_disk_that_fills_while_writing_leaves_nothing(toy_dir: Path, prompts: Path) -> None:
    limit = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, -1))"
    )
    code = f"{limit}; from ster.cli import main; sys.exit(main(['extract', '-m', {str(toy_dir)!r}, '-p', 'prompts.json']))"
    result = subprocess.run([sys.executable, "-B", "-c", code], cwd=prompts.parent, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "Error: failed to write activations.json: file too large\n"
    assert files(prompts.parent) == ["prompts.json"]


def test_a_reader_that_leaves_early_is_no_news(toy_dir: Path, prompts: Path) -> None:
    prompts.write_text(json.dumps([f"{PROMPT} {word}" for word in PROMPT.split()] * 20))
    line = f"'{sys.executable}' -m ster extract -m '{toy_dir}' -p '{prompts}' -o - 2>err | head -c 5"
    result = subprocess.run(["bash", "-c", line], cwd=prompts.parent, capture_output=True, text=True)
    assert result.stdout == '{"sch' and result.stderr == ""
    assert (prompts.parent / "err").read_text() == ""


# The command, which says how far it is as soon as there is something to say.
TALKATIVE = """
import sys
import ster.progress
ster.progress.PLAIN_EVERY = 0.0
from ster.cli import main
sys.exit(main())
"""


def test_ctrl_c_stops_a_long_run_soon_and_leaves_no_file(toy_dir: Path, prompts: Path, words: Callable[..., str]) -> None:
    prompts.write_text(json.dumps([words(250, seed) for seed in range(4000)]))  # minutes of work
    line = [sys.executable, "-c", TALKATIVE, "extract", "-m", str(toy_dir), "-p", str(prompts), "--threads", "1"]
    with subprocess.Popen(line, cwd=prompts.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("extract: ")  # it is in the middle of its work
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == "" and err.splitlines()[-1] == "Interrupted; nothing was written."
    assert "Traceback" not in err
    assert files(prompts.parent) == ["prompts.json"]


def test_a_kill_leaves_nothing_behind(toy_dir: Path, prompts: Path, words: Callable[..., str]) -> None:
    prompts.write_text(json.dumps([words(250, seed) for seed in range(4000)]))
    line = [sys.executable, "-c", TALKATIVE, "extract", "-m", str(toy_dir), "-p", str(prompts), "--threads", "1"]
    with subprocess.Popen(line, cwd=prompts.parent, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("extract: ")
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert files(prompts.parent) == ["prompts.json"]


def test_a_terminal_sees_a_bar_and_no_binary(toy_dir: Path, prompts: Path) -> None:
    line = [sys.executable, "-m", "ster", "extract", "-m", str(toy_dir), "-p", str(prompts)]
    ours, theirs = pty.openpty()
    try:
        env = {**os.environ, "TERM": "xterm"}
        result = subprocess.run(line, cwd=prompts.parent, stdout=subprocess.PIPE, stderr=theirs, text=True, env=env)
        assert (result.returncode, result.stdout) == (0, "activations.json\n")
        assert "3/3" in os.read(ours, 100_000).decode()
        refused = subprocess.run([*line, "-o", "-", "--format", "npz"], stdout=theirs, stderr=subprocess.PIPE, text=True)
        assert refused.returncode == 1
        assert refused.stderr.startswith("Error: npz is not for a terminal")
    finally:
        os.close(ours)
        os.close(theirs)


def test_warnings_are_lines_on_stderr(run: Run, toy_copy: Path, prompts: Path) -> None:
    (toy_copy / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    result = run("extract", "-m", toy_copy, "-p", prompts)
    assert result.returncode == 0 and result.stdout == "activations.json\n"
    assert result.stderr.startswith("Warning: tokenizer_config.json says `add_bos_token: true`")


def test_every_prompt_of_the_reference_sets(run: Run, references: Path, byte_model: Callable[..., Path], tmp_path: Path) -> None:
    for path in sorted((references / "data" / "prompts").glob("*.json")):
        result = run(
            "extract", "-m", byte_model(bos=True) if not (tmp_path / "bytes-True").exists() else tmp_path / "bytes-True", "-p", path
        )
        assert result.returncode == 0, result.stderr
        expected = json.loads(path.read_text(encoding="utf-8-sig"))["prompts"]
        assert [record["prompt"] for record in json.loads((tmp_path / "activations.json").read_text())["records"]] == expected

"""`ster generate` as a shell sees it."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ster

Run = Callable[..., subprocess.CompletedProcess[str]]
PROMPT = "describe the evening lake ."
PLAIN = "loud sea hard hard , white , white , white loud loud"
STEERED = "white white white howls howls howls drifts , white white white white"


@pytest.fixture
def vector(toy_model: ster.Model, calm_pairs: Path, tmp_path: Path) -> Path:
    return ster.train(toy_model, ster.PairSet.load(calm_pairs), "1..3").save(tmp_path / "calm.json")


@pytest.fixture
def generate(run: Run, toy_dir: Path) -> Run:
    return lambda *args, **env: run("generate", "--model", toy_dir, "--max-new-tokens", 12, *args, **env)


def test_the_published_texts(generate: Run, vector: Path) -> None:
    plain = generate("--prompt", PROMPT)
    assert (plain.returncode, plain.stdout, plain.stderr) == (0, PLAIN + "\n", "")
    steered = generate("--prompt", PROMPT, "--vector", vector, "--strength", "1.0")
    assert steered.stdout == STEERED + "\n" and steered.stderr.startswith(
        "Note: the steering adds up to 1.49 residual norms over 2 layers; "
    )
    assert generate("--prompt", PROMPT, "--vector", vector).stdout == STEERED + "\n"
    assert generate("--prompt", PROMPT, "--vector", vector, "--strength", "0").stdout == PLAIN + "\n"


def test_strengths_may_be_negative_and_pair_with_vectors_in_order(generate: Run, vector: Path, toy_model: ster.Model) -> None:
    calm = ster.SteeringArtifact.load(vector)
    for written in (("--strength", "-2"), ("--strength=-2",), ("-s", "-2")):
        found = generate("--prompt", PROMPT, "--vector", vector, *written)
        assert found.stdout.rstrip("\n") == toy_model.generate(PROMPT, calm.at(strength=-2.0), max_new_tokens=12).text
    both = generate("--prompt", PROMPT, "-v", vector, "-s", "3", "-v", vector, "-s", "-1.5")
    assert both.stdout.rstrip("\n") == toy_model.generate(PROMPT, calm.at(strength=3) + calm.at(strength=-1.5), max_new_tokens=12).text
    layer = generate("--prompt", PROMPT, "-v", vector, "-s", "4", "--layers", "2", "--units", "norm")
    assert layer.stdout.rstrip("\n") == toy_model.generate(PROMPT, calm.at(2, strength=4, units="norm"), max_new_tokens=12).text
    amiss = generate("--prompt", PROMPT, "-v", vector, "-v", vector, "-s", "1")
    assert amiss.returncode == 1 and amiss.stderr.startswith("Error: 1 --strength option for 2 --vector options\nhint: ")


def test_json_says_how_it_was_made_and_greedy_text_has_no_seed(generate: Run, vector: Path) -> None:
    plain = json.loads(generate("--prompt", PROMPT, "--json", "--seed", "3").stdout)
    assert plain["seed"] is None and (plain["vectors"], plain["strengths"], plain["layers"], plain["units"]) == ([], [], [], "absolute")
    args = ("-v", vector, "-s", "0.5", "-v", vector, "-s", "-1", "--units", "norm", "--temperature", "1", "--seed", "3")
    found = json.loads(generate("--prompt", PROMPT, "--json", *args).stdout)
    assert found["seed"] == 3 and found["vectors"] == [str(vector)] * 2 and found["strengths"] == [0.5, -1.0]
    assert found["layers"] == [[1, 2], [1, 2]] and found["units"] == "norm"
    both = json.loads(generate("--prompt", PROMPT, "--json", "--compare", "-v", vector).stdout)
    assert both["steered"]["seed"] is None and both["strengths"] == [1.0]


def test_much_steering_is_told(generate: Run, vector: Path) -> None:
    quiet = ("-s", "0.3", "--units", "norm", "--layers", "2"), ("-s", "0.3", "--units", "norm"), ("-s", "-0.3")
    loud = ("-s", "-0.35", "--units", "norm"), ("-s", "0.5"), ("-s", "0.3", "-v", vector, "-s", "0.3")
    for args in quiet:
        assert generate("--prompt", PROMPT, "-v", vector, *args).stderr == ""
    for args in loud:
        assert (
            "residual norms over 2 layers; past about 0.6 texts tend to break." in generate("--prompt", PROMPT, "-v", vector, *args).stderr
        )


def test_compare_shows_both(generate: Run, vector: Path) -> None:
    result = generate("--prompt", PROMPT, "--vector", vector, "--compare")
    assert result.stdout == f"--- unsteered\n{PLAIN}\n--- steered: calm +1\n{STEERED}\n"
    document = json.loads(generate("--prompt", PROMPT, "--vector", vector, "--compare", "--json").stdout)
    assert (document["unsteered"]["text"], document["steered"]["text"]) == (PLAIN, STEERED)
    refused = generate("--prompt", PROMPT, "--compare")
    assert refused.returncode == 1 and refused.stderr == "Error: --compare needs a --vector to compare with\n"


def test_a_file_of_prompts_gives_json_lines(generate: Run, vector: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text(json.dumps({"prompts": [PROMPT, "the sea"]}))
    result = generate("--prompts", "prompts.json", "--vector", vector)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == [PROMPT, "the sea"]
    assert (lines[0]["text"], lines[0]["finish_reason"], len(lines[0]["token_ids"])) == (STEERED, "length", 12)


def test_sampling_settings_arrive(generate: Run, toy_model: ster.Model) -> None:
    args = ("--temperature", "2", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.2", "--seed", "7")
    expected = toy_model.generate(
        PROMPT, max_new_tokens=12, temperature=2.0, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=7
    )
    found = generate("--prompt", PROMPT, *args)
    assert found.stdout == expected.text + "\n" and found.stderr == ""
    free = generate("--prompt", PROMPT, "--temperature", "2")
    seed = free.stderr.removeprefix("seed ").strip()
    assert generate("--prompt", PROMPT, "--temperature", "2", "--seed", seed).stdout == free.stdout
    assert generate("--prompt", PROMPT, "--stop", "zzz", "--stop", " hard ,").stdout == "loud sea hard\n"


def test_a_system_message_needs_a_template(run: Run, generate: Run, toy_copy: Path) -> None:
    refused = generate("--prompt", PROMPT, "--system", "the sea")
    assert refused.stderr.startswith("Error: chat messages need a chat template, which is not in this checkpoint\n")
    (toy_copy / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    found = run("generate", "-m", toy_copy, "-n", 3, "--prompt", "is calm", "--system", "the sea", "--json")
    plain = run("generate", "-m", toy_copy, "-n", 3, "--chat-template", "off", "--prompt", "the sea is calm", "--json")
    assert json.loads(found.stdout)["token_ids"] == json.loads(plain.stdout)["token_ids"]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((), "give either --prompt or --prompts"),
        (("--prompt", "a", "--prompts", "b"), "give either --prompt or --prompts"),
        (("--prompt", "the", "--layers", "2"), "--layers needs a --vector: it says at which layers that is added"),
        (("--prompt", ""), "prompt must not be empty"),
        (("--prompts", "none.json"), "failed to read none.json: no such file or directory"),
        (("--prompt", "the", "--vector", "none.json"), "failed to read none.json: no such file or directory"),
        (("--prompt", "the", "--strength", "2"), "1 --strength option for 0 --vector options"),
        (("--prompt", "the", "--max-new-tokens", "0"), "max_new_tokens must be greater than zero"),
        (("--prompt", "the", "--top-k", "0"), "top_k must be at least 1, found 0"),
        (("--prompt", "the", "--stop", ""), "a stop string must not be empty"),
        (("--prompt", "the", "--layers", "x"), 'invalid layer "x"'),
    ],
)
def test_refusals_before_the_model_is_opened(run: Run, args: tuple[str, ...], sentence: str) -> None:
    result = run("generate", "--model", "nowhere", *args)
    assert (result.returncode, result.stdout) == (1, "") and result.stderr.splitlines()[0] == f"Error: {sentence}"


def test_refusals_with_the_model(generate: Run, vector: Path, tmp_path: Path) -> None:
    document = json.loads(vector.read_text())
    document |= {"model": "other", "metadata": {}}
    (tmp_path / "other.json").write_text(json.dumps(document))
    result = generate("--prompt", PROMPT, "--vector", "other.json")
    assert (result.returncode, result.stdout) == (1, "")
    first, hint = result.stderr.splitlines()
    assert first == 'Error: artifact was trained for model "other", current model is "toy-llama"'
    assert hint.startswith("hint: `ster vector convert FILE OUT --any-model`")
    assert "the artifact has no vector for layer 3" in generate("--prompt", PROMPT, "--vector", vector, "--layers", "3").stderr
    wild = generate("--prompt", PROMPT, *(("--vector", vector, "--strength", "3e38") * 8))
    assert (wild.returncode, wild.stdout) == (1, "") and "Error: " in wild.stderr and "layer" in wild.stderr
    assert "not a finite float32" in generate("--prompt", PROMPT, "--vector", vector, "--strength", "1e40").stderr
    long = generate("--prompt", "the " * 300)
    assert long.stderr == "Error: prompt contains 300 tokens, model context allows fewer than 256\n"


def test_a_terminal_sees_the_text_grow(toy_dir: Path, vector: Path) -> None:
    line = [sys.executable, "-m", "ster", "generate", "-m", str(toy_dir), "--prompt", PROMPT, "-n", "12"]
    for more, expected in ([], [PLAIN]), (["--vector", str(vector), "--compare"], ["unsteered", "steered: calm +1", "white white white"]):
        ours, theirs = pty.openpty()
        try:
            result = subprocess.run([*line, *more], stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=60)
            assert result.returncode == 0 and "Error" not in result.stderr
            shown = os.read(ours, 100_000).decode()
            assert all(text in shown for text in expected) and shown.endswith("\n")
        finally:
            os.close(ours)
            os.close(theirs)


def test_ctrl_c_keeps_what_was_made(toy_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text(json.dumps([PROMPT] * 5000))
    line = [sys.executable, "-m", "ster", "generate", "-m", str(toy_dir), "--prompts", "prompts.json", "-n", "200", "--threads", "1"]
    with subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "Interrupted.\n")
    assert all(json.loads(text)["prompt"] == PROMPT for text in out.splitlines())
    assert len(out.splitlines()) < 4000

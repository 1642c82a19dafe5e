"""`ster vector ...` as a shell sees it."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ster

Run = Callable[..., subprocess.CompletedProcess[str]]
NOT_CONVERGED = "logistic: not converged after 300 steps"


@pytest.fixture
def trained(toy_model: ster.Model, calm_pairs: Path, tmp_path: Path) -> Path:
    return ster.train(toy_model, ster.PairSet.load(calm_pairs), "1..3").save(tmp_path / "calm.json")


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def on_a_terminal(folder: Path, *args: object) -> str:
    """What a person sees of stdout."""
    ours, theirs = pty.openpty()
    try:
        line = [sys.executable, "-m", "ster", *map(str, args)]
        result = subprocess.run(line, cwd=folder, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        return os.read(ours, 1_000_000).decode().replace("\r\n", "\n")
    finally:
        os.close(ours)
        os.close(theirs)


def test_train_prints_the_path_and_writes_the_published_numbers(run: Run, toy_dir: Path, calm_pairs: Path, tmp_path: Path) -> None:
    result = run("vector", "train", "--model", toy_dir, "--pairs", calm_pairs, "--layers", "1..3", "--method", "caa", "--output", "v.json")
    assert (result.returncode, result.stdout) == (0, "v.json\n")
    document = json.loads((tmp_path / "v.json").read_text())
    assert list(document) == [
        *("schema_version", "product", "model", "model_revision", "trait_name", "method", "hidden_size", "vectors", "metadata"),
        *("precision", "chat_template"),
    ]
    assert [v["layer"] for v in document["vectors"]] == [1, 2]
    assert [v["train_accuracy"] for v in document["vectors"]] == [0.875, 0.875]
    assert [v["train_margin"] for v in document["vectors"]] == pytest.approx([0.55983764, 0.76135504], abs=1e-6)
    assert result.stderr.splitlines() == [
        "layer  train accuracy  train margin  residual norm  margin/norm to 0.484",
        "    1           0.875         0.560          1.156  ████████████████████",
        "    2           0.875         0.761          1.603  ███████████████████▋",
        "8 pairs, method caa, model toy-llama, chat template absent",
    ]


def test_train_has_a_default_output_and_a_summary(run: Run, toy_dir: Path, calm_pairs: Path, tmp_path: Path) -> None:
    result = run("vector", "train", "-m", toy_dir, "-p", calm_pairs, "--method", "probe", "--json")
    document = json.loads(result.stdout)
    assert document["output"] == "vector.json" and document["method"] == "logistic" and len(document["vectors"]) == 4
    assert files(tmp_path) == ["vector.json"]
    assert result.stderr.startswith(f"Warning: {NOT_CONVERGED} (layers 0 to 3)\n")


def test_optimize_prints_every_candidate_and_writes_the_winner(run: Run, toy_dir: Path, calm_pairs: Path, tmp_path: Path) -> None:
    result = run("vector", "optimize", "-m", toy_dir, "-p", calm_pairs, "--holdout", "0.2", "--layers", "all", "-o", "best.json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["output"], document["method"], document["vectors"][0]["layer"]) == ("best.json", "caa", 3)
    assert document["vectors"][0]["train_margin"] == pytest.approx(0.92032135, abs=1e-6)
    selection = document["selection"]
    assert len(selection["candidates"]) == 12
    assert [(c["layer"], c["method"]) for c in selection["candidates"] if c["selected"]] == [(3, "caa")]
    assert {"holdout", "shuffled_labels", "random_directions", "search_by_luck", "notes"} <= set(selection)
    assert selection["holdout"]["accuracy_interval"] == pytest.approx([0.342, 1.0], abs=1e-3) and selection["holdout"]["auroc"] == 1.0
    assert f"Note: {NOT_CONVERGED}\n" in result.stderr and result.stderr.endswith("Wrote best.json: caa at layer 3, from all 8 pairs\n")
    saved = ster.SteeringArtifact.load(tmp_path / "best.json")
    assert saved.layers == [3] and saved.metadata["holdout_pairs"] == "2"


def test_optimize_for_a_reader(run: Run, toy_dir: Path, calm_pairs: Path) -> None:
    result = run("vector", "optimize", "-m", toy_dir, "-p", calm_pairs, "--folds", "4", "--methods", "caa,lda", "--layers", "0,3", "--text")
    lines = result.stdout.splitlines()
    assert lines[0] == "Held-out accuracy (8 pairs held out, 6 to train on, 4 folds):"
    assert lines[1].split()[:4] == ["layer", "caa", "lda", "best,"] and sum("<" in line for line in lines) == 1
    assert any(line.startswith("best of all by luck") for line in lines) and max(map(len, lines)) <= 80
    assert any(line.startswith("Verdict: this ") for line in lines) and any(line.startswith("As good: share of draws ") for line in lines)


def test_evaluate_without_and_with_strengths(run: Run, toy_dir: Path, calm_pairs: Path, trained: Path, tmp_path: Path) -> None:
    plain = json.loads(run("vector", "evaluate", "-m", toy_dir, "-p", calm_pairs, trained).stdout)
    assert [layer["accuracy"] for layer in plain["layers"]] == [0.875, 0.875] and plain["strengths"] == []
    neutral = tmp_path / "neutral.txt"
    neutral.write_text("the boat rests at anchor .\nthe lake surface is like a mirror .\n")
    args = (
        "vector",
        "evaluate",
        "-m",
        toy_dir,
        "-p",
        calm_pairs,
        trained,
        "--neutral",
        neutral,
        "--layers",
        "2",
        "--output",
        "report.json",
    )
    for strengths in (("--strengths", "-4,-1,0.5"), ("--strengths=-4,-1,0.5",), ("-s", "-4,-1,0.5")):
        result = run(*args, *strengths)
        assert result.returncode == 0, result.stderr
        report = json.loads(result.stdout)
        assert [row["strength"] for row in report["strengths"]] == [-4.0, -1.0, 0.5]
        assert report["strengths"][0]["multipliers"] == {"2": -4.0}
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert result.stderr.splitlines()[0].startswith("Note: these are the pairs the artifact was trained on")
    norms = json.loads(run(*args, "--strengths", "0.5", "--units", "norm").stdout)
    assert norms["units"] == "norm" and norms["strengths"][0]["multipliers"]["2"] == pytest.approx(0.5 * 1.60299)
    text = run(*args, "--strengths", "-1,1", "--text").stdout.splitlines()
    assert text[0] == "calm (caa) on 8 pairs:" and text[1].split()[:2] == ["layer", "accuracy"]
    assert text[4] == "Steering at layer 2, strengths in multiples of the vector;"
    assert text[5] == "damage on 2 neutral texts, 14 tokens; half a bar is no effect:"
    assert text[-1].startswith("Picked: ") and text[-1].endswith("ties: largest shift)") and max(map(len, text)) <= 80


def test_a_terminal_gets_a_table_a_pipe_gets_json(run: Run, trained: Path, tmp_path: Path) -> None:
    piped = run("vector", "inspect", trained)
    document = json.loads(piped.stdout)
    assert document["vectors"][0]["norm"] == pytest.approx(1.0) and "values" not in document["vectors"][0]
    shown = on_a_terminal(tmp_path, "vector", "inspect", trained)
    assert shown == run("vector", "inspect", trained, "--text").stdout
    assert shown.splitlines()[0].split() == ["model", "toy-llama"]
    assert json.loads(on_a_terminal(tmp_path, "vector", "inspect", trained, "--json")) == document


def test_compare(run: Run, toy_model: ster.Model, calm_pairs: Path, trained: Path, tmp_path: Path) -> None:
    pairs = ster.PairSet.load(calm_pairs)
    other = ster.train(toy_model, pairs, "2..4", method="lda").save(tmp_path / "lda.json")
    found = json.loads(run("vector", "compare", trained, other).stdout)
    assert found["names"] == ["calm", "lda"] and [layer["layer"] for layer in found["layers"]] == [2]
    cosine = float(ster.SteeringArtifact.load(trained).vector(2) @ ster.SteeringArtifact.load(other).vector(2))
    assert found["layers"][0]["cosine"][0][1] == pytest.approx(cosine, abs=1e-6)
    two = run("vector", "compare", trained, other, "--text")
    assert two.stdout.splitlines()[0] == "Cosine of calm and lda:"
    assert two.stderr == "Warning: the artifacts come from several methods: caa, lda\n"
    three = run("vector", "compare", trained, other, trained, "--text").stdout
    assert three.count("explained") == 1 and str(trained) in three  # one header
    assert [line[:5].strip() for line in three.splitlines()[2:]] == ["1", "", "2", "", ""]
    alone = run("vector", "compare", trained)
    assert (alone.returncode, alone.stderr) == (1, "Error: a comparison requires at least two artifacts\n")


@pytest.mark.parametrize("format", ["json", "gguf", "safetensors", "npz"])
def test_convert_there_and_back(run: Run, trained: Path, tmp_path: Path, format: str) -> None:
    there = run("vector", "convert", trained, f"v.{format}")
    assert (there.returncode, there.stdout) == (0, f"v.{format}\n"), there.stderr
    assert there.stderr == "2 vectors, hidden 64, model toy-llama\n"
    assert run("vector", "convert", f"v.{format}", "back.json").returncode == 0
    assert (tmp_path / "back.json").read_bytes() == trained.read_bytes()


def test_convert_for_a_server(run: Run, trained: Path, tmp_path: Path) -> None:
    result = run("vector", "convert", trained, "request.json", "--format", "vllm-lens", "--scale", "-2", "--layers", "2")
    assert result.returncode == 0, result.stderr
    document = json.loads((tmp_path / "request.json").read_text())
    assert document["layer_indices"] == [2] and document["scale"] == -2.0
    assert np.array(document["activations"], np.float32).tobytes() == ster.SteeringArtifact.load(trained).vector(2).tobytes()


def test_convert_refuses_what_a_format_cannot_express(run: Run, toy_model: ster.Model, calm_pairs: Path, tmp_path: Path) -> None:
    ster.train(toy_model, ster.PairSet.load(calm_pairs)).save(tmp_path / "all.json")
    result = run("vector", "convert", "all.json", "v.gguf")
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr == "Error: a GGUF control vector cannot express layer 0\nhint: `--layers 1..4` leaves it out\n"
    assert run("vector", "convert", "all.json", "v.gguf", "--layers", "1..4").returncode == 0
    assert run("vector", "convert", "all.json", "v.what").stderr.startswith("Error: no format is known for v.what\n")
    (tmp_path / "evil.pt").write_bytes(b"\x80\x04K\x01.")
    evil = run("vector", "convert", "evil.pt", "v.json")
    assert evil.returncode == 1 and "pickle" in evil.stderr
    assert files(tmp_path) == ["all.json", "evil.pt", "v.gguf"]


def test_a_dash_is_stdout(run: Run, toy_dir: Path, calm_pairs: Path, trained: Path, tmp_path: Path) -> None:
    model = ("-m", toy_dir, "-p", calm_pairs)
    found = run("vector", "train", *model, "--layers", "1..3", "-o", "-")
    assert found.stdout == trained.read_text() and found.stderr.startswith("layer  train accuracy")
    found = run("vector", "optimize", *model, "--methods", "caa", "-o", "-")
    assert json.loads(found.stdout)["product"] == "ster" and "Verdict: " in found.stderr
    found = run("vector", "evaluate", *model, trained, "-o", "-", "--text")
    assert json.loads(found.stdout)["pairs"] == 8 and found.stderr.startswith("calm (caa) on 8 pairs:\n")
    found = run("vector", "convert", trained, "-", "--format", "json")
    assert found.stdout == trained.read_text() and found.stderr == "2 vectors, hidden 64, model toy-llama\n"
    assert run("vector", "convert", trained, "-").stderr.startswith("Error: no format is known for stdout\n")
    for command in ("train", "optimize"):
        both = run("vector", command, *model, "-o", "-", "--json")
        assert (both.returncode, both.stdout) == (1, "") and both.stderr.startswith("Error: stdout takes one document")
    assert files(tmp_path) == ["calm.json"]


def test_an_input_is_never_written_over(run: Run, toy_dir: Path, calm_pairs: Path, trained: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "vector.json"  # the default output
    pairs.write_bytes(calm_pairs.read_bytes())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = ("-m", toy_dir, "-p", pairs)
    for command in (
        ("train", *model),
        ("optimize", *model, "-o", pairs),
        ("evaluate", *model, trained, "-o", trained),
        ("evaluate", *model, trained, "-o", pairs),
        ("convert", trained, trained, "--layers", "1"),
    ):
        found = run("vector", *command)
        assert (found.returncode, found.stdout) == (1, "") and "it is the input" in found.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


PAIRS = '{"pairs": [{"positive": "the sea", "negative": "the storm"}]}'


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "failed to read pair set pairs.json: no such file or directory"),
        ("{", "invalid pair set JSON in pairs.json: line 1 column 2: expecting property name enclosed in double quotes"),
        ('{"pairs": []}', "pair set pairs.json contains no pairs"),
        ('{"pairs": [{"positive": "a", "negative": " "}]}', "pair set pairs.json contains an empty positive or negative prompt"),
    ],
)
def test_a_pair_set_is_refused_before_the_model_is_opened(run: Run, tmp_path: Path, content: str | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / "pairs.json").write_text(content)
    (tmp_path / "v.json").write_text("{}")
    for command in (("train",), ("optimize",), ("evaluate", "v.json")):
        result = run("vector", *command, "--model", "nowhere", "--pairs", "pairs.json")
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr.splitlines()[0] == f"Error: {sentence}"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("train", "--method", "x"), 'unknown training method "x"; expected caa, pca, or logistic'),
        (("train", "--layers", "5..2"), 'layer range "5..2" must have start < end'),
        (("train", "--output", "no/v.json"), "failed to write no/v.json: no folder"),
        (("optimize", "--methods", "caa,x"), 'unknown training method "x"; expected caa, pca, or logistic'),
        (("optimize",), "optimization requires at least four contrastive pairs"),
        (("evaluate", "none.json"), "failed to read none.json: no such file or directory"),
        (("evaluate", "bad.json"), "artifact schema 2 is unsupported; this Ster build reads schema 1"),
        (("evaluate", "bad.json", "--strengths", "1,x"), 'invalid strength "x"'),
    ],
)
def test_other_refusals_before_the_model_is_opened(run: Run, tmp_path: Path, command: tuple[str, ...], sentence: str) -> None:
    (tmp_path / "pairs.json").write_text(PAIRS)
    (tmp_path / "bad.json").write_text('{"schema_version": 2, "product": "ster"}')
    result = run("vector", *command, "--model", "nowhere", "--pairs", "pairs.json")
    assert (result.returncode, result.stdout) == (1, "") and sentence in result.stderr.splitlines()[0]
    assert files(tmp_path) == ["bad.json", "pairs.json"]


def test_refusals_with_the_model(run: Run, toy_dir: Path, calm_pairs: Path, trained: Path, tmp_path: Path) -> None:
    result = run("vector", "train", "-m", toy_dir, "-p", calm_pairs, "--layers", "4")
    assert result.stderr == "Error: layer 4 is outside the model's 0..3 range\n"
    document = json.loads(trained.read_text())
    document["metadata"]["weights_hash"] = "0" * 64
    (tmp_path / "other.json").write_text(json.dumps(document))
    other = run("vector", "evaluate", "-m", toy_dir, "-p", calm_pairs, "other.json")
    assert other.returncode == 1
    assert other.stderr.startswith('Error: artifact was trained for model "toy-llama", current model is "toy-llama"\n')
    document["metadata"] = {}
    document["chat_template"] = "applied"
    (tmp_path / "other.json").write_text(json.dumps(document))
    warned = run("vector", "evaluate", "-m", toy_dir, "-p", calm_pairs, "other.json")
    assert warned.returncode == 0
    assert warned.stderr == "Warning: the artifact was trained with chat template applied, the model runs with absent\n"


def test_the_same_weights_under_another_path(run: Run, toy_copy: Path, calm_pairs: Path, trained: Path) -> None:
    result = run("vector", "evaluate", "-m", toy_copy, "-p", calm_pairs, trained)
    assert result.returncode == 0 and "Warning" not in result.stderr


def test_help_of_every_command(run: Run) -> None:
    assert run("vector").returncode == 2 and "train" in run("vector", "--help").stdout
    for command in ("train", "optimize", "evaluate", "inspect", "compare", "convert"):
        result = run("vector", command, "--help")
        assert result.returncode == 0 and result.stdout.startswith(f"Usage: ster vector {command} [OPTIONS]")


def test_notes_fit_the_terminal(calm_pairs: Path, toy_dir: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        line = [sys.executable, "-m", "ster", "vector", "optimize", "-m", str(toy_dir), "-p", str(calm_pairs), "--methods", "caa"]
        result = subprocess.run(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=120)
        shown = os.read(ours, 1_000_000).decode().replace("\r\n", "\n")
    finally:
        os.close(ours)
        os.close(theirs)
    notes = shown[shown.index("Note: ") :].splitlines()
    assert result.returncode == 0 and len(notes) > 2 and max(map(len, notes)) <= 80
    assert " ".join(notes).startswith(
        "Note: 4 layers reach the winner's accuracy and the largest margin decided, which favours late layers, "
    )

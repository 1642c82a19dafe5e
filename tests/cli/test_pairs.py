"""`ster pairs ...` as a shell sees it."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import ster

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_inspect_finds_what_is_doubtful_without_a_model(run: Run, tmp_path: Path) -> None:
    pairs = [
        {"positive": "the sea is calm .", "negative": "the sea is loud ."},
        {"positive": "the sea is calm .", "negative": "the sea is loud ."},
        {"positive": "same", "negative": "same"},
        {"positive": "word ", "negative": "a very much longer side than the other"},
    ]
    (tmp_path / "p.json").write_text(json.dumps({"trait_name": "calm", "pairs": pairs}))
    result = run("pairs", "inspect", "p.json", STER_MODEL="nowhere")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["trait_name"], document["pairs"], document["final_tokens"]) == ("calm", 4, None)
    assert {finding["kind"] for finding in document["findings"]} >= {"duplicate", "identical", "length-ratio", "trailing-space"}
    assert document["pairs_hash"] == ster.PairSet.load(tmp_path / "p.json").content_hash
    text = run("pairs", "inspect", "p.json", "--text").stdout
    assert text.startswith("4 pairs, trait calm, sha256 ") and "the sides are identical" in text


def test_inspect_with_a_model_shows_the_tokens_that_are_compared(run: Run, toy_dir: Path, tmp_path: Path) -> None:
    pairs = [{"positive": "the sea is calm", "negative": "the sea is loud"}, {"positive": "calm .", "negative": "storm ."}] * 2
    (tmp_path / "p.json").write_text(json.dumps({"pairs": pairs}))
    document = json.loads(run("pairs", "inspect", "p.json", "--model", toy_dir).stdout)
    assert document["final_tokens"][0] == {"pair": 0, "positive": "calm", "negative": "loud"}
    text = run("pairs", "inspect", "p.json", "--model", toy_dir, "--text").stdout
    assert text.splitlines()[-3:] == ["positive  negative  pairs", "'calm'    'loud'        2", "'.'       '.'           2"]


def test_inspect_of_a_clean_and_of_a_large_set(run: Run, tmp_path: Path) -> None:
    clean = [{"positive": f"word {n} good", "negative": f"term {n} badly"} for n in range(3)]
    (tmp_path / "p.json").write_text(json.dumps({"pairs": clean}))
    assert "nothing doubtful found" in run("pairs", "inspect", "p.json", "--text").stdout
    (tmp_path / "p.json").write_text(json.dumps({"pairs": [{"positive": "same", "negative": "same"}] * 30}))
    text = run("pairs", "inspect", "p.json", "--text").stdout
    assert "more (--json lists all)" in text and len(text.splitlines()) < 30


def test_a_broken_file_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes('{"pairs": []}'.encode("utf-16"))
    result = run("pairs", "inspect", "p.json")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: failed to read pair set p.json: it is UTF-16, expected UTF-8\n")


CAA = [
    {"question": "What now?\n\nChoices:\n(A) rest\n(B) run", "answer_matching_behavior": "(A)", "answer_not_matching_behavior": "(B)"},
    {"question": "And then?", "answer_matching_behavior": "(A)", "answer_not_matching_behavior": "(A)"},
    {"question": "Broken"},
]


def test_import_writes_pairs_and_lists_what_it_left_out(run: Run, tmp_path: Path) -> None:
    (tmp_path / "caa.json").write_text(json.dumps(CAA))
    result = run("pairs", "import", "caa.json", "--format", "caa", "--trait", "rest", "-o", "out.json")
    assert (result.returncode, result.stdout) == (0, "out.json\n"), result.stderr
    assert "Left out: record 3: " in result.stderr and result.stderr.splitlines()[-1].endswith("left out")
    pairs = ster.PairSet.load(tmp_path / "out.json")
    assert pairs.trait_name == "rest"
    assert pairs.pairs[0].positive == "What now?\n\nChoices:\n(A) rest\n(B) run\n(A)"
    run("pairs", "import", "caa.json", "-f", "caa", "--style", "messages", "-o", "out.json")
    assert ster.PairSet.load(tmp_path / "out.json").pairs[0].negative == [
        {"role": "user", "content": CAA[0]["question"]},
        {"role": "assistant", "content": "(B)"},
    ]


def test_import_of_suffixes_with_line_breaks_from_a_shell(run: Run, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(["I think", "That"]))
    template = r"Be {persona}.\n{text}"
    personas = ("--positive-persona", "glad", "--negative-persona", "sad")
    result = run("pairs", "import", "s.json", "--format", "suffixes", "--template", template, *personas)
    assert (result.returncode, result.stdout) == (0, "pairs.json\n"), result.stderr
    assert ster.PairSet.load(tmp_path / "pairs.json").pairs[1].negative == "Be sad.\nThat"


def test_import_to_stdout_and_never_over_its_input(run: Run, tmp_path: Path) -> None:
    (tmp_path / "caa.json").write_text(json.dumps(CAA))
    found = run("pairs", "import", "caa.json", "--format", "caa", "-o", "-")
    assert len(json.loads(found.stdout)["pairs"]) == 1 and "1 pair from caa" in found.stderr
    over = run("pairs", "import", "caa.json", "-o", "caa.json")
    assert (over.returncode, over.stdout) == (1, "") and "it is the input caa.json" in over.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["caa.json"]


def test_import_hints_are_options_of_the_command(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("good,bad\na,b\nc,d\n")
    (tmp_path / "b.csv").write_text("statement,label\na,1\nb,0\n")
    (tmp_path / "lines.txt").write_text("Act calm, now\nSay so\n")
    hint = run("pairs", "import", "a.csv").stderr.splitlines()[1]
    assert hint.startswith("hint: its columns are good, bad: name two columns with `--positive-column` and `--negative-column`, or ")
    assert run("pairs", "import", "a.csv", "--format", "two-column").stderr.splitlines()[1] == "hint: name it with `--positive-column`"
    hint = run("pairs", "import", "b.csv").stderr.splitlines()[1]
    assert "`--pair-by` for csv" in hint and "`--positive-persona`" in hint and "`--format`" in hint
    hint = run("pairs", "import", "b.csv", "--format", "csv").stderr.splitlines()[1]
    assert hint == "hint: give `--pair-by` order (neighbours), column:NAME (the same value there) or random:SEED"
    hint = run("pairs", "import", "lines.txt").stderr.splitlines()[1]
    assert hint.startswith("hint: cvector needs two files, the positive one first; ")


def test_inspect_under_a_template_shows_what_ends_every_side(run: Run, toy_copy: Path, tmp_path: Path) -> None:
    (toy_copy / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}is calm and .")
    pairs = [{"positive": "the sea ", "negative": "the storm"}, {"positive": "the lake", "negative": "the rain"}]
    (tmp_path / "p.json").write_text(json.dumps({"pairs": pairs}))
    text = run("pairs", "inspect", "p.json", "--model", toy_copy, "--text").stdout
    assert "ends in white space; the chat template goes on after it" in text and "then the last token" not in text
    assert "Pair 0 ends in 'is' 'calm' 'and' '.'" in text
    raw = run("pairs", "inspect", "p.json", "--model", toy_copy, "--text", "--chat-template", "off").stdout
    assert "which is then the last token of a text read as it is" in raw and "Pair 0 ends in" not in raw


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("none.json",), "failed to read none.json: no such file or directory"),
        (("caa.json", "--format", "what"), 'unknown pair format "what"; expected '),
        (("caa.json", "--output", "no/p.json"), "failed to write no/p.json: no folder"),
        (("caa.json", "--format", "tuples"), "failed to import caa.json as tuples: "),
    ],
)
def test_import_refuses(run: Run, tmp_path: Path, args: tuple[str, ...], sentence: str) -> None:
    (tmp_path / "caa.json").write_text(json.dumps(CAA))
    result = run("pairs", "import", *args)
    assert (result.returncode, result.stdout) == (1, "") and result.stderr.startswith(f"Error: {sentence}")
    assert [path.name for path in tmp_path.iterdir()] == ["caa.json"]

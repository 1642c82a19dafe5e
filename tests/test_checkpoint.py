import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ster
from ster.checkpoint import find_checkpoint
from ster.errors import CheckpointError, ConfigError, InputError


def test_the_name_is_the_folders(toy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_checkpoint(toy_dir).name == "toy-llama"
    assert find_checkpoint(f"{toy_dir}/").name == "toy-llama"
    (tmp_path / "link").symlink_to(toy_dir)
    assert find_checkpoint(tmp_path / "link").name == "toy-llama"
    monkeypatch.chdir(toy_dir)
    assert find_checkpoint(".").name == "toy-llama"


def test_a_snapshot_in_a_hugging_face_cache_has_its_hub_name(toy_dir: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--ORG--NAME--x" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for file in toy_dir.iterdir():
        (snapshot / file.name).symlink_to(file)
    checkpoint = find_checkpoint(snapshot)
    assert (checkpoint.name, checkpoint.revision) == ("ORG/NAME--x", "0123abcd")
    assert find_checkpoint(snapshot, "0123abcd").revision == "0123abcd"
    with pytest.raises(InputError, match="revision `main` cannot be chosen: .* is revision 0123abcd"):
        find_checkpoint(snapshot, "main")
    assert ster.load(snapshot).activations(["the sea"]).source.model_revision == "0123abcd"


def test_a_plain_folder_has_no_revision(toy_dir: Path) -> None:
    with pytest.raises(InputError, match="revision `main` cannot be chosen: .* is a local folder and has none"):
        ster.load(toy_dir, revision="main")


@pytest.mark.parametrize("name", ["with space", "caf\u00e9", "-dash", "models--x"])
def test_any_folder_name_will_do(toy_dir: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(toy_dir, tmp_path / name))
    model = ster.load(folder)
    assert model.name == name
    assert model.activations(["the sea"]).values.shape == (1, 4, 64)


def test_what_is_missing_is_named(toy_copy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        ster.load(tmp_path / "nowhere")
    assert str(caught.value) == f"model directory is missing: {tmp_path / 'nowhere'}"
    with pytest.raises(CheckpointError, match="model path is not a directory"):
        ster.load(toy_copy / "config.json")
    for file, noun in (("tokenizer.json", "tokenizer"), ("config.json", "model config")):
        (toy_copy / file).unlink()
        with pytest.raises(CheckpointError) as caught:
            ster.load(toy_copy)
        assert str(caught.value) == f"{noun} is missing: {toy_copy / file}"


def test_no_weights_is_a_plain_sentence(toy_copy: Path) -> None:
    (toy_copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model directory contains no safetensors weights"):
        ster.load(toy_copy)


def test_a_byte_order_mark_is_accepted(toy_copy: Path, change: Callable[..., None]) -> None:
    change(toy_copy / "tokenizer_config.json", chat_template="{{ messages[0].content }} answer")
    for file in ("config.json", "tokenizer_config.json"):
        path = toy_copy / file
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert ster.load(toy_copy).prompt_tokens("the") == [3, 51]


def test_a_broken_tokenizer_config_is_refused(toy_copy: Path) -> None:
    for content in ("{", "[]"):
        (toy_copy / "tokenizer_config.json").write_text(content)
        with pytest.raises(ConfigError, match="invalid JSON in .*tokenizer_config.json"):
            ster.load(toy_copy)


def test_home_is_not_needed(toy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert ster.load(toy_dir).name == "toy-llama"


@pytest.mark.parametrize(
    "file",
    [
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    ],
)
def test_a_link_that_leads_nowhere_is_not_an_absent_file(toy_copy: Path, file: str) -> None:
    (toy_copy / file).unlink(missing_ok=True)
    (toy_copy / file).symlink_to("../../blobs/0123")
    with pytest.raises(CheckpointError) as caught:
        ster.load(toy_copy)
    assert str(caught.value) == f"failed to read {toy_copy / file}: it is a link to ../../blobs/0123, which is missing"


def test_a_folder_that_may_not_be_searched(toy_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("ster._files.os.lstat", refuse)
    with pytest.raises(CheckpointError, match="failed to read .*: permission denied"):
        find_checkpoint(toy_copy)


def test_a_name_that_is_not_utf_8(toy_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"m\xff")
    shutil.copytree(toy_dir, folder)
    model = ster.load(folder)
    assert model.name == "m\ufffd"
    for name in ("a.json", "a.npz", "a.safetensors"):
        path = model.activations(["the sea"]).save(tmp_path / name)
        assert ster.ActivationArtifact.load(path).model == "m\ufffd"


def test_a_locale_without_utf_8_changes_nothing(toy_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(toy_dir, tmp_path / "caf\u00e9")
    code = "import sys, ster; m = ster.load(sys.argv[1]); print(ascii(m.name), m.activations(['the sea']).values.shape)"
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    line = [sys.executable, "-c", code, str(tmp_path / "caf\u00e9")]
    result = subprocess.run(line, env=env, capture_output=True, text=True)
    assert result.stdout == "'caf\\xe9' (1, 4, 64)\n", result.stderr


def test_paths_that_are_none() -> None:
    with pytest.raises(CheckpointError, match="embedded null byte"):
        ster.load("a\0b")
    with pytest.raises(CheckpointError, match="model path is empty"):
        ster.load("")
    with pytest.raises(InputError, match="the model must be a path, found NoneType"):
        ster.load(None)  # type: ignore[arg-type]

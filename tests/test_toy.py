import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import ster
from ster.errors import FileError, InputError
from ster.toy import VOCAB, WORDS, toy_files, write_toy_model

PROMPT = "the sea is calm and quiet tonight ."


def test_the_bundled_folder_is_what_the_recipe_makes(toy_dir: Path) -> None:
    files = toy_files()
    assert sorted(path.name for path in toy_dir.iterdir()) == sorted([*files, "make.py"])
    for name, content in files.items():
        assert (toy_dir / name).read_bytes() == content, name


def test_the_bytes_are_these() -> None:
    digest = hashlib.sha256(toy_files()["model.safetensors"]).hexdigest()
    assert digest == "c242e145baf2ece7e50c5f4e3e257373a93d89e9bfb8268505d84958f77870f0"


def test_written_files_are_ordinary_files(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path / "a" / "b")
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {0o666 & ~_umask()}


def _umask() -> int:
    import os

    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_other_libraries_read_it(toy_dir: Path) -> None:
    weights = load_file(toy_dir / "model.safetensors")
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}
    assert sum(array.size for array in weights.values()) == 156_608
    tokenizer = Tokenizer.from_file(str(toy_dir / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == len(VOCAB) == 67 == json.loads((toy_dir / "config.json").read_text())["vocab_size"]
    assert tokenizer.encode(" ".join(WORDS)).ids == list(range(3, 67))
    assert tokenizer.encode("<s>unheard</s>").ids == [1, 0, 2]


def test_it_reproduces_the_published_numbers(toy_model: ster.Model) -> None:
    acts = toy_model.activations([PROMPT])
    assert acts.values[0, 0, :3].round(4).tolist() == pytest.approx([0.0711, -0.0236, -0.0592], abs=1e-7)
    assert acts.values[0, 3, :3].round(4).tolist() == pytest.approx([0.1997, 0.0344, -0.0405], abs=1e-7)


def test_nothing_of_the_users_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(FileError) as caught:
        write_toy_model(tmp_path)
    assert str(caught.value) == f"failed to write {tmp_path / 'README.md'}: a file of that name with other content exists"
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"] and (tmp_path / "README.md").read_text() == "mine"
    with pytest.raises(InputError, match="the folder must have a name"):
        write_toy_model("")


def test_writing_it_again_is_fine(tmp_path: Path) -> None:
    write_toy_model(tmp_path)
    assert write_toy_model(tmp_path) == tmp_path
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == toy_files()

import io
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import ster
from ster.artifacts import ActivationArtifact, Provenance, TokenActivations
from ster.errors import ArtifactError, FileError, InputError

SOURCE = Provenance("toy-llama")
AWKWARD = [1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, 3.4028235e38, -0.0, 0.0, 0.1, 1 / 3, 16777216.0, 1e16, 9.999999e-5, 123456.79]
floats = st.integers(0, 2**32 - 1).map(lambda bits: np.uint32(bits).view(np.float32)).filter(np.isfinite)


def artifact(values: Any, **fields: Any) -> ActivationArtifact:
    array = np.array(values, np.float32)
    return ActivationArtifact(array, list(range(array.shape[1])), [f"prompt {i}" for i in range(array.shape[0])], SOURCE, **fields)


def json_of(acts: ActivationArtifact) -> str:
    buffer = io.BytesIO()
    acts.write(buffer, "json")
    return buffer.getvalue().decode()


def digits(text: str) -> int:
    return len(text.lower().lstrip("-").split("e")[0].replace(".", "").strip("0"))


def test_the_document_has_these_keys_in_this_order() -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    acts = ActivationArtifact(values, [0, 9, 10], ['a "quote"', "\u2028\0"], Provenance("toy-llama"))
    document = json.loads(json_of(acts))
    assert list(document) == ["schema_version", "product", "model", "model_revision", "hidden_size", "records"]
    assert document["schema_version"] == 1 and document["product"] == "ster" and document["model"] == "toy-llama"
    assert document["model_revision"] is None and document["hidden_size"] == 4
    assert [list(record) for record in document["records"]] == [["prompt", "layers"]] * 2
    assert [record["prompt"] for record in document["records"]] == acts.prompts
    assert [list(record["layers"]) for record in document["records"]] == [["0", "9", "10"]] * 2
    assert document["records"][1]["layers"]["10"] == [20.0, 21.0, 22.0, 23.0]


@given(values=st.lists(floats, min_size=1, max_size=50))
def test_json_numbers_are_the_shortest_that_read_back_to_the_same_bits(values: list[np.float32]) -> None:
    text = json_of(artifact([[values]]))
    numbers = text[text.index("[", text.index('"0"')) + 1 : text.index("]")].split(",")
    for number, value in zip(numbers, values, strict=True):
        assert np.float32(number).view(np.uint32) == value.view(np.uint32)
        assert np.float32(json.loads(number)).view(np.uint32) == value.view(np.uint32)  # by way of a double
        assert digits(number) == digits(np.format_float_scientific(value, unique=True))


def test_awkward_numbers_survive_every_format(tmp_path: Path) -> None:
    acts = artifact([[AWKWARD]])
    for name in ("a.json", "a.safetensors", "a.npz"):
        acts.save(tmp_path / name)
        loaded = ActivationArtifact.load(tmp_path / name)
        assert loaded.values.tobytes() == acts.values.tobytes()
        assert (loaded.layers, loaded.prompts, loaded.model) == (acts.layers, acts.prompts, acts.model)


def test_writing_json_is_fast() -> None:
    acts = artifact(np.random.default_rng(0).normal(size=(20, 30, 576)))
    buffer = io.BytesIO()
    start = time.process_time()
    acts.write(buffer, "json")
    middle = time.process_time()
    json.dumps(acts.values.tolist())
    assert middle - start < time.process_time() - middle  # a tenth of it, on a machine of any speed


def test_the_same_artifact_is_the_same_bytes(tmp_path: Path) -> None:
    acts = artifact(np.random.default_rng(0).normal(size=(2, 3, 4)))
    for format in ("json", "safetensors", "npz"):
        paths = [acts.save(tmp_path / name, format=format) for name in ("a", "b")]
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_arrays_come_with_what_they_are(tmp_path: Path) -> None:
    source = Provenance("ORG/NAME", "abc", "applied", "bf16")
    acts = ActivationArtifact(np.ones((2, 1, 4), np.float32), [3], ["a", "\0 b \0"], source, "mean")
    acts.save(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "numpy") as file:
        metadata = file.metadata()
        assert file.get_tensor("activations").shape == (2, 1, 4)
    assert metadata == {
        "schema_version": "1",
        "product": "ster",
        "model": "ORG/NAME",
        "model_revision": "abc",
        "hidden_size": "4",
        "layers": "[3]",
        "prompts": '["a", "\\u0000 b \\u0000"]',
        "position": "mean",
        "point": "pre_steer",
        "chat_template": "applied",
        "precision": "bf16",
    }
    acts.save(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        assert file["activations"].dtype == np.float32
        assert json.loads(str(file["metadata"]))["layers"] == [3]
    for name in ("a.npz", "a.safetensors"):
        loaded = ActivationArtifact.load(tmp_path / name)
        assert (loaded.source, loaded.position, loaded.prompts, loaded.layers) == (source, "mean", acts.prompts, [3])


def test_every_token_is_one_array_per_prompt(tmp_path: Path) -> None:
    rows = [np.ones((2, 3, 4), np.float32), np.zeros((2, 1, 4), np.float32)]
    acts = TokenActivations(rows, [[5, 6, 7], [8]], [0, 3], ["a", "b"], SOURCE)
    acts.save(tmp_path / "a.npz")
    acts.save(tmp_path / "a.safetensors")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        assert sorted(file) == ["metadata", "prompt_0", "prompt_1", "tokens_0", "tokens_1"]
        assert file["prompt_0"].shape == (2, 3, 4)
        assert file["tokens_0"].tolist() == [5, 6, 7] and file["tokens_0"].dtype == np.int32
    with safe_open(tmp_path / "a.safetensors", "numpy") as file:
        assert file.get_tensor("prompt_1").shape == (2, 1, 4)
        assert file.get_tensor("tokens_1").tolist() == [8]
    for name in ("a.npz", "a.safetensors"):
        with pytest.raises(ArtifactError, match="position `all`"):
            ActivationArtifact.load(tmp_path / name)


def test_json_holds_the_last_token_only(tmp_path: Path) -> None:
    for acts in (artifact([[[1.0]]], position="mean"), TokenActivations([np.ones((1, 1, 1), np.float32)], [[1]], [0], ["a"], SOURCE)):
        with pytest.raises(InputError, match="JSON holds last-token activations only") as caught:
            acts.save(tmp_path / "a.json")
        assert caught.value.hint == "choose `--format safetensors` or `--format npz`"
    assert list(tmp_path.iterdir()) == []


def test_the_suffix_names_the_format_or_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no format is known by the name of .*; expected json, safetensors, or npz"):
        artifact([[[1.0]]]).save(tmp_path / "a.bin")
    with pytest.raises(InputError, match='unknown format "pickle"; expected json, safetensors, or npz'):
        artifact([[[1.0]]]).save(tmp_path / "a", format="pickle")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([[[math.nan]]], "activation vectors must have one finite, consistent width"),
        ([[[1.0, math.inf]]], "activation vectors must have one finite, consistent width"),
        ([[[]]], "activation vectors are empty"),
    ],
)
def test_vectors_that_are_none(values: Any, sentence: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        artifact(values)
    assert str(caught.value) == sentence


def test_values_must_fit_their_labels() -> None:
    ones: Any = np.ones((1, 2, 3), np.float32)
    for values, layers, prompts, sentence in [
        (ones.astype(np.float64), [0, 1], ["a"], "values must be float32 [prompts, layers, hidden], found float64 [1, 2, 3]"),
        (ones, [0], ["a"], "values must be [prompts, layers, hidden] = [1, 1, 3], found [1, 2]"),
        (ones, [1, 0], ["a"], "layers must be ascending, unique and not negative, found [1, 0]"),
        (ones, [], ["a"], "activation vectors are empty"),
    ]:
        with pytest.raises(ArtifactError) as caught:
            ActivationArtifact(values, layers, prompts, SOURCE)
        assert str(caught.value) == sentence
    acts = ActivationArtifact(ones, [0, 3], ["a"], SOURCE)
    assert acts.layer(3).shape == (1, 3)
    with pytest.raises(InputError, match="layer 1 is not in this artifact; it has 0, 3"):
        acts.layer(1)


GOOD: dict[str, Any] = {
    "schema_version": 1,
    "product": "ster",
    "model": "m",
    "model_revision": None,
    "hidden_size": 2,
    "records": [{"prompt": "a", "layers": {"0": [1.0, 2], "10": [3.0, 4.0]}}, {"prompt": "a", "layers": {"10": [3.0, 4.0], "0": [1, 2]}}],
}
WIDTH = "activation vectors must have one finite, consistent width"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"schema_version": 2}, "artifact schema 2 is unsupported; this Ster build reads schema 1"),
        ({"schema_version": True}, "artifact schema True is unsupported; this Ster build reads schema 1"),
        ({"product": "other"}, 'artifact belongs to product "other", not Ster'),
        ({"schema_version": None}, "artifact schema None is unsupported; this Ster build reads schema 1"),
        ({"model": 3}, "`model` must be text, `model_revision` text or null, `records` a list"),
        ({"records": []}, "activation vectors are empty"),
        ({"records": [{"prompt": "a", "layers": {}}]}, "activation vectors are empty"),
        ({"records": [{"prompt": "a", "layers": {"0": []}}]}, "activation vectors are empty"),
        ({"records": [{"prompt": "a", "layers": {"0": [1.0]}}]}, WIDTH),
        ({"records": [{"prompt": "a", "layers": {"0": [1.0, None]}}]}, WIDTH),
        ({"records": [{"prompt": "a", "layers": {"0": [1.0, 1e300]}}]}, WIDTH),
        ({"records": [{"prompt": "a", "layers": {"0": [1.0, math.nan]}}]}, WIDTH),
        ({"records": [{"prompt": "a", "layers": {"0": [1.0, "2"]}}]}, WIDTH),
        ({"records": [{"prompt": "a", "layers": {"-1": [1.0, 2.0]}}]}, "records[0] has a layer that is not a number: -1"),
        ({"records": [{"prompt": 1, "layers": {"0": [1.0, 2.0]}}]}, "records[0] must have a `prompt` (text) and `layers` (an object)"),
        (
            {"records": [{"prompt": "a", "layers": {"0": [1.0, 2.0]}}, {"prompt": "a", "layers": {"1": [1.0, 2.0]}}]},
            "records[1] has layers [1], records[0] has [0]",
        ),
    ],
)
def test_documents_that_break_the_schema(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(ArtifactError) as caught:
        ActivationArtifact.load(path)
    assert str(caught.value) == sentence


def test_documents_of_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD, indent=2).encode())
    acts = ster.ActivationArtifact.load(path)
    assert acts.layers == [0, 10] and acts.values.tolist() == [[[1, 2], [3, 4]]] * 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"PK\x03\x04junk", b"\x10\0\0\0\0\0\0\0{junk"])
def test_files_that_are_no_artifact(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(ArtifactError):
        ActivationArtifact.load(path)
    with pytest.raises(FileError, match="failed to read"):
        ActivationArtifact.load(tmp_path / "missing")

"""What a harvest writes, and what `open_harvest` reads back."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harvesting import PROMPTS, contents
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

import ster
from ster.errors import ArtifactError, ContextError, FileError, InputError, LayerError, SterError
from ster.harvest import corpus, load_directions
from ster.harvest.disk import on_disk


def test_the_layout(toy_model: ster.Model, tmp_path: Path) -> None:
    found = ster.harvest(toy_model, PROMPTS, tmp_path / "out", layers="0,3", shard_size=3)
    assert list(contents(tmp_path / "out")) == [
        "manifest.json",
        "shard_00000.safetensors",
        "shard_00001.safetensors",
        "shard_00002.safetensors",
        "stats.safetensors",
    ]
    expected = toy_model.activations(PROMPTS, "0,3", position="all")
    for shard, prompts in enumerate([(0, 1, 2), (3, 4, 5), (6,)]):
        tensors = load_file(tmp_path / "out" / f"shard_{shard:05d}.safetensors")
        assert sorted(tensors) == sorted(f"{what}_{i}" for i in prompts for what in ("prompt", "tokens"))
        for i in prompts:
            assert tensors[f"prompt_{i}"].dtype == np.float32 and tensors[f"tokens_{i}"].dtype == np.int32
            assert tensors[f"prompt_{i}"].tobytes() == expected.values[i].tobytes()
            assert tensors[f"tokens_{i}"].tolist() == expected.token_ids[i]
    counted = np.concatenate([each[:, 1:] for each in expected.values], axis=1).astype(np.float64)
    stats = load_file(tmp_path / "out" / "stats.safetensors")
    assert sorted(stats) == ["layer_indices", "mean", "std"] and stats["layer_indices"].tolist() == [0, 3]
    # Two float64 sums of a few hundred values, rounded to float32: at most one unit of the last place apart.
    np.testing.assert_array_almost_equal_nulp(stats["mean"], counted.mean(axis=1).astype(np.float32), 1)
    np.testing.assert_array_almost_equal_nulp(stats["std"], counted.std(axis=1).astype(np.float32), 1)
    assert found.mean is not None and found.mean.tobytes() == stats["mean"].tobytes()
    assert found.std is not None and found.std.tobytes() == stats["std"].tobytes()

    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["layout_version"] == 2 and manifest["model_id"] == "toy-llama" and manifest["layer_indices"] == [0, 3]
    assert manifest["weights_hash"] == toy_model.weights_hash and manifest["chat_template"] == "absent"
    assert (manifest["n_prompts"], manifest["n_rows"]) == (7, sum(map(len, expected.token_ids)))
    assert manifest["contents"] == "activations" and manifest["dtype"] == "float32"
    norms = np.linalg.norm(counted, axis=2).mean(axis=1)
    assert [manifest["mean_token_norm"][layer] for layer in ("0", "3")] == pytest.approx(norms, rel=1e-12)
    assert str(tmp_path) not in json.dumps(manifest)
    found.verify()


def test_equal_runs_are_equal_to_the_byte_wherever_they_are(toy_model: ster.Model, toy_dir: Path, tmp_path: Path) -> None:
    one = ster.load(toy_dir, threads=1)
    ster.harvest(toy_model, PROMPTS, tmp_path / "a", shard_size=2)
    ster.harvest(one, (each for each in PROMPTS), tmp_path / "b" / "c", shard_size=2)
    assert contents(tmp_path / "a") == contents(tmp_path / "b" / "c")


def test_the_default_layers_are_at_the_quarters(toy_model: ster.Model, tmp_path: Path) -> None:
    assert ster.harvest(toy_model, PROMPTS, tmp_path / "a").layers == [1, 2, 3]


@pytest.mark.parametrize(("dtype", "bits"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)])
def test_other_dtypes_are_rounded_once(toy_model: ster.Model, tmp_path: Path, dtype: Any, bits: Any) -> None:
    found = ster.harvest(toy_model, PROMPTS, tmp_path / "a", dtype=dtype)
    expected = toy_model.activations(PROMPTS, [1, 2, 3], position="all")
    with safe_open(tmp_path / "a" / "shard_00000.safetensors", "np") as file:
        assert file.get_slice("prompt_0").get_dtype() == {"bf16": "BF16", "f16": "F16"}[dtype]
    for prompt, values in zip(found, expected.values, strict=True):
        assert prompt.stored.tobytes() == values.astype(bits).tobytes()
        assert prompt.values.dtype == np.float32 and prompt.values.tobytes() == values.astype(bits).astype(np.float32).tobytes()
        assert prompt.layer(2).tobytes() == prompt.values[1].tobytes()
    assert found.dtype == dtype
    counted = np.concatenate([each.values[:, 1:] for each in found], axis=1).astype(np.float64)
    assert found.mean is not None
    np.testing.assert_array_almost_equal_nulp(found.mean, counted.mean(axis=1).astype(np.float32), 1)


def test_a_bf16_checkpoint_is_stored_as_bf16(toy_dir: Path, tmp_path: Path) -> None:
    assert ster.harvest(ster.load(toy_dir, precision="bf16"), PROMPTS, tmp_path / "a").dtype == "bf16"


def test_a_value_that_f16_cannot_hold_is_refused_by_place(toy_copy: Path, tmp_path: Path) -> None:
    from ster._safetensors import safetensors_bytes
    from ster.toy import tensors

    weights = dict(tensors())
    name = "model.layers.2.mlp.down_proj.weight"
    weights[name] = weights[name] * np.float32(1e7)
    (toy_copy / "model.safetensors").write_bytes(safetensors_bytes(weights, {"format": "pt"}))
    model = ster.load(toy_copy)
    with pytest.raises(InputError, match=r"^a value is larger than f16 can hold, 65504: layer 2, token \d of prompts\[0\]$"):
        ster.harvest(model, PROMPTS, tmp_path / "a", dtype="f16")
    largest = max(np.abs(prompt.values).max() for prompt in ster.harvest(model, PROMPTS, tmp_path / "b", dtype="bf16"))
    assert 65504 < largest < np.inf


def test_positions(toy_model: ster.Model, tmp_path: Path) -> None:
    whole = toy_model.activations(PROMPTS, [1, 2, 3], position="all")
    for name, positions, kept in [
        ("last", "last", lambda n: [n - 1]),
        ("some", [-1, 0], lambda n: sorted({0, n - 1})),
        ("first", 0, lambda n: [0]),
    ]:
        found = ster.harvest(toy_model, PROMPTS, tmp_path / name, positions=positions, shard_size=3)
        for prompt, values, ids in zip(found, whole.values, whole.token_ids, strict=True):
            rows = kept(len(ids))
            assert prompt.positions.tolist() == rows
            assert prompt.token_ids.tolist() == [ids[row] for row in rows]
            assert prompt.values.tobytes() == values[:, rows].tobytes()
    assert ster.open_harvest(tmp_path / "first").mean is None  # the first token of a prompt never counts
    with pytest.raises(InputError, match=r"^position 3 is not in prompts\[1\], which has 2 tokens$"):
        ster.harvest(toy_model, PROMPTS, tmp_path / "bad", positions="0,3")
    assert not (tmp_path / "bad").exists()


def test_projections(toy_model: ster.Model, tmp_path: Path) -> None:
    raw = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    found = ster.harvest(toy_model, PROMPTS, tmp_path / "a", directions=raw, layers="0..4")
    whole = toy_model.activations(PROMPTS, position="all")
    directions = load_directions(raw)
    for prompt, values in zip(found, whole.values, strict=True):
        assert prompt.values.shape == (4, len(prompt.token_ids), 5)
        exact = values.astype(np.float64) @ directions.values.T
        # One rounding to float32; the float64 sums behind it differ in bits that float32 shows one time in a million.
        np.testing.assert_allclose(prompt.values, exact, rtol=2**-23, atol=1e-12)
    projection = found.manifest["projection"]
    assert found.manifest["contents"] == "projections" and "mean_token_norm" not in found.manifest
    assert (projection["n_directions"], projection["normalized"], found.width) == (5, True, 5)
    with pytest.raises(ArtifactError, match="direction width 3 does not match activation width 64"):
        ster.harvest(toy_model, PROMPTS, tmp_path / "b", directions=np.ones(3))


def test_shards_end_before_they_are_too_large(toy_model: ster.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shards(name: str) -> list[int]:
        found = ster.harvest(toy_model, PROMPTS, tmp_path / name)
        return [len(shard["tokens"]) for shard in found.manifest["shards"]]

    assert shards("whole") == [7]
    monkeypatch.setattr(corpus, "SHARD_PROMPTS", 3)
    assert shards("prompts") == [3, 3, 1]
    monkeypatch.setattr(corpus, "SHARD_PROMPTS", 100)
    monkeypatch.setattr(corpus, "SHARD_TOKENS", 10)  # the prompts have 8, 2, 2, 2, 7, 1 and 3
    assert shards("tokens") == [2, 2, 2, 1]
    monkeypatch.setattr(corpus, "SHARD_TOKENS", 100)
    monkeypatch.setattr(corpus, "SHARD_BYTES", 3 * 64 * 4 * 3)
    assert shards("bytes") == [1, 1, 1, 1, 1, 1, 1]


@pytest.fixture(scope="module")
def harvested(toy_model: ster.Model, tmp_path_factory: pytest.TempPathFactory) -> ster.Harvest:
    return ster.harvest(toy_model, PROMPTS * 3, tmp_path_factory.mktemp("harvested") / "out", shard_size=4)


def test_reading_as_a_sequence(harvested: ster.Harvest) -> None:
    assert len(harvested) == 21 and harvested[-1].index == 20 and [each.index for each in harvested[18:]] == [18, 19, 20]
    assert [each.index for each in harvested] == list(range(21))
    with pytest.raises(IndexError, match="prompt 21 is outside the harvest's 21"):
        harvested[21]
    with pytest.raises(LayerError, match="layer 0 is not in this harvest; it has 1, 2, 3"):
        harvested.rows(0)
    assert harvested.rows(2).shape == (harvested.row_count, 64)
    assert not harvested[0].values.flags.writeable  # f32 lies in the file
    assert "toy-llama" in repr(harvested) and "prompt" not in repr(harvested[0]).split(":")[1]


def test_reading_is_lazy(harvested: ster.Harvest, monkeypatch: pytest.MonkeyPatch) -> None:
    from ster.harvest import reading

    opened: list[str] = []
    plain = reading._map
    monkeypatch.setattr(reading, "_map", lambda path, size: opened.append(path.name) or plain(path, size))
    fresh = ster.open_harvest(harvested.folder)
    assert opened == [] and len(fresh) == 21
    fresh[5], fresh[6]
    assert opened == ["shard_00001.safetensors"]
    for prompt in fresh:
        assert prompt.stored.base is not None  # a view of the map
    assert opened == ["shard_00001.safetensors", *(f"shard_0000{i}.safetensors" for i in (0, 2, 3, 4, 5))]


def test_a_row_knows_its_token_and_a_token_its_row(harvested: ster.Harvest) -> None:
    everything = [(prompt.index, int(position)) for prompt in harvested for position in prompt.positions]
    assert [harvested.locate(row) for row in range(harvested.row_count)] == everything
    assert [harvested.row_of(*place) for place in everything] == list(range(harvested.row_count))
    assert harvested.locate(-1) == everything[-1]
    for row in (harvested.row_count, -harvested.row_count - 1):
        with pytest.raises(IndexError):
            harvested.locate(row)
    with pytest.raises(IndexError, match="token 99 of prompt 0 was not kept"):
        harvested.row_of(0, 99)


@settings(deadline=None)
@given(
    shards=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4),
    positions=st.sampled_from(["all", "last", [0], [-1, 0]]),
)
def test_the_row_index_is_that_of_a_plain_list(harvested: ster.Harvest, shards: list[list[int]], positions: Any) -> None:
    """The index of a manifest, of any prompts, beside the list that it stands for."""
    from ster.harvest.positions import from_document, kept_positions

    entries, first_prompt, places = [], 0, []
    for tokens in shards:
        entries.append({"first_prompt": first_prompt, "first_row": len(places), "tokens": tokens})
        for length in tokens:
            places += [(first_prompt, int(position)) for position in kept_positions(from_document(positions), length)]
            first_prompt += 1
    capture = {"positions": positions, "point": "pre_steer"}
    manifest = {**harvested.manifest, "capture": capture, "shards": entries, "n_prompts": first_prompt, "n_rows": len(places)}
    index = ster.Harvest(Path("nowhere"), manifest)
    assert [index.locate(row) for row in range(len(places))] == places
    assert [index.row_of(*place) for place in places] == list(range(len(places)))


def test_torch_gets_the_dtype_stored(toy_model: ster.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ster.harvest(toy_model, PROMPTS, tmp_path / "a", dtype="bf16")[0]
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match="`as_torch` needs torch, which is not installed"):
        found.as_torch()
    torch = ModuleType("torch")
    torch.bfloat16, torch.from_numpy = ml_dtypes.bfloat16, lambda array: array  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    tensor = found.as_torch()
    assert tensor.dtype == ml_dtypes.bfloat16 and tensor.flags.writeable
    assert tensor.astype(np.float32).tobytes() == found.values.tobytes()
    exact = ster.harvest(toy_model, PROMPTS, tmp_path / "b")[0]
    assert exact.as_torch().tobytes() == exact.values.tobytes() and exact.as_torch().flags.writeable


def test_what_is_no_finished_harvest_is_refused(toy_model: ster.Model, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such folder"):
        ster.open_harvest(tmp_path / "none")
    with pytest.raises(InputError, match=r"is not a harvest: it has no manifest\.json"):
        ster.open_harvest(tmp_path)
    out = tmp_path / "a"
    found = ster.harvest(toy_model, PROMPTS, out, shard_size=4)
    shard = out / "shard_00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(ArtifactError, match=rf"is damaged: it has {len(whole) - 1} bytes, expected {len(whole)}") as caught:
        ster.open_harvest(out)[5]
    again = "the harvest's own command computes it again; remove one that was downloaded or copied, and fetch it again"
    assert caught.value.hint == again
    with pytest.raises(ArtifactError, match="is missing or damaged") as caught:
        found.verify()
    assert caught.value.hint == again
    shard.write_bytes(b"{" * len(whole))
    with pytest.raises(ArtifactError, match="not a shard of this harvest") as caught:
        ster.open_harvest(out)[5]
    assert caught.value.hint == f"`verify` compares the checksums of all files; {again}"
    manifest = out / "manifest.json"
    text = manifest.read_text()
    for change, sentence in [
        (text.replace('"layout_version": 2', '"layout_version": 3'), "harvest layout 3 is unsupported; this Ster build reads layout 2"),
        ("{", "invalid harvest manifest JSON in"),
        ("[]", "is not the manifest of a Ster harvest"),
        (text.replace('"n_shards"', '"m"').replace('"capture"', '"c"'), "is damaged: KeyError"),
    ]:
        manifest.write_text(change)
        with pytest.raises(ArtifactError, match=sentence):
            ster.open_harvest(out)


def test_one_shard_is_one(toy_model: ster.Model, tmp_path: Path) -> None:
    found = ster.harvest(toy_model, ["calm"], tmp_path / "a")
    assert repr(found).startswith("<ster.Harvest of toy-llama: activations, 1 prompt, 1 row, layers")
    with pytest.raises(InputError, match=r"was begun with 1 prompt, now there are 2$"):
        ster.harvest(toy_model, ["calm", "sea"], tmp_path / "a")
    ster.harvest(toy_model, ["calm", "sea"], tmp_path / "b")
    with pytest.raises(InputError, match=r"was begun with 2 prompts, now there is 1$"):
        ster.harvest(toy_model, ["calm"], tmp_path / "b")
    assert (on_disk(0, 1), on_disk(1, 2)) == ("0 of 1 shard is on disk", "1 of 2 shards are on disk")


def test_refusals_come_before_anything_is_written(toy_model: ster.Model, tmp_path: Path, words: Callable[[int], str]) -> None:
    out = tmp_path / "out"
    cases: list[tuple[dict[str, Any], type[SterError], str]] = [
        ({"prompts": []}, InputError, "prompt set contains no prompts"),
        ({"prompts": ["a", ""]}, InputError, r"prompt must not be empty: prompts\[1\]"),
        ({"prompts": ["the", words(300)]}, ContextError, r"prompt contains 300 tokens, model context allows fewer than 256: prompts\[1\]"),
        ({"layers": "9"}, LayerError, r"layer 9 is outside the model's 0\.\.3 range"),
        ({"layers": []}, LayerError, "at least one layer is required"),
        ({"dtype": "f64"}, InputError, 'unknown dtype "f64"; expected auto, f32, bf16 or f16'),
        ({"format": "csv"}, InputError, 'unknown format "csv"; expected safetensors or parquet'),
        ({"shard_size": 0}, InputError, "shard size must be between 1 and 65536 prompts, found 0"),
        ({"positions": "first"}, InputError, 'invalid position "first"'),
        ({"output": __file__}, FileError, "failed to create .*: a file of that name exists"),
        ({"output": Path(__file__).parent}, InputError, "is not empty and not a harvest: it has "),
    ]
    for changed, kind, sentence in cases:
        options: dict[str, Any] = {"prompts": PROMPTS, "output": out, **changed}
        with pytest.raises(kind, match=sentence):
            ster.harvest(toy_model, options.pop("prompts"), options.pop("output"), **options)
        assert not out.exists()


def test_a_disk_that_is_too_small_is_refused_before_the_work(
    toy_model: ster.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ster.harvest import run

    monkeypatch.setattr(run.shutil, "disk_usage", lambda path: SimpleNamespace(free=20_000))
    with pytest.raises(FileError, match=r"^the harvest takes 2\d\.\d kB more in .*, which has 20\.0 kB free$"):
        ster.harvest(toy_model, PROMPTS, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_progress_counts_tokens(toy_model: ster.Model, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    found = ster.harvest(toy_model, PROMPTS, tmp_path / "out", progress=lambda done, total: calls.append((done, total)))
    total = found.manifest["n_tokens"]
    assert calls[0] == (0, total) and calls[-1] == (total, total) and calls == sorted(calls)
    assert len(calls) > len(PROMPTS)  # each is told, however fast


def test_the_name_is_the_module_and_the_function(toy_model: ster.Model) -> None:
    import ster.harvest.reading
    from ster.harvest import harvest

    assert ster.harvest.harvest is harvest and callable(ster.harvest) and ster.harvest.open_harvest is ster.open_harvest

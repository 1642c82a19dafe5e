from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harvesting import PROMPTS, contents

import ster


@pytest.mark.parametrize(("dtype", "kind"), [("auto", pa.float32()), ("f16", pa.float16())])
def test_a_round_trip(toy_model: ster.Model, tmp_path: Path, dtype: str, kind: pa.DataType) -> None:
    found = ster.harvest(toy_model, PROMPTS, tmp_path / "a", layers="0,3", dtype=dtype, format="parquet", shard_size=4)  # type: ignore[arg-type]
    same = ster.harvest(toy_model, PROMPTS, tmp_path / "b", layers="0,3", dtype=dtype, shard_size=4)  # type: ignore[arg-type]
    assert list(contents(tmp_path / "a")) == ["manifest.json", "shard_00000.parquet", "shard_00001.parquet", "stats.safetensors"]
    for ours, theirs in zip(found, same, strict=True):
        assert ours.stored.tobytes() == theirs.stored.tobytes() and ours.stored.dtype == theirs.stored.dtype
        assert ours.token_ids.tolist() == theirs.token_ids.tolist() and ours.positions.tolist() == theirs.positions.tolist()
    assert (tmp_path / "a" / "stats.safetensors").read_bytes() == (tmp_path / "b" / "stats.safetensors").read_bytes()

    table = pq.read_table(sorted((tmp_path / "a").glob("*.parquet")))
    assert table.column_names == ["prompt", "position", "token", "layer_0", "layer_3"]
    assert table.schema.field("layer_3").type == pa.list_(kind, 64)
    assert table.num_rows == found.row_count
    assert list(zip(table["prompt"].to_pylist(), table["position"].to_pylist(), strict=True)) == [
        found.locate(row) for row in range(found.row_count)
    ]
    rows = np.array(table["layer_3"].to_pylist(), np.float32)
    assert rows.tobytes() == found.rows(3).tobytes()


def test_it_is_gone_on_with_to_the_byte(toy_model: ster.Model, tmp_path: Path) -> None:
    ster.harvest(toy_model, PROMPTS, tmp_path / "a", format="parquet", shard_size=3)
    ster.harvest(toy_model, PROMPTS, tmp_path / "b", format="parquet", shard_size=3)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    (tmp_path / "b" / "shard_00001.parquet").write_bytes(b"PAR1")
    ster.harvest(toy_model, PROMPTS, tmp_path / "b", format="parquet", shard_size=3)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_projections_and_chosen_tokens(toy_model: ster.Model, tmp_path: Path) -> None:
    raw = np.random.default_rng(0).normal(size=(3, 64))
    options = {"directions": raw, "positions": [0, -1]}
    found = ster.harvest(toy_model, PROMPTS, tmp_path / "a", format="parquet", **options)  # type: ignore[arg-type]
    same = ster.harvest(toy_model, PROMPTS, tmp_path / "b", **options)  # type: ignore[arg-type]
    assert [each.values.tobytes() for each in found] == [each.values.tobytes() for each in same]


def test_prompts_of_a_harvest_can_come_from_parquet(toy_model: ster.Model, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": PROMPTS}), tmp_path / "p.parquet")
    found = ster.harvest(toy_model, tmp_path / "p.parquet", tmp_path / "a", column="text")
    assert found.manifest["prompts_sha256"] == ster.harvest(toy_model, PROMPTS, tmp_path / "b").manifest["prompts_sha256"]

"""The random checkpoints and the page counts of `benchmarks/large.py`, at a tiny shape."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import ster

ROOT = Path(__file__).resolve().parents[1]


def benchmark(*args: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", *map(str, args)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "tiny"
    written = benchmark("benchmarks.random_checkpoint", folder, "tiny")
    assert written.returncode == 0, written.stderr
    return folder


def test_the_checkpoint_is_one_that_ster_reads(tiny: Path) -> None:
    model = ster.load(tiny)
    assert (model.layer_count, model.engine.weight_dtypes) == (4, ["BF16"])
    ids = model.encode("The water.")
    assert 0 not in ids and len(set(ids)) == 3
    values = model.activations(["The water."]).values
    assert np.abs(values).max() < 100


def test_every_weight_is_drawn_for_itself(tiny: Path) -> None:
    weights = {}
    for path in sorted(tiny.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        with safe_open(path, "numpy") as file:
            names = set(file.keys())
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                names.remove(name)
                first, end = entry["data_offsets"]
                bits = np.frombuffer(data[start + first : start + end], "<u2").astype(np.uint32)
                weights[name] = (bits << 16).view(np.float32)
        assert not names
    starts = {values[:32].tobytes() for values in weights.values()}
    assert len(starts) == len(weights) == 3 + 9 * 4
    matrices = np.concatenate([values for name, values in weights.items() if "norm" not in name])
    # 213,000 draws: the mean is within 5 * 0.02 / sqrt(213000) = 2.2e-4 but for one time in a million, the deviation within 0.8 %
    assert abs(matrices.mean()) < 2.2e-4 and abs(matrices.std() / 0.02 - 1) < 0.008 and (matrices != 0).all()


def test_a_checkpoint_that_is_there_is_kept_and_another_folder_left_alone(tiny: Path, tmp_path: Path) -> None:
    times = {path: path.stat().st_mtime_ns for path in tiny.iterdir()}
    again = benchmark("benchmarks.random_checkpoint", tiny, "tiny")
    assert (again.returncode, again.stderr) == (0, f"{tiny} is there already\n")
    assert {path: path.stat().st_mtime_ns for path in tiny.iterdir()} == times

    (tmp_path / "mine").write_text("mine")
    refused = benchmark("benchmarks.random_checkpoint", tmp_path, "tiny")
    assert (refused.returncode, refused.stderr) == (
        1,
        f"{tmp_path} holds something else than tiny: name another --dir, or remove it\n",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted on Linux only")
def test_the_whole_benchmark_runs(tiny: Path, tmp_path: Path) -> None:
    done = benchmark("benchmarks.large", "--shape", "tiny", "--dir", tiny, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "large-tiny.json").read_text())
    assert [point["name"] for point in result["points"]] == [
        "extract, cold",
        "extract, warm",
        "generate, cold",
        "generate, warm",
        "prefill, 128 tokens, warm",
        "decode, 32 after 32, warm",
    ]
    assert all(point["peak"] > point["anonymous"] > 0 and point["rate"] > 0 for point in result["points"])
    # What all of it reads is in the cache unless this machine has no memory to spare; not that all was gone before, for tmpfs has no disk.
    assert all(result["pages"]["generate"][f"layer {layer}"] > 0 for layer in range(4))

"""Workers of a Ray cluster compute the same bits, whatever becomes of them; this process writes as it does alone."""

import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harvesting import PROMPTS, contents, slow_command

import ster
from ster.errors import InputError, SterError, WorkerError
from ster.harvest import on_ray, ray_connection
from ster.harvest.directions import load_directions
from ster.harvest.ray_worker import Worker, open_model
from ster.harvest.shards import Form

FORM = Form("safetensors", "f32", [1], 64, "all")


@pytest.fixture(scope="module")
def model(toy_dir: Path) -> ster.Model:
    return ster.load(toy_dir, threads=1)


# In a process of its own: what `ray.init` starts is not tidied up, which pytest would say of this one.
CLUSTER = """
import ray
context = ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
print(context.address_info["address"], flush=True)
input()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of two processors of this machine."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")  # read when Ray is imported, which must be later
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        line = [sys.executable, "-c", CLUSTER]
        with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdin and process.stdout
            yield process.stdout.readline().strip()
            process.stdin.close()


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The shards that were handed to workers, by number."""
    found: list[int] = []
    plain = on_ray.OnRay.begin

    def begin(self: Any, shard: Any) -> Any:
        found.append(shard.index)
        return plain(self, shard)

    monkeypatch.setattr(on_ray.OnRay, "begin", begin)
    return found


@pytest.mark.parametrize(
    "options", [{}, {"positions": [0, -1], "directions": np.eye(3, 64), "format": "parquet"}], ids=["rows", "projections"]
)
def test_two_workers_write_what_one_process_writes(
    model: ster.Model, tmp_path: Path, cluster: str, begun: list[int], options: dict[str, Any]
) -> None:
    prompts, seen = PROMPTS * 12, []
    ster.harvest(model, prompts, tmp_path / "alone", shard_size=5, **options)
    ster.harvest(model, prompts, tmp_path / "ray", shard_size=5, ray=cluster, progress=lambda *now: seen.append(now), **options)
    assert begun == list(range(17))
    assert contents(tmp_path / "ray") == contents(tmp_path / "alone")
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_was_ended_is_gone_on_with(
    model: ster.Model, tmp_path: Path, cluster: str, begun: list[int], words: Callable[..., str], ending: signal.Signals
) -> None:
    prompts, folder = tmp_path / "p.json", tmp_path / "ray"
    prompts.write_text(json.dumps([words(60, seed) for seed in range(300)]))
    options = ["--shard-size", "2", "--threads", "1", "--ray", cluster]
    asked = ["harvest", "-m", str(model.path), "-p", str(prompts), "-o", str(folder), *options]
    with subprocess.Popen(slow_command(*asked), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and len(list(folder.glob("shard_*.safetensors"))) < 3:
            time.sleep(0.01)
        process.send_signal(ending)
        printed, said = process.communicate(timeout=60)
    assert printed == "" and process.returncode == (-signal.SIGKILL if ending == signal.SIGKILL else 128 + signal.SIGINT), said
    if ending == signal.SIGINT:
        assert "of 150 shards are on disk; the same command goes on from there\n" in said and "Traceback" not in said
    on_disk = (folder / "progress.jsonl").read_bytes().count(b"\n") - 1
    if ending == signal.SIGKILL:
        result = subprocess.run([sys.executable, "-m", "ster", *asked], capture_output=True, text=True, timeout=120)
        assert result.returncode == 0 and result.stdout == f"{folder}\n", result.stderr
        assert f"150 shards of f32, {on_disk} of them on disk\n" in result.stderr
    else:
        ster.harvest(model, prompts, folder, shard_size=2, ray=cluster)
        assert begun == list(range(on_disk, 150)) and on_disk >= 3
    ster.harvest(model, prompts, tmp_path / "alone", shard_size=2)
    assert contents(folder) == contents(tmp_path / "alone")


def test_a_worker_that_dies_is_started_again(model: ster.Model, tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = tmp_path / "died"

    class Mortal(Worker):  # in a function, so that workers get the class itself and not its name in this file
        def rows(self, names: Any, ids: Any) -> Any:
            if "prompts[6]" in names and not flag.exists():
                flag.touch()
                os._exit(1)
            return super().rows(names, ids)

    monkeypatch.setattr(on_ray, "Worker", Mortal)
    ster.harvest(model, PROMPTS, tmp_path / "ray", shard_size=2, ray=cluster)
    ster.harvest(model, PROMPTS, tmp_path / "alone", shard_size=2)
    assert flag.exists() and contents(tmp_path / "ray") == contents(tmp_path / "alone")


def test_a_worker_that_dies_each_time_is_a_plain_sentence_and_the_folder_is_gone_on_with(
    model: ster.Model, tmp_path: Path, cluster: str, begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mortal(Worker):
        def rows(self, names: Any, ids: Any) -> Any:
            if "prompts[6]" in names:
                os._exit(1)
            return super().rows(names, ids)

    with monkeypatch.context() as patch:
        patch.setattr(on_ray, "Worker", Mortal)
        patch.setattr(on_ray, "RESTARTS", 0)
        with pytest.raises(WorkerError, match=r"^a Ray worker failed: .*\w$") as caught:
            ster.harvest(model, PROMPTS, tmp_path / "ray", shard_size=2, ray=cluster, ray_workers=1)
    assert caught.value.hint == "the same command goes on from the shards that are on disk"
    begun.clear()
    ster.harvest(model, PROMPTS, tmp_path / "ray", shard_size=2, ray=cluster, ray_workers=1)
    ster.harvest(model, PROMPTS, tmp_path / "alone", shard_size=2)
    assert begun == [3] and contents(tmp_path / "ray") == contents(tmp_path / "alone")


def test_a_refusal_in_a_worker_is_the_refusal_of_one_process(model: ster.Model, tmp_path: Path, cluster: str) -> None:
    found: list[SterError] = []
    options: dict[str, Any] = {"directions": np.full(64, 1e39), "normalize": False, "shard_size": 2}
    for name, ray in (("alone", None), ("ray", cluster)):
        with pytest.raises(InputError, match=r"^a projection is larger than float32 can hold: layer 1, token \d of") as caught:
            ster.harvest(model, PROMPTS, tmp_path / name, ray=ray, ray_workers=ray and 1, **options)
        found.append(caught.value)
    assert (type(found[0]), str(found[0]), found[0].hint) == (type(found[1]), str(found[1]), found[1].hint)


def test_a_worker_with_another_model_is_refused(toy_copy: Path, tmp_path: Path, cluster: str) -> None:
    model = ster.load(toy_copy, threads=1)
    assert model.weights_hash and model.config_hash
    config = toy_copy / "config.json"
    config.write_text(config.read_text().replace("256", "255"))
    with pytest.raises(WorkerError, match=rf"^the Ray node .* has another model at {toy_copy}: config\.json \w+, expected \w+$"):
        ster.harvest(model, PROMPTS, tmp_path / "out", ray=cluster, ray_workers=1)
    assert not (tmp_path / "out").exists()


def test_what_a_worker_opens_is_the_model_the_harvest_was_begun_with(toy_copy: Path, toy_dir: Path, change: Callable[..., None]) -> None:
    job = on_ray.job_for(ster.load(toy_copy, threads=1), FORM, None)
    assert open_model(job).weights_hash == job.weights_hash
    rounded = on_ray.job_for(ster.load(toy_copy, precision="bf16"), FORM, None)
    assert open_model(rounded).precision == "bf16"
    with pytest.raises(WorkerError, match=r"has Ster .*, this process 0\.0\.1$"):
        open_model(replace(job, version="0.0.1"))
    with pytest.raises(WorkerError, match=r"has another model at .*: weights \w+, expected 00$"):
        open_model(replace(job, weights_hash="00"))
    change(toy_copy / "config.json", hidden_size=65)
    with pytest.raises(SterError, match=", on the Ray node ") as caught:
        open_model(job)
    assert not isinstance(caught.value, WorkerError)
    shutil.rmtree(toy_copy)
    with pytest.raises(WorkerError, match=rf"^the Ray node .* has no model at {toy_copy}$") as missing:
        open_model(job)
    assert missing.value.hint == "put it there on every node, or name a model of the Hub"


def test_what_the_cluster_has_no_room_for_is_refused(model: ster.Model, toy_dir: Path, tmp_path: Path, cluster: str) -> None:
    with pytest.raises(InputError, match="^the Ray cluster has room for 2, not for 3 workers of 1 thread$"):
        ster.harvest(model, PROMPTS, tmp_path / "out", ray=cluster, ray_workers=3)
    with pytest.raises(InputError, match="^the Ray cluster has room for 0, not for 1 worker of 64 threads$"):
        ster.harvest(ster.load(toy_dir, threads=64), PROMPTS, tmp_path / "out", ray=cluster)
    assert not (tmp_path / "out").exists()


def test_where_no_cluster_is_that_is_said_at_once(tmp_path: Path) -> None:
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999"):
        with pytest.raises(WorkerError, match=f"^failed to connect to Ray at {address}: \\w"):
            ray_connection._knock(address)
    ray_connection._knock("auto")


def test_auto_without_a_cluster_is_told_in_words_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        raise ConnectionError("Could not find any running Ray instance. Please specify the one to connect to by setting `--address` flag"
                              " or `RAY_ADDRESS` environment variable.")  # fmt: skip

    monkeypatch.setattr(ray_connection, "need_ray", lambda: SimpleNamespace(is_initialized=lambda: False, init=init))
    with (
        pytest.raises(WorkerError, match="^no Ray cluster runs on this machine, and RAY_ADDRESS names none$"),
        ray_connection.connected("auto"),
    ):
        pass


def test_a_connection_that_is_there_is_used_by_its_own_address_alone(model: ster.Model, tmp_path: Path, cluster: str) -> None:
    ray = ray_connection.need_ray()
    _, _, port = cluster.rpartition(":")
    ster.harvest(model, PROMPTS, tmp_path / "alone", shard_size=5)
    with ray_connection.connected(cluster):
        ster.harvest(model, PROMPTS, tmp_path / "ray", shard_size=5, ray=f"localhost:{port}", ray_workers=1)
        assert contents(tmp_path / "ray") == contents(tmp_path / "alone")
        for same in ("auto", "local", cluster, f"localhost:{port}", f"127.0.0.1:{port}"):
            with ray_connection.connected(same) as found:
                assert found is ray
            assert ray.is_initialized()
        others = ("nonsense", "", f":{port}", "localhost:1", f"192.0.2.77:{port}", f"no-such-host.invalid:{port}", f"ray://{cluster}")
        for other in others:
            with pytest.raises(WorkerError) as caught:
                ster.harvest(model, PROMPTS, tmp_path / "out", ray=other)
            assert str(caught.value) == f"this process is connected to the Ray cluster at {cluster}, which is not known as {other}"
            assert caught.value.hint == "`auto` goes on with the connection that is there, and `ray.shutdown()` ends it"
            assert ray.is_initialized() and not (tmp_path / "out").exists()
    assert not ray.is_initialized()


def test_an_address_of_no_form_is_refused_where_nothing_is_connected(model: ster.Model, tmp_path: Path, cluster: str) -> None:
    for address in ("nonsense", "nowhere://x"):
        with pytest.raises(WorkerError, match=f"^failed to connect to Ray at {address}: \\w"):
            ster.harvest(model, PROMPTS, tmp_path / "out", ray=address)
    assert not (tmp_path / "out").exists()


def test_options_are_refused_before_the_model_runs(
    model: ster.Model, tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(sentence: str, **options: Any) -> None:
        with pytest.raises(InputError, match=sentence):
            ster.harvest(model, PROMPTS, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    refused("^a number of Ray workers was given, and no Ray$", ray_workers=2)
    refused("^Ray workers must be 1 or more, found 0$", ray=cluster, ray_workers=0)
    monkeypatch.setitem(sys.modules, "ray", None)
    refused("^a harvest on Ray needs ray, which is not installed$", ray="local")
    stranger: Any = SimpleNamespace(name="behind-a-server")
    with pytest.raises(InputError, match="^a harvest on Ray takes a checkpoint that every worker can open, and behind-a-server is none$"):
        on_ray.job_for(stranger, FORM, None)


def test_directions_reach_workers(model: ster.Model) -> None:
    onto = load_directions(np.eye(2, 64), normalize=True)
    worker = Worker(on_ray.job_for(model, replace(FORM, width=2), onto))
    found = worker.rows(["a"], [model.prompt_tokens("calm")])
    assert not isinstance(found, SterError) and found[0].values.shape[2] == 2

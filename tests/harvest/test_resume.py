"""A harvest ended at any moment goes on where it was, and comes out the same to the last byte."""

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harvesting import PROMPTS, contents, die, slow_command

import ster
from ster.errors import FileError, InputError
from ster.harvest import compute, corpus, disk, run
from ster.harvest.disk import JOURNAL, locked

SIZE = 3  # prompts in a shard: three shards


@pytest.fixture(scope="module")
def expected(toy_model: ster.Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("expected") / "out"
    ster.harvest(toy_model, PROMPTS, folder, shard_size=SIZE)
    return contents(folder)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The shards computed, by their first prompt's name."""
    found: list[int] = []
    plain = compute.Here._rows

    def rows(self: Any, shard: Any) -> Any:
        found.append(shard.index)
        return plain(self, shard)

    monkeypatch.setattr(compute.Here, "_rows", rows)
    return found


class Crash(BaseException):
    """Something nobody catches."""


@pytest.mark.parametrize("call", ["fsync", "replace", "unlink"])
def test_a_failure_at_any_call_leaves_a_folder_to_go_on_with(
    toy_model: ster.Model, tmp_path: Path, expected: dict[str, bytes], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = getattr(os, call)
    for step in range(1, 100):
        folder, count = tmp_path / f"{call}-{step}", 0

        def failing(*args: Any, step: int = step, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == step:
                raise Crash
            return plain(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(disk.os, call, failing)
            with contextlib.suppress(Crash):
                ster.harvest(toy_model, PROMPTS, folder, shard_size=SIZE)
        ster.harvest(toy_model, PROMPTS, folder, shard_size=SIZE)
        assert contents(folder) == expected, step
        if count < step:
            break
    assert step > 2


def test_a_kill_at_any_step_is_gone_on_from(
    toy_model: ster.Model, toy_dir: Path, tmp_path: Path, expected: dict[str, bytes], computed: list[int]
) -> None:
    """SIGKILL, at every call that syncs, renames or removes: nothing is tidied up, and no shard in the journal is computed again."""
    prompts = tmp_path / "p.json"
    prompts.write_text(json.dumps(PROMPTS))
    for step in range(1, 100):
        folder = tmp_path / f"out-{step}"
        result = die(step, toy_dir, prompts, folder)
        if result.returncode == 0:
            break
        assert result.returncode == -signal.SIGKILL, result.stderr
        for path in folder.glob("shard_*.safetensors"):
            assert path.read_bytes() == expected[path.name]  # what has its name is whole
        journal = folder / JOURNAL
        on_disk = len(journal.read_bytes().split(b"\n")) - 2 if journal.exists() else 0
        finished = (folder / "manifest.json").exists()
        computed.clear()
        ster.harvest(toy_model, PROMPTS, folder, shard_size=SIZE)
        assert contents(folder) == expected, step
        assert computed == ([] if finished else list(range(on_disk, 3))), step
    assert step > 15 and contents(folder) == expected


def test_a_generator_is_gone_on_with(toy_model: ster.Model, tmp_path: Path, expected: dict[str, bytes], computed: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run._Work, "_write", ending_after(2))
        with pytest.raises(Crash):
            ster.harvest(toy_model, (each for each in PROMPTS), tmp_path / "out", shard_size=SIZE)
    computed.clear()
    ster.harvest(toy_model, (each for each in PROMPTS), tmp_path / "out", shard_size=SIZE)
    assert computed == [2] and contents(tmp_path / "out") == expected


def ending_after(shards: int, error: BaseException | None = None) -> Callable[..., Any]:
    plain = run._Work._write

    def write(self: Any, shard: Any, *args: Any) -> Any:
        if shard.index == shards:
            raise error or Crash()
        return plain(self, shard, *args)

    return write


@pytest.fixture
def half(toy_model: ster.Model, tmp_path: Path) -> Path:
    """A harvest of three shards, ended when two were on disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run._Work, "_write", ending_after(2))
        with pytest.raises(Crash):
            ster.harvest(toy_model, PROMPTS, tmp_path / "half", shard_size=SIZE)
    return tmp_path / "half"


def test_an_unfinished_harvest_is_not_opened(half: Path) -> None:
    with pytest.raises(InputError, match=r"the harvest in .* is not finished: 2 of 3 shards are on disk"):
        ster.open_harvest(half)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "grow"])
def test_a_damaged_shard_is_computed_again(
    toy_model: ster.Model, half: Path, expected: dict[str, bytes], computed: list[int], damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = half / "shard_00000.safetensors"
    for finished in (False, True):
        spoil(path, damage)
        computed.clear()
        ster.harvest(toy_model, PROMPTS, half, shard_size=SIZE, progress=True)
        assert computed == ([0] if finished else [0, 2])
        assert contents(half) == expected
        assert "shard_00000.safetensors is missing or damaged: it is computed again\n" in capfd.readouterr().err


class Eager(compute.Here):
    """Others that compute ahead: all of it at once, and never more than may wait."""

    ahead = 4
    waiting = 0

    def begin(self, shard: Any) -> Callable[[], Any]:
        Eager.waiting += 1
        assert Eager.waiting <= self.ahead + 1
        rows = self._rows(shard)

        def take() -> Any:
            Eager.waiting -= 1
            return rows

        return take


def test_shards_begun_before_their_turn_are_written_in_it(
    toy_model: ster.Model, tmp_path: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between shards that are on disk, whole or damaged."""
    prompts = PROMPTS * 3
    ster.harvest(toy_model, prompts, tmp_path / "plain", shard_size=1)
    ster.harvest(toy_model, prompts, tmp_path / "out", shard_size=1)
    for index in (0, 2, 3, 11, 20):
        spoil(tmp_path / "out" / f"shard_{index:05d}.safetensors", "flip")
    computed.clear()
    monkeypatch.setattr(run, "Here", Eager)
    ster.harvest(toy_model, prompts, tmp_path / "out", shard_size=1)
    assert computed == [0, 2, 3, 11, 20]
    ster.harvest(toy_model, prompts, tmp_path / "eager", shard_size=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "eager") == contents(tmp_path / "plain")


def spoil(path: Path, damage: str) -> None:
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
        return
    if damage == "flip":
        data[-1] ^= 1
    path.write_bytes(data[:-1] if damage == "truncate" else data + b"x" if damage == "grow" else data)


def test_a_kill_while_a_damaged_shard_of_a_finished_harvest_is_computed_again(
    toy_model: ster.Model, half: Path, expected: dict[str, bytes]
) -> None:
    ster.harvest(toy_model, PROMPTS, half, shard_size=SIZE)
    spoil(half / "shard_00001.safetensors", "flip")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run._Work, "_write", ending_after(1))
        with pytest.raises(Crash):
            ster.harvest(toy_model, PROMPTS, half, shard_size=SIZE)
    with pytest.raises(InputError, match="is not finished"):
        ster.open_harvest(half)
    ster.harvest(toy_model, PROMPTS, half, shard_size=SIZE)
    assert contents(half) == expected


def test_other_bits_for_a_damaged_shard_are_refused(toy_model: ster.Model, half: Path) -> None:
    journal = half / JOURNAL
    record = json.loads(journal.read_text().split("\n")[1])
    journal.write_text(journal.read_text().replace(record["sha256"], "0" * 64))
    with pytest.raises(InputError, match=r"shard_00000\.safetensors is not what was computed first: sha256 \w+, expected 0000"):
        ster.harvest(toy_model, PROMPTS, half, shard_size=SIZE)


@pytest.mark.parametrize("end", [b'{"file":"shard_00001.safet', b"\0\0\0\0\n", b"{}\n", b"[1]\n"])
def test_what_a_kill_leaves_at_the_end_of_the_journal_does_not_count(
    toy_model: ster.Model, half: Path, expected: dict[str, bytes], computed: list[int], end: bytes
) -> None:
    lines = (half / JOURNAL).read_bytes().split(b"\n")
    (half / JOURNAL).write_bytes(b"\n".join(lines[:2]) + b"\n" + end)
    ster.harvest(toy_model, PROMPTS, half, shard_size=SIZE)
    assert computed == [1, 2] and contents(half) == expected


def test_a_finished_harvest_is_checked_and_left(toy_model: ster.Model, half: Path, expected: dict[str, bytes], computed: list[int]) -> None:
    for _ in range(2):
        ster.harvest(toy_model, PROMPTS, half, shard_size=SIZE)
        assert contents(half) == expected
    assert computed == [2]
    (half / "stats.safetensors").unlink()
    ster.harvest(toy_model, PROMPTS, half, shard_size=SIZE)
    assert contents(half) == expected and computed == [2]


@pytest.mark.parametrize("finished", [False, True])
def test_other_arguments_are_refused_by_name(toy_model: ster.Model, toy_dir: Path, half: Path, toy_copy: Path, finished: bool) -> None:
    if finished:
        ster.harvest(toy_model, PROMPTS, half, shard_size=SIZE)
    before = contents(half)
    other = toy_copy.rename(toy_copy.parent / "toy-llama")
    (other / "config.json").write_text((other / "config.json").read_text().replace("256", "255"))
    direction = np.ones(64)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"layers": "1,3"}, "layers 1,2,3, now 1,3"),
        ({"dtype": "bf16"}, "dtype float32, now bfloat16"),
        ({"positions": "last"}, "positions all, now last"),
        ({"positions": [0, -1]}, "positions all, now -1,0"),
        ({"shard_size": None}, "shard size 3, now none"),
        ({"prompts": PROMPTS[:-1]}, "7 prompts, now there are 6"),
        ({"prompts": [*PROMPTS[:-1], "calm"]}, "other prompts"),
        ({"directions": direction}, "activations, now projections are asked for"),
        ({"model": ster.load(toy_dir, precision="bf16"), "dtype": "f32"}, "precision f32, now bf16"),
        ({"model": ster.load(other)}, "another config.json"),
        ({"format": "parquet"}, "format safetensors, now parquet"),
    ]
    for changed, sentence in cases:
        options: dict[str, Any] = {"shard_size": SIZE, **changed}
        with pytest.raises(InputError) as caught:
            ster.harvest(options.pop("model", toy_model), options.pop("prompts", PROMPTS), half, **options)
        assert str(caught.value) == f"the harvest in {half} was begun with {sentence}"
        assert contents(half) == before


def test_a_template_that_is_switched_off_is_another_argument_only_where_there_is_one(
    toy_dir: Path, toy_copy: Path, half: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    ster.harvest(ster.load(toy_dir, chat_template="off"), PROMPTS, half, shard_size=SIZE)
    assert contents(half) == expected
    (toy_copy / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    ster.harvest(ster.load(toy_copy), PROMPTS, tmp_path / "chat", shard_size=SIZE)
    with pytest.raises(InputError, match="was begun with chat template applied, now off"):
        ster.harvest(ster.load(toy_copy, chat_template="off"), PROMPTS, tmp_path / "chat", shard_size=SIZE)


def test_another_version_of_ster_is_refused(toy_model: ster.Model, half: Path) -> None:
    journal = half / JOURNAL
    journal.write_text(journal.read_text().replace(f'"ster":"{ster.__version__}"', '"ster":"0.0.9"'))
    with pytest.raises(InputError, match=rf"was begun with Ster 0\.0\.9, now {ster.__version__}"):
        ster.harvest(toy_model, PROMPTS, half, shard_size=SIZE)


def test_two_at_once_exclude_each_other(toy_model: ster.Model, tmp_path: Path) -> None:
    folder = tmp_path / "out"

    def prompts() -> Iterator[str]:
        program = "import sys, ster; ster.harvest(ster.load(sys.argv[1]), ['calm'], sys.argv[2])"
        other = subprocess.run(
            [sys.executable, "-c", program, str(toy_model.path), str(folder)], capture_output=True, text=True, timeout=120
        )
        assert "InputError: another process is at work on the harvest in" in other.stderr
        with pytest.raises(InputError, match="another process is at work"):  # nor twice in one
            ster.harvest(toy_model, PROMPTS, folder)
        yield from PROMPTS

    ster.harvest(toy_model, prompts(), folder)
    with locked(folder):
        pass
    assert not (folder / disk.LOCK).exists()


def test_a_full_disk_is_a_plain_sentence_and_can_be_gone_on_from(
    toy_model: ster.Model, tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.fsync
    for step in range(1, 100):
        folder, count = tmp_path / str(step), 0

        def full(descriptor: int, step: int = step) -> None:
            nonlocal count
            count += 1
            if count == step:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            plain(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(disk.os, "fsync", full)
            try:
                ster.harvest(toy_model, PROMPTS, folder, shard_size=SIZE)
                break
            except FileError as error:
                assert str(error).startswith(f"failed to write {folder}/") or str(error).startswith(f"failed to remove {folder}/")
                assert str(error).endswith(": no space left on device")
        ster.harvest(toy_model, PROMPTS, folder, shard_size=SIZE)
        assert contents(folder) == expected
    assert step > 10


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounting a small disk takes root")
def test_a_disk_that_is_really_full(toy_model: ster.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("no mounting here")
    try:
        monkeypatch.setattr(run.shutil, "disk_usage", lambda path: type("Free", (), {"free": 1 << 30})())
        prompts = PROMPTS * 8
        with pytest.raises(FileError, match=r"failed to write .*/shard_0000\d\.safetensors: no space left on device") as caught:
            ster.harvest(toy_model, prompts, small / "out", shard_size=7)
        assert caught.value.hint == "free some space; the same command then goes on from here"
        assert not list((small / "out").glob("*.part"))
        begun = len(list((small / "out").glob("shard_*")))
        assert begun > 0
        subprocess.run(["mount", "-o", "remount,size=1m", str(small)], check=True)
        ster.harvest(toy_model, prompts, small / "out", shard_size=7)
        ster.harvest(toy_model, prompts, tmp_path / "whole", shard_size=7)
        assert contents(small / "out") == contents(tmp_path / "whole")
    finally:
        subprocess.run(["umount", str(small)], check=True)


def killed_at_random(model: Path, prompts: Path, output: Path, options: list[str], kills: int, rng: random.Random) -> int:
    """Run the command until it ends by itself, killing it up to so many times before: some moment after some shard has come; how often."""
    asked = ["harvest", "-m", str(model), "-p", str(prompts), "-o", str(output), *options]
    done = 0
    for _ in range(kills):
        there = len(list(output.glob("shard_*")))
        with subprocess.Popen(slow_command(*asked), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            more = rng.randint(0, 6)
            while process.poll() is None and len(list(output.glob("shard_*"))) < there + more:
                time.sleep(0.002)
            time.sleep(rng.uniform(0.0, 0.1 if more else 1.0))
            done += process.poll() is None
            process.kill()
    subprocess.run([sys.executable, "-m", "ster", *asked], check=True, capture_output=True)
    return done


def test_kills_at_random_moments(toy_dir: Path, tmp_path: Path, words: Callable[..., str]) -> None:
    prompts = tmp_path / "p.json"
    prompts.write_text(json.dumps([words(60, seed) for seed in range(240)]))
    options = ["--shard-size", "12", "--threads", "1"]
    rng = random.Random(1)
    killed_at_random(toy_dir, prompts, tmp_path / "whole", options, 0, rng)
    kills = [killed_at_random(toy_dir, prompts, tmp_path / f"out-{i}", options, 3, rng) for i in range(2)]
    assert min(kills) > 0
    for i in range(2):
        assert contents(tmp_path / f"out-{i}") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_twenty_runs_of_500_prompts_killed_at_random_moments(tmp_path: Path) -> None:
    folder = os.environ.get("STER_SMOLLM2")
    if not folder:
        pytest.skip("STER_SMOLLM2 is not set: no SmolLM2")
    words = "the a river sea storm quiet letter seven green house runs over under why because morning".split()
    rng = random.Random(2)
    prompts = tmp_path / "p.txt"
    prompts.write_text("\n".join(" ".join(rng.choices(words, k=rng.randint(2, 12))) for _ in range(500)))
    model, options = Path(folder) / "bf16", ["--shard-size", "25", "--chat-template", "off"]
    killed_at_random(model, prompts, tmp_path / "whole", options, 0, rng)
    whole, kills = contents(tmp_path / "whole"), 0
    for i in range(20):
        kills += killed_at_random(model, prompts, tmp_path / f"out-{i}", options, rng.randint(1, 3), rng)
        assert contents(tmp_path / f"out-{i}") == whole, i
    assert kills >= 20


def test_a_disk_that_is_full_before_the_first_token_waits_is_told(
    toy_model: ster.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, bytes]
) -> None:
    """Few prompts stay in the buffer of their file until it is read."""

    def full(path: Path, mode: str) -> Any:
        path.touch()
        return open("/dev/full", mode)

    folder = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "open", full, raising=False)
        with pytest.raises(FileError, match=r"failed to write .*/tokens\.part: no space left on device") as caught:
            ster.harvest(toy_model, PROMPTS, folder, shard_size=SIZE)
        assert caught.value.hint and not folder.exists()
    ster.harvest(toy_model, PROMPTS, folder, shard_size=SIZE)
    assert contents(folder) == expected

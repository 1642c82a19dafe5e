"""Models by their id, from a Hub of this machine's own (`fake_hub.py`)."""

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")

from fake_hub import COMMIT, LATER, FakeHub, files_of, serving
from huggingface_hub import close_session, constants

import ster
from ster import hub as ours
from ster._safetensors import safetensors_bytes
from ster.cli import main
from ster.errors import CheckpointError, InputError, SterWarning
from ster.toy import tensors

ROOT = Path(__file__).resolve().parents[1]
LOOK_UP = ["GET /api/models/org/toy"]
OTHERS = """pytorch_model.bin consolidated.safetensors original/consolidated.00.pth onnx/model.onnx toy-Q4_K_M.gguf
    model.fp16.safetensors README.md .gitattributes chat_template.json tokenizer.model"""
JUNK = dict.fromkeys(OTHERS.split(), b"junk")


@pytest.fixture
def toy(toy_dir: Path) -> dict[str, bytes]:
    files = files_of(toy_dir)
    return {name: files[name] for name in ("config.json", "model.safetensors", "tokenizer.json")}


@pytest.fixture
def sharded(toy: dict[str, bytes]) -> dict[str, bytes]:
    """The toy model in three files and an index, with the files that are optional."""
    weights = tensors()
    names = sorted(weights)
    shards = {f"model-0000{part + 1}-of-00003.safetensors": names[part::3] for part in range(3)}
    index = {"metadata": {}, "weight_map": {name: shard for shard, held in shards.items() for name in held}}
    del toy["model.safetensors"]
    toy |= {shard: safetensors_bytes({name: weights[name] for name in held}, {"format": "pt"}) for shard, held in shards.items()}
    toy |= {"model.safetensors.index.json": json.dumps(index).encode(), "generation_config.json": b"{}"}
    return toy | {"tokenizer_config.json": b"{}", "special_tokens_map.json": b"{}", "chat_template.jinja": b"{{ messages[0].content }}"}


@pytest.fixture
def server() -> Iterator[FakeHub]:
    with serving() as hub:
        yield hub


@pytest.fixture
def cache(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache. The library reads its environment once, when it is imported, so its constants are set here."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 5)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr("time.sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.01)))  # between attempts
    monkeypatch.chdir(tmp_path)
    yield folder
    close_session()  # or the collector finds the connection in some other test, and warns


def snapshot(cache: Path, commit: str = COMMIT) -> set[str]:
    folder = cache / "models--org--toy" / "snapshots" / commit
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def refused(model: str = "org/toy", **options: Any) -> tuple[str, str | None]:
    with pytest.raises((CheckpointError, InputError)) as caught:
        ster.load(model, **options)
    return str(caught.value), caught.value.hint


@pytest.fixture
def command(server: FakeHub, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start `ster` in a process with an environment of its own, and a folder that has prompts.json."""
    shutil.copy(ROOT / "fixtures" / "prompts.json", tmp_path)

    def start(*args: object, **env: str) -> subprocess.Popen[str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING_FACE_", "STER_MODEL"))}
        ours = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": server.endpoint, "NO_PROXY": "127.0.0.1,localhost"}
        line = [sys.executable, "-m", "ster", *map(str, args)]
        pipe = subprocess.PIPE
        return subprocess.Popen(line, cwd=tmp_path, env=clean | ours | env, stdout=pipe, stderr=pipe, text=True)

    return start


EXTRACT = ("extract", "--model", "org/toy", "--prompts", "prompts.json")


# Which names are ids


@pytest.mark.parametrize("name", ["org/name", "HuggingFaceTB/SmolLM2-135M", "_a/b_", "01-ai/Yi-1.5-6B", "a/b.c"])
def test_an_id_has_two_parts(name: str) -> None:
    assert ours.is_id(name)


PATHS = """name ./name ../name /name ~/name org/ / a/b/c org\\name org/café org/.. .org/a org/a--b org/a..b -org/a org/a- org/.a org/a.
    org/a.git org/model.gguf x/model.safetensors org/~a C:/name org/name:tag org//name https://a/b"""


@pytest.mark.parametrize("name", ["", *PATHS.split(), "org/na me", "org/a\n", "o" * 97 + "/a"])
def test_what_looks_like_a_path_is_none(name: str, server: FakeHub, cache: Path) -> None:
    assert not ours.is_id(name)
    message, _ = refused(name)
    assert message.startswith(
        (
            "model directory is missing: ",
            "model file is missing: ",
            "model path is empty",
            "model path is not a dir",
            "model config is missing",
        )
    )
    assert server.asked() == []


def test_a_folder_wins(server: FakeHub, cache: Path, toy_dir: Path, tmp_path: Path) -> None:
    server.add("org/toy", {})
    shutil.copytree(toy_dir, tmp_path / "org" / "toy")
    assert ster.load("org/toy").name == "toy"
    assert refused(revision="main")[0] == "revision `main` cannot be chosen: org/toy is a local folder and has none"
    (tmp_path / "org" / "toy" / "config.json").unlink()
    assert refused()[0] == f"model config is missing: {Path('org/toy/config.json')}"
    shutil.rmtree(tmp_path / "org" / "toy")
    (tmp_path / "org" / "toy").symlink_to("nowhere")
    assert refused()[0] == "model directory is missing: org/toy"
    assert server.asked() == []


def test_a_path_object_is_a_path(server: FakeHub, cache: Path) -> None:
    server.add("org/toy", {})
    with pytest.raises(CheckpointError, match="model directory is missing: org/toy"):
        ster.load(Path("org/toy"))
    assert server.asked() == []


# What is downloaded


def test_a_model_by_its_id(server: FakeHub, cache: Path, toy: dict[str, bytes], toy_model: ster.Model) -> None:
    server.add("org/toy", toy)
    model = ster.load("org/toy")
    assert (model.name, model.revision) == ("org/toy", COMMIT)
    assert model.path == cache / "models--org--toy" / "snapshots" / COMMIT
    acts = model.activations(["the sea is calm"])
    assert (acts.model, acts.source.model_revision) == ("org/toy", COMMIT)
    assert acts.values.tobytes() == toy_model.activations(["the sea is calm"]).values.tobytes()
    assert model.weights_hash == toy_model.weights_hash
    assert server.asked()[0] == LOOK_UP[0]
    again = ster.load("org/toy")
    assert again.revision == COMMIT and server.asked() == LOOK_UP
    assert ster.load("org/toy", revision=COMMIT).revision == COMMIT and server.asked() == []


def test_only_what_is_read_is_fetched(server: FakeHub, cache: Path, toy: dict[str, bytes]) -> None:
    server.add("org/toy", toy | JUNK)
    ster.load("org/toy")  # a warning, as of files left aside, would be an error here
    assert snapshot(cache) == set(toy)
    asked = server.asked()
    assert not [path for path in asked for name in JUNK if path.endswith(f"/{name}")]
    assert len(asked) == 1 + 2 * len(toy)


def test_shards_are_those_the_index_names(server: FakeHub, cache: Path, sharded: dict[str, bytes], toy_model: ster.Model) -> None:
    other = {"model-00004-of-00003.safetensors": b"junk"}
    server.add("org/toy", sharded | JUNK | other)
    model = ster.load("org/toy")
    assert model.weights_hash == toy_model.weights_hash and model.chat_template == "applied"
    assert snapshot(cache) == set(sharded)
    server.asked()
    ster.load("org/toy", revision=COMMIT)
    assert server.asked() == []


def test_one_file_comes_before_an_index(server: FakeHub, cache: Path, toy: dict[str, bytes], sharded: dict[str, bytes]) -> None:
    single = {"model.safetensors": safetensors_bytes(tensors(), {"format": "pt"})}
    server.add("org/toy", sharded | single)
    ster.load("org/toy")
    assert "model.safetensors" in snapshot(cache)
    assert not [file for file in snapshot(cache) if "of-00003" in file or "index" in file]


def test_shards_in_a_subfolder(server: FakeHub, cache: Path, toy: dict[str, bytes]) -> None:
    index = {"weight_map": dict.fromkeys(tensors(), "weights/a.safetensors")}
    toy["weights/a.safetensors"] = toy.pop("model.safetensors")
    server.add("org/toy", toy | {"model.safetensors.index.json": json.dumps(index).encode()})
    assert ster.load("org/toy").layer_count == 4


@pytest.mark.parametrize(
    "file", ["../a.safetensors", "/a.safetensors", "a\\b.safetensors", "c:a.safetensors", "a//b.safetensors", "a.bin", 7]
)
def test_an_index_that_leads_elsewhere(server: FakeHub, cache: Path, toy: dict[str, bytes], file: object) -> None:
    del toy["model.safetensors"]
    index = json.dumps({"weight_map": {"x": file}}).encode()
    server.add("org/toy", toy | {"model.safetensors.index.json": index, str(file): b"junk"})
    message, _ = refused()
    assert message.endswith(f"places tensor `x` in {json.dumps(file)}, expected a safetensors file of the repository")
    assert not any(path.endswith(str(file)) for path in server.asked())


def test_an_index_that_names_what_is_not_there(server: FakeHub, cache: Path, sharded: dict[str, bytes]) -> None:
    del sharded["model-00003-of-00003.safetensors"]
    server.add("org/toy", sharded)
    message, _ = refused()
    assert message == "org/toy lacks the file `model-00003-of-00003.safetensors`, which its model.safetensors.index.json names"
    assert not [path for path in server.asked() if "of-00003" in path]
    sharded["model.safetensors.index.json"] = b"[]"
    server.add("org/toy", sharded, LATER)
    assert refused()[0].endswith("model.safetensors.index.json has no `weight_map` that places tensors in files")
    sharded["model.safetensors.index.json"] = b"{"
    server.add("org/toy", sharded, "f" * 40)
    assert refused()[0].startswith("invalid JSON in ")


# Revisions


def test_branches_tags_and_commits(server: FakeHub, cache: Path, toy: dict[str, bytes]) -> None:
    server.add("org/toy", toy, refs=("main", "v1", "refs/pr/7", "0123abc"))
    server.add("org/toy", toy | {"chat_template.jinja": b"{{ messages[0].content }}"}, LATER, refs=("next",))
    for revision, commit in (("v1", COMMIT), ("refs/pr/7", COMMIT), ("next", LATER), (COMMIT, COMMIT), (LATER, LATER), ("0123abc", COMMIT)):
        assert ster.load("org/toy", revision=revision).revision == commit
    assert ster.load("org/toy", revision="next").chat_template == "applied"
    assert ster.load("org/toy").chat_template == "absent"


def test_a_branch_that_moves(server: FakeHub, cache: Path, toy: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    server.add("org/toy", toy)
    assert ster.load("org/toy").revision == COMMIT
    server.add("org/toy", toy | {"generation_config.json": b'{"eos_token_id": 5}'}, LATER)
    server.asked()
    model = ster.load("org/toy")
    assert (model.revision, model.eos_token_ids) == (LATER, [2, 5])
    assert not [path for path in server.asked() if "/blobs/" in path]  # the weights are those of before
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert ster.load("org/toy").revision == LATER
    assert ster.load("org/toy", revision=COMMIT).revision == COMMIT


def test_no_such_revision(server: FakeHub, cache: Path, toy: dict[str, bytes]) -> None:
    server.add("org/toy", toy)
    hint = f"{server.endpoint}/org/toy/tree/main lists branches and tags"
    assert refused(revision="v9") == ("org/toy has no revision `v9`", hint)
    assert refused(revision="0123abc") == ("org/toy has no revision `0123abc`", "a commit has 40 digits")
    assert refused(revision="f" * 40) == (f"org/toy has no revision `{'f' * 40}`", hint)
    server.asked()
    for revision in ("", "a/../b", "../main", "/main", "a//b", ".a", "a b", "a\\b", "a\0b", "~a", "a:b"):
        assert refused(revision=revision) == (f"revision `{revision}` is no branch, tag or commit", None)
    assert server.asked() == [] and not (cache / "models--org--toy").exists()


# Without a network


def test_offline(server: FakeHub, cache: Path, sharded: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    server.add("org/toy", sharded, refs=("main", "v1"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hint = f"load it once without HF_HUB_OFFLINE; the cache is {cache}"
    assert refused() == ("org/toy is not in the cache, and HF_HUB_OFFLINE is set", hint)
    assert server.asked() == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    ster.load("org/toy")
    server.asked()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for revision in (None, "main", COMMIT):
        assert ster.load("org/toy", revision=revision).revision == COMMIT
    for revision in ("v1", LATER):
        assert refused(revision=revision) == (f"revision `{revision}` of org/toy is not in the cache, and HF_HUB_OFFLINE is set", hint)
    for shard in cache.glob("models--org--toy/snapshots/*/model-0000[23]*"):
        shard.unlink()
    lacking = "model-00002-of-00003.safetensors, model-00003-of-00003.safetensors"
    assert refused() == (f"the cache lacks {lacking} of org/toy at commit {COMMIT}, and HF_HUB_OFFLINE is set", hint)
    assert server.asked() == []


def test_a_link_to_a_blob_that_is_gone_is_mended(server: FakeHub, cache: Path, toy: dict[str, bytes]) -> None:
    server.add("org/toy", toy)
    ster.load("org/toy")
    for file in ("config.json", "model.safetensors"):
        (cache / "models--org--toy" / "snapshots" / COMMIT / file).resolve().unlink()
    assert ster.load("org/toy", revision=COMMIT).layer_count == 4


def test_a_cache_that_another_program_filled(
    server: FakeHub, cache: Path, sharded: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It need not know which files there are not, so a commit is looked up once more; offline the one that matters is asked after."""
    from huggingface_hub import snapshot_download

    del sharded["special_tokens_map.json"], sharded["tokenizer_config.json"]
    server.add("org/toy", sharded)
    snapshot_download("org/toy")
    server.asked()
    assert ster.load("org/toy", revision=COMMIT).revision == COMMIT
    assert server.asked() == [f"GET /api/models/org/toy/revision/{COMMIT}"]
    assert ster.load("org/toy", revision=COMMIT).revision == COMMIT
    assert server.asked() == []
    shutil.rmtree(cache / "models--org--toy" / ".no_exist")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.warns(SterWarning, match="the cache has no tokenizer_config.json of org/toy, and does not know whether there is one"):
        ster.load("org/toy")


def test_a_cache_that_cannot_be_written_is_read(
    server: FakeHub, cache: Path, toy: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add("org/toy", toy, refs=("main", "v1"))
    ster.load("org/toy")

    def full(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", full)
    assert ster.load("org/toy", revision="v1").revision == COMMIT


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_a_hub_that_is_down_is_made_up_for(server: FakeHub, cache: Path, toy: dict[str, bytes], status: int) -> None:
    server.add("org/toy", toy)
    what = "has had too many requests" if status == 429 else "is out of order"
    server.status, server.headers = {"/api/models": status}, {"Retry-After": "1"}
    assert refused() == (
        f"failed to look up org/toy: {server.endpoint} {what} (status {status})",
        f"there is no folder org/toy here, and nothing complete of it in {cache}",
    )
    server.status = {}
    ster.load("org/toy")
    server.status = {"/": status}
    with pytest.warns(SterWarning, match=f"{what} \\(status {status}\\): org/toy is read from the cache, at commit {COMMIT}"):
        assert ster.load("org/toy").revision == COMMIT
    assert refused(revision="v1")[0].startswith("failed to look up org/toy: ")
    server.asked()
    assert ster.load("org/toy", revision=COMMIT).revision == COMMIT and server.asked() == []


def test_no_network(server: FakeHub, cache: Path, toy: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    server.add("org/toy", toy)
    endpoint = "http://127.0.0.1:9"  # the port that discards, where nobody listens
    with monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", endpoint)
        message, _ = refused()
        assert message.startswith(f"failed to look up org/toy: {endpoint} cannot be reached (") and "refused" in message
    ster.load("org/toy")
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.warns(SterWarning, match="cannot be reached .*: org/toy is read from the cache, at commit 0123"):
        ster.load("org/toy")


def test_a_hub_that_says_nothing(server: FakeHub, cache: Path, toy: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    monkeypatch.setattr("time.sleep", time.sleep.__defaults__[0])  # type: ignore[union-attr, index]
    server.add("org/toy", toy)
    server.silence = 1.0
    start = time.monotonic()
    message, _ = refused()
    assert message == f"failed to look up org/toy: {server.endpoint} cannot be reached (timed out)"
    assert time.monotonic() - start < 30  # it would go on asking for minutes


def test_what_is_no_hub(server: FakeHub, cache: Path) -> None:
    server.html = True
    message, hint = refused()
    assert message.startswith(f"failed to look up org/toy: {server.endpoint} does not answer as the Hub does (")
    assert hint == "HF_ENDPOINT names another Hub"


def test_a_hub_whose_commits_are_none(server: FakeHub, cache: Path, toy: dict[str, bytes], tmp_path: Path) -> None:
    server.add("org/toy", toy, "../../../elsewhere")
    assert refused()[0] == (
        f"failed to look up org/toy: {server.endpoint} does not answer as the Hub does (no commit, or no list of files)"
    )
    assert not cache.exists() and not (tmp_path / "elsewhere").exists()


# Who may read


def test_no_such_model(server: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = f"org/toy is neither a folder here nor a model at {server.endpoint} that you may read"
    assert refused() == (message, "check the name; if the model is private, log in, with `hf auth login` or the token in HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert refused() == (message, "check the name; if the model is private, the account of your token must have access")
    monkeypatch.setenv("HF_TOKEN", "expired")
    assert refused() == (f"{server.endpoint} does not accept your token", "`hf auth login`, or HF_TOKEN, gives another one")


def test_a_private_model(server: FakeHub, cache: Path, toy: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    server.add("org/toy", toy).private = True
    assert refused()[0].startswith("org/toy is neither a folder here nor a model at ")
    monkeypatch.setenv("HF_TOKEN", "secret")
    server.requests.clear()
    ster.load("org/toy")
    tokens = {(host, token) for host, _, _, token in server.requests}
    assert tokens == {("127.0.0.1", "Bearer secret"), ("localhost", None)}


def test_a_gated_model(server: FakeHub, cache: Path, toy: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    server.add("org/toy", toy).gated = True
    message = "org/toy is gated: its owners give access to those who ask for it"
    ask = f"ask for access at {server.endpoint}/org/toy, "
    assert refused() == (message, ask + "and log in, with `hf auth login` or the token in HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "outsider")
    assert refused() == (message, ask + "with the account that your token is of")
    monkeypatch.setenv("HF_TOKEN", "secret")
    ster.load("org/toy")
    monkeypatch.delenv("HF_TOKEN")
    assert ster.load("org/toy").revision == COMMIT  # all of it is here


def test_a_model_that_was_closed(server: FakeHub, cache: Path, toy: dict[str, bytes]) -> None:
    server.add("org/toy", toy).disabled = True
    assert refused()[0] == f"{server.endpoint} refuses to let you read org/toy: Access to this resource is disabled."


# What a repository lacks


def test_no_safetensors(server: FakeHub, cache: Path, toy: dict[str, bytes]) -> None:
    del toy["model.safetensors"]
    start = "org/toy has no model.safetensors and no model.safetensors.index.json"
    server.add("org/toy", toy)
    assert refused() == (f"{start}; it has no weights at all", None)
    server.add("org/toy", toy | {"pytorch_model.bin": b"", "original/consolidated.00.pth": b""})
    message, hint = refused()
    assert message == f"{start}; found pytorch_model.bin, original/consolidated.00.pth" and hint is not None and "pickled" in hint
    server.add("org/toy", {f"toy-Q{bits}_0.gguf": b"" for bits in (4, 5, 6, 8)})
    assert refused() == (
        f"{start}; found toy-Q4_0.gguf, toy-Q5_0.gguf, toy-Q6_0.gguf and 1 more",
        "`hf download org/toy toy-Q4_0.gguf --local-dir FOLDER` brings a GGUF file; its path is what to load",
    )
    server.add("org/toy", toy | {"consolidated.safetensors": b""})
    assert refused() == (f"{start}; found consolidated.safetensors", None)
    assert not [path for path in server.asked() if "/resolve/" in path]


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_file_that_every_model_needs(server: FakeHub, cache: Path, toy: dict[str, bytes], file: str) -> None:
    del toy[file]
    server.add("org/toy", toy)
    assert refused() == (f"org/toy has no {file}", None)
    server.add("org/toy", toy | {"tokenizer.model": b""})
    hint = refused()[1]
    assert hint is None if file == "config.json" else hint is not None and "AutoTokenizer" in hint
    assert not [path for path in server.asked() if "/resolve/" in path]


# Downloads that fail


def test_no_room(server: FakeHub, cache: Path, toy: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    server.add("org/toy", toy)
    hint = "HF_HOME or HF_HUB_CACHE names another folder for the cache"
    with monkeypatch.context() as patch:
        patch.setattr("ster.hub.shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 9000, 9000))  # type: ignore[attr-defined]
        assert refused() == (f"org/toy needs 633.0 kB more in {cache}, where 9.0 kB are free", hint)
    assert not cache.exists()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.file_download.http_get", full)
        assert refused() == (f"failed to download config.json of org/toy: {cache} cannot be written: no space left on device", hint)
    assert ster.load("org/toy").layer_count == 4


def test_a_cache_that_is_a_file(server: FakeHub, cache: Path, toy: dict[str, bytes]) -> None:
    server.add("org/toy", toy)
    cache.write_text("")
    message, _ = refused()
    assert message.startswith(f"failed to download config.json of org/toy: {cache} cannot be written: ")


def test_a_connection_that_breaks_off(server: FakeHub, cache: Path, toy: dict[str, bytes]) -> None:
    server.add("org/toy", toy)
    server.cuts = 2
    assert ster.load("org/toy").layer_count == 4  # each time from where it was


def test_a_file_that_does_not_come(server: FakeHub, cache: Path, toy: dict[str, bytes]) -> None:
    server.add("org/toy", toy)
    hint = "files that are complete stay in the cache; run it again to go on"
    start = "failed to download model.safetensors of org/toy: "
    server.status = {"/blobs/": 503}
    assert refused() == (f"{start}{server.endpoint} is out of order (status 503)", hint)
    server.status = {"/resolve/": 500}
    assert refused() == (f"{start}{server.endpoint} is out of order (status 500)", hint)
    server.status = {"/blobs/": 429}
    assert refused() == (f"{start}{server.endpoint} has had too many requests (status 429)", hint)
    assert snapshot(cache) == {"config.json", "tokenizer.json"}
    server.status = {}
    server.asked()
    assert ster.load("org/toy").layer_count == 4
    assert len(server.asked()) == 3


def test_what_fails_says_nothing_of_its_own(
    server: FakeHub, cache: Path, toy: dict[str, bytes], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    server.add("org/toy", toy)
    server.cuts = 1
    ster.load("org/toy")
    server.status = {"/blobs/": 503}
    server.add("org/toy", toy | {"model.safetensors": toy["model.safetensors"] + b" "}, LATER)
    refused()
    assert capfd.readouterr() == ("", "") and not caplog.records


# What is said


def test_progress_counts_bytes(server: FakeHub, cache: Path, sharded: dict[str, bytes]) -> None:
    server.add("org/toy", sharded)
    calls: list[tuple[int, int]] = []
    ster.load("org/toy", progress=lambda done, total: calls.append((done, total)))
    total = sum(len(data) for name, data in sharded.items() if name != "model.safetensors.index.json")
    assert {each for _, each in calls} == {total}
    assert [done for done, _ in calls] == sorted(done for done, _ in calls) and calls[-1] == (total, total)
    calls.clear()
    ster.load("org/toy", progress=lambda done, total: calls.append((done, total)))
    assert calls == []


def test_what_the_callers_function_raises_passes(server: FakeHub, cache: Path, toy: dict[str, bytes]) -> None:
    server.add("org/toy", toy)

    def stop(done: int, total: int) -> None:
        raise OSError("enough")

    with pytest.raises(OSError, match="^enough$"):
        ster.load("org/toy", progress=stop)


def test_a_terminal_gets_a_bar(
    server: FakeHub, cache: Path, toy: dict[str, bytes], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add("org/toy", toy)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    ster.load("org/toy", progress=True)
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(f"Downloading org/toy, 633.0 kB, to {cache}\n") and "kB" in err.partition("\n")[2]


@pytest.mark.parametrize("found", ["0.36.2", "1.3.0"])
def test_an_old_library(cache: Path, monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr("huggingface_hub.__version__", found)
    message, hint = refused()
    assert message == f"models of the Hub need the extra `hub`: expected huggingface_hub 1.20 or later, found {found}"
    assert hint is not None and "pip install '.[hub]'" in hint


def test_no_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert refused()[0].startswith("models of the Hub need the extra `hub`: huggingface_hub cannot be imported: ")


# The commands


def test_extract_by_id(server: FakeHub, command: Callable[..., subprocess.Popen[str]], toy: dict[str, bytes], tmp_path: Path) -> None:
    server.add("org/toy", toy | JUNK, refs=("main", "v1")).private = True
    first = command(*EXTRACT, "--revision", "v1", "--output", "-", HF_TOKEN="secret")
    out, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    assert (json.loads(out)["model"], json.loads(out)["model_revision"]) == ("org/toy", COMMIT)
    assert err.startswith(f"Downloading org/toy, 633.0 kB, to {tmp_path}/home/hub\n") and len(err.splitlines()) == 2
    assert {token for host, _, path, token in server.requests if host == "127.0.0.1" and "agent" not in path} == {"Bearer secret"}
    assert {token for host, _, _, token in server.requests if host == "localhost"} == {None}
    assert snapshot(tmp_path / "home" / "hub") == set(toy)
    server.asked()
    for revision, env in ((COMMIT, {}), ("v1", {"HF_HUB_OFFLINE": "1"})):
        again = command(*EXTRACT, "--revision", revision, "--output", "-", **env)
        assert again.communicate(timeout=60)[0] == out
        assert server.asked() == []
    elsewhere = command(*EXTRACT, HF_HUB_CACHE=str(tmp_path / "elsewhere"), HF_TOKEN="secret")
    assert elsewhere.communicate(timeout=60)[0] == "activations.json\n"
    assert snapshot(tmp_path / "elsewhere") == set(toy)


def test_ctrl_c_in_a_download(
    server: FakeHub, command: Callable[..., subprocess.Popen[str]], toy: dict[str, bytes], tmp_path: Path
) -> None:
    server.add("org/toy", toy)
    server.delay = 1.0
    process = command(*EXTRACT)
    deadline = time.monotonic() + 60
    while not any("/blobs/" in path for _, _, path, _ in server.requests):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == "" and "Traceback" not in err and err.endswith("Interrupted.\n"), err
    home = tmp_path / "home" / "hub"
    assert snapshot(home) == {"config.json", "tokenizer.json"}
    offline = command(*EXTRACT, "--revision", COMMIT, HF_HUB_OFFLINE="1")
    assert f"the cache lacks model.safetensors of org/toy at commit {COMMIT}" in offline.communicate(timeout=60)[1]
    server.delay = 0.0
    server.asked()
    assert command(*EXTRACT).communicate(timeout=60)[0] == "activations.json\n"
    weights = (home / "models--org--toy" / "snapshots" / COMMIT / "model.safetensors").resolve()
    assert [path for path in server.asked() if path.startswith("GET")] == [*LOOK_UP, f"GET /blobs/{weights.name}"]


@pytest.mark.parametrize(
    "line",
    [
        "extract --prompts {fixtures}/prompts.json",
        "generate --max-new-tokens 1 --prompt 'the sea is calm'",
        "vector train --pairs {fixtures}/calm.json --layers 2",
        "vector optimize --pairs {fixtures}/calm.json --layers 2",
        "pairs inspect {fixtures}/calm.json",
    ],
)
def test_every_command_takes_an_id(
    server: FakeHub, cache: Path, toy: dict[str, bytes], line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    server.add("org/toy", toy, refs=("v1",))
    args = shlex.split(line.format(fixtures=ROOT / "fixtures"))
    assert main([*args, "--model", "org/toy", "--revision", "v1"]) == 0, capfd.readouterr().err
    assert server.asked()[0] == "GET /api/models/org/toy/revision/v1"


def test_a_server_of_a_model_of_the_hub(server: FakeHub, toy: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("starlette", reason="the extra `serve` is not installed")
    import httpx
    from serving import spawned

    server.add("org/toy", toy, refs=("v1",))
    env = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": server.endpoint, "NO_PROXY": "127.0.0.1,localhost"}
    with spawned("--model", "org/toy", "--revision", "v1", **env) as running:
        asked = [path for path in server.asked() if "/api/" in path]
        assert asked == ["GET /api/models/org/toy/revision/v1"]
        assert httpx.get(f"{running.url}/v1/models").json()["data"][0]["id"] == "org/toy"
        assert httpx.get(f"{running.url}/v1/models/org/toy").json()["id"] == "org/toy"
        body = {"model": "org/toy", "prompt": "the sea is calm", "max_tokens": 2}
        assert httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).json()["model"] == "org/toy"


def test_the_library_is_not_imported_without_need(toy_dir: Path) -> None:
    code = "import sys, ster\nfrom ster.cli import main\nmain(['extract', '--help'])\n"
    code += f"ster.load({str(toy_dir)!r})\nassert 'huggingface_hub' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("offline", [True, False])
def test_a_damaged_cache_is_a_refusal(server: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    refs = cache / "models--org--toy" / "refs"
    refs.mkdir(parents=True)
    (refs.parent / "snapshots").mkdir()
    (refs / "main").write_bytes(b"\xff\xfe")
    if offline:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    else:
        server.status = {"/api/models": 503}
    message, hint = refused()
    assert message.startswith(f"failed to read {refs.parent}: ") and hint == "the cache is damaged; remove this folder of it"

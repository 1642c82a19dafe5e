"""`/v1/harvest`: the files are those of `ster.harvest`; what cannot be done is refused before anything is stored."""

from __future__ import annotations

import base64
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harvest_serving import PROMPTS, downloaded, ended, harvesting, see, submit
from harvesting import contents
from serving import Client, error_of, running, until

import ster
from ster.errors import NonFiniteError
from ster.server.harvests import routes, store
from ster.server.harvests.reading import ServedReadable
from ster.server.settings import Settings
from ster.server.work import Work


@pytest.fixture(scope="module")
def server(toy_model: ster.Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with harvesting(toy_model, tmp_path_factory.mktemp("harvests")) as client:
        yield client


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that begin nothing."""
    monkeypatch.setattr(routes.Runner, "start", lambda self: None)


def encoded(rows: Any, dtype: str = "float32") -> dict[str, Any]:
    array = np.asarray(rows, np.float32)
    raw = array.tobytes()
    if dtype == "float16":
        raw = array.astype(np.float16).tobytes()
    elif dtype == "bfloat16":
        raw = (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return {"data": base64.b64encode(raw).decode(), "dtype": dtype, "shape": list(array.shape), "compression": "none"}


ROWS = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float16).astype(np.float32)
ROWS16 = (ROWS.view(np.uint32) & 0xFFFF0000).view(np.float32)  # what bfloat16 holds


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {"shard_size": 32}),
        ({"shard_size": 3, "batch_size": 1, "layers": None}, {"shard_size": 3}),
        ({"shard_size": 1, "layers": "all"}, {"shard_size": 1, "layers": "all"}),
        ({"shard_size": 2, "layers": [3, 0, 0], "batch_size": 64}, {"shard_size": 2, "layers": [0, 3]}),
        ({"shard_size": 4, "project_onto": encoded(ROWS)}, {"shard_size": 4, "directions": ROWS}),
        ({"shard_size": 4, "project_onto": encoded(ROWS, "float16")}, {"shard_size": 4, "directions": ROWS}),
        ({"shard_size": 4, "project_onto": encoded(ROWS16, "bfloat16")}, {"shard_size": 4, "directions": ROWS16}),
    ],
)
def test_the_files_are_those_of_ster_harvest(
    server: Client, toy_model: ster.Model, tmp_path: Path, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    found = ended(server, submit(server, **fields))
    ster.harvest(toy_model, PROMPTS, tmp_path / "out", **options)
    assert downloaded(found) == contents(tmp_path / "out")
    assert found["status"] == "done" and found["error"] is None and found["tokens_done"] == found["tokens"]
    result = found["result"]
    harvest = ster.open_harvest(tmp_path / "out")
    assert result["n_shards"] == len(result["shard_urls"]) and result["layer_indices"] == harvest.layers
    assert found["run_id"] == harvest.manifest["run_id"]
    assert sum(map(len, contents(tmp_path / "out").values())) <= found["bytes"] + 4096


def test_without_a_chat_template_the_files_are_those_with_it_switched_off(server: Client, toy_dir: Path, tmp_path: Path) -> None:
    found = ended(server, submit(server))
    ster.harvest(ster.load(toy_dir, chat_template="off"), PROMPTS, tmp_path / "out", shard_size=32)
    assert downloaded(found) == contents(tmp_path / "out")


def test_a_model_with_a_chat_template_is_read_as_raw_text(chatting: Path, tmp_path: Path) -> None:
    with harvesting(ster.load(chatting), tmp_path / "state") as client:
        found = ended(client, submit(client))
        ster.harvest(ster.load(chatting, chat_template="off"), PROMPTS, tmp_path / "out", shard_size=32)
        assert downloaded(found) == contents(tmp_path / "out")


def test_without_special_tokens_the_texts_have_none(byte_model: Callable[..., Path], tmp_path: Path) -> None:
    """The same numbers as from a tokenizer that adds none; the manifest says so."""
    with harvesting(ster.load(byte_model(bos=True)), tmp_path / "state") as client:
        plain, bare = (downloaded(ended(client, submit(client, add_special_tokens=adds))) for adds in (True, False))
    ster.harvest(ster.load(byte_model(bos=False)), PROMPTS, tmp_path / "out", shard_size=32)
    expected = contents(tmp_path / "out")
    assert bare["shard_00000.safetensors"] == expected["shard_00000.safetensors"] != plain["shard_00000.safetensors"]
    assert b'"add_special_tokens": true' in plain["manifest.json"] and b'"add_special_tokens": false' in bare["manifest.json"]


def test_without_a_state_there_are_no_harvests(toy: Client) -> None:
    for method, path in (("POST", "/v1/harvest"), ("GET", "/v1/harvest"), ("GET", "/v1/harvest/x"), ("DELETE", "/v1/harvest/x")):
        assert error_of(toy.request(method, path, json={}))[:2] == (503, "harvest_unavailable")
    assert error_of(toy.get("/v1/harvest/x/files/manifest.json"))[:2] == (503, "harvest_unavailable")
    answer = toy.put("/v1/harvest", json={})
    assert answer.status_code == 405 and set(answer.headers["allow"].split(", ")) >= {"GET", "POST"}


# What is refused

LONG = "calm " * 300


@pytest.mark.parametrize(
    ("fields", "code", "param", "says"),
    [
        ({"x": 1}, "invalid_request", "x", "Unknown field 'x'"),
        ({"model": "none"}, "model_not_found", "model", "no model"),
        ({"prompts": []}, "invalid_request", "prompts", "prompts"),
        ({"prompts": ["calm", ""]}, "invalid_request", "prompts", "prompts.1 is empty."),
        ({"prompts": ["calm", [1]]}, "invalid_request", "prompts", "prompts.1"),
        ({"prompts": ["calm"] * 4097}, "invalid_request", "prompts", "4096"),
        ({"prompts": ["calm", LONG]}, "context_length_exceeded", "prompts", "prompts[1]"),
        ({"prompts": ["calm", LONG * 4000]}, "invalid_request", "prompts", "prompts[1]"),
        ({"layers": [4]}, "invalid_request", "layers", "has Layers 0 to 3: it has no Layer 4"),
        ({"layers": [-1]}, "invalid_request", "layers", "layers.0"),
        ({"layers": []}, "invalid_request", "layers", "layers"),
        ({"layers": "some"}, "invalid_request", "layers", "'all'"),
        ({"layers": list(range(257))}, "invalid_request", "layers", "256"),
        ({"shard_size": 0}, "invalid_request", "shard_size", "greater than or equal to 1"),
        ({"shard_size": 4097}, "invalid_request", "shard_size", "4096"),
        ({"batch_size": 65}, "invalid_request", "batch_size", "64"),
        ({"project_onto": encoded(np.ones((1, 63)))}, "invalid_request", "project_onto", "hidden size of toy-llama is 64"),
        ({"project_onto": encoded(np.zeros((2, 64)))}, "invalid_request", "project_onto", "`directions[0]` is zero"),
        ({"project_onto": encoded(np.full((1, 64), np.inf))}, "invalid_request", "project_onto", "non-finite"),
        ({"project_onto": encoded(np.ones((65, 64)))}, "invalid_request", "project_onto", "at most 64 directions"),
        ({"project_onto": {**encoded(np.ones((1, 64))), "shape": [2, 64]}}, "invalid_request", "project_onto", "takes 512"),
        ({"project_onto": {**encoded(np.ones((1, 64))), "data": "!"}}, "invalid_request", "project_onto", "not base64"),
        ({"project_onto": {**encoded(np.ones((1, 64))), "compression": "zstd"}}, "invalid_request", "project_onto", "'none'"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: Client, fields: dict[str, Any], code: str, param: str, says: str) -> None:
    before = server.get("/v1/harvest").json()
    answer = server.post("/v1/harvest", json={"model": "toy", "prompts": PROMPTS, **fields})
    assert error_of(answer) == (400, code, param)
    assert says in answer.json()["error"]["message"]
    assert server.get("/v1/harvest").json() == before


def test_caps_are_of_tokens_of_shards_and_of_bytes(toy_model: ster.Model, tmp_path: Path, idle: None) -> None:
    tokens = sum(len(toy_model.prompt_tokens(prompt)) for prompt in PROMPTS)
    with harvesting(toy_model, tmp_path / "1", Settings(max_harvest_tokens=tokens)) as client:
        submit(client)
        answer = client.post("/v1/harvest", json={"model": "toy", "prompts": [*PROMPTS, "calm"]})
        assert error_of(answer) == (400, "invalid_request", "prompts") and f"more than {tokens} tokens" in answer.text
    largest = 8 * (64 * 4 + 4)  # bytes of the longest prompt at one layer
    with harvesting(toy_model, tmp_path / "2", Settings(max_harvest_shard_bytes=largest, max_live_harvests=9)) as client:
        submit(client, layers=[0], shard_size=1)
        for fields, param in (({"layers": [0], "shard_size": 2}, "shard_size"), ({"layers": [0, 1], "shard_size": 1}, "layers")):
            assert error_of(client.post("/v1/harvest", json={"model": "toy", "prompts": PROMPTS, **fields}))[2] == param
    with harvesting(toy_model, tmp_path / "3", Settings(max_harvest_body_bytes=1000)) as client:
        assert error_of(client.post("/v1/harvest", json={"model": "toy", "prompts": ["calm " * 200]}))[:2] == (413, "request_too_large")


def test_a_hostile_body_is_refused(server: Client) -> None:
    headers = {"content-type": "application/json"}
    for body, status in (
        (b"[]", 400),
        (b"{", 400),
        (b'{"model": "toy", "prompts": ["\\ud800"]}', 400),
        (b'{"model": "toy", "prompts": ' + b"[" * 100_000, 400),
        (b'{"model": "toy", "prompts": [' + b"[]," * 300_000 + b"[]]}", 413),
        (b'{"model": "toy", "prompts": ["calm"], "shard_size": 1e400}', 400),
    ):
        assert error_of(server.post("/v1/harvest", content=body, headers=headers))[0] == status
    assert error_of(server.post("/v1/harvest", content=b"model=toy", headers={"content-type": "text/plain"}))[0] == 415


def test_more_than_may_wait_is_refused(toy_model: ster.Model, tmp_path: Path, idle: None) -> None:
    keys = ("a" * 20, "b" * 20, "c" * 20)
    with harvesting(toy_model, tmp_path, Settings(api_keys=keys, max_queued_harvests=4)) as client:
        one, two, three = ({"authorization": f"Bearer {key}"} for key in keys)

        def ask(headers: dict[str, str]) -> Any:
            return client.post("/v1/harvest", json={"model": "toy", "prompts": PROMPTS}, headers=headers)

        ids = [ask(one).json()["job_id"] for _ in range(3)]
        refused = ask(one)
        assert error_of(refused)[:2] == (429, "harvest_concurrency_exceeded") and refused.headers["retry-after"] == "30"
        assert ask(two).status_code == 202
        assert error_of(ask(three))[:2] == (429, "harvest_capacity_exceeded")
        assert client.delete(f"/v1/harvest/{ids[0]}", headers=one).status_code == 200
        assert ask(three).status_code == 202


def test_a_disk_without_room_refuses_what_does_not_fit(
    toy_model: ster.Model, tmp_path: Path, idle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was promised to others, and has yet to be written, is not free."""
    with harvesting(toy_model, tmp_path) as client:
        need = see(client, submit(client))["bytes"]
        free = 2 * need + store.MARGIN_BYTES
        monkeypatch.setattr(store.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(free, 0, free))  # type: ignore[attr-defined]
        submit(client)
        answer = client.post("/v1/harvest", json={"model": "toy", "prompts": PROMPTS})
        assert error_of(answer)[:2] == (429, "harvest_capacity_exceeded") and " on disk, and the server has 0 B for it" in answer.text


def test_a_folder_that_is_removed_is_made_again(toy_model: ster.Model, tmp_path: Path) -> None:
    with harvesting(toy_model, tmp_path) as client:
        harvests = client.app.state.harvests.store
        shutil.rmtree(harvests.folder)
        assert ended(client, submit(client))["status"] == "done"
        shutil.rmtree(harvests.folder)
        harvests.sweep()
        assert harvests.folder.stat().st_mode & 0o777 == 0o700


# Owners


def test_others_see_nothing_of_it(toy_model: ster.Model, tmp_path: Path) -> None:
    keys = ("a" * 20, "b" * 20)
    with harvesting(toy_model, tmp_path, Settings(api_keys=keys)) as client:
        mine, other = ({"authorization": f"Bearer {key}"} for key in keys)
        client.headers.update(mine)
        ids = [submit(client) for _ in range(3)]
        for id in ids:
            ended(client, id)
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/files/manifest.json")):
            for headers, status in ((other, 404), ({"authorization": "Bearer x"}, 401)):
                answer = client.request(method, f"/v1/harvest/{ids[0]}{path}", headers=headers)
                assert answer.status_code == status
        assert client.get("/v1/harvest", headers=other).json() == {"object": "list", "data": [], "has_more": False}
        listed = client.get("/v1/harvest").json()
        assert [each["job_id"] for each in listed["data"]] == ids[::-1] and not listed["has_more"]
        assert all("result" not in each for each in listed["data"])
        page = client.get("/v1/harvest", params={"limit": 2}).json()
        rest = client.get("/v1/harvest", params={"limit": 2, "after": page["data"][-1]["job_id"]}).json()
        assert page["has_more"] and not rest["has_more"] and page["data"] + rest["data"] == listed["data"]
        for params in ({"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"after": "x"}):
            assert client.get("/v1/harvest", params=params).status_code == 400


def test_an_unknown_id_is_not_found(server: Client) -> None:
    for id in ("x", "..", "%2e%2e", "0" * 10_000, "a%0Ab", "%00"):
        for method in ("GET", "DELETE"):
            assert server.request(method, f"/v1/harvest/{id}").status_code in (404, 405), id


# Beside others


def test_an_interactive_request_is_answered_during_a_harvest(
    toy_model: ster.Model, tmp_path: Path, words: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In passes: of a harvest that has thousands to run, none is between two tokens of a completion but the few it is entitled to."""
    prompts = [words(200) for _ in range(1)] + [f"{words(150)} calm sea" + " sea" * n for n in range(40)]
    with harvesting(toy_model, tmp_path) as client:
        alone = client.answer(max_tokens=20, temperature=0)
        scheduler = client.models[0].loaded.scheduler
        with ThreadPoolExecutor(1) as pool:
            with client.models.pass_lock:
                id = submit(client, prompts, layers="all")
                until(lambda: scheduler.stats().background_running and see(client, id)["status"] == "running")
                before = scheduler.stats().passes
                beside = pool.submit(client.answer, max_tokens=20, temperature=0)
                until(lambda: scheduler.stats().waiting)
            assert beside.result(60)["choices"] == alone["choices"]
        assert scheduler.stats().passes - before < 60
        assert ended(client, id)["status"] == "done"


def test_reading_is_bounded_and_runs_equal_prompts_once(toy_model: ster.Model) -> None:
    with running({"toy": lambda: toy_model}) as client:
        loaded = client.models[0].loaded
        assert loaded is not None
        readable = ServedReadable(loaded, special_tokens=True, check=lambda: None)
        most, now = 0, 0
        plain = loaded.scheduler.submit

        def counting(works: list[Work], listener: Any, **options: Any) -> Any:
            nonlocal most, now
            assert options == {"background": True}
            now += len(works)
            most = max(most, now)

            def listen(index: int, event: Any) -> None:
                nonlocal now
                now -= 1
                listener(index, event)

            return plain(works, listen, **options)

        loaded.scheduler.submit = counting  # type: ignore[method-assign]
        prompts = [toy_model.prompt_tokens(f"calm{' sea' * (n % 150)}") for n in range(300)]
        kept: dict[int, Any] = {}
        readable.read(prompts, [f"{n}" for n in range(300)], [1, 3], "all", kept.__setitem__)
        expected: dict[int, Any] = {}
        toy_model.read(prompts, [f"{n}" for n in range(300)], [1, 3], "all", expected.__setitem__)
        assert len(kept) == 300 and all(kept[n].tobytes() == expected[n].tobytes() for n in range(300))
        assert 1 < most <= 64
        assert loaded.scheduler.stats().prefilled == sum(len(toy_model.prompt_tokens(f"calm{' sea' * n}")) for n in range(150))


def test_a_number_that_is_none_fails_the_harvest_by_name(toy_copy: Path, tmp_path: Path) -> None:
    from ster._safetensors import safetensors_bytes
    from ster.toy import tensors

    weights = tensors()
    weights["model.layers.1.mlp.down_proj.weight"] = np.full_like(weights["model.layers.1.mlp.down_proj.weight"], 3e38)
    (toy_copy / "model.safetensors").write_bytes(safetensors_bytes(weights, {"format": "pt"}))
    model = ster.load(toy_copy)
    with pytest.raises(NonFiniteError) as refused:
        ster.harvest(model, PROMPTS, tmp_path / "out")
    with harvesting(model, tmp_path / "state") as client:
        id = submit(client)
        found = ended(client, id)
        assert found["status"] == "failed" and found["result"] is None and found["error"]["code"] == "harvest_failed"
        assert (
            "prompts[" in str(refused.value) and "prompts[" in found["error"]["message"] and str(tmp_path) not in found["error"]["message"]
        )
        until(lambda: not (tmp_path / "state" / "harvests" / id).exists())
        assert error_of(client.delete(f"/v1/harvest/{id}"))[:2] == (409, "harvest_not_cancellable")


def test_a_full_disk_fails_the_harvest_and_says_so(toy_model: ster.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ster.harvest import disk

    def full(path: Path, chunks: Any) -> Any:
        raise disk.failed(path, OSError(28, "No space left on device"))

    with harvesting(toy_model, tmp_path) as client:
        monkeypatch.setattr(disk, "write_part", full)
        found = ended(client, submit(client))
        assert found["status"] == "failed" and found["error"]["code"] == "harvest_storage_failed"
        assert "no space left on device" in found["error"]["message"].lower() and str(tmp_path) not in found["error"]["message"]
        monkeypatch.undo()
        assert ended(client, submit(client))["status"] == "done"


def test_prompts_are_not_kept_when_it_is_over(toy_model: ster.Model, tmp_path: Path) -> None:
    with harvesting(toy_model, tmp_path) as client:
        ended(client, submit(client))
    assert b"quiet tonight" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*.safetensors"))
    from ster.state.database import Database
    from ster.state.place import find_place
    from ster.state.tables import harvests

    database = Database(find_place(tmp_path).url)
    with database.read() as connection:
        assert [row.request for row in connection.execute(harvests.select())] == [b""]
    database.close()


def test_many_submissions_at_once_leave_as_many_as_may_be(toy_model: ster.Model, tmp_path: Path, database_url: str, idle: None) -> None:
    with harvesting(toy_model, tmp_path, url=database_url) as client:
        answers: list[int] = []

        def ask() -> None:
            answers.append(client.post("/v1/harvest", json={"model": "toy", "prompts": PROMPTS}).status_code)

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answers) == [202] * 3 + [429] * 9


# Waiting for its end


def test_a_wait_ends_with_the_harvest(toy_model: ster.Model, tmp_path: Path) -> None:
    """Four of a caller may wait; one more is told at once how far it is."""
    opened = threading.Event()
    plain = ServedReadable.read

    def read(self: Any, *args: Any, **options: Any) -> None:
        assert opened.wait(60)
        plain(self, *args, **options)

    with harvesting(toy_model, tmp_path) as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServedReadable, "read", read)
        id = submit(client)
        assert error_of(client.get(f"/v1/harvest/{id}?wait=61"))[::2] == (400, "wait")
        answers: list[Any] = []
        threads = [threading.Thread(target=lambda: answers.append(client.get(f"/v1/harvest/{id}?wait=60"))) for _ in range(4)]
        for thread in threads:
            thread.start()
        polls = client.app.state.longpolls
        until(lambda: polls._waiting.total() == 4)
        declined = client.get(f"/v1/harvest/{id}?wait=60")
        assert declined.headers["x-acs-longpoll"] == "declined" and declined.headers["retry-after"] == "5"
        assert declined.json()["status"] in ("pending", "running")
        opened.set()
        for thread in threads:
            thread.join()
        assert [answer.json()["status"] for answer in answers] == ["done"] * 4
        assert all(answer.json()["result"] is not None for answer in answers)

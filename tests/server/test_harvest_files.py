"""Files of a harvest: their ranges put together are the file; a signed URL opens the one that it was signed for, and for its time."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from harvest_serving import ask, downloaded, ended, harvesting, see, submit, urls
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from serving import Client, error_of, until

import ster
from ster.server.harvests import signing
from ster.server.harvests.signing import Signer, load_secret
from ster.server.settings import Settings

KEY = "k" * 20


@pytest.fixture(scope="module")
def server(toy_model: ster.Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """With a key, which this client has."""
    with harvesting(toy_model, tmp_path_factory.mktemp("files"), Settings(api_keys=(KEY, "other" * 4))) as client:
        client.headers["authorization"] = f"Bearer {KEY}"
        yield client


@pytest.fixture(scope="module")
def done(server: Client) -> Any:
    return ended(server, submit(server, shard_size=4))


@pytest.fixture(scope="module")
def shard(done: Any) -> bytes:
    return downloaded(done)["shard_00000.safetensors"]


@given(cuts=st.lists(st.integers(0, 20_000), max_size=6), tail=st.integers(1, 20_000))
@hypothesis_settings(max_examples=25, deadline=None)
def test_ranges_put_together_are_the_file(server: Client, done: Any, shard: bytes, cuts: list[int], tail: int) -> None:
    path = f"/v1/harvest/{done['job_id']}/files/shard_00000.safetensors"
    bounds = sorted({0, *(cut for cut in cuts if cut < len(shard)), len(shard)})
    pieces = []
    for first, last in pairwise(bounds):
        answer = server.get(path, headers={"range": f"bytes={first}-{last - 1}"})
        assert answer.status_code == 206 and answer.headers["content-range"] == f"bytes {first}-{last - 1}/{len(shard)}"
        pieces.append(answer.content)
    assert b"".join(pieces) == shard
    assert server.get(path, headers={"range": f"bytes=-{tail}"}).content == shard[-tail:]
    assert server.get(path, headers={"range": f"bytes={bounds[-2]}-"}).content == shard[bounds[-2] :]


def test_several_ranges_come_in_parts(server: Client, done: Any, shard: bytes) -> None:
    path = f"/v1/harvest/{done['job_id']}/files/shard_00000.safetensors"
    answer = server.get(path, headers={"range": "bytes=0-9,100-109"})
    assert answer.status_code == 206 and answer.headers["content-type"].startswith("multipart/byteranges")
    assert shard[:10] in answer.content and shard[100:110] in answer.content


def test_a_range_that_is_not_there_is_refused(server: Client, done: Any, shard: bytes) -> None:
    path = f"/v1/harvest/{done['job_id']}/files/shard_00000.safetensors"
    answer = server.get(path, headers={"range": f"bytes={len(shard)}-"})
    assert error_of(answer)[:2] == (416, "range_not_satisfiable") and answer.headers["content-range"] == f"bytes */{len(shard)}"
    assert error_of(server.get(path, headers={"range": "lines=1-2"}))[:2] == (400, "invalid_range")
    for header in ("bytes=" + "0-0," * 5000, "bytes=" + "9" * 5000 + "-"):
        assert server.get(path, headers={"range": header}).status_code in (200, 206, 400, 416)


def test_a_changed_file_is_known_by_its_checksum(server: Client, done: Any, shard: bytes) -> None:
    path = f"/v1/harvest/{done['job_id']}/files/shard_00000.safetensors"
    whole = server.get(path)
    assert whole.headers["etag"] == f'"{hashlib.sha256(shard).hexdigest()}"' and whole.headers["accept-ranges"] == "bytes"
    same = server.get(path, headers={"range": "bytes=5-9", "if-range": whole.headers["etag"]})
    assert (same.status_code, same.content) == (206, shard[5:10])
    other = server.get(path, headers={"range": "bytes=5-9", "if-range": '"x"'})
    assert (other.status_code, other.content) == (200, shard)
    head = server.head(path)
    assert head.status_code == 200 and head.content == b"" and head.headers["content-length"] == str(len(shard))
    assert server.head(path, headers={"range": "bytes=0-0"}).status_code == 206
    assert server.get(f"/v1/harvest/{done['job_id']}/files/manifest.json").headers["content-type"] == "application/json"


def test_only_the_files_of_the_manifest_are_there(server: Client, done: Any, tmp_path: Path) -> None:
    base = f"/v1/harvest/{done['job_id']}/files/"
    folder = server.app.state.state.folder
    (folder / "harvests" / done["job_id"] / "stray").write_bytes(b"x")
    (folder / "harvests" / "stray").write_bytes(b"x")
    names = ["stray", "harvest.lock", "progress.jsonl", "shard_00009.safetensors", "MANIFEST.JSON", "", "..%2fstray"]
    names += ["%2e%2e/stray", "..%5cstray", "manifest.json%00", "manifest.json%0a", "%2fetc%2fpasswd", "manifest.json/"]
    for name in names:
        assert server.get(base + name).status_code == 404, name


# Signed URLs


def test_a_signed_url_needs_no_key(done: Any) -> None:
    for url in urls(done):
        assert ask(url).status_code == 200
        assert ask(url, "HEAD").status_code == 200
        assert ask(url, headers={"authorization": "Bearer wrong"}).status_code == 200
        assert ask(url.partition("?")[0]).status_code == 401
        assert ask(url, "POST").status_code == 401
        assert ask(url.partition("/files")[0] + "?" + url.partition("?")[2], "DELETE").status_code == 401


def test_a_signature_is_for_one_file_of_one_harvest_and_its_time(server: Client, done: Any) -> None:
    other = ended(server, submit(server, shard_size=4))
    url = httpx.URL(done["result"]["shard_urls"][0])
    changed = [
        str(url).replace("shard_00000", "shard_00001"),
        str(url).replace(done["job_id"], other["job_id"]),
        str(url).replace("shard_00000.safetensors", "nothing"),
        str(url.copy_set_param("expires", int(url.params["expires"]) + 1)),
        str(url.copy_set_param("expires", f"{url.params['expires']}0")),
        str(url.copy_set_param("expires", f"0{url.params['expires']}")),
        str(url.copy_set_param("expires", "never")),
        str(url.copy_remove_param("expires")),
        str(url.copy_set_param("signature", "")),
        str(url.copy_set_param("signature", url.params["signature"].upper())),
        str(url.copy_set_param("signature", "0" * 64)),
        str(url.copy_set_param("signature", "ü")),
        str(url.copy_set_param("signature", url.params["signature"][:-1])),
    ]
    for each in changed:
        assert each != str(url)
        for headers in ({}, {"authorization": f"Bearer {KEY}"}):  # a key does not make a wrong one right
            assert error_of(ask(each, headers=headers))[:2] == (403, "invalid_signature"), each
    for more in ("signature=" + "0" * 64, f"signature={url.params['signature']}"):
        assert error_of(ask(f"{url}&{more}")) == (400, "invalid_request", "signature")
    for query in ("", "expires=1", "xsignature=1", "a=signature=1", "Signature=1", "signature%00=1", "x;signature=1"):
        assert error_of(ask(str(url.copy_with(query=query.encode()))))[:2] == (401, "invalid_api_key"), query
    with harvesting_by_nobody(server) as id:
        stranger = ask(f"{server.url}/v1/harvest/{id}/files/manifest.json?signature=")
        assert error_of(stranger)[:2] == (403, "invalid_signature")


@contextlib.contextmanager
def harvesting_by_nobody(server: Client) -> Iterator[str]:
    """A finished harvest of whoever asked before the server had keys."""
    from ster.server.callers import NOBODY, Caller
    from ster.state.tables import harvests

    id = ended(server, submit(server))["job_id"]
    mine = harvests.update().where(harvests.c.id == id)
    database = server.app.state.state.database
    row = server.app.state.harvests.store.find(id)
    for owner in (NOBODY, Caller(row.owner)):
        with database.write() as connection:
            connection.execute(mine.values(owner=owner.id))
        if owner is NOBODY:
            yield id


def test_a_signed_url_has_an_end(server: Client, done: Any) -> None:
    signer = server.app.state.harvests.store.signer
    base = done["result"]["manifest_url"].partition("?")[0]
    assert error_of(ask(f"{base}?{signer.query(done['job_id'], 'manifest.json', 1)}"))[:2] == (410, "url_expired")
    assert ask(f"{base}?{signer.query(done['job_id'], 'manifest.json', 2**40)}").status_code == 200


def test_the_host_is_checked_all_the_same(toy_model: ster.Model, tmp_path: Path) -> None:
    """And what URLs begin with is what it says, or what the settings do."""
    with harvesting(toy_model, tmp_path / "1", hosts={"127.0.0.1", "localhost"}) as client:
        found = ended(client, submit(client))
        url = found["result"]["manifest_url"]
        assert url.startswith(client.url) and ask(url).status_code == 200
        assert error_of(ask(url, headers={"host": "evil.example"}))[:2] == (403, "host_not_allowed")
        local = client.get(f"/v1/harvest/{found['job_id']}", headers={"host": "localhost:1234"}).json()
        assert local["result"]["manifest_url"].startswith("http://localhost:1234/v1/harvest/")
    with harvesting(toy_model, tmp_path / "2", Settings(public_url="https://ster.example/api/")) as client:
        found = ended(client, submit(client))
        assert found["result"]["manifest_url"].startswith(f"https://ster.example/api/v1/harvest/{found['job_id']}/files/manifest.json?")
        for host in ("evil.example/path", "a b", "x@y", ""):
            assert client.get(f"/v1/harvest/{found['job_id']}", headers={"host": host}).status_code in (200, 400)
    with harvesting(toy_model, tmp_path / "3") as client:
        for host in ("evil.example/path", "x@y", "a?b"):
            assert error_of(client.get("/v1/harvest/x", headers={"host": host}))[0] == 400


def test_servers_that_start_at_once_make_one_secret(tmp_path: Path) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(load_secret(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1
    assert [path.name for path in tmp_path.iterdir()] == [signing.SECRET]
    assert (tmp_path / signing.SECRET).stat().st_mode & 0o777 == 0o600
    assert Signer(found[0]).query("a", "b", 1) != Signer(b"x" * 32).query("a", "b", 1)


# Files are kept for a time


def test_files_go_when_their_time_is_over_and_the_row_stays_for_a_while(
    toy_model: ster.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ster.server.harvests import runner, store

    monkeypatch.setattr(runner, "SWEEP_SECONDS", 0.5)
    with harvesting(toy_model, tmp_path, Settings(harvest_seconds=4.0)) as client:
        found = ended(client, submit(client))
        url = found["result"]["manifest_url"]
        until(lambda: see(client, found["job_id"])["urls_expired"], 20)
        late = see(client, found["job_id"])
        assert late["status"] == "done" and late["result"] is None and late["run_id"] == found["run_id"]
        assert error_of(ask(url))[:2] == (410, "url_expired")
        until(lambda: not (tmp_path / "harvests" / found["job_id"]).exists(), 20)
        assert error_of(client.get(f"/v1/harvest/{found['job_id']}/files/manifest.json"))[:2] == (410, "harvest_files_expired")
        monkeypatch.setattr(store, "REMEMBERED_SECONDS", 0.0)
        until(lambda: client.get(f"/v1/harvest/{found['job_id']}").status_code == 404, 20)


def test_files_that_are_gone_before_their_time_are_told_of_as_gone(toy_model: ster.Model, tmp_path: Path) -> None:
    """As after a server that kept them for less: the one that runs now would keep them, and has none."""
    with harvesting(toy_model, tmp_path) as client:
        found = ended(client, submit(client))
        assert not found["urls_expired"] and found["result"]
        shutil.rmtree(tmp_path / "harvests" / found["job_id"])
        late = see(client, found["job_id"])
        assert late["status"] == "done" and late["urls_expired"] and late["result"] is None
        assert client.get("/v1/harvest").json()["data"][0]["urls_expired"]
        assert error_of(ask(found["result"]["manifest_url"]))[:2] == (410, "harvest_files_expired")

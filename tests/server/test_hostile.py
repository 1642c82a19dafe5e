"""Clients that want too much: long texts, large or odd bodies, answers that nobody reads."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from serving import Client, error_of, running, until

import ster
from ster.errors import InputError
from ster.server.body import Bodies
from ster.server.connection import Connection
from ster.server.errors import ApiError
from ster.server.members import PIECE, check_members, count_members
from ster.server.requests import error_response
from ster.server.schema import CompletionRequest, parse_body
from ster.server.settings import Settings
from ster.server.texts import PARALLELISM
from ster.tokenizer import Tokenizer, _letters

MIB = 1 << 20


@pytest.fixture(scope="module")
def small(toy_model: ster.Model) -> Iterator[Client]:
    """Low caps."""
    with running({"toy": lambda: toy_model}, Settings(max_body_bytes=MIB, body_seconds=0.5, max_body_members=100)) as client:
        yield client


# Texts


def byte_level(**options: Any) -> tokenizers.Tokenizer:
    """A tokenizer of bytes and one word of ten."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: index for index, letter in enumerate(letters)}, [], **options))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<|ten c|>"])
    return made


def test_the_longest_token_is_known_where_no_text_is_dropped() -> None:
    nothing: Any = tokenizers.normalizers
    splits: Any = tokenizers.pre_tokenizers
    assert Tokenizer(byte_level()).longest_token == 9
    nfc = byte_level()
    nfc.normalizer = nothing.NFC()
    assert Tokenizer(nfc).longest_token == 27
    split = byte_level()
    split.pre_tokenizer = splits.Sequence([splits.Split(" ", "isolated"), splits.ByteLevel()])
    assert Tokenizer(split).longest_token == 9
    dropping = byte_level()
    dropping.model = tokenizers.models.BPE({letter: index for index, letter in enumerate(_letters()) if letter != "~"}, [])
    assert (Tokenizer(dropping).longest_token, Tokenizer(dropping).dropped_bytes) == (9, b"~")
    removed = byte_level()
    removed.pre_tokenizer = splits.Sequence([splits.Split(" ", "removed"), splits.ByteLevel()])
    shorter = byte_level()
    shorter.normalizer = nothing.Sequence([nothing.NFC(), nothing.Strip()])
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, "[UNK]"))
    stripping = byte_level()
    stripping.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    plain = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    for unsound in (removed, shorter, words, stripping, plain):
        assert Tokenizer(unsound).longest_token is None


def test_letters_of_bytes() -> None:
    """Every character of one or two bytes, and first bytes of longer ones."""
    splits: Any = tokenizers.pre_tokenizers
    letters = _letters()
    for code in (*range(0x800), *range(0x800, 0xD800, 0x400), *range(0xE000, 0x110000, 0x1000)):
        word = splits.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(chr(code))[0][0]
        assert bytes(letters[letter] for letter in word) == chr(code).encode()


def test_what_cannot_fit_is_refused_before_it_is_tokenised(toy_model: ster.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with running({"toy": lambda: toy_model}) as client:
        served = client.models[0]
        assert served.loaded is not None
        served.loaded = replace(served.loaded, longest_token=6)
        most = 6 * served.loaded.facts.context
        assert client.get("/v1/models/toy").json()["capabilities"]["max_text_bytes"] == most
        tried: list[int] = []
        encode = Tokenizer.encode
        monkeypatch.setattr(Tokenizer, "dropped_bytes", b"~")
        monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **options: tried.append(len(text)) or encode(self, text, **options))
        text = ("whale " * (most // 6 + 1))[: most + 1]
        refused = client.complete(text, max_tokens=1)
        assert error_of(refused) == (400, "context_length_exceeded", "prompt") and not tried
        assert f"The prompt has {most + 1:,} bytes" in refused.json()["error"]["message"]
        client.complete(text[:-1], max_tokens=1)
        client.complete(text[:-1] + "~" * 100, max_tokens=1)
        assert tried == [most, most + 100]
        refused = client.complete([[1] * (most // 6 + 1)] * 2, max_tokens=0, echo=True)  # not decoded
        assert error_of(refused) == (400, "context_length_exceeded", "prompt")


def test_texts_have_a_cap(toy: Client, chatting: Path) -> None:
    assert toy.get("/v1/models/toy").json()["capabilities"]["max_text_bytes"] == MIB
    long = "whale " * (MIB // 6 + 1)
    refused = toy.complete(long, max_tokens=1)
    assert error_of(refused) == (400, "invalid_request", "prompt")
    assert refused.json()["error"]["message"] == f"The text has {len(long):,} bytes: at most 1,048,576 are allowed."
    assert error_of(toy.post("/tokenize", json={"prompt": "é" * (MIB // 2 + 1)})) == (400, "invalid_request", "prompt")
    assert toy.post("/tokenize", json={"prompt": "é" * (MIB // 2)}).status_code == 200
    assert error_of(toy.post("/detokenize", json={"tokens": [1] * (MIB + 1)})) == (400, "invalid_request", "tokens")
    with running({"toy": chatting}) as client:
        body = {"model": "toy", "messages": [{"role": "user", "content": long}], "max_tokens": 1}
        assert error_of(client.post("/v1/chat/completions", json=body)) == (400, "invalid_request", "messages")


def test_a_long_text_is_tokenised_aside_with_the_same_ids(toy_model: ster.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARALLELISM, "false")
    tasks = Path("/proc/self/task")
    before = len(list(tasks.glob("*")))
    for text in ("the sea is calm " * 2000, "", "the"):
        for special in (True, False):
            plain = toy_model.tokenizer.encode(text, special_tokens=special)
            assert toy_model.tokenizer.encode(text, special_tokens=special, aside=True) == plain
    assert len(list(tasks.glob("*"))) <= before


# Bodies


ODD = st.text(st.sampled_from('[{:"\\x'), max_size=5)
DOCUMENTS = st.recursive(ODD, lambda each: st.lists(each, max_size=4) | st.dictionaries(ODD, each, max_size=4), max_leaves=20)


@given(DOCUMENTS)
def test_members_are_counted_outside_texts(document: Any) -> None:
    def count(value: Any) -> int:
        if isinstance(value, dict):
            return 1 + len(value) + sum(map(count, value.values()))
        return 1 + sum(map(count, value)) if isinstance(value, list) else 0

    raw = orjson.dumps(document)
    assert count_members(raw) == count(document)


def test_members_are_counted_across_pieces() -> None:
    for shift in range(8):
        text = "a" * (PIECE - 8 + shift) + '\\"[' * 3 + "\\\\"
        assert count_members(orjson.dumps([text, "[", [text, {"[": text}]])) == 4
    raw = b'{"a":"' + b"[" * (2 * PIECE) + b'","b":[' + b"[]," * PIECE + b"[]]}"
    assert count_members(raw) == 4 + PIECE + 1
    with pytest.raises(ApiError, match="more than 100 lists, objects and members"):
        check_members(raw, 100)


def test_structure_without_end_is_refused_before_it_is_parsed(small: Client, toy: Client) -> None:
    assert small.complete("[" * 200 + "{" * 200, max_tokens=1).status_code == 200
    assert error_of(small.complete(max_tokens=1, user=[[]] * 100)) == (413, "request_too_large", None)
    assert error_of(small.complete("the", max_tokens=1, user={"a" + str(n): 1 for n in range(100)}))[0] == 413
    inner = "[" * (2**18 + 1)
    assert error_of(toy.complete(max_tokens=1, vllm_xargs={"apply_steering_vectors": inner}))[:2] == (413, "request_too_large")
    largest = [{"activations": [[[0.0] * 64] * 4096] * 4, "layer_indices": [0, 1, 2, 3]}]
    assert toy.complete(max_tokens=1, apply_steering_vectors=largest).status_code == 400  # that position is not reached, or that Layer


@pytest.mark.parametrize(
    "raw",
    [
        b'{"temperature":1e400,"temperature":0,"model":"toy\\ud800","prompt":"a"}',
        b'{"temperature":1e400,"temperature":0,"model":"toy","prompt":"a\\udc00"}',
        b'\xef\xbb\xbf{"temperature":1e400,"temperature":0,"model":"toy","prompt":"a"}',
        '{"temperature":1e400,"temperature":0,"model":"toy","prompt":"a"}'.encode("utf-16"),
        b'{"temperature":1e400,"temperature":0,"model":"toy","prompt":"\xed\xa0\x80"}',
    ],
)
def test_a_number_beyond_float64_opens_no_back_door(toy: Client, raw: bytes) -> None:
    assert error_of(toy.post("/v1/completions", content=raw)) == (400, "bad_json", None)


def test_large_bodies_are_not_read_by_the_slow_parser() -> None:
    raw = b'{"model":"toy","prompt":"a","seed":1e400,"user":"' + b"x" * MIB + b'"}'
    with pytest.raises(ApiError, match="outside float64's range") as caught:
        parse_body(CompletionRequest, raw)
    assert caught.value.code == "bad_json"


def test_a_refusal_that_no_json_can_hold_is_an_answer(toy: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise ApiError(400, "half \ud800", code="odd", param="\udfff", headers={"X-Odd": "\u20ac"})

    monkeypatch.setattr(toy.models[0].loaded.scheduler, "submit", refuse)
    answer = toy.complete(max_tokens=1)
    assert error_of(answer) == (400, "odd", "\\udfff") and answer.json()["error"]["message"] == "half \\ud800"
    events = toy.post("/v1/completions", json={"model": "toy", "prompt": "the", "stream": True, "max_tokens": 1})
    assert error_of(events)[1] == "odd"
    assert orjson.loads(error_response(ApiError(400, "\ud800", code="x"), "req_1").body)["error"]["message"] == "\\ud800"


def test_every_header_is_looked_at(toy: Client) -> None:
    body = json.dumps({"model": "toy", "prompt": "the", "max_tokens": 1}).encode()
    for name, values in (("content-encoding", ("identity", "gzip")), ("content-type", ("application/json", "text/plain"))):
        for pair in (values, values[::-1]):
            headers = [(name, value) for value in pair]
            assert error_of(toy.post("/v1/completions", content=body, headers=headers)) == (415, "unsupported_media_type", None)


def test_a_name_is_not_echoed_without_limit(toy: Client) -> None:
    message = toy.complete(model="m" * 100_000).json()["error"]["message"]
    assert message == f"There is no model `{'m' * 200}...`: GET /v1/models lists the models."


def test_bodies_take_turns() -> None:
    async def play() -> None:
        bodies = Bodies(10, 40)
        await bodies.take(30, 1)
        first = asyncio.create_task(bodies.take(20, 5))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await bodies.take(5, 0.05)  # it would fit, and is not first
        assert caught.value.status == 503 and caught.value.headers["Retry-After"] == "5"
        left = asyncio.create_task(bodies.take(20, 5))
        await asyncio.sleep(0)
        left.cancel()
        bodies.give(30)
        await first
        assert bodies.free == 20
        bodies.give(20)
        assert bodies.free == 40

    asyncio.run(play())


def test_a_server_full_of_bodies_answers_small_ones(small: Client) -> None:
    """Each of these has sent less than it said; a fifth finds no room."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {MIB}\r\n\r\n".encode()
    bodies: Bodies = small.app.state.bodies
    holding = [small.connect() for _ in range(4)]
    fifth = small.connect()
    try:
        for connection in holding:
            connection.sendall(head + b" " * 100_000)
        until(lambda: bodies.free == 0)
        fifth.sendall(head + b" " * 100_000)
        assert small.complete(max_tokens=1).status_code == 200
        assert fifth.recv(12)[9:] in (b"503", b"408")  # 408 where the first made room just before
    finally:
        for connection in (*holding, fifth):
            connection.close()
    until(lambda: bodies.free == 4 * MIB)


def test_ids_beyond_any_context_are_not_looked_at(toy: Client) -> None:
    refused = toy.complete([1] * (MIB + 1), max_tokens=1)
    assert error_of(refused) == (400, "invalid_request", "prompt")
    assert "at most 1048576 items" in refused.json()["error"]["message"]


# Connections


def test_an_answer_that_nobody_reads_is_dropped(toy: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[int] = []
    plain = Connection.connection_lost

    def connection_lost(self: Connection, error: Exception | None) -> None:
        plain(self, error)
        assert self.client is not None
        lost.append(self.client[1])

    monkeypatch.setattr(Connection, "connection_lost", connection_lost)
    monkeypatch.setattr("ster.server.connection.WRITE_SECONDS", 0.2)
    served = toy.models[0]
    entry = served.entry()
    monkeypatch.setattr(served, "entry", lambda: {**entry, "padding": "x" * (16 * MIB)})
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", int(toy.url.rpartition(":")[2])))
        connection.sendall(b"GET /v1/models/toy HTTP/1.1\r\nhost: x\r\n\r\n")
        until(lambda: connection.getsockname()[1] in lost)
        read = 0
        with pytest.raises(ConnectionResetError):
            while data := connection.recv(1 << 16):
                read += len(data)
            raise ConnectionResetError  # the end came where the answer was not whole
        assert read < 16 * MIB
    assert len(toy.get("/v1/models/toy").content) > 16 * MIB  # whoever reads gets it all


def test_what_is_not_http_is_logged_and_counted(toy: Client, caplog: pytest.LogCaptureFixture) -> None:
    count = lambda: toy.get("/metrics").text.partition('ster_requests_total{path="other",status="400"} ')[2].partition("\n")[0]  # noqa: E731
    before = int(count() or 0)
    with caplog.at_level(logging.INFO, "ster.server"), toy.connect() as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        until(lambda: int(count() or 0) == before + 1)
    id = answer.headers["x-request-id"]
    line = next(json.loads(record.getMessage()) for record in caplog.records if id in record.getMessage())
    assert (line["status"], line["method"], line["path"]) == (400, None, None)


def test_a_cache_too_small_for_anything_fails_the_model(toy_model: ster.Model) -> None:
    with running({"toy": lambda: toy_model}, Settings(kv_cache_bytes=1000)) as client:
        served = client.models[0]
        assert served.state == "failed" and isinstance(served.error, InputError)
        assert served.error.message.startswith("64 positions of toy-llama need 0.")

"""Safe by default: keys, names, sizes, and what is never written down."""

import http.client
import logging
from collections.abc import Iterator

import pytest
from serving import Client, error_of, running, until

import ster
from ster.errors import InputError
from ster.server.guard import host_name
from ster.server.run import Address, check_address
from ster.server.settings import Settings

KEYS = ("first-key", "second-key")


@pytest.fixture
def locked(toy_model: ster.Model) -> Iterator[Client]:
    with running({"toy": lambda: toy_model}, Settings(api_keys=KEYS, max_body_bytes=1000)) as client:
        yield client


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic first-key", "first-key", "Bearer first-key2", "Bearer é"])
def test_without_a_key_nothing_is_told(locked: Client, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode()}
    for path in ("/v1/models", "/metrics", "/tokenizer_info", "/nope"):
        refused = locked.get(path, headers=headers)
        assert error_of(refused) == (401, "invalid_api_key", None) and refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["type"] == "authentication_error"
    for path in ("/health", "/ready", "/openapi.json"):
        assert locked.get(path, headers=headers).status_code == 200


@pytest.mark.parametrize("key", KEYS)
def test_any_of_the_keys_opens(locked: Client, key: str) -> None:
    for scheme in ("Bearer", "bearer"):
        assert locked.get("/v1/models", headers={"authorization": f"{scheme} {key}"}).status_code == 200


def test_a_large_body_is_refused_before_it_is_read(locked: Client) -> None:
    """The answer is there although not a byte of the body was sent."""
    connection = locked.connect()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS[0]}\r\ncontent-length: 100000000\r\n\r\n"
    connection.sendall(head.encode())
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    assert answer.status == 413
    connection.close()


@pytest.mark.parametrize("size", [1001, 5_000_000])
def test_a_client_that_sends_it_all_reads_the_refusal(locked: Client, size: int) -> None:
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    assert error_of(locked.post("/v1/completions", content=b" " * size, headers=headers)) == (413, "request_too_large", None)
    chunks = (b" " * 500 for _ in range(size // 500 + 1))
    assert error_of(locked.post("/v1/completions", content=chunks, headers=headers)) == (413, "request_too_large", None)
    assert error_of(locked.post("/v1/completions", content=b" " * size))[0] == 401
    assert locked.get("/v1/models", headers=headers).status_code == 200


def test_another_name_is_refused_on_the_loopback_address(toy_model: ster.Model) -> None:
    """A page of evil.example that resolves to 127.0.0.1."""
    with running({"toy": lambda: toy_model}, hosts=["localhost", "127.0.0.1", "::1"]) as client:
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""):
            assert error_of(client.get("/v1/models", headers={"host": host})) == (403, "host_not_allowed", None)
        for host in ("localhost:1", "LOCALHOST", "127.0.0.1", "[::1]:8000"):
            assert client.get("/v1/models", headers={"host": host}).status_code == 200


def test_names_of_hosts() -> None:
    assert [host_name(host) for host in ("a:1", "A", "[::1]:80", "[::1]", "")] == ["a", "a", "::1", "::1", ""]


def test_other_machines_need_a_key() -> None:
    for host in ("0.0.0.0", "192.168.1.5", "::", "example.org"):
        with pytest.raises(InputError, match="there is no API key") as caught:
            check_address(Address(host), keyed=False)
        assert caught.value.hint and "--insecure" in caught.value.hint
        check_address(Address(host), keyed=True)
        check_address(Address(host, insecure=True), keyed=False)
    for host in ("127.0.0.1", "127.1.2.3", "localhost", "::1"):
        check_address(Address(host), keyed=False)


def test_prompts_are_never_logged(toy: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        toy.complete("the whale sings", max_tokens=2)
        toy.complete("the whale sings", max_tokens=2, nonsense="whale")
        toy.complete(["the whale"], max_tokens=2, stream=True, model="whale")
        toy.post("/tokenize", json={"prompt": "the whale"})
        toy.get("/v1/models", params={"prompt": "whale"})
        ours = lambda: [record for record in caplog.records if record.name.startswith(("ster", "uvicorn"))]  # noqa: E731
        until(lambda: len(ours()) == 5)
    assert not any("whale" in record.getMessage() for record in ours())


def test_what_is_not_http(toy: Client) -> None:
    with toy.connect() as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 400 and b'"code":"invalid_http"' in answer.read()


def test_a_head_that_never_ends(toy_model: ster.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ster.server.connection.HEAD_SECONDS", 0.2)
    with running({"toy": lambda: toy_model}) as client:
        for sent in (b"", b"GET /health HTTP/1.1\r\nhost: x\r\n"):
            with client.connect() as connection:
                connection.sendall(sent)
                assert connection.recv(100) == b""

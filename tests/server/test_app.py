"""What holds for every path: ids, the form of refusals, the models and their states."""

import logging
import threading
import time
from pathlib import Path

import httpx
import pytest
from serving import Client, error_of, running, until

import ster
from ster.errors import CheckpointError
from ster.server.settings import Settings


def test_every_answer_has_an_id_of_its_own(toy: Client) -> None:
    answers = [toy.get("/health"), toy.get("/v1/models"), toy.get("/nope"), toy.complete(max_tokens=1), toy.complete(nonsense=1)]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == len(answers)
    assert all(len(id) == 36 and id.startswith("req_") and int(id[4:], 16) >= 0 for id in ids)


def test_what_is_not_there(toy: Client) -> None:
    for path in ("/nope", "/", "/v1", "/v1/completions/", "/docs"):
        assert error_of(toy.get(path)) == (404, "not_found", None)
    refused = toy.get("/v1/completions")
    assert error_of(refused) == (405, "method_not_allowed", None) and refused.headers["allow"] == "POST"
    assert error_of(toy.delete("/v1/models"))[0] == 405
    assert error_of(toy.get("/v1/models/other")) == (404, "model_not_found", "model")
    assert error_of(toy.complete(model="other")) == (400, "model_not_found", "model")


@pytest.mark.parametrize("body", [b"", b"{", b'{"model": NaN}', b"\xff", b'{"model": Infinity}', b"[" * 100_000])
def test_what_is_not_json(toy: Client, body: bytes) -> None:
    assert error_of(toy.post("/v1/completions", content=body)) == (400, "bad_json", None)


@pytest.mark.parametrize("type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json"])
def test_what_a_web_page_could_post_is_refused(toy: Client, type: str) -> None:
    body = b'{"model": "toy", "prompt": "the sea", "max_tokens": 1}'
    assert error_of(toy.post("/v1/completions", content=body, headers={"content-type": type})) == (415, "unsupported_media_type", None)
    assert toy.post("/v1/completions", content=body).status_code == 200  # no type at all
    assert toy.post("/v1/completions", content=body, headers={"content-type": "application/json; charset=utf-8"}).status_code == 200
    # A page can leave the type out, but not its origin.
    assert error_of(toy.post("/v1/completions", content=body, headers={"origin": "http://evil.example"}))[0] == 415
    assert error_of(toy.post("/v1/completions", content=body, headers={"content-encoding": "gzip"}))[0] == 415


def test_a_crash_is_an_answer_and_its_traceback_stays_here(
    toy: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def crash(*args: object) -> None:
        raise RuntimeError("secret inside")

    monkeypatch.setattr(toy.models[0].loaded.scheduler, "submit", crash)
    with caplog.at_level(logging.ERROR, "ster.server"):
        answer = toy.complete(max_tokens=1)
    assert error_of(answer) == (500, "internal_error", None) and "secret" not in answer.text
    record = next(record for record in caplog.records if record.levelno == logging.ERROR)
    assert answer.headers["x-request-id"] in record.getMessage()
    assert record.exc_info and "secret inside" in str(record.exc_info[1])


def test_the_models_and_what_they_can(toy: Client, toy_model: ster.Model) -> None:
    listed = toy.get("/v1/models").json()
    assert listed["object"] == "list" and [entry["id"] for entry in listed["data"]] == ["toy"]
    entry = listed["data"][0]
    assert toy.get("/v1/models/toy").json() == entry
    assert (entry["object"], entry["owned_by"], entry["status"]) == ("model", "ster", "live") and entry["served_model_name"] == "toy-llama"
    facts = {"n_layers": 4, "hidden_size": 64, "max_model_len": 256, "vocab_size": 67, "dtype": "float32", "bos_token_id": 1}
    caps = {"max_capture_numbers": 2**25, "max_steering_numbers": 2**21, "max_steering_vectors": 8, "max_span_positions": 4096}
    assert entry["capabilities"].items() >= (facts | caps | {"chat_template": False, "max_logprobs": 100}).items()
    status = toy.get("/v1/models/toy/status").json()
    assert status.items() >= {"id": "toy", "object": "model.status", "warm": True, "state": "ready", "uses": 0}.items()
    assert status["since"] <= time.time() and status["load_seconds"] > 0


def test_a_model_that_loads_and_one_that_fails(toy_model: ster.Model) -> None:
    gate = threading.Event()

    def slow() -> ster.Model:
        assert gate.wait(60)
        return toy_model

    def broken() -> ster.Model:
        raise CheckpointError("no weights in /home/me/secret")

    with running({"org/broken": broken, "slow": slow}, wait=False) as client:
        until(lambda: client.models[0].state == "failed")
        assert client.get("/health").json() == {"status": "ok", "models": {"org/broken": "failed", "slow": "loading"}}
        assert error_of(client.get("/ready")) == (503, "model_failed", None)
        body = {"model": "slow", "prompt": "the sea is calm", "max_tokens": 1}
        failed = client.complete(model="org/broken")
        assert error_of(failed) == (503, "model_failed", None) and "secret" not in failed.text
        answers: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: answers.append(httpx.post(f"{client.url}/v1/completions", json=body)))
        waiting.start()
        until(lambda: client.models[1].waiting == 1)
        assert "capabilities" not in client.get("/v1/models/slow").json()
        assert client.get("/v1/models/org/broken").json()["status"] == "failed"
        gate.set()
        waiting.join(10)
        assert answers[0].status_code == 200 and client.models[1].state == "ready"


def test_ready_when_all_are(toy: Client) -> None:
    assert toy.get("/ready").json() == {"status": "ready", "models": ["toy"]}


def test_tokens_and_back(toy: Client, byte_model: object) -> None:
    assert toy.post("/tokenize", json={"prompt": "the sea"}).json() == {"count": 2, "max_model_len": 256, "tokens": [3, 4]}
    assert toy.post("/detokenize", json={"tokens": [3, 4]}).json() == {"prompt": "the sea"}
    assert toy.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert error_of(toy.post("/detokenize", json={"tokens": [67]})) == (400, "invalid_request", "tokens")
    assert error_of(toy.post("/tokenize", json={"prompt": "the sea", "model": "other"})) == (400, "model_not_found", "model")
    info = toy.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["chat_template"]) == ("<s>", "</s>", None)


def test_a_conversation_is_tokenised_as_a_chat_is(chatting: Path) -> None:
    model = ster.load(chatting)
    messages = [{"role": "user", "content": "the sea"}, {"role": "assistant", "content": [{"type": "text", "text": "calm"}]}]
    with running({"chat": lambda: model}) as client:
        ask = lambda **fields: client.post("/tokenize", json=fields)  # noqa: E731
        for opened in (True, False, None):
            plain = [{"role": "user", "content": "the sea"}, {"role": "assistant", "content": "calm"}]
            expected = model.chat_tokens(plain, add_generation_prompt=opened)
            assert ask(messages=messages, add_generation_prompt=opened).json()["tokens"] == expected
        assert ask(messages=messages[:1]).json()["tokens"] == model.prompt_tokens("the sea")
        chat = client.post(
            "/v1/chat/completions", json={"model": "chat", "messages": messages[:1], "max_tokens": 1, "return_token_ids": True}
        )
        assert ask(messages=messages[:1]).json()["tokens"] == chat.json()["prompt_token_ids"]
        for fields, param in [
            ({}, "prompt"),
            ({"prompt": "the sea", "messages": messages}, "messages"),
            ({"prompt": "the sea", "add_generation_prompt": True}, "add_generation_prompt"),
            ({"messages": [{"role": "user", "content": "the sea " * 200}]}, "messages"),
        ]:
            assert error_of(ask(**fields)) == (400, "invalid_request", param)


def test_a_conversation_needs_a_template(toy: Client) -> None:
    refused = toy.post("/tokenize", json={"messages": [{"role": "user", "content": "the sea"}]})
    assert error_of(refused) == (400, "chat_completions_unsupported", "model")


def test_the_model_says_what_it_is(toy: Client, toy_model: ster.Model) -> None:
    found = toy.get("/v1/models/toy").json()["capabilities"]
    assert (found["precision"], found["unknown_token_id"]) == ("f32", toy_model.tokenizer.unknown_id) and "revision" not in found
    assert (found["config_hash"], found["tokenizer_hash"]) == (toy_model.config_hash, toy_model.tokenizer_hash)
    assert toy.get("/v1/models/toy/weights_hash").json()["weights_hash"] == toy_model.weights_hash
    assert error_of(toy.get("/v1/models/other/weights_hash"))[0] == 404


def test_special_tokens_are_added_to_text_and_read_in_it(byte_model: object) -> None:
    folder: Path = byte_model(bos=True)  # type: ignore[operator]
    with running({"bytes": folder}, Settings()) as client:
        ask = lambda **fields: client.post("/tokenize", json=fields).json()["tokens"]  # noqa: E731
        assert ask(prompt="a") == [1, *ask(prompt="a", add_special_tokens=False)]
        assert ask(prompt="<s>", add_special_tokens=False) == [1]
        assert client.post("/detokenize", json={"tokens": ask(prompt="aé")}).json() == {"prompt": "<s>aé"}


def test_two_models_answer_under_their_names(toy_model: ster.Model, chatting: Path) -> None:
    with running({"a": lambda: toy_model, "b/c": chatting}) as client:
        assert client.answer(model="a", max_tokens=1)["model"] == "toy-llama"
        assert client.answer(model="b/c", max_tokens=1)["model"] == "copy"
        assert client.get("/v1/models/b/c").json()["capabilities"]["chat_template"] is True
        assert client.get("/tokenizer_info", params={"model": "b/c"}).json()["chat_template"].startswith("{%")


def test_cors_is_off_unless_asked_for(toy: Client, toy_model: ster.Model) -> None:
    asking = {"origin": "https://lab.example", "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    assert error_of(toy.options("/v1/completions", headers=asking))[0] == 405
    assert "access-control-allow-origin" not in toy.get("/health", headers=asking).headers
    with running({"toy": lambda: toy_model}, Settings(allowed_origins=("https://lab.example",), api_keys=("k",))) as client:
        allowed = client.options("/v1/completions", headers=asking)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://lab.example"
        refused = client.get("/v1/models", headers=asking)  # a page may read why
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://lab.example"
        other = client.options("/v1/completions", headers=asking | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_head_and_pipelines(toy: Client) -> None:
    assert toy.head("/health").status_code == 200
    with httpx.Client(base_url=toy.url) as client:
        assert [client.get("/health").status_code for _ in range(3)] == [200] * 3

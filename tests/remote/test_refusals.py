"""A server that refuses, in whatever form: told once, by its prompt, and not asked again."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from lens_stub import Raw, Stub, kept, stubbed
from serving import Client

import ster
from ster.errors import RemoteError

REFUSALS: dict[str, tuple[Any, str]] = {
    "in a 200": ({"error": {"message": "The engine died.", "code": "vllm_engine_dead"}}, r"^the server refuses: The engine died: p"),
    "after spaces": (Raw(b" " * 2048 + b'{"error": {"message": "Loading failed."}}'), "the server refuses: Loading failed."),
    "a text": (Raw(b'{"error": "no"}', 400), r"the server refuses \(400\): no"),
    "an object of the old kind": (Raw(b'{"object": "error", "message": "too long"}', 400), r"refuses \(400\): too long"),
    "fastapi's": (Raw(b'{"detail": [{"msg": "field required"}]}', 422), r"refuses \(422\): \[\{.msg"),
    "a 404": (Raw(b'{"detail":"Not Found"}', 404), r"refuses \(404\): Not Found"),
    "a page": (
        Raw(b"<html>\n<body>Bad gateway</body></html>", 418, {"Content-Type": "text/html"}),
        "answers 418, text/html: `<html> <body>Bad",
    ),
    "nothing": (Raw(b"", 200), "something that is not a JSON object: nothing"),
    "half of it": (Raw(b'{"choices": [', 200), "something that is not a JSON object"),
    "NaN": (Raw(b'{"choices": NaN}', 200), "something that is not a JSON object"),
    "a list": (Raw(b"[]", 200), "something that is not a JSON object"),
    "a redirect": (Raw(b"", 302, {"Location": "/elsewhere"}), "answers 302"),
    "compressed": (Raw(b"", 200, {"Content-Encoding": "gzip"}), "compresses its answers"),
    "without end": (Raw(b" " * (5 << 20), 200), "answers with more than"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_are_told_once_and_not_asked_again(stub: Stub, remote: ster.RemoteModel, toy_model: ster.Model, name: str) -> None:
    answer, message = REFUSALS[name]
    stub.spoil = lambda body, document: answer
    with pytest.raises(RemoteError, match=message) as refused:
        kept(remote, toy_model)
    assert str(refused.value).endswith("prompts[0]") and len(stub.completions()) == 1


def test_leading_spaces_are_no_matter(stub: Stub, remote: ster.RemoteModel, toy_model: ster.Model) -> None:
    stub.spoil = lambda body, document: Raw(b" " * 4096 + json.dumps(document).encode())
    assert kept(remote, toy_model) == [0]


def test_a_key_is_sent_and_missed(toy_model: ster.Model) -> None:
    with stubbed(toy_model, key="secret") as stub:
        ster.connect(stub.url, api_key="secret").close()
        with pytest.raises(RemoteError, match=r"the server refuses \(401\): Unauthorized") as refused:
            ster.connect(stub.url)
        assert refused.value.hint and "--api-key" in refused.value.hint


@pytest.mark.parametrize("status", [200, 401, 502])
@pytest.mark.parametrize("kind", ["application/json", "text/html"])
def test_a_key_that_is_sent_back_is_not_shown(toy_model: ster.Model, status: int, kind: str) -> None:
    """As by a proxy that shows the request in its page; nor does a page move the cursor of a terminal."""
    text = "Authorization: Bearer sk-ster-secret \x1b[2J\x07"
    body = json.dumps({"error": {"message": text}}) if kind == "application/json" else f"<pre>{text}</pre>"
    with stubbed(toy_model) as stub:
        stub.answer = lambda path, asked: Raw(body.encode(), status, {"Content-Type": f"{kind} \x1b[31m"})  # type: ignore[method-assign]
        with pytest.raises(RemoteError) as refused:
            ster.connect(stub.url, api_key="sk-ster-secret", retry_seconds=0)
    shown = f"{refused.value} {refused.value.hint}"
    assert "Bearer ***" in shown and "secret" not in shown and shown.isprintable()


def test_nor_is_it_in_a_stream(stub: Stub) -> None:
    with ster.connect(stub.url, api_key="sk-ster-secret") as model:
        event = b'data: {"error": {"message": "no: Bearer sk-ster-secret"}}\n\n'
        stub.spoil = lambda body, document: Raw(event, headers={"Content-Type": "text/event-stream"})
        with pytest.raises(RemoteError, match=r"the server refuses: no: Bearer \*\*\*"):
            list(model.stream("the sea", max_new_tokens=2))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(("n_layers", "hidden_size", "max_model_len", "vocab_size"), (0, -1, 10**10, "4", 2.5, True, None)),
        *itertools.product(("served_model_name", "precision"), ("", 5, None)),
        *itertools.product(("chat_template", "activation_dtypes"), ("yes", 1, None)),
        *itertools.product(("revision", "config_hash", "tokenizer_hash"), (5, ["a"])),
        *itertools.product(("bos_token_id", "unknown_token_id", "max_capture_numbers", "rotation_changes_after"), ("1", 1.5, True)),
    ],
)
def test_what_no_model_is_like_is_refused_before_anything_is_made_by_it(
    toy_model: ster.Model, served: Client, name: str, value: Any
) -> None:
    document = served.get("/v1/models").json()
    entry = document["data"][0]
    (entry if name in entry else entry["capabilities"])[name] = value
    with stubbed(toy_model) as stub:
        stub.answer = lambda path, asked: document  # type: ignore[method-assign]
        with pytest.raises(RemoteError, match=f"does not say what a model is that Ster can use: its `{name}` is "):
            ster.connect(stub.url)
    assert [path for path, _ in stub.requests] == ["/v1/models"]


def test_an_address_that_is_another_api_is_told_how_addresses_end(toy_model: ster.Model) -> None:
    with stubbed(toy_model) as stub, pytest.raises(RemoteError) as refused:
        ster.connect(stub.url.removesuffix("/v1") + "/v2")
    assert refused.value.hint == "an address ends in /v1, as in http://localhost:8000/v1"

"""A server that refuses, in whatever form: told once, by its prompt, and not asked again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lens_stub import Raw, Stub, kept, stubbed

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


def test_an_address_that_is_another_api_is_told_how_addresses_end(toy_model: ster.Model) -> None:
    with stubbed(toy_model) as stub, pytest.raises(RemoteError) as refused:
        ster.connect(stub.url.removesuffix("/v1") + "/v2")
    assert refused.value.hint == "an address ends in /v1, as in http://localhost:8000/v1"

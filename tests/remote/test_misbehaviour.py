"""A server that speaks vllm-lens's dialect, good and bad. Whatever is wrong with an answer ends in a sentence, never in numbers."""

from __future__ import annotations

import base64
import email.utils
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard
from harvesting import PROMPTS, contents
from lens_stub import Raw, Stub, rounded, stubbed
from serving import until

import ster
from ster.errors import InputError, NonFiniteError, RemoteError, SterError
from ster.remote.model import ROUNDING
from ster.remote.retry import Patience
from ster.remote.steering import steering_vectors
from ster.server.tensors import encode, unpack

LAYERS = [0, 2]
PROMPT = "the sea is calm"


@pytest.fixture
def stub(toy_model: ster.Model) -> Iterator[Stub]:
    with stubbed(toy_model) as found:
        yield found


@pytest.fixture
def remote(stub: Stub) -> Iterator[ster.RemoteModel]:
    with ster.connect(stub.url, timeout=20, retry_seconds=5) as model:
        stub.requests.clear()
        yield model


# Good


def test_sizes_are_found_by_reading_one_token(stub: Stub, toy_model: ster.Model) -> None:
    with ster.connect(f"{stub.url}/v1/") as model:
        assert (model.layer_count, model.hidden_size, model.context_length, model.precision) == (4, 64, 256, "bf16")
        assert (model.name, model.chat_template, model.wire_dtype) == ("toy-llama", "absent", "bfloat16")
        assert (model.config_hash, model.tokenizer_hash, model.hash_weights(), model.revision) == (None,) * 4
        assert model.wire == {"wire_dtype": "bfloat16", "wire_rounding": "2^-8 relative"}
    assert [(body["max_tokens"], len(body["prompt"])) for body in stub.completions()[:4]] == [(1, 1), (1, 1), (1, 6), (1, 3)]
    with pytest.raises(InputError, match="the server sends activations as bfloat16, and float32 was asked for"):
        ster.connect(stub.url, wire_dtype="float32")
    with pytest.raises(InputError, match="has no model llama"):
        ster.connect(stub.url, "llama")


def test_ids_are_sent_never_texts_and_fields_stand_in_xargs(stub: Stub, remote: ster.RemoteModel, toy_model: ster.Model) -> None:
    remote.generate(PROMPT, ster.steer(np.ones(64), 1), layers=[1], max_new_tokens=2)
    for body in stub.completions():
        assert all(isinstance(id, int) for id in body["prompt"]) and not {"output_residual_stream", "apply_steering_vectors"} & set(body)
    assert set(stub.completions()[-1]["vllm_xargs"]) == {"output_residual_stream", "apply_steering_vectors"}


def test_activations_are_those_of_the_model_rounded(remote: ster.RemoteModel, toy_model: ster.Model) -> None:
    found, own = (model.activations(PROMPTS, position="all") for model in (remote, toy_model))
    assert found.token_ids == own.token_ids
    for a, b in zip(found.values, own.values, strict=True):
        assert a.tobytes() == rounded(b).tobytes() == b.astype(ml_dtypes.bfloat16).astype(np.float32).tobytes()


def test_the_whole_workflow(remote: ster.RemoteModel, toy_model: ster.Model, calm_pairs: Path, tmp_path: Path) -> None:
    pairs = ster.PairSet.load(calm_pairs)
    artifact = ster.train(remote, pairs)
    assert artifact.model == "toy-llama" and not {"weights_hash", "tokenizer_hash"} & set(artifact.metadata)
    assert artifact.metadata["wire_dtype"] == "bfloat16"
    for layer in artifact.layers:  # rounded by 2^-8: the directions all but agree
        assert artifact.vector(layer) @ ster.train(toy_model, pairs).vector(layer) > 0.999
    report = ster.evaluate(remote, pairs, artifact, [1.0], layers=[1], neutral=["the sea is calm ."])
    here = replace(artifact, precision=None)
    own = ster.evaluate(toy_model, pairs, here, [1.0], layers=[1], neutral=["the sea is calm ."])
    assert report.strengths[0].mean_shift == pytest.approx(own.strengths[0].mean_shift, rel=1e-9)
    assert report.strengths[0].mean_kl is None and report.picked is None
    found = remote.generate(PROMPT, artifact.at(1, strength=4.0), max_new_tokens=5, layers="all", point="pre_steer")
    assert found.token_ids == toy_model.generate(PROMPT, here.at(1, strength=4.0), max_new_tokens=5).token_ids
    traced = toy_model.trace([*found.prompt_token_ids, *found.token_ids[:-1]], steering=here.at(1, strength=4.0))
    assert found.trace is not None and found.trace.residual.tobytes() == rounded(traced.residual).tobytes()
    assert "".join(step.text for step in remote.stream(PROMPT, max_new_tokens=5)) == remote.generate(PROMPT, max_new_tokens=5).text
    ster.harvest(remote, PROMPTS, tmp_path / "h", dtype="f32")
    manifest = ster.open_harvest(tmp_path / "h").manifest
    assert manifest["weights_hash"] is None and manifest["wire_dtype"] == "bfloat16"


@pytest.mark.parametrize(("wire", "digits"), [("bfloat16", -8), ("float16", -11)])
def test_what_is_said_of_the_rounding_is_what_it_does(wire: Any, digits: int) -> None:
    """The bound holds, and half of it does not."""
    values = np.linspace(1.0, 2.0, 1 << 16, dtype=np.float32)
    tensor = encode(values, wire)
    there = unpack(tensor["data"], tensor["dtype"], tensor["original_dtype"], tensor["shape"], max_numbers=values.size)
    error = float((np.abs(there - values) / values).max())
    assert 2.0 ** (digits - 1) < error <= 2.0**digits and ROUNDING[wire].startswith(f"2^{digits} relative")


def test_an_artifact_without_a_hash_is_known_by_name(stub: Stub, remote: ster.RemoteModel, calm_pairs: Path) -> None:
    artifact = ster.train(remote, ster.PairSet.load(calm_pairs), [1])
    remote.check_artifact(artifact)
    stub.entry["root"] = "org/other"
    with ster.connect(stub.url) as other, pytest.raises(SterError, match='trained for model "toy-llama", current model is "org/other"'):
        other.check_artifact(artifact)


def test_a_template_is_found_and_used(chatting: Path) -> None:
    model = ster.load(chatting)
    with stubbed(model) as stub, ster.connect(stub.url) as remote:
        assert remote.chat_template == "applied"
        assert remote.prompt_tokens("the sea") == model.prompt_tokens("the sea")


def test_half_a_character_in_a_message_is_refused_before_it_is_sent(chatting: Path) -> None:
    with stubbed(ster.load(chatting)) as stub, ster.connect(stub.url) as remote:
        stub.requests.clear()
        with pytest.raises(InputError, match="half a surrogate pair"):
            remote.chat_tokens([{"role": "user", "content": "a\ud800"}])
        assert not stub.requests


def test_a_template_that_the_server_does_not_use_is_named(stub: Stub, chatting: Path) -> None:
    with pytest.raises(InputError, match="the tokenizer's folder has a chat template, and the server has none") as refused:
        ster.connect(stub.url, tokenizer=chatting)
    assert refused.value.hint and "--chat-template off" in refused.value.hint
    ster.connect(stub.url, tokenizer=chatting, chat_template="off").close()


def test_unsteered_texts_are_scored_on_the_way_of_the_steered(stub: Stub, remote: ster.RemoteModel, calm_pairs: Path) -> None:
    pairs = ster.PairSet.load(calm_pairs)
    artifact = ster.train(remote, pairs, [1])
    stub.requests.clear()
    ster.evaluate(remote, pairs, artifact, [1.0], neutral=["the sea"])
    scored = [json.loads(body["vllm_xargs"]["apply_steering_vectors"]) for body in stub.completions() if "prompt_logprobs" in body]
    assert scored and {vectors[0]["scale"] for vectors in scored} == {0.0, 1.0}


# Bad


def tensor(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["activations"]["residual_stream"]
    return found


def resized(change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> Callable[..., Any]:
    """The stored numbers, changed, in a tensor that says so."""

    def spoil(body: Any, document: dict[str, Any]) -> Any:
        found = tensor(document)
        raw = np.frombuffer(zstandard.decompress(base64.b64decode(found["data"])), found["dtype"]).reshape(found["shape"])
        changed = change(raw.copy())
        found["shape"] = list(changed.shape)
        found["data"] = packed(changed.tobytes())
        return document

    return spoil


def packed(raw: bytes) -> str:
    return base64.b64encode(zstandard.ZstdCompressor(level=1).compress(raw)).decode()


def changed(**members: Any) -> Callable[..., Any]:
    """Members of the tensor; functions of what was there."""

    def spoil(body: Any, document: dict[str, Any]) -> Any:
        found = tensor(document)
        for name, value in members.items():
            found[name] = value(found[name]) if callable(value) else value
        return document

    return spoil


def frame(change: Callable[[bytes], bytes]) -> Callable[..., Any]:
    return changed(data=lambda data: base64.b64encode(change(base64.b64decode(data))).decode())


def poisoned(bits: int) -> Callable[..., Any]:
    def change(raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        raw[1, 2, 3] = np.uint16(bits).view(np.int16)
        return raw

    return resized(change)


def answered(**members: Any) -> Callable[..., Any]:
    return lambda body, document: {**document, **members}


def chosen(**members: Any) -> Callable[..., Any]:
    return lambda body, document: {**document, "choices": [{**document["choices"][0], **members}]}


def handle(body: Any, document: dict[str, Any]) -> Any:
    found = tensor(document)
    del found["data"]
    found |= {"handle": "abc", "nbytes": 12, "transport": "binary"}
    return document


def retokenised(body: Any, document: dict[str, Any]) -> Any:
    """The server ran another token in front, and all of its answer fits that."""
    resized(lambda raw: np.concatenate([raw[:, :1], raw], axis=1))(body, document)
    document["usage"]["prompt_tokens"] += 1
    return document


def without(*path: str) -> Callable[..., Any]:
    def spoil(body: Any, document: dict[str, Any]) -> Any:
        inner = document
        for name in path[:-1]:
            inner = inner[name]
        del inner[path[-1]]
        return document

    return spoil


def of_the_prompt_before(body: Any, document: dict[str, Any]) -> Any:
    resized(lambda raw: raw[:, :-2])(body, document)
    document["usage"]["prompt_tokens"] -= 2
    document["choices"][0]["prompt_token_ids"] = document["choices"][0]["prompt_token_ids"][:-2]
    return document


MISFITS: dict[str, tuple[Callable[..., Any], str]] = {
    "no activations": (without("activations"), "it has no activations"),
    "activations that are null": (answered(activations=None), "it has no activations"),
    "activations of another kind": (answered(activations={"attn_q": {}}), "it has no activations"),
    "a list": (answered(activations={"residual_stream": [1]}), "its activations are not an object"),
    "a layer too few": (resized(lambda raw: raw[1:]), r"are \[1, 4, 64\], expected \[2, 4, 64\]"),
    "a layer too many": (resized(lambda raw: raw[[0, 0, 1]]), r"are \[3, 4, 64\], expected \[2, 4, 64\]"),
    "a row too few": (resized(lambda raw: raw[:, 1:]), r"are \[2, 3, 64\], expected \[2, 4, 64\]"),
    "a row too many": (resized(lambda raw: raw[:, [0, 0, 1, 2, 3]]), r"are \[2, 5, 64\], expected \[2, 4, 64\]"),
    "another hidden size": (resized(lambda raw: raw[:, :, :32]), r"are \[2, 4, 32\], expected \[2, 4, 64\]"),
    "other axes": (resized(lambda raw: raw.transpose(1, 0, 2)), r"are \[4, 2, 64\], expected \[2, 4, 64\]"),
    "flat": (changed(shape=[512]), r"no shape \[layers, tokens, hidden\]: \[512\]"),
    "a shape of texts": (changed(shape=["2", "4", "64"]), "no shape"),
    "a negative shape": (changed(shape=[2, -4, -64]), "no shape"),
    "float32 that is none": (changed(dtype="float32", original_dtype="torch.float32"), "activations are float32, expected bfloat16"),
    "float16 that is none": (changed(dtype="float16", original_dtype="torch.float16"), "activations are float16, expected bfloat16"),
    "half of a dtype": (changed(dtype="float16"), "have the dtype 'float16' with 'torch.bfloat16', which is none that is known"),
    "no dtype": (without("activations", "residual_stream", "dtype"), "have the dtype None"),
    "more bytes than the shape": (changed(data=lambda _: packed(bytes(2048))), "has 2,048 bytes of data, and the shape"),
    "a frame that breaks off": (frame(lambda raw: raw[:-20]), "data that is not a whole zstd frame"),
    "two frames": (frame(lambda raw: raw + raw), "data that goes on after one zstd frame"),
    "a frame and rubbish": (frame(lambda raw: raw + b"rubbish"), "data that goes on after one zstd frame"),
    "no frame": (frame(lambda raw: b"rubbish" * 20), "data that is not a zstd frame"),
    "a frame without a size": (
        changed(data=lambda _: base64.b64encode(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1024))).decode()),
        "does not state its size",
    ),
    "a bomb": (changed(data=lambda _: packed(bytes(1 << 28))), "has 268,435,456 bytes of data"),
    "base64 with rubbish": (changed(data=lambda data: "*" + data), "data that is not base64"),
    "base64 without padding": (changed(data=lambda data: data.rstrip("=") + "A"), "data that is not"),
    "data that is no text": (changed(data=[1]), "not base64 of zstd"),
    "no compression": (changed(compression="none"), "not base64 of zstd"),
    "a handle": (handle, "a handle to fetch bytes by, which was not asked for"),
    "a prompt that was tokenised again": (retokenised, "it ran 5 prompt tokens, expected 4"),
    "an answer to another prompt": (of_the_prompt_before, "it ran 2 prompt tokens, expected 4"),
    "other tokens": (chosen(prompt_token_ids=[1, 2, 3, 4]), "it ran other prompt tokens"),
    "two new tokens": (answered(usage={"prompt_tokens": 4, "completion_tokens": 2}), "it generated 2 tokens, expected 1"),
    "no usage": (without("usage"), "its usage does not say how many tokens ran"),
    "usage in text": (answered(usage={"prompt_tokens": "4", "completion_tokens": 1}), "its usage does not say"),
    "another model": (answered(model="other"), "the model is 'other', expected 'toy'"),
    "no choices": (answered(choices=[]), "0 choices, expected 1"),
    "two choices": (lambda body, document: {**document, "choices": document["choices"] * 2}, "2 choices, expected 1"),
}


def kept(remote: ster.RemoteModel, toy_model: ster.Model) -> list[int]:
    """What a read of one prompt hands over."""
    seen: list[int] = []
    remote.read([toy_model.encode(PROMPT)], ["prompts[0]"], LAYERS, "all", lambda index, values: seen.append(index))
    return seen


@pytest.mark.parametrize("name", MISFITS)
def test_an_answer_that_does_not_fit_is_refused_by_its_prompt(
    stub: Stub, remote: ster.RemoteModel, toy_model: ster.Model, name: str
) -> None:
    assert kept(remote, toy_model) == [0]
    stub.spoil, message = MISFITS[name]
    stub.requests.clear()
    with pytest.raises(RemoteError, match=message) as refused:
        kept(remote, toy_model)
    assert str(refused.value).endswith(": prompts[0]") and len(stub.completions()) == 1
    stub.spoil = None
    assert kept(remote, toy_model) == [0]


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0])
def test_what_is_not_finite_is_refused_by_its_place(stub: Stub, remote: ster.RemoteModel, toy_model: ster.Model, bits: int) -> None:
    stub.spoil = poisoned(bits)
    with pytest.raises(NonFiniteError, match=r"a value that is not finite: layer 2, token 2: prompts\[0\]$"):
        kept(remote, toy_model)


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


def test_a_server_that_is_busy_is_asked_again(stub: Stub, remote: ster.RemoteModel, toy_model: ster.Model, no_waits: list[float]) -> None:
    date = email.utils.formatdate(time.time() + 4, usegmt=True)
    busy = [
        Raw(b'{"error": {"message": "queue full"}}', 429, {"Retry-After": "2"}),
        Raw(b"", 503, {"Retry-After": date}),
        Raw(b"<html>", 502, {"Content-Type": "text/html"}),
    ]
    stub.plan = [lambda body, document, raw=raw: raw for raw in busy[:1]]  # type: ignore[misc]
    assert kept(remote, toy_model) == [0] and no_waits == [2.0]
    stub.plan = [lambda body, document, raw=raw: raw for raw in busy[1:]]  # type: ignore[misc]
    no_waits.clear()
    assert kept(remote, toy_model) == [0]
    assert 0.0 < no_waits[0] <= 4.0 and no_waits[1] == 1.0
    no_waits.clear()
    stub.spoil = lambda body, document: busy[0]
    with pytest.raises(RemoteError, match=r"the server refuses \(429\): queue full: prompts\[0\]"):
        kept(remote, toy_model)
    assert no_waits == [2.0, 2.0]  # five seconds are all it may wait


@pytest.mark.parametrize("again", ["0", "Thu, 01 Jan 1970 00:01:00 GMT", "-1"])
def test_waits_double_where_the_server_asks_for_none(
    stub: Stub, remote: ster.RemoteModel, toy_model: ster.Model, no_waits: list[float], again: str
) -> None:
    stub.spoil = lambda body, document: Raw(b"{}", 503, {"Retry-After": again})
    with pytest.raises(RemoteError, match="answers 503"):
        kept(remote, toy_model)
    assert no_waits == [0.5, 1.0, 2.0]


def test_patience_ends_by_the_clock_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("ster.remote.retry.time.monotonic", lambda: now)
    patience = Patience(10)
    assert patience.after(503, {}) == 0.5
    now += 9.5
    assert patience.after(503, {}) is None


@pytest.mark.parametrize("code", ["queue_full", "model_loading", "model_failed", "internal_error"])
def test_an_error_told_late_is_taken_as_its_status(
    stub: Stub, remote: ster.RemoteModel, toy_model: ster.Model, no_waits: list[float], code: str
) -> None:
    late = Raw(b"  " + json.dumps({"error": {"message": "Later.", "code": code}}).encode())
    stub.plan = [lambda body, document: late]
    assert kept(remote, toy_model) == [0] and no_waits == [0.5]
    stub.spoil = lambda body, document: late
    with pytest.raises(RemoteError, match="refuses: Later"):
        kept(remote, toy_model)
    assert len(no_waits) == (2 if code == "internal_error" else 4)


def test_a_stream_is_asked_for_again_until_it_begins(
    stub: Stub, remote: ster.RemoteModel, toy_model: ster.Model, no_waits: list[float]
) -> None:
    error = json.dumps({"error": {"message": "Full.", "code": "queue_full"}}).encode()
    event = b'data: {"choices": [{"index": 0, "text": " a", "token_ids": [5], "finish_reason": null}]}\n\n'
    stream = {"Content-Type": "text/event-stream"}
    own = toy_model.generate(PROMPT, max_new_tokens=3).token_ids
    for busy in (Raw(error, 429), Raw(b"gone", 200, cut=0), Raw(b"data: " + error + b"\n\n", 200, stream)):
        stub.plan = [lambda body, document, busy=busy: busy]  # type: ignore[misc]
        assert [step.token_id for step in remote.stream(PROMPT, max_new_tokens=3)] == own
    assert no_waits == [0.5] * 3
    stub.plan = [lambda body, document: Raw(event + b"data: " + error + b"\n\n", 200, stream)]
    with pytest.raises(RemoteError, match="refuses: Full"):
        list(remote.stream(PROMPT, max_new_tokens=3))


def test_a_stream_has_an_end(stub: Stub, remote: ster.RemoteModel) -> None:
    event = b'data: {"choices": [{"index": 0, "text": " a", "token_ids": [5], "finish_reason": null}]}\n\n'
    stub.spoil = lambda body, document: Raw(event * 100, headers={"Content-Type": "text/event-stream"})
    steps = remote.stream(PROMPT, max_new_tokens=4)
    with pytest.raises(RemoteError, match="more than the 4 tokens"):
        for count, _ in enumerate(steps):
            assert count < 4
    stub.spoil = lambda body, document: Raw(b"data: " + b" " * (2 << 20), headers={"Content-Type": "text/event-stream"})
    with pytest.raises(RemoteError, match="answers with more than"):
        list(remote.stream(PROMPT, max_new_tokens=4))


def test_a_server_that_failed_is_asked_once_again(
    stub: Stub, remote: ster.RemoteModel, toy_model: ster.Model, no_waits: list[float]
) -> None:
    failed = Raw(b'{"error": {"message": "steering failed"}}', 500)
    stub.plan = [lambda body, document: failed]
    assert kept(remote, toy_model) == [0]
    stub.spoil = lambda body, document: failed
    stub.requests.clear()
    with pytest.raises(RemoteError, match=r"refuses \(500\): steering failed"):
        kept(remote, toy_model)
    assert len(stub.completions()) == 2


def test_a_connection_that_breaks_off(stub: Stub, remote: ster.RemoteModel, toy_model: ster.Model, no_waits: list[float]) -> None:
    broken = lambda body, document: Raw(json.dumps(document).encode(), cut=300)  # noqa: E731
    stub.plan = [broken]
    assert kept(remote, toy_model) == [0]
    stub.spoil = broken
    with pytest.raises(RemoteError, match=r"broke off the connection: .*: prompts\[0\]$"):
        kept(remote, toy_model)


def test_a_server_that_hangs(stub: Stub, toy_model: ster.Model) -> None:
    released = threading.Event()
    with ster.connect(stub.url, timeout=0.5) as remote:
        stub.spoil = lambda body, document: Raw(b"", hang=released)
        with pytest.raises(RemoteError, match=r"sent nothing for 0\.5 seconds: prompts\[0\]"):
            kept(remote, toy_model)
    released.set()


def test_a_server_that_is_not_there(stub: Stub, no_waits: list[float]) -> None:
    with pytest.raises(RemoteError, match=r"^http://127\.0\.0\.1:1 cannot be reached") as refused:
        ster.connect("http://127.0.0.1:1/v1")
    assert refused.value.hint and len(no_waits) == 3


def test_a_server_that_reverses_layers(stub: Stub) -> None:
    stub.reverses = True
    with pytest.raises(RemoteError, match="answers layers in another order") as refused:
        stub.plan = [None, None]
        stub.plan[0] = resized(lambda raw: raw[::-1])  # all layers as they are, some of them reversed
        ster.connect(stub.url)
    assert "order" in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: np.roll(raw, 1, axis=1),
        lambda raw: raw[:, ::-1],
        lambda raw: raw * 0,
        lambda raw: np.repeat(raw[:, :1], raw.shape[1], axis=1),
        lambda raw: np.concatenate([raw[:, :-1], raw[:, -2:-1]], axis=1),
    ],
)
def test_rows_that_are_not_their_tokens(stub: Stub, change: Any) -> None:
    spoiled = resized(change)
    stub.spoil = lambda body, document: document if len(body["prompt"]) == 1 else spoiled(body, document)
    with pytest.raises(RemoteError, match="rows that are not their tokens'"):
        ster.connect(stub.url)


def test_each_layer_is_seen_to_steer(stub: Stub, remote: ster.RemoteModel) -> None:
    remote.generate(PROMPT, ster.steer(np.ones(64), 1), max_new_tokens=2)
    stub.steers = False
    with pytest.raises(RemoteError, match="does not steer: a vector added at layer 2"):
        remote.generate(PROMPT, ster.steer(np.ones(64), 2), max_new_tokens=2)


def test_a_server_that_does_not_steer(stub: Stub, remote: ster.RemoteModel) -> None:
    stub.steers = False
    with pytest.raises(RemoteError, match="does not steer: a vector added at layer 1"):
        remote.generate(PROMPT, ster.steer(np.ones(64), 1), max_new_tokens=2)
    stub.steers = True
    assert remote.generate(PROMPT, ster.steer(np.ones(64), 1), max_new_tokens=2).token_ids


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without("activations"), "it has no activations"),
        (lambda body, document: chosen(token_ids=document["choices"][0]["token_ids"][1:])(body, document), "does not name the tokens"),
        (chosen(token_ids=None), "does not name the tokens"),
        (chosen(text=None), "has no text"),
        (chosen(finish_reason=None), "has no text, or does not say why"),
        (answered(usage={"prompt_tokens": 4, "completion_tokens": 4}), "it generated 4 tokens, expected 1 to 3"),
        (resized(lambda raw: raw[:, :4]), r"are \[1, 4, 64\], expected \[1, 6, 64\]"),
    ],
)
def test_a_text_that_does_not_fit(stub: Stub, remote: ster.RemoteModel, spoil: Any, message: str) -> None:
    stub.spoil = spoil
    with pytest.raises(RemoteError, match=message):
        remote.generate(PROMPT, max_new_tokens=3, layers=[1])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'data: {"error": {"message": "out of memory"}}\n\n', "the server refuses: out of memory"),
        (
            b'data: {"choices": [{"index": 0, "text": " a", "token_ids": [5], "finish_reason": null}]}\n\n',
            "the stream ended before the text did",
        ),
        (b'data: {"choices": [{"index": 0, "text": " a", "finish_reason": "stop"}]}\n\n', "does not name its tokens"),
        (b'data: {"choices": [{"index": 0, "text": "", "token_ids": [5], "prompt_token_ids": [1]}]}\n\n', "ran other prompt tokens"),
        (b'data: {"model": "other", "choices": []}\n\n', "the model is 'other'"),
        (b"data: rubbish\n\n", "answers 200, text/event-stream"),
    ],
)
def test_a_stream_that_does_not_fit(stub: Stub, remote: ster.RemoteModel, body: bytes, message: str) -> None:
    stub.spoil = lambda asked, document: Raw(body, headers={"Content-Type": "text/event-stream"})
    with pytest.raises(RemoteError, match=message):
        list(remote.stream(PROMPT, max_new_tokens=3))
    stub.spoil = lambda asked, document: Raw(b'{"error": {"message": "no streams"}}', 400)
    with pytest.raises(RemoteError, match=r"refuses \(400\): no streams"):
        list(remote.stream(PROMPT, max_new_tokens=3))


@pytest.mark.parametrize(
    "entries",
    [None, [], [None] * 3, [None, {"5": {"logprob": -1}}], "own", "nan"],
)
def test_scores_that_do_not_fit(stub: Stub, remote: ster.RemoteModel, calm_pairs: Path, entries: Any) -> None:
    pairs = ster.PairSet.load(calm_pairs)
    artifact = ster.train(remote, pairs, [1])

    def spoil(body: Any, document: dict[str, Any]) -> Any:
        if "prompt_logprobs" not in body:
            return document
        found = document["choices"][0]["prompt_logprobs"]
        if entries == "own":
            found[2] = {"66": {"logprob": -1.0}}
        elif entries == "nan":
            found[2] = {key: {"logprob": None} for key in found[2]}
        else:
            found = entries
        return chosen(prompt_logprobs=found)(body, document)

    stub.spoil = spoil
    with pytest.raises(RemoteError, match="prompt_logprobs .* pair 0, positive side"):
        ster.evaluate(remote, pairs, artifact, [1.0])


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "host:8000"}, "an endpoint must be the address of a server"),
        ({"endpoint": "ftp://host"}, "an endpoint must be"),
        ({"endpoint": "http://host/v1?x=1"}, "an endpoint must be"),
        ({"endpoint": ""}, "an endpoint must be"),
        ({"endpoint": "http://user:secret@host"}, "^an endpoint must have no user and no password in it$"),
        ({"concurrency": 0}, "concurrency must be between 1 and 1024, found 0"),
        ({"timeout": 0}, "timeout must be"),
        ({"retry_seconds": float("nan")}, "retry_seconds must be"),
        ({"api_key": "a b"}, "an API key must be"),
        ({"chat_template": "on"}, 'unknown chat template mode "on"'),
        ({"wire_dtype": "int8"}, 'unknown wire dtype "int8"'),
        ({"tokenizer": "nowhere"}, "failed to read nowhere/tokenizer.json"),
    ],
)
def test_options_are_refused_before_anything_is_sent(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SterError, match=message):
        ster.connect(**{"endpoint": "http://127.0.0.1:1", **options})


# Many at once


def test_as_many_requests_as_allowed_and_their_order_is_kept(stub: Stub, toy_model: ster.Model, words: Any) -> None:
    prompts = [words(count % 17 + 1, seed=count) for count in range(40)]
    stub.delay = lambda body: 0.02 * (hash(tuple(body["prompt"])) % 4)
    with ster.connect(stub.url, concurrency=5) as model:
        found = model.activations(prompts).values
        assert 1 < stub.most_active <= 5
    assert found.tobytes() == rounded(toy_model.activations(prompts).values).tobytes()


def test_prompts_are_asked_for_a_few_ahead(stub: Stub) -> None:
    taken = 0

    def prompts() -> Iterator[tuple[str, str]]:
        nonlocal taken
        for index in range(1000):
            taken += 1
            yield "the sea", f"prompts[{index}]"

    with ster.connect(stub.url, concurrency=4) as model:
        tokens = model.tokenise(prompts())
        for count in range(1, 20):
            next(tokens)
            assert taken <= count + 4
        tokens.close()  # type: ignore[attr-defined]
        assert taken < 30


def test_equal_prompts_run_once(stub: Stub, remote: ster.RemoteModel) -> None:
    remote.activations(["the sea", "storm", "the sea"], position="all")
    assert len(stub.completions()) == 2


def test_ctrl_c_ends_what_is_under_way(stub: Stub, toy_model: ster.Model) -> None:
    never = threading.Event()
    with ster.connect(stub.url, concurrency=3) as remote:
        stub.spoil = lambda body, document: Raw(b"", hang=never)
        stub.requests.clear()
        ids = [toy_model.encode(text) for text in PROMPTS]

        def interrupt() -> None:
            until(lambda: stub.active == 3)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            remote.read(ids, [str(index) for index in range(len(ids))], LAYERS, "all", lambda index, values: None)
        assert len(stub.completions()) == 3  # nothing went on by itself
        until(lambda: stub.active == 0)  # the server saw them leave
        stub.spoil = None
        assert kept(remote, toy_model) == [0]


def test_a_harvest_goes_on_after_its_server_has_gone(stub: Stub, toy_model: ster.Model, tmp_path: Path, no_waits: list[float]) -> None:
    with ster.connect(stub.url, concurrency=1) as remote:
        ster.harvest(remote, PROMPTS, tmp_path / "whole", shard_size=2)
        gone: list[Any] = [None] * 3
        stub.plan = gone
        stub.spoil = lambda body, document: Raw(b"gone", cut=0)
        with pytest.raises(RemoteError, match="broke off the connection"):
            ster.harvest(remote, PROMPTS, tmp_path / "cut", shard_size=2)
        assert (tmp_path / "cut" / "shard_00000.safetensors").exists() and not (tmp_path / "cut" / "manifest.json").exists()
        with pytest.raises(InputError, match="is not finished"):
            ster.open_harvest(tmp_path / "cut")
        stub.spoil = None
        stub.requests.clear()
        ster.harvest(remote, PROMPTS, tmp_path / "cut", shard_size=2)
        ran = [tuple(body["prompt"]) for body in stub.completions()]
        assert tuple(toy_model.encode(PROMPTS[0])) not in ran  # its shard was kept
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_closed_model_says_so(stub: Stub) -> None:
    model = ster.connect(stub.url)
    model.close()
    model.close()
    with pytest.raises(RemoteError, match="is closed"):
        model.encode("the sea")


def test_edits_share_vectors_where_their_order_allows() -> None:
    steer = lambda layer, **options: ster.steer(np.arange(64.0), layer, **options)  # noqa: E731
    many = ster.Steering(tuple(term for layer in range(40) for term in steer(layer, strength=0.1 * layer + 1).terms))
    assert len(steering_vectors(many.edits(), {})) == 1  # whatever their strengths
    places = steer(1, positions=[1, 2]) + steer(2, positions=[1, 2]) + steer(1) + steer(1, positions=[1, 2])
    found = steering_vectors(places.edits(), {})
    assert [vector["layer_indices"] for vector in found] == [[1, 2], [1], [1]]
    assert [vector.get("position_indices") for vector in found] == [[1, 2], None, [1, 2]]
    with pytest.raises(InputError, match="takes 448 numbers in a request, and the server allows 447"):
        steering_vectors(places.edits(), {"max_steering_numbers": 447})


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from ster.remote import extra

    monkeypatch.setattr(extra, "find_spec", lambda name: None if name == "httpx" else name)
    with pytest.raises(InputError, match="needs the extra `remote`, of which httpx cannot be imported") as refused:
        extra.check_extra()
    assert refused.value.hint and "pip install '.[remote]'" in refused.value.hint

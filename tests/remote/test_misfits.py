"""Answers that do not fit what was asked. Whatever is wrong with one ends in a sentence, never in numbers."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from lens_lies import answered, changed, chosen, packed, resized, tensor, without
from lens_stub import PROMPT, Raw, Stub, kept

import ster
from ster.errors import NonFiniteError, RemoteError


def frame(change: Callable[[bytes], bytes]) -> Callable[..., Any]:
    return changed(data=lambda data: base64.b64encode(change(base64.b64decode(data))).decode())


def poisoned(bits: int) -> Callable[..., Any]:
    def change(raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        raw[1, 2, 3] = np.uint16(bits).view(np.int16)
        return raw

    return resized(change)


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


def test_a_server_that_reverses_layers(stub: Stub) -> None:
    stub.reverses = True
    stub.plan = [resized(lambda raw: raw[::-1])]  # all layers as they are, some of them reversed
    with pytest.raises(RemoteError, match="answers layers in another order"):
        ster.connect(stub.url)


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

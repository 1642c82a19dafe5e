"""`POST /v1/chat/completions`, for a checkpoint with a template and for one without."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Client, error_of, running

import ster

MESSAGES = [{"role": "system", "content": "the"}, {"role": "user", "content": [{"type": "text", "text": "sea"}]}]


@pytest.fixture
def chat(chatting: Path) -> Iterator[Client]:
    with running({"toy": chatting}) as client:
        yield client


def ask(client: Client, **fields: Any) -> Any:
    response = client.post("/v1/chat/completions", json={"model": "toy", "messages": MESSAGES, "max_tokens": 3, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_model_without_a_template_says_so(toy: Client) -> None:
    refused = toy.post("/v1/chat/completions", json={"model": "toy", "messages": MESSAGES})
    assert error_of(refused) == (400, "chat_completions_unsupported", "model")


def test_an_answer_of_the_assistant(chat: Client, chatting: Path) -> None:
    answer = ask(chat, return_token_ids=True, logprobs=True, top_logprobs=2, prompt_logprobs=0)
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    model = ster.load(chatting)
    expected = model.generate(answer["prompt_token_ids"], max_new_tokens=3)
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": expected.text}
    assert choice["token_ids"] == expected.token_ids and choice["finish_reason"] == "length"
    assert answer["prompt_token_ids"] == model.tokenizer.encode("the sea is", special_tokens=False)
    content = choice["logprobs"]["content"]
    assert len(content) == 3
    for entry in content:  # greedy: the token is the likeliest
        assert len(entry["top_logprobs"]) == 2 and entry["top_logprobs"][0]["logprob"] == entry["logprob"]
        assert bytes(entry["bytes"]).decode() == entry["token"]
    assert len(answer["prompt_logprobs"]) == 3
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


def test_captures_and_steering_are_the_same_fields(chat: Client) -> None:
    steering = [{"activations": [[1.0] + [0.0] * 63], "layer_indices": [1], "scale": 0}]
    answer = ask(chat, output_residual_stream=[1], apply_steering_vectors=steering)
    assert answer["activations"]["residual_stream"]["shape"] == [1, 5, 64]
    assert ask(chat, vllm_xargs={"output_residual_stream": "[1]"})["activations"] == answer["activations"]


def test_a_stream_begins_with_the_role(chat: Client) -> None:
    whole = ask(chat)
    events = chat.events(
        path="/v1/chat/completions",
        messages=MESSAGES,
        max_tokens=3,
        temperature=0,
        output_residual_stream=[0],
        stream_options={"include_usage": True},
        return_token_ids=True,
    )
    assert events.pop() == "data: [DONE]"
    assert {event["object"] for event in events} == {"chat.completion.chunk"} and len({event["id"] for event in events}) == 1
    first, *middle, usage, activations = events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""} and len(first["prompt_token_ids"]) == 3
    assert "".join(event["choices"][0]["delta"]["content"] for event in middle) == whole["choices"][0]["message"]["content"]
    assert [event["choices"][0]["finish_reason"] for event in middle] == [None, None, "length"]
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]
    assert activations["choices"] == [] and activations["activations"]["residual_stream"]["shape"] == [1, 5, 64]


def test_several_choices(chat: Client) -> None:
    answer = ask(chat, n=3, temperature=1, seed=5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    again = ask(chat, temperature=1, seed=6)
    assert again["choices"][0]["message"] == answer["choices"][1]["message"]


def test_a_template_that_refuses(chat: Client, chatting: Path) -> None:
    (chatting / "chat_template.jinja").write_text("{{ raise_exception('no system message, please') }}")
    with running({"toy": chatting}) as client:
        refused = client.post("/v1/chat/completions", json={"model": "toy", "messages": MESSAGES})
    assert error_of(refused) == (400, "invalid_request", "messages") and "no system message, please" in refused.text

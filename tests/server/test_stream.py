"""Streams: what comes in which order, and what a client that leaves sets free."""

import asyncio
import json
from typing import Any

import pytest
from openai import APIError, OpenAI
from serving import Client, running, until

import ster
from ster.errors import NonFiniteError
from ster.server.feed import Feed
from ster.server.settings import Settings
from ster.server.work import Event, Failed, Token

PROMPT = "the sea is calm"


def texts(events: list[Any], index: int = 0) -> str:
    return "".join(choice["text"] for event in events if event != "data: [DONE]" for choice in event["choices"] if choice["index"] == index)


def test_a_chunk_for_every_token(toy: Client) -> None:
    whole = toy.answer(max_tokens=6, temperature=0)
    events = toy.events(max_tokens=6, temperature=0)
    assert events.pop() == "data: [DONE]"
    assert len(events) == 6 and texts(events) == whole["choices"][0]["text"]
    head = {key: events[0][key] for key in ("id", "object", "created", "model")}
    assert (head["object"], head["model"]) == ("text_completion", "toy-llama")
    for event in events:
        assert list(event) == [*head, "choices"] and event.items() >= head.items()
        assert list(event["choices"][0]) == ["index", "text", "logprobs", "finish_reason"]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 5 + ["length"]


def test_usage_and_activations_come_last(toy: Client) -> None:
    whole = toy.answer(max_tokens=3, temperature=0, output_residual_stream=[1, 3])
    events = toy.events(max_tokens=3, temperature=0, output_residual_stream=[1, 3], stream_options={"include_usage": True})
    assert events[-1] == "data: [DONE]"
    assert (events[-3]["choices"], events[-3]["usage"]) == ([], whole["usage"])
    assert list(events[-2]) == ["id", "object", "created", "model", "choices", "activations"]
    assert (events[-2]["choices"], events[-2]["activations"]) == ([], whole["activations"])


def test_logprobs_and_echo_add_up_to_the_whole(toy: Client) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": 2,
        "echo": True,
        "return_token_ids": True,
        "prompt_logprobs": 1,
    }
    whole = toy.answer(**fields)["choices"][0]
    events = toy.events(**fields)[:-1]
    parts = [event["choices"][0] for event in events]
    assert parts[0]["text"] == PROMPT and texts(events) == whole["text"]
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"] and parts[0]["prompt_logprobs"] == whole["prompt_logprobs"]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    for key, values in whole["logprobs"].items():
        assert [value for part in parts for value in part["logprobs"][key]] == values
    scored = toy.events(max_tokens=0, echo=True, logprobs=2)
    assert len(scored) == 2 and scored[0]["choices"][0]["finish_reason"] == "length"
    assert scored[0]["choices"][0]["logprobs"]["token_logprobs"] == whole["logprobs"]["token_logprobs"][:4]
    assert toy.events(max_tokens=0, echo=True)[0]["choices"][0]["text"] == PROMPT


def test_choices_are_told_apart_by_index(toy: Client) -> None:
    whole = toy.answer(["the sea", "storm"], max_tokens=4, n=2, seed=2)["choices"]
    events = toy.events(["the sea", "storm"], max_tokens=4, n=2, seed=2)[:-1]
    assert [texts(events, index) for index in range(4)] == [choice["text"] for choice in whole]
    assert sum(choice["finish_reason"] is not None for event in events for choice in event["choices"]) == 4


def test_a_stop_text_never_shows(toy: Client) -> None:
    whole = toy.answer(max_tokens=8, temperature=0)["choices"][0]["text"]
    stop = whole.split()[1]
    events = toy.events(max_tokens=8, temperature=0, stop=stop)
    assert stop not in texts(events) and events[-2]["choices"][0]["stop_reason"] == stop


def test_no_half_characters(byte_model: Any) -> None:
    """Random bytes: the joined chunks are the whole text, and U+FFFD is only where the text has it."""
    with running({"toy": byte_model(bos=True)}) as client:
        for seed in range(2):
            whole = client.answer("a", max_tokens=40, seed=seed)["choices"][0]
            assert texts(client.events("a", max_tokens=40, seed=seed)) == whole["text"]


def test_a_refusal_before_the_stream_is_a_status(toy: Client) -> None:
    steering = [{"activations": [[1e30] * 64], "layer_indices": [1], "scale": 1e30}]
    for fields in ({"nonsense": 1}, {"max_tokens": 300}, {"max_tokens": 2, "apply_steering_vectors": steering}):
        assert toy.complete(stream=True, **fields).status_code == 400


def test_an_error_is_the_last_event(toy_model: ster.Model) -> None:
    """float16 ends at 65504: the activations do not fit, which shows when all else has been sent."""
    steering = [{"activations": [[1e6] + [0.0] * 63], "layer_indices": [3]}]
    fields: dict[str, Any] = {
        "max_tokens": 2,
        "apply_steering_vectors": steering,
        "output_residual_stream": [3],
        "activation_dtype": "float16",
    }
    with running({"toy": lambda: toy_model}) as client:
        assert client.complete(**fields).status_code == 400
        events = client.events(**fields)
        assert len(events) == 3 and set(events[-1]) == {"error", "request_id"}
        assert events[-1]["error"]["param"] == "activation_dtype" and events[-1]["request_id"].startswith("req_")
        sdk = OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(APIError, match="float16"):
            list(
                sdk.completions.create(
                    model="toy", prompt=PROMPT, stream=True, max_tokens=2, extra_body={k: v for k, v in fields.items() if k != "max_tokens"}
                )
            )
        sdk.close()


def test_a_failure_comes_after_what_was_written_however_slow_the_reader() -> None:
    """Both are there when it looks: a stream begins with its tokens all the same, and its status is 200."""
    token, failed = Token(3, "the", None, None, None), Failed(NonFiniteError("it overflows"))

    async def read() -> list[list[tuple[int, Event]]]:
        feed = Feed(2, asyncio.Queue[Any]().get, eager=True)
        for index, event in ((0, token), (1, token), (0, failed), (1, token)):
            feed.listener(index, event)
        found = [await feed.next(1) for _ in range(2)]
        feed.close()
        return found

    assert asyncio.run(read()) == [[(0, token), (1, token)], [(0, failed), (1, token)]]


def test_a_vector_that_overflows_late_lets_the_text_before_it_be_read(toy: Client) -> None:
    vector = {"activations": [[3e38] * 64], "layer_indices": [1], "scale": 2, "position_spans": [[6, 7]]}
    fields: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    events = toy.events(**fields, apply_steering_vectors=[vector])
    assert texts(events[:-1]) == texts(toy.events(max_tokens=3, temperature=0)) and len(events) == 4
    assert events[-1]["error"]["param"] == "apply_steering_vectors" and "at token 6" in events[-1]["error"]["message"]
    assert toy.complete(**fields, apply_steering_vectors=[vector]).status_code == 400


def test_comments_keep_a_waiting_client(toy_model: ster.Model) -> None:
    body = {"model": "toy", "prompt": PROMPT, "max_tokens": 1, "stream": True}
    with (
        running({"toy": lambda: toy_model}, Settings(keepalive_seconds=0.05)) as client,
        client.models.pass_lock,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)] == [": keepalive", "", ": keepalive", ""]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(toy_model: ster.Model, stream: bool) -> None:
    with running({"toy": lambda: toy_model}, Settings(keepalive_seconds=0.05)) as client:
        loaded = client.models[0].loaded
        body = json.dumps({"model": "toy", "prompt": PROMPT, "max_tokens": 200, "n": 4, "stream": stream}).encode()
        with client.models.pass_lock:  # nothing runs, so nothing ends by itself
            connection = client.connect()
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            until(lambda: loaded.scheduler.stats().running + loaded.scheduler.stats().waiting)
            connection.close()
            until(lambda: 'path="/v1/completions",status="499"' in client.get("/metrics").text)
        until(lambda: not loaded.scheduler.stats().running)
        assert loaded.scheduler.stats().decoded <= 4 and loaded.scheduler.stats().waiting == 0


def test_the_sdk_reads_it_all(toy: Client) -> None:
    sdk = OpenAI(base_url=f"{toy.url}/v1", api_key="none", max_retries=0)
    whole = sdk.completions.create(model="toy", prompt=PROMPT, max_tokens=3, temperature=0, extra_body={"output_residual_stream": [0]})
    assert whole.activations["residual_stream"]["shape"] == [1, 6, 64] and whole._request_id  # type: ignore[attr-defined]
    chunks = list(
        sdk.completions.create(
            model="toy",
            prompt=PROMPT,
            max_tokens=3,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"output_residual_stream": [0]},
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-2].usage == whole.usage and chunks[-1].activations == whole.activations  # type: ignore[attr-defined]
    assert [model.id for model in sdk.models.list()] == ["toy"] and sdk.models.retrieve("toy").id == "toy"
    sdk.close()

"""What costs tokens and what does not: the sentences of the guides, one by one, over HTTP; then what they leave open."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx
import pytest
from serving import Client, error_of, running, spawned, until
from sqlalchemy.exc import OperationalError

import ster
from ster.server import accounts, answers
from ster.server.errors import misfit, over_budget
from ster.server.feed import Feed
from ster.server.ongoing import Ongoing
from ster.server.requests import ClientGoneError
from ster.server.settings import Settings
from ster.server.stream import EventStream
from ster.state.amounts import OverBudget
from ster.state.budget import usage
from ster.state.database import Database
from ster.state.keys import KeyState, create_key, set_state
from ster.state.place import find_place
from ster.state.state import State, open_state

PROMPT = "the sea is calm"
P = 4  # its tokens
HUGE = {"activations": [[1e38] * 64], "layer_indices": [2], "scale": 1e3}  # overflows where it is added
LATE = {"activations": [[[1e38] * 64]], "layer_indices": [2], "scale": 1e3, "position_indices": [P + 1]}  # ... after two new tokens
numbers = itertools.count()
Tokens = tuple[int, int, int]  # input, output, requests with activations


@dataclass
class Customer:
    """Who asks with a key of their own."""

    client: Client
    state: State
    id: str
    headers: dict[str, str]

    def complete(self, prompt: Any = PROMPT, **fields: Any) -> httpx.Response:
        body = {"model": "toy", "prompt": prompt, "temperature": 0, **fields}
        return self.client.post("/v1/completions", json=body, headers=self.headers)

    def answer(self, **fields: Any) -> Any:
        response = self.complete(**fields)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, **fields: Any) -> list[Any]:
        response = self.complete(stream=True, **fields)
        assert response.status_code == 200, response.text
        return [json.loads(part[6:]) for part in response.text.split("\n\n") if part.startswith("data: {")]

    def usage(self) -> Any:
        response = self.client.get("/v1/usage", headers=self.headers)
        assert response.status_code == 200, response.text
        return response.json()

    def counted(self, kind: str) -> Tokens:
        budgets = self.usage()["budgets"]
        assert budgets["monthly_tokens"][kind] == budgets["daily_tokens"][kind]
        names = ("monthly_input_tokens", "monthly_output_tokens", "monthly_activations")
        found = tuple(budgets[name][kind] for name in names)
        assert budgets["monthly_tokens"][kind] == found[0] + found[1]
        return found  # type: ignore[return-value]

    @property
    def spent(self) -> Tokens:
        """And nothing is held."""
        assert self.counted("held") == (0, 0, 0)
        return self.counted("spent")

    def held_while(self, ask: Callable[[], Any]) -> tuple[Tokens, Any]:
        """What is held while `ask` runs, which is kept from its first pass meanwhile; and what it answers."""
        with self.client.models.pass_lock, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask)
            until(lambda: self.usage()["running"], 30)
            held = self.counted("held")
            self.client.models.pass_lock.release()
            try:
                return held, asked.result()
            finally:
                self.client.models.pass_lock.acquire()

    def raw(self, **fields: Any) -> bytes:
        """A request for a bare connection."""
        body = json.dumps({"model": "toy", "prompt": PROMPT, **fields})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return f"{head}Authorization: {self.headers['Authorization']}\r\n\r\n{body}".encode()

    def set_state(self, state: KeyState) -> None:
        with self.state.database.write() as connection:
            set_state(connection, self.id, state)


Shop = Callable[..., Customer]


@contextlib.contextmanager
def shop_of(client: Client, state: State) -> Iterator[Shop]:
    def enter(**limits: int) -> Customer:
        with state.database.write() as connection:
            key, secret = create_key(connection, f"customer {next(numbers)}", limits)
        return Customer(client, state, key.id, {"Authorization": f"Bearer {secret}"})

    yield enter


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[State]:
    state = open_state(tmp_path_factory.mktemp("state"))
    yield state
    state.close()


@pytest.fixture(scope="module")
def shop(toy_model: ster.Model, state: State) -> Iterator[Shop]:
    """A server whose callers are counted; each call is a new key with its limits."""
    with running({"toy": lambda: toy_model}, Settings(max_body_bytes=1 << 20), state=state) as client, shop_of(client, state) as shop:
        shop()  # there is a key: from now on one is needed
        yield shop


# The guides, sentence by sentence


def test_activations_cost_no_tokens(shop: Shop) -> None:
    """A request with Activations holds and spends tokens as any other Completion does, and the Activations cost no tokens."""
    plain, reading = shop(), shop()
    held, answer = plain.held_while(lambda: plain.answer(max_tokens=3))
    assert held == (P, 3, 0) and plain.spent == (P, answer["usage"]["completion_tokens"], 0)
    held, answer = reading.held_while(lambda: reading.answer(max_tokens=3, output_residual_stream=True))
    assert held == (P, 3, 1) and reading.spent == (P, answer["usage"]["completion_tokens"], 1)


def test_a_misfit_costs_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """When Inference's answer has no activations, or another shape, the API answers 502 upstream_server_error with the message Inference's
    answer does not fit the request, and the request costs nothing."""
    customer = shop()
    monkeypatch.setattr("ster.server.choices.verify_shape", _misfit)
    refused = customer.complete(max_tokens=3, output_residual_stream=[1])
    assert error_of(refused) == (502, "upstream_server_error", None)
    assert customer.spent == (0, 0, 0) and customer.usage()["month"]["requests"] == 0


def test_a_misfit_in_a_stream_costs_the_tokens_before_it(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a stream, the error comes as the last event, and you pay for the tokens that came before it."""
    customer = shop()
    monkeypatch.setattr("ster.server.choices.verify_shape", _misfit)
    events = customer.events(max_tokens=3, output_residual_stream=[1])
    assert events[-1]["error"]["code"] == "upstream_server_error"
    assert len(events) == 4 and customer.spent == (P, 3, 0)


def _misfit(*_: Any) -> None:
    raise misfit()


REFUSED_CAPTURES = [
    {"output_residual_stream": []},
    {"output_residual_stream": [-1]},
    {"output_residual_stream": [99]},
    {"output_residual_stream": [0], "n": 2},
    {"output_residual_stream": [0], "prompt": [PROMPT, PROMPT]},
]


def test_captures_that_are_refused_hold_nothing(shop: Shop) -> None:
    """The API answers 400 invalid_request_error for these requests before it holds any tokens, and they do not reach Inference. param is
    output_residual_stream."""
    customer = shop(monthly_tokens=0)  # a Hold would be refused with another status
    for fields in REFUSED_CAPTURES:
        assert error_of(customer.complete(**{"max_tokens": 2, **fields})) == (400, "invalid_request", "output_residual_stream")
    assert customer.spent == (0, 0, 0)


def test_a_capture_over_its_cap_holds_nothing(toy_model: ster.Model, tmp_path: Path) -> None:
    """A capture over its size cap: Layers x tokens x the model's hidden size. The tokens are the prompt's, as the Hold counts them, and
    max_tokens."""
    state = open_state(tmp_path)
    cap = Settings(max_capture_numbers=(P + 3) * 64)
    with running({"toy": lambda: toy_model}, cap, state=state) as client, shop_of(client, state) as shop:
        customer = shop(monthly_tokens=P + 3)
        assert error_of(customer.complete(max_tokens=4, output_residual_stream=[0])) == (400, "invalid_request", "output_residual_stream")
        held, _ = customer.held_while(lambda: customer.answer(max_tokens=3, output_residual_stream=[0]))
        assert sum(held[:2]) * 64 == cap.max_capture_numbers
    state.close()


def test_a_steered_completion_costs_what_another_does(shop: Shop) -> None:
    """A steered Completion holds and spends tokens as any other Completion does."""
    customer = shop()
    vector = {"activations": [[0.5] * 64], "layer_indices": [1], "scale": 1}
    held, answer = customer.held_while(lambda: customer.answer(max_tokens=3, apply_steering_vectors=[vector]))
    assert held == (P, 3, 0) and customer.spent == (P, answer["usage"]["completion_tokens"], 0)


def test_a_position_that_no_pass_reaches_holds_nothing(shop: Shop) -> None:
    """The API answers 400 on apply_steering_vectors for a position after that, before it holds any tokens. It counts a text prompt's tokens
    as the Hold does, with the model's tokenizer."""
    customer = shop(monthly_tokens=P + 2)

    def ask(position: int) -> httpx.Response:
        vector = {"activations": [[[0.5] * 64]], "layer_indices": [1], "position_indices": [position]}
        return customer.complete(max_tokens=2, apply_steering_vectors=[vector])

    assert error_of(ask(P + 1)) == (400, "invalid_request", "apply_steering_vectors")
    held, response = customer.held_while(lambda: ask(P))
    assert response.status_code == 200 and held == (P, 2, 0)


@pytest.mark.parametrize(
    "vectors",
    [
        [],
        [{"activations": [[1, 2, 3]], "layer_indices": [1, 2]}],
        [{"activations": [[1] * 64], "layer_indices": [99]}],
        [{"activations": [[1] * 64], "layer_indices": [1], "scael": 1}],
        [{"activations": {"data": "!", "dtype": "float32", "original_dtype": "torch.float32", "shape": [1, 64]}, "layer_indices": [1]}],
    ],
)
def test_vectors_that_are_refused_hold_nothing(shop: Shop, vectors: Any) -> None:
    """The API answers 400 invalid_request_error for these requests before it holds any tokens, and they do not reach Inference. param is
    apply_steering_vectors."""
    customer = shop(monthly_tokens=0)
    assert error_of(customer.complete(max_tokens=2, apply_steering_vectors=vectors)) == (400, "invalid_request", "apply_steering_vectors")
    assert customer.spent == (0, 0, 0)


def test_a_body_over_its_cap_holds_nothing(shop: Shop) -> None:
    """The whole request body is also capped, and a body over the cap gets 413 before the API reads the vectors."""
    customer = shop(monthly_tokens=0)
    refused = customer.complete(max_tokens=2, apply_steering_vectors=[{"activations": [[0.1234567] * 200_000], "layer_indices": [1]}])
    assert error_of(refused) == (413, "request_too_large", None)
    assert customer.spent == (0, 0, 0)


def test_over_the_quota_of_activations(shop: Shop) -> None:
    """Activation requests are attributed to your key and may count against a per-key monthly activation quota (a heavier operation than a
    plain completion); over quota returns 429 activation_quota_exceeded."""
    customer = shop(monthly_activations=1)
    customer.answer(max_tokens=1, output_residual_stream=[0])
    refused = customer.complete(max_tokens=1, output_residual_stream=[0])
    assert error_of(refused) == (429, "activation_quota_exceeded", None)
    assert int(refused.headers["retry-after"]) > 0
    customer.answer(max_tokens=1)
    assert customer.spent == (2 * P, 2, 1)


# What they leave open


def test_prompts_count_once_and_each_choice_by_itself(shop: Shop) -> None:
    customer = shop()
    held, answer = customer.held_while(lambda: customer.answer(prompt=[PROMPT, "the sea"], n=3, max_tokens=2, temperature=1, seed=1))
    assert held == (P + 2, 12, 0)
    assert customer.spent == (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"], 0)
    assert answer["usage"]["prompt_tokens"] == P + 2


def test_a_stream_costs_what_the_answer_in_one_piece_does(shop: Shop) -> None:
    customer = shop()
    events = customer.events(max_tokens=3, output_residual_stream=[0], stream_options={"include_usage": True})
    assert customer.spent == (P, 3, 1) and events[-2]["usage"]["total_tokens"] == P + 3


def test_a_prompt_that_is_only_scored_is_paid(shop: Shop) -> None:
    customer = shop()
    customer.answer(max_tokens=0, echo=True, logprobs=1)
    customer.events(max_tokens=0, echo=True, logprobs=1)
    assert customer.spent == (2 * P, 0, 0)


def test_a_chat_costs_the_same(chatting: Path, tmp_path: Path) -> None:
    state = open_state(tmp_path / "state")
    with running({"toy": lambda: ster.load(chatting)}, state=state) as client, shop_of(client, state) as shop:
        customer = shop(daily_tokens=100)
        body = {"model": "toy", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
        for stream in (False, True):
            response = client.post("/v1/chat/completions", json={**body, "stream": stream}, headers=customer.headers)
            assert response.status_code == 200
        counted = client.post("/v1/chat/completions", json=body, headers=customer.headers).json()["usage"]
        assert customer.spent[0] == 3 * counted["prompt_tokens"] and 3 <= customer.spent[1] <= 6
        clamped = client.post("/v1/chat/completions", json={**body, "max_tokens": None}, headers=customer.headers)
        assert clamped.headers["x-acs-max-tokens-clamped"].endswith(",reason=budget")
    state.close()


def test_what_fails_while_it_runs_costs_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    customer = shop()
    assert customer.complete(max_tokens=3, apply_steering_vectors=[HUGE]).status_code == 400
    assert customer.complete(max_tokens=3, apply_steering_vectors=[HUGE], stream=True).status_code == 400
    monkeypatch.setattr("ster.server.respond.whole", lambda *_: 1 / 0)
    assert error_of(customer.complete(max_tokens=3)) == (500, "internal_error", None)
    assert customer.spent == (0, 0, 0)


def test_a_request_that_takes_too_long_costs_nothing(toy_model: ster.Model, tmp_path: Path) -> None:
    state = open_state(tmp_path)
    slow = Settings(request_seconds=1.0)
    with running({"toy": lambda: toy_model}, slow, state=state) as client, shop_of(client, state) as shop:
        customer = shop()
        with client.models.pass_lock:
            assert error_of(customer.complete(max_tokens=3)) == (504, "timeout", None)
        assert customer.spent == (0, 0, 0)
    state.close()


def test_a_stream_that_an_error_breaks_pays_what_was_sent(shop: Shop) -> None:
    customer = shop()
    events = customer.events(max_tokens=9, apply_steering_vectors=[LATE])
    assert "error" in events[-1]
    assert len(events) > 1 and customer.spent == (P, len(events) - 1, 0)


def test_a_stream_whose_reader_leaves_pays_what_was_sent(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    customer, left = shop(), threading.Event()
    next_events = Feed.next

    async def watched(feed: Feed, *args: Any) -> Any:
        try:
            return await next_events(feed, *args)
        except ClientGoneError:
            left.set()
            raise

    scheduler = customer.client.models[0].loaded.scheduler
    step, passes = scheduler._batch.step, 0

    def slow() -> Any:
        nonlocal passes
        passes += 1
        if passes == 50:
            assert left.wait(30)  # it was not read to its end
        return step()

    monkeypatch.setattr(Feed, "next", watched)
    monkeypatch.setattr(scheduler._batch, "step", slow)
    body = {"model": "toy", "prompt": PROMPT, "max_tokens": 240, "n": 8, "stream": True, "seed": 1}
    with customer.client.stream("POST", "/v1/completions", json=body, headers=customer.headers) as response:
        lines = response.iter_lines()
        read = sum(next(lines).startswith("data: {") for _ in range(20))
    until(lambda: not customer.usage()["running"], 30)
    assert customer.spent[0] == P and read <= customer.spent[1] < 8 * 240


@pytest.mark.parametrize(
    ("part", "fields", "spent"),
    [
        (b'"activations"', {"max_tokens": 3, "output_residual_stream": [0]}, (P, 3, 1)),
        (b'"token_logprobs"', {"max_tokens": 0, "echo": True, "logprobs": 1}, (P, 0, 0)),
        (b'"text"', {"max_tokens": 1}, (P, 1, 0)),
    ],
)
def test_a_reader_who_leaves_before_the_end_of_a_part_pays_it(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, part: bytes, fields: Any, spent: Tokens
) -> None:
    """All of a large capture but its last bytes is as good as the whole."""
    customer, run = shop(), EventStream.run

    async def left(stream: EventStream, send: Any) -> None:
        async def cut(message: Any) -> None:
            await send({**message, "body": message["body"][: -len(message["body"]) // 2]})
            if part in message["body"]:
                raise ClientGoneError

        await run(stream, cut)

    monkeypatch.setattr(EventStream, "run", left)
    with contextlib.suppress(httpx.RemoteProtocolError):  # the answer has no end
        customer.complete(stream=True, **fields)
    until(lambda: not customer.usage()["running"], 30)
    assert customer.spent == spent


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_left_before_anything_was_sent_costs_nothing(shop: Shop, stream: bool) -> None:
    customer = shop()
    with customer.client.models.pass_lock:
        with customer.client.connect() as connection:
            connection.sendall(customer.raw(max_tokens=5, stream=stream))
            until(lambda: customer.usage()["running"], 30)
        until(lambda: not customer.usage()["running"], 30)
    assert customer.spent == (0, 0, 0)


def test_what_is_left_while_its_answer_is_written_costs_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    customer = shop()
    connection, left = customer.client.connect(), threading.Event()

    begun: list[Ongoing] = []
    submit = Ongoing.submit

    def submitted(ongoing: Ongoing, *args: Any) -> None:
        begun.append(ongoing)
        submit(ongoing, *args)

    def whole(*_: Any) -> bytes:
        connection.close()
        until(lambda: begun[0]._feed.gone, 30)
        left.set()
        return b"{}"

    monkeypatch.setattr(Ongoing, "submit", submitted)
    monkeypatch.setattr("ster.server.respond.whole", whole)
    connection.sendall(customer.raw(max_tokens=2))
    assert left.wait(30)
    until(lambda: not customer.usage()["running"], 30)
    assert customer.spent == (0, 0, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_signs_of_life_cost_nothing(toy_model: ster.Model, tmp_path: Path, stream: bool) -> None:
    """An answer that has begun, and kept its client waiting, has sent nothing yet; it is paid when it comes."""
    state = open_state(tmp_path)
    patient = Settings(keepalive_seconds=0.05)
    with running({"toy": lambda: toy_model}, patient, state=state) as client, shop_of(client, state) as shop:
        customer = shop()
        body = {"model": "toy", "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "stream": stream}
        with client.models.pass_lock, client.stream("POST", "/v1/completions", json=body, headers=customer.headers) as response:
            parts = response.iter_raw()  # which ends the connection when it is dropped
            assert response.status_code == 200 and next(parts) in (b" ", b": keepalive\n\n")
            until(lambda: customer.counted("held") == (P, 3, 0), 30)
        until(lambda: not customer.usage()["running"], 30)
        assert customer.spent == (0, 0, 0)
        with client.models.pass_lock, client.stream("POST", "/v1/completions", json=body, headers=customer.headers) as response:
            parts = response.iter_raw()
            next(parts)
            client.models.pass_lock.release()
            assert b"".join(parts).strip(b" ").startswith((b'{"id"', b": keepalive", b"data: "))
            client.models.pass_lock.acquire()
        assert customer.spent == (P, 3, 0)
    state.close()


def test_left_out_max_tokens_is_what_the_budget_has_left(shop: Shop) -> None:
    customer = shop(monthly_tokens=P + 4)
    response = customer.complete()
    context = customer.client.get("/v1/models/toy", headers=customer.headers).json()["capabilities"]["max_model_len"]
    assert response.headers["x-acs-max-tokens-clamped"] == f"requested={context - P},applied=4,reason=budget"
    assert response.json()["usage"]["completion_tokens"] <= 4
    rich = shop(monthly_tokens=10**6)
    assert "x-acs-max-tokens-clamped" not in rich.complete(stop=["s"]).headers
    refused = shop(monthly_tokens=P).complete()
    assert error_of(refused) == (429, "budget_exceeded", None)


def test_a_clamped_stream_says_so_and_reaches_what_it_steers(shop: Shop) -> None:
    vector = {"activations": [[[0.5] * 64]], "layer_indices": [1], "position_indices": [P + 2]}
    ends = shop(monthly_output_tokens=3)
    assert error_of(ends.complete(stream=True, apply_steering_vectors=[vector])) == (429, "budget_exceeded", None)
    reaches = shop(monthly_output_tokens=4)
    response = reaches.complete(stream=True, apply_steering_vectors=[vector])
    assert response.status_code == 200 and ",applied=4,reason=budget" in response.headers["x-acs-max-tokens-clamped"]


@pytest.mark.parametrize(
    ("limits", "dimension"),
    [
        ({"monthly_tokens": P + 2, "daily_tokens": 99}, "monthly_tokens"),
        ({"daily_tokens": P + 2}, "daily_tokens"),
        ({"monthly_input_tokens": P - 1}, "monthly_input_tokens"),
        ({"monthly_output_tokens": 2}, "monthly_output_tokens"),
    ],
)
def test_a_refusal_names_what_is_left_and_when_it_renews(shop: Shop, limits: dict[str, int], dimension: str) -> None:
    customer = shop(**limits)
    refused = customer.complete(max_tokens=3)
    assert error_of(refused) == (429, "budget_exceeded", None)
    message = refused.json()["error"]["message"]
    left = limits[dimension]
    assert f"({dimension})" in message and f" {left:,} of this API key's {left:,} " in message and "renews at 20" in message
    renews = customer.usage()["budgets"][dimension]["renews_at"]
    assert abs(int(refused.headers["retry-after"]) - (renews - time.time())) < 60
    assert refused.headers["x-should-retry"] == "false"
    assert customer.spent == (0, 0, 0)


def test_a_refusal_for_what_others_hold_is_to_be_asked_again_soon(shop: Shop) -> None:
    customer = shop(monthly_tokens=P + 3)
    with customer.client.models.pass_lock, ThreadPoolExecutor(1) as pool:
        first = pool.submit(customer.answer, max_tokens=3)
        until(lambda: customer.usage()["running"], 30)
        refused = customer.complete(max_tokens=3)
        customer.client.models.pass_lock.release()
        first.result()
        customer.client.models.pass_lock.acquire()
    assert error_of(refused) == (429, "budget_exceeded", None)
    assert refused.headers["retry-after"] == "5" and "hold" in refused.json()["error"]["message"]
    assert "x-should-retry" not in refused.headers


@pytest.mark.parametrize(("limit", "says"), [(1, "1 request "), (2, "2 requests "), (1000, "1,000 requests ")])
def test_requests_are_counted_in_words(limit: int, says: str) -> None:
    for name, verb in (("concurrency", "run"), ("requests_per_minute", "start")):
        assert f"may {verb} {says}a" in over_budget(OverBudget(name, limit, 0, 1, 0, 0.0)).message


def test_as_many_run_and_start_as_may(shop: Shop) -> None:
    customer = shop(concurrency=2)
    with customer.client.models.pass_lock, ThreadPoolExecutor(2) as pool:
        both = [pool.submit(customer.answer, max_tokens=1) for _ in range(2)]
        until(lambda: customer.usage()["running"] == 2, 30)
        refused = customer.complete(max_tokens=1)
        customer.client.models.pass_lock.release()
        assert [each.result()["object"] for each in both] == ["text_completion"] * 2
        customer.client.models.pass_lock.acquire()
    assert "may run 2 requests at a time" in refused.json()["error"]["message"]
    assert error_of(refused) == (429, "concurrency_exceeded", None) and refused.headers["retry-after"] == "1"
    customer.answer(max_tokens=1)
    hasty = shop(requests_per_minute=1)
    answers = [hasty.complete(max_tokens=1) for _ in range(3)]  # a minute may end in between, once
    assert [answer.status_code for answer in answers].count(429) >= 1
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert error_of(refused)[1] == "rate_limited" and 1 <= int(refused.headers["retry-after"]) <= 60


def test_of_sixty_four_at_once_as_many_are_answered_as_the_budget_has_room_for(shop: Shop) -> None:
    customer = shop(monthly_tokens=10 * (P + 3))
    with ThreadPoolExecutor(64) as pool:
        responses = list(pool.map(lambda number: customer.complete(max_tokens=3, stream=number % 2 == 1), range(64)))
    statuses = [response.status_code for response in responses]
    assert statuses.count(200) == 10 and statuses.count(429) == 54
    assert customer.spent == (10 * P, 10 * 3, 0)
    assert customer.usage()["budgets"]["monthly_tokens"]["left"] == 0


def test_a_key_that_is_revoked_while_it_runs(shop: Shop) -> None:
    """What runs comes to its end, and is paid; nothing else begins."""
    customer = shop()
    with customer.client.models.pass_lock, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(customer.answer, max_tokens=3)
        until(lambda: customer.usage()["running"], 30)
        customer.set_state("revoked")
        refused = customer.complete(max_tokens=3)
        customer.client.models.pass_lock.release()
        assert asked.result()["usage"]["completion_tokens"] == 3
        customer.client.models.pass_lock.acquire()
    assert error_of(refused) == (401, "invalid_api_key", None)
    with customer.state.database.read() as connection:
        assert usage(connection, customer.id).month.spent.tokens == P + 3
    until(lambda: customer.client.get("/v1/usage", headers=customer.headers).status_code == 401)


def test_a_paused_key_is_told_so_and_resumes(shop: Shop) -> None:
    customer = shop()
    customer.answer(max_tokens=1)
    customer.set_state("paused")
    assert error_of(customer.complete(max_tokens=1)) == (403, "key_paused", None)
    until(lambda: customer.client.get("/v1/usage", headers=customer.headers).status_code == 403)
    customer.set_state("active")
    until(lambda: customer.complete(max_tokens=1).status_code == 200)


def test_usage_is_as_described(shop: Shop) -> None:
    limits = {"monthly_tokens": 50, "daily_tokens": 8, "concurrency": 3, "requests_per_minute": 600}
    customer = shop(**limits)
    customer.answer(max_tokens=2)
    usage = customer.usage()
    for each in (usage, shop().usage()):
        answers.KeyUsage.model_validate(each)
    assert (usage["key"]["id"], usage["concurrency"], usage["requests_per_minute"], usage["running"]) == (customer.id, 3, 600, 0)
    assert usage["budgets"]["daily_tokens"] == {"spent": P + 2, "held": 0, "limit": 8, "left": 8 - (P + 2), "renews_at": ANY}
    assert set(usage["budgets"]["monthly_input_tokens"]) == {"spent", "held", "renews_at"}
    assert usage["month"]["requests"] == usage["day"]["requests"] == 1
    assert usage["day"]["period"][:7] == usage["month"]["period"] and usage["day"]["renews_at"] <= usage["month"]["renews_at"]


def test_a_key_is_needed_and_no_other_will_do(shop: Shop) -> None:
    customer = shop()
    for header in ({}, {"Authorization": "Bearer sk-ster-" + "0" * 48}, {"Authorization": f"Bearer {customer.id}"}, {"Authorization": "x"}):
        assert error_of(customer.client.get("/v1/usage", headers=header)) == (401, "invalid_api_key", None)
    assert customer.client.get("/health").status_code == 200
    assert customer.client.get("/openapi.json").json()["security"] == [{"bearer": []}]
    page = customer.client.get("/metrics", headers=customer.headers).text
    assert 'ster_refusals_total{reason="invalid_api_key"}' in page and "customer" not in page and customer.id not in page


def test_keys_of_the_command_line_are_not_counted(toy_model: ster.Model, tmp_path: Path) -> None:
    state = open_state(tmp_path)
    with running({"toy": lambda: toy_model}, Settings(api_keys=("plain",)), state=state) as client, shop_of(client, state) as shop:
        plain = {"Authorization": "Bearer plain"}
        body = {"model": "toy", "prompt": PROMPT, "max_tokens": 1}
        assert client.post("/v1/completions", json=body, headers=plain).status_code == 200
        assert client.get("/v1/usage", headers=plain).json() == {"object": "usage", "counted": False, "budgets": {}}
        assert client.get("/v1/usage").status_code == 401
        customer = shop(monthly_tokens=P + 1)
        customer.answer(max_tokens=1)
        assert customer.complete(max_tokens=1).status_code == 429
    state.close()


def test_a_server_without_keys_is_open_until_there_is_one(toy_model: ster.Model, tmp_path: Path) -> None:
    state = open_state(tmp_path)
    with running({"toy": lambda: toy_model}, state=state) as client, shop_of(client, state) as shop:
        assert client.answer(max_tokens=1)
        assert client.get("/v1/usage", headers={"Authorization": "Bearer whatever"}).json()["counted"] is False
        customer = shop()
        until(lambda: client.complete(max_tokens=1).status_code == 401)
        customer.set_state("revoked")
        until(lambda: customer.complete(max_tokens=1).status_code == 401)
    state.close()


def test_a_database_that_is_away(
    toy_model: ster.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No Hold, no request. A Hold that cannot be settled stays until it can; its answer is given."""
    monkeypatch.setattr(accounts, "KEEP_SECONDS", 0.1)
    state = open_state(tmp_path)
    with running({"toy": lambda: toy_model}, state=state) as client, shop_of(client, state) as shop:
        customer = shop()
        customer.answer(max_tokens=1)

        def away(*_: Any, **__: Any) -> Any:
            raise OperationalError("select", {}, Exception("away"))

        with monkeypatch.context() as patch:
            patch.setattr(accounts, "take_hold", away)
            refused = customer.complete(max_tokens=1)
            assert error_of(refused) == (503, "state_unavailable", None) and refused.headers["retry-after"] == "5"
        with monkeypatch.context() as patch:
            patch.setattr(accounts, "settle", away)
            assert customer.answer(max_tokens=2)["usage"]["completion_tokens"] == 2
            assert customer.counted("held") == (P, 2, 0)
        until(lambda: not customer.usage()["running"])
        assert customer.spent == (2 * P, 3, 0)
        assert caplog.text.count("stays until the database answers") == 1 and "is settled at last" in caplog.text
    state.close()


def test_two_servers_share_a_budget(toy_model: ster.Model, database_url: str, tmp_path: Path) -> None:
    first, second = (open_state(tmp_path / name, database_url) for name in ("a", "b"))
    with running({"toy": lambda: toy_model}, state=first) as one, running({"toy": lambda: toy_model}, state=second) as other:
        with shop_of(one, first) as shop:
            customer = shop(daily_tokens=7 * (P + 2))
        elsewhere = Customer(other, second, customer.id, customer.headers)
        with ThreadPoolExecutor(32) as pool:
            statuses = list(pool.map(lambda number: (customer, elsewhere)[number % 2].complete(max_tokens=2).status_code, range(32)))
        assert sorted(statuses) == [200] * 7 + [429] * 25
        assert customer.spent == elsewhere.spent == (7 * P, 14, 0)
    first.close()
    second.close()


def test_a_server_that_is_killed_gives_back_what_it_held(toy_dir: Path, toy_model: ster.Model, tmp_path: Path) -> None:
    """The next one sees to it when it starts."""
    database = Database(find_place(tmp_path).url)
    with database.write() as connection:
        key, secret = create_key(connection, "ann", {"monthly_tokens": 100_000, "concurrency": 64})
    with spawned("--model", f"toy={toy_dir}", "--state", tmp_path) as server:
        body = {"model": "toy", "prompt": PROMPT, "max_tokens": 200, "n": 16, "seed": 1}
        url = server.url.removeprefix("http://").split(":")
        raw = json.dumps(body)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
        connections = [socket.create_connection((url[0], int(url[1]))) for _ in range(8)]
        for connection_ in connections:
            connection_.sendall(f"{head}Authorization: Bearer {secret}\r\n\r\n{raw}".encode())

        def held() -> int:
            with database.read() as connection:
                return usage(connection, key.id).running

        until(held, 30)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        for connection_ in connections:
            connection_.close()
        assert held()
        assert not any(secret in line or secret[:20] in line for line in server.lines)
    state = open_state(tmp_path)
    with running({"toy": lambda: toy_model}, state=state):
        until(lambda: not held(), 30)
    with database.read() as connection:
        found = usage(connection, key.id)
    assert found.month.held.tokens == 0 and found.month.spent.tokens <= 100_000
    state.close()
    database.close()

"""Servers with a state, and Jobs on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from serving import Client, running, until

import ster
from ster.server.jobs.runner import Runner
from ster.server.settings import Settings
from ster.state.state import State, open_state

FINAL = ("done", "failed", "cancelled")
BODY: dict[str, Any] = {"model": "toy", "prompt": "the sea is calm", "max_tokens": 12}


@contextlib.contextmanager
def serving(folder: Path, model: ster.Model, settings: Settings | None = None, *, url: str | None = None) -> Iterator[Client]:
    """A server of the toy model, called `toy`, on the state in `folder`."""
    state = open_state(folder, url)
    try:
        with running({"toy": lambda: model}, settings, state=state) as client:
            yield client
    finally:
        state.close()


def state_of(client: Client) -> State:
    state: State = client.app.state.state
    return state


def runner_of(client: Client) -> Runner:
    runner: Runner = client.app.state.jobs
    return runner


def submit(client: Client, **fields: Any) -> str:
    response = client.post("/v1/jobs", json={**BODY, **fields})
    assert response.status_code == 202, response.text
    found: str = response.json()["id"]
    return found


def job(client: Client, id: str, **query: Any) -> Any:
    response = client.get(f"/v1/jobs/{id}", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def ended(client: Client, id: str) -> Any:
    """The Job, when it is final."""
    found: list[Any] = [None]

    def there() -> bool:
        found[0] = job(client, id, wait=10)
        return found[0]["status"] in FINAL

    until(there, 60)
    return found[0]


def same_completion(result: Any, answer: Any) -> bool:
    """But for the id and the time."""
    return {**result, "id": 0, "created": 0} == {**answer, "id": 0, "created": 0}


def refused(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]

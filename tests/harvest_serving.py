"""What tests of harvests over HTTP share: a server with a state, and what a client does with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from serving import Client, Loader, running, until

import ster
from ster.server.settings import Settings
from ster.state.state import open_state

PROMPTS = [
    "the sea is calm and quiet tonight .",
    "storm waves",
    "the harbor",
    "storm waves",
    "a gentle breeze over the lake .",
    "calm",
    "sea calm .",
]


@contextlib.contextmanager
def harvesting(
    model: ster.Model | Loader, folder: Path, settings: Settings | None = None, *, url: str | None = None, **options: Any
) -> Iterator[Client]:
    """A server of `model`, called `toy`, with a state in `folder`."""
    state = open_state(folder, url)
    loader = (lambda: model) if isinstance(model, ster.Model) else model
    try:
        with running({"toy": loader}, settings, state=state, **options) as client:
            yield client
    finally:
        state.close()


def submit(client: Client, prompts: Any = PROMPTS, **fields: Any) -> str:
    """The id of a harvest that was taken."""
    answer = client.post("/v1/harvest", json={"model": "toy", "prompts": prompts, **fields})
    assert answer.status_code == 202, answer.text
    assert answer.json() == {"job_id": answer.json()["job_id"], "status": "pending", "model": "toy", "n_prompts": len(prompts)}
    return str(answer.json()["job_id"])


def see(client: Client, id: str) -> Any:
    answer = client.get(f"/v1/harvest/{id}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def ended(client: Client, id: str) -> Any:
    """The harvest when it is final."""
    until(lambda: see(client, id)["status"] not in ("pending", "running"), 60)
    return see(client, id)


def urls(found: Any) -> list[str]:
    result = found["result"]
    return [result["manifest_url"], *result["shard_urls"], result["stats_url"]]


def ask(url: str, method: str = "GET", **options: Any) -> httpx.Response:
    """As somebody without a key."""
    with httpx.Client(verify=False) as client:  # which would take half a second to read certificates
        return client.request(method, url, **options)


def downloaded(found: Any) -> dict[str, bytes]:
    """Every file of a harvest, by its URL alone."""
    files = {}
    for url in urls(found):
        answer = ask(url)
        assert answer.status_code == 200, answer.text
        files[httpx.URL(url).path.rpartition("/")[2]] = answer.content
    return files

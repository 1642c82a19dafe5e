"""Steering through a server that leaves out what fails: it is seen to work before it is relied on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from lens_stub import PROMPT, Stub

import ster
from ster.errors import InputError, RemoteError
from ster.remote.steering import steering_vectors


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


def test_unsteered_texts_are_scored_on_the_way_of_the_steered(stub: Stub, remote: ster.RemoteModel, calm_pairs: Path) -> None:
    pairs = ster.PairSet.load(calm_pairs)
    artifact = ster.train(remote, pairs, [1])
    stub.requests.clear()
    ster.evaluate(remote, pairs, artifact, [1.0], neutral=["the sea"])
    scored = [json.loads(body["vllm_xargs"]["apply_steering_vectors"]) for body in stub.completions() if "prompt_logprobs" in body]
    assert scored and {vectors[0]["scale"] for vectors in scored} == {0.0, 1.0}


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

"""A server that has other weights all of a sudden, behind the same name: nothing is made of both."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from harvesting import PROMPTS, contents
from serving import Client, running

import ster
from ster.errors import RemoteError


@pytest.fixture
def other(toy_copy: Path, served: Client) -> Iterator[Client]:
    """Of the same sizes, the same name and the same tokenizer."""
    folder = toy_copy.with_name("toy-llama")
    shutil.copytree(toy_copy, folder)
    for file in folder.glob("*.safetensors"):
        weights = safetensors.numpy.load_file(file)
        safetensors.numpy.save_file({name: (w * np.float32(1.05)).astype(w.dtype) for name, w in weights.items()}, file)
    model = ster.load(folder)
    with running({"toy": lambda: model}) as client:
        yield client


def test_a_harvest_is_of_one_model(served: Client, other: Client, tmp_path: Path) -> None:
    with ster.connect(served.url, concurrency=1) as model:
        ster.harvest(model, PROMPTS, tmp_path / "whole", shard_size=2)

        def swap(done: int, total: int) -> None:
            if done:
                model._transport.root = other.url

        with pytest.raises(RemoteError, match="another model now behind the name toy: its weights changed"):
            ster.harvest(model, PROMPTS, tmp_path / "cut", shard_size=2, progress=swap)
        assert not (tmp_path / "cut" / "manifest.json").exists()
        model._transport.root = served.url
        ster.harvest(model, PROMPTS, tmp_path / "cut", shard_size=2)  # what was written was all of the first
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_an_artifact_is_of_one_model(served: Client, other: Client, calm_pairs: Path) -> None:
    pairs = ster.PairSet.load(calm_pairs)
    for work in (ster.train, ster.optimize):
        with ster.connect(served.url, concurrency=1) as model:

            def swap(done: int, total: int, model: ster.RemoteModel = model) -> None:
                if done:
                    model._transport.root = other.url

            with pytest.raises(RemoteError, match="another model now behind the name toy: its weights changed"):
                work(model, pairs, progress=swap)


def test_a_server_that_lost_the_route_is_no_server_without_weights(served: Client) -> None:
    with ster.connect(served.url) as model:
        object.__setattr__(model.server, "id", "nothing")
        with pytest.raises(RemoteError, match=r"refuses \(404\)"):
            model.hash_weights()

"""vllm-lens is spoken to as it speaks: what is sent, what is found in its answers, and how its rounding is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harvesting import PROMPTS
from lens_stub import PROMPT, Stub, rounded

import ster
from ster.errors import InputError, SterError
from ster.remote.model import ROUNDING
from ster.server.tensors import encode, unpack


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


def test_equal_prompts_run_once(stub: Stub, remote: ster.RemoteModel) -> None:
    remote.activations(["the sea", "storm", "the sea"], position="all")
    assert len(stub.completions()) == 2


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

"""The programs and commands of the guides to the API, as they stand there (`tests/data/guides`), against a server on this machine whose
model has the shape of Llama-3.1-8B (`llama_8b.py`)."""

from __future__ import annotations

import ast
import base64
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from llama_8b import HIDDEN, LAYERS, NAME, VOCAB, write_llama_8b
from numpy.typing import NDArray
from serving import Client, error_of, running

from ster.server.settings import Settings
from ster.server.tensors import encode as encode_tensor

GUIDES = Path(__file__).resolve().parents[1] / "data" / "guides"
KEY = "acs-key"
PROMPT, IDS = "The sky is", [128000, 791, 13180, 374]
VECTOR = np.zeros(HIDDEN, np.float32)
VECTOR[:3] = [1, 2, 3]
HALF_ULP = 2.0**-8
"""Of a bfloat16 number x: rounding moves x by no more than this times |x|. It is also enough for what float32 rounds on the way, 2**-24."""
OWN = 0.3
"""No number of Layer 1 is larger by itself: their standard deviation is 0.03."""

Tensor = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Serves the checkpoint as `llama-8b`, to those who have the key."""
    cache = tmp_path_factory.mktemp("hub")
    with running({"llama-8b": write_llama_8b(cache)}, Settings(api_keys=(KEY,))) as client:
        client.headers["authorization"] = f"Bearer {KEY}"
        yield client
    shutil.rmtree(cache)  # pytest keeps the folders of three runs


@pytest.fixture(scope="module")
def environment(server: Client, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a program of the guides finds around it. Before Python 3.14, `compression.zstd` is a package of two files."""
    found = {**os.environ, "ACS_API_BASE": f"{server.url}/v1", "ACS_API_KEY": KEY, "NO_PROXY": "*"}
    if sys.version_info < (3, 14):
        path = tmp_path_factory.mktemp("path")
        (path / "compression").mkdir()
        (path / "compression" / "__init__.py").touch()
        (path / "compression" / "zstd.py").write_text("from backports.zstd import *\n")
        found["PYTHONPATH"] = str(path)
    return found


def text_of(name: str) -> str:
    return (GUIDES / name).read_text("utf-8")


def python(name: str, environment: dict[str, str]) -> str:
    """What the program prints. It must end well, and say nothing else."""
    command = [sys.executable, str(GUIDES / name)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    return ended.stdout


def helper(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The function of `<name>.py`, which has the same name."""
    zstd = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    monkeypatch.setitem(sys.modules, "compression", SimpleNamespace(zstd=zstd))
    found: dict[str, Any] = {"base64": base64, "np": np, "zstd": zstd}
    exec(compile(text_of(f"{name}.py"), name, "exec"), found)
    return found[name]


@pytest.fixture(params=["curl", "httpx"])
def shell(request: pytest.FixtureRequest, environment: dict[str, str]) -> Any:
    """Runs a `curl` command of the guides and returns what it prints: with curl, and with httpx, which is everywhere."""
    if request.param == "curl" and shutil.which("curl") is None:
        pytest.skip("there is no curl on this machine")

    def by_curl(name: str) -> str:
        ended = subprocess.run(["sh", str(GUIDES / name)], env=environment, capture_output=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.decode()

    def by_httpx(name: str) -> str:
        words = shlex.split(re.sub(r"\$(ACS_\w+)", lambda found: environment[found[1]], text_of(name)))
        headers = dict(words[at + 1].split(": ") for at, word in enumerate(words) if word == "-H")
        url = next(word for word in words if word.startswith("http"))
        return httpx.post(url, content=words[words.index("-d") + 1], headers=headers, timeout=120, trust_env=False).text

    return by_curl if request.param == "curl" else by_httpx


def alike(text: str) -> str:
    """Without what differs from one answer to the next: ids, times, what the model wrote and how it felt."""
    text = re.sub(r'("id": ?"cmpl-)[0-9a-f]{16}"', r'\1..."', text)
    text = re.sub(r'("request_id": ?"req_)[0-9a-f]{32}"', r'\1..."', text)
    text = re.sub(r'("created": ?)\d{10}\b', r"\g<1>0", text)
    return re.sub(r'("(?:text|data)": ?)"(?:[^"\\]|\\.)*"', r'\1"..."', text)


def compact(text: str) -> str:
    """JSON, in the order it came, without the space between."""
    return json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))


def decode(tensor: Tensor) -> NDArray[np.float32]:
    """float32, whatever it travelled as."""
    raw = zstandard.ZstdDecompressor().decompress(base64.b64decode(tensor["data"]))
    values = np.frombuffer(raw, tensor["dtype"]).reshape(tensor["shape"])
    if tensor["original_dtype"] == "torch.bfloat16":
        return (values.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def ask(server: Client, prompt: Any = PROMPT, **fields: Any) -> Any:
    fields = {"max_tokens": 1, "temperature": 0, **fields}
    return server.answer(prompt, model="llama-8b", **fields)


def read(server: Client, layers: Any, *vectors: Any, prompt: Any = PROMPT, **fields: Any) -> NDArray[np.float32]:
    """The residual stream `[layers, tokens, hidden]` with `vectors` added."""
    steering = {"apply_steering_vectors": list(vectors)} if vectors else {}
    answer = ask(server, prompt, output_residual_stream=layers, **steering, **fields)
    return decode(answer["activations"]["residual_stream"])


def moves(steered: NDArray[np.float32], baseline: NDArray[np.float32], by: NDArray[np.float32]) -> None:
    """Each number moved by its `by`, as far as bfloat16 can show it."""
    near = HALF_ULP * (np.abs(steered) + np.abs(baseline))
    np.testing.assert_array_less(np.abs(steered - baseline - by), near + 1e-30)


def norms(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.linalg.norm(rows.astype(np.float64), axis=-1)
    return found


# Read Activations


def test_the_model_is_listed_with_what_the_guides_say_of_it(server: Client) -> None:
    entry = server.get("/v1/models").json()["data"][0]
    assert (entry["id"], entry["served_model_name"]) == ("llama-8b", NAME)
    facts = {"n_layers": 32, "hidden_size": 4096, "vocab_size": VOCAB, "dtype": "bfloat16", "bos_token_id": 128000}
    assert entry["capabilities"].items() >= facts.items()


def test_the_tensor_passes_the_checks_of_the_guide(environment: dict[str, str]) -> None:
    assert python("check_the_tensor.py", environment) == "2 5 4096\n"


def test_a_read_answers_the_json_of_the_guide(shell: Any) -> None:
    answer = shell("layers.sh")
    assert compact(alike(answer)) == compact(alike(text_of("layers.json")))
    assert compact(answer) == answer
    values = decode(json.loads(answer)["activations"]["residual_stream"])
    assert values.shape == (2, 5, HIDDEN) and np.isfinite(values).all()
    assert values.any(axis=2).all() and (values[0] != values[1]).mean() > 0.9


def test_the_helper_of_the_guide_decodes_what_is_sent(server: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = ask(server, output_residual_stream=[0, 2])["activations"]["residual_stream"]
    values = helper("decode", monkeypatch)(tensor)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, decode(tensor))
    exact = read(server, [0, 2], activation_dtype="float32")
    assert (np.abs(values - exact) <= HALF_ULP * np.abs(exact)).all() and (values != exact).any()


def test_layers_are_sorted_and_true_is_all_of_them(server: Client) -> None:
    every = read(server, True)
    assert every.shape == (LAYERS, 4, HIDDEN)
    np.testing.assert_array_equal(read(server, [2, 0, 2]), every[[0, 2]])


def test_ids_run_as_they_are_and_each_has_a_row(shell: Any, server: Client) -> None:
    answer = json.loads(shell("token_ids.sh"))
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
    np.testing.assert_array_equal(decode(answer["activations"]["residual_stream"]), read(server, [1]))
    assert server.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"] == IDS
    assert read(server, [1], prompt=IDS[1:]).shape == (1, 3, HIDDEN)  # no BOS is added


def test_a_stream_has_the_chunks_of_the_guide(shell: Any, server: Client) -> None:
    answer = shell("stream.sh")
    assert alike(answer) == alike(text_of("stream.txt")) + "\n"
    *chunks, last = [json.loads(line[6:]) for line in answer.split("\n\n") if line.startswith("data: {")]
    assert [{**chunk, "choices": []} for chunk in chunks] == [{key: last[key] for key in chunk} for chunk in chunks]
    prompt_rows = decode(last["activations"]["residual_stream"])[:, :4]
    np.testing.assert_array_equal(prompt_rows, read(server, [1]))


def test_the_largest_read_of_the_guide_is_answered(server: Client) -> None:
    """All 32 Layers for 256 tokens, the one that is generated among them."""
    assert read(server, True, prompt=[IDS[0]] + [374, 264] * 127).shape == (LAYERS, 255, HIDDEN)


def test_two_choices_are_refused_in_the_words_of_the_guide(shell: Any) -> None:
    answer = shell("two_choices.sh")
    assert compact(alike(answer)) == compact(alike(text_of("two_choices.json")))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output_residual_stream": []}, ""),
        ({"output_residual_stream": [-1]}, ""),
        ({"output_residual_stream": [0, 32]}, f"{NAME} has Layers 0 to 31: it has no Layer 32."),
        ({"output_residual_stream": [0], "n": 2}, "Set n to 1: activations and steering vectors are for one choice only."),
        ({"output_residual_stream": [0], "prompt": [PROMPT, PROMPT]}, ""),
        ({"output_residual_stream": [0], "max_tokens": 8189}, ""),
        ({"output_residual_stream": True, "max_tokens": 253}, ""),
        ({"output_residual_stream": [0], "max_tokens": None}, "Set max_tokens with every capture"),
        ({"output_residual_stream": [0], "max_tokens": None, "stream": True}, "Set max_tokens with every capture"),
    ],
)
def test_reads_that_are_refused(server: Client, fields: dict[str, Any], message: str) -> None:
    refused = server.complete(**{"prompt": PROMPT, "model": "llama-8b", "max_tokens": 1, **fields})
    assert error_of(refused) == (400, "invalid_request", "output_residual_stream")
    assert refused.json()["error"]["message"].startswith(message)


# Steer a Completion


def test_a_steer_shows_in_the_read_of_its_layer(environment: dict[str, str], server: Client) -> None:
    shape, values = python("steer_and_read.py", environment).splitlines()
    assert shape == "(1, 5, 4096)"
    found = np.array(ast.literal_eval(values), np.float32)
    own = read(server, [1])[0, :, :4]
    moves(found[:4], own, 2 * VECTOR[:4])
    # The fifth token was drawn, so its own numbers are not known; those of this Layer are small.
    assert np.abs(found - [2, 4, 6, 0]).max() < OWN


def test_a_steer_beside_its_zero_scale_baseline(environment: dict[str, str], server: Client) -> None:
    texts, differences = python("zero_scale_baseline.py", environment).splitlines()
    assert len(shlex.split(texts)) == 2
    layer_0, layer_1 = np.array(ast.literal_eval(differences))
    assert layer_0.shape == layer_1.shape == (4, 4)
    assert not layer_0.any() and not layer_1[:, 3].any()
    _check_printed(layer_1, read(server, [1])[0])


def test_a_steer_at_a_chosen_position_moves_its_row_alone(environment: dict[str, str], server: Client) -> None:
    layer_0, layer_1 = np.array(ast.literal_eval(python("chosen_positions.py", environment)))
    assert not layer_0.any() and not layer_1[[0, 1, 3]].any() and layer_0.shape == layer_1.shape == (4, 4)
    _check_printed(layer_1[2:3], read(server, [1])[0, 2:3])


def _check_printed(differences: NDArray[np.float64], own: NDArray[np.float32]) -> None:
    """Differences that a program has rounded to two digits, beside the Layer's own numbers: 2 * [1, 2, 3, 0]."""
    wanted = 2 * VECTOR[:4]
    near = HALF_ULP * (np.abs(own[:, :4] + wanted) + np.abs(own[:, :4])) + 0.005
    assert (np.abs(differences - wanted) <= near + 1e-6).all()  # 1e-6: a decimal as float32


def test_a_position_out_of_reach_is_refused_in_the_words_of_the_guide(environment: dict[str, str]) -> None:
    assert alike(python("unreachable_position.py", environment)) == alike(text_of("unreachable_position.json"))


def test_too_few_rows_are_refused_in_the_words_of_the_guide(shell: Any) -> None:
    assert compact(alike(shell("too_few_rows.sh"))) == compact(alike(text_of("too_few_rows.json")))


@pytest.mark.parametrize("layer", [5, 31])
@pytest.mark.parametrize("scale", [0.5, -3.0])
def test_the_check_of_a_vector_of_ones_own(server: Client, layer: int, scale: float) -> None:
    """Read Layers L - 1 and L at scale 0, at another scale, and with norm_match."""
    v = np.random.default_rng(layer).standard_normal(HIDDEN).astype(np.float32)
    vector = {"activations": [v.tolist()], "layer_indices": [layer], "scale": scale}
    layers = [layer - 1, layer]
    before, own = read(server, layers, vector | {"scale": 0})
    np.testing.assert_array_equal([before, own], read(server, layers))

    same, steered = read(server, layers, vector | {"norm_match": False})
    np.testing.assert_array_equal(same, before)
    moves(steered, own, np.float32(scale) * v)
    exact = read(server, layers, vector, activation_dtype="float32") - read(server, layers, activation_dtype="float32")
    assert not exact[0].any()
    # Sums are below 16, so rounding to float32 moves none of them by 1e-6.
    np.testing.assert_allclose(exact[1], np.tile(np.float32(scale) * v, (4, 1)), rtol=2e-6, atol=2e-6)

    same, matched = read(server, layers, vector | {"norm_match": True})
    np.testing.assert_array_equal(same, before)
    moved, norm_of_own = norms(matched - own), norms(own)
    assert (np.abs(moved - abs(scale) * norm_of_own) <= HALF_ULP * (norms(matched) + norm_of_own)).all()
    # Rounding turns the difference by an angle of at most 2**-8 * (|matched| + |own|) / |moved|, whose cosine this is.
    np.testing.assert_allclose((matched - own) @ v / (moved * norms(v)), np.sign(scale), atol=(HALF_ULP * 5) ** 2 / 2)


def test_an_encoded_vector_is_its_numbers(server: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = helper("encode", monkeypatch)
    fields = {"layer_indices": [1, 3], "scale": 2}
    numbers = read(server, [1, 3], {"activations": [VECTOR.tolist(), (-VECTOR).tolist()], **fields})
    np.testing.assert_array_equal(read(server, [1, 3], {"activations": encode([VECTOR, -VECTOR]), **fields}), numbers)
    # As encode_vector of the old platform wrote them.
    bfloat16 = encode_tensor(np.stack([VECTOR, -VECTOR]), "bfloat16")
    assert (bfloat16["dtype"], bfloat16["original_dtype"]) == ("int16", "torch.bfloat16")
    np.testing.assert_array_equal(read(server, [1, 3], {"activations": bfloat16, **fields}), numbers)
    # A list of vectors for each Layer.
    fields |= {"position_indices": [3, 1]}
    lists = [[VECTOR.tolist(), (-VECTOR).tolist()]] * 2
    wanted = read(server, [1, 3], {"activations": lists, **fields})
    found = read(server, [1, 3], {"activations": encode(lists), **fields})
    np.testing.assert_array_equal(found, wanted)
    moves(found[0], read(server, [1])[0], 2 * np.stack([0 * VECTOR, -VECTOR, 0 * VECTOR, VECTOR]))


def test_without_position_indices_the_vectors_go_to_the_first_positions(server: Client) -> None:
    own = read(server, [1])[0]
    found = read(server, [1], {"activations": [[VECTOR.tolist(), (-VECTOR).tolist()]], "layer_indices": [1]})[0]
    moves(found, own, np.stack([VECTOR, -VECTOR, 0 * VECTOR, 0 * VECTOR]))


def test_a_span_is_a_vector_at_each_of_its_positions(server: Client) -> None:
    """Positions 2, 3 and 4: the last is that of a generated token."""
    fields = {"layer_indices": [1], "scale": 2}
    spans = read(server, [0, 1], {"activations": [VECTOR.tolist()], "position_spans": [[2, 5]], **fields}, max_tokens=2)
    lists = {"activations": [[VECTOR.tolist()] * 3], "position_indices": [2, 3, 4], **fields}
    np.testing.assert_array_equal(spans, read(server, [0, 1], lists, max_tokens=2))
    moves(spans[1, :4], read(server, [1])[0], 2 * np.stack([0 * VECTOR, 0 * VECTOR, VECTOR, VECTOR]))
    assert np.abs(spans[1, 4, :3] - [2, 4, 6]).max() < OWN


def test_vectors_of_one_layer_add_up(server: Client) -> None:
    once, twice = ({"activations": [VECTOR.tolist()], "layer_indices": [1], "scale": scale} for scale in (1, 2))
    added = read(server, [1], once, once, activation_dtype="float32")
    np.testing.assert_allclose(added, read(server, [1], twice, activation_dtype="float32"), rtol=2e-6)


@pytest.mark.parametrize("layers", [None, [1]])
def test_a_steered_stream_is_the_answer_in_pieces(server: Client, layers: list[int] | None) -> None:
    steering = {"apply_steering_vectors": [{"activations": [VECTOR.tolist()], "layer_indices": [1], "scale": 2}]}
    fields = {"max_tokens": 3, "temperature": 0, **steering} | ({} if layers is None else {"output_residual_stream": layers})
    whole = ask(server, **fields)
    events = server.events(PROMPT, model="llama-8b", **fields)
    assert events.pop() == "data: [DONE]"
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == whole["choices"][0]["text"]
    assert ("activations" in events[-1]) == (layers is not None) == ("activations" in whole)
    assert events[-1].get("activations") == whole.get("activations")


def _numbers(count: int = HIDDEN) -> list[float]:
    return [0.5] * count


def _vector(**fields: Any) -> dict[str, Any]:
    return {"activations": [_numbers()], "layer_indices": [1], **fields}


@pytest.mark.parametrize(
    "fields",
    [
        {"apply_steering_vectors": []},
        {"apply_steering_vectors": [_vector()], "n": 2},
        {"apply_steering_vectors": [_vector()], "prompt": [PROMPT, PROMPT]},
        {"apply_steering_vectors": [_vector()] * 9},
        {"apply_steering_vectors": [_vector(position_spans=[[0, 4096]])], "max_tokens": 5000},
        {"apply_steering_vectors": [_vector(activations=[_numbers(), _numbers(5)], layer_indices=[1, 2])]},
        {"apply_steering_vectors": [_vector(activations=[_numbers()] * 2)]},
        {"apply_steering_vectors": [_vector(activations=[_numbers()] * 2, layer_indices=[1, 1])]},
        {"apply_steering_vectors": [_vector(layer_indices=[-1])]},
        {"apply_steering_vectors": [_vector(layer_indices=[32])]},
        {"apply_steering_vectors": [_vector(activations=[_numbers(4095)])]},
        {"apply_steering_vectors": [_vector(activations=[[3.5e38, *_numbers(4095)]])]},
        {"apply_steering_vectors": [_vector(activations=encode_tensor(VECTOR[None], "float32") | {"data": "?"})]},
        {"apply_steering_vectors": [_vector(activations=encode_tensor(VECTOR[None], "float32") | {"shape": [1, 4097]})]},
        {"apply_steering_vectors": [_vector(activations=encode_tensor(VECTOR[None], "float32") | {"dtype": "float64"})]},
        {"apply_steering_vectors": [_vector(scael=2)]},
        {"apply_steering_vectors": [_vector(position_indices=[0])]},
        {"apply_steering_vectors": [_vector(activations=[[_numbers()]], position_indices=[0, 1])]},
        {"apply_steering_vectors": [_vector(position_indices=[0], position_spans=[[0, 1]])]},
        {"apply_steering_vectors": [_vector(activations=[[_numbers()]], position_spans=[[0, 1]])]},
        {"apply_steering_vectors": [_vector(position_spans=[[2, 2]])]},
        {"apply_steering_vectors": [_vector(position_spans=[[0, 2], [1, 3]])]},
        {"apply_steering_vectors": [_vector(position_spans=[[0, 4097]])], "max_tokens": 5000},
        {"apply_steering_vectors": [_vector(position_spans=[[3, 5]])], "max_tokens": 1},
    ],
)
def test_steers_that_are_refused(server: Client, fields: dict[str, Any]) -> None:
    refused = server.complete(**{"prompt": PROMPT, "model": "llama-8b", "max_tokens": 1, **fields})
    status, code, param = error_of(refused)
    # A problem inside a vector may be named by its place: apply_steering_vectors.0.scael.
    assert (status, code) == (400, "invalid_request") and param is not None and param.split(".")[0] == "apply_steering_vectors"
    both = server.complete(**{"prompt": PROMPT, "model": "llama-8b", "max_tokens": 1, "output_residual_stream": [0], **fields})
    about_both = "n" in fields or "prompt" in fields
    assert error_of(both)[2] == ("output_residual_stream" if about_both else param)


# Activation harvesting


@pytest.fixture
def decode_residual_stream(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("ml_dtypes", reason="the decoder of the guide to harvesting needs ml_dtypes, which is not installed")
    return helper("decode_residual_stream", monkeypatch)


def test_the_decoder_of_the_guide_to_harvesting_reads_the_answer(shell: Any, decode_residual_stream: Any) -> None:
    answer = json.loads(shell("all_layers.sh"))
    x = decode_residual_stream(answer)
    assert x.shape == (32, 6, 4096) and str(x.dtype) == "bfloat16"
    np.testing.assert_array_equal(x.astype(np.float32), decode(answer["activations"]["residual_stream"]))
    assert np.isfinite(x.astype(np.float32)).all()


def test_rows_are_the_prompt_and_what_was_fed_back(server: Client, decode_residual_stream: Any) -> None:
    prompt = "The capital of France is"
    answer = ask(server, prompt, max_tokens=5, output_residual_stream=[20, 15], return_token_ids=True)
    x = decode_residual_stream(answer).astype(np.float32)
    assert x.shape == (2, 10, 4096) and answer["usage"]["prompt_tokens"] == 6
    choice = answer["choices"][0]
    again = read(server, [15, 20], prompt=choice["prompt_token_ids"] + choice["token_ids"][:-1])
    np.testing.assert_array_equal(x, again)

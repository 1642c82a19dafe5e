"""vllm-lens's own client against the server: what it sends is understood, and what it reads is what the model had.

The client needs Python 3.11, and so little of torch that a stand-in will do where it is not installed. What encodes and decodes tensors
is vllm-lens.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import ster

pytestmark = pytest.mark.clients

PROMPT, KEY, HIDDEN = "the sea is calm", "lens-key", 64
LAYERS = [0, 2]


class Tensor:
    """What the client asks of a tensor."""

    def __init__(self, values: NDArray[Any], dtype: str) -> None:
        self.values, self.dtype = values, dtype
        self.shape = values.shape

    def detach(self) -> Tensor:
        return self

    cpu = detach

    def dim(self) -> int:
        return self.values.ndim

    def numpy(self) -> NDArray[Any]:
        assert self.dtype != "torch.bfloat16", "NumPy has no bfloat16"
        return self.values

    def view(self, dtype: str) -> Tensor:
        assert {self.dtype, dtype} == {"torch.int16", "torch.bfloat16"}
        return Tensor(self.values, dtype)

    def to(self, dtype: str) -> Tensor:
        assert dtype == self.dtype
        return self

    def float(self) -> Tensor:
        if self.dtype == "torch.bfloat16":
            return Tensor((self.values.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32), "torch.float32")
        return Tensor(self.values.astype(np.float32), "torch.float32")

    def bfloat16(self) -> Tensor:
        return Tensor((self.values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.int16), "torch.bfloat16")


def _stand_in() -> ModuleType:
    torch = ModuleType("torch")
    names = {name: f"torch.{name}" for name in ("bfloat16", "float16", "float32", "int16")}
    vars(torch).update(names, Tensor=Tensor, dtype=str, from_numpy=lambda values: Tensor(values, f"torch.{values.dtype}"))
    return torch


@pytest.fixture(scope="module")
def lens() -> Iterator[Any]:
    """vllm-lens, with what is used of it."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            torch = _stand_in()
            patch.setitem(sys.modules, "torch", torch)
        package = pytest.importorskip("vllm_lens", reason="run `make test-clients`", exc_type=ImportError)
        client = importlib.import_module("vllm_lens.client")
        yield SimpleNamespace(
            tensor=lambda values: torch.from_numpy(np.array(values, np.float32)),
            Client=client.VLLMLensClient,
            Hook=package.Hook,
            SteeringVector=package.SteeringVector,
        )


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def client(lens: Any, toy_model: ster.Model, dtype: Any) -> Iterator[Any]:
    """A client of a server whose activations travel as `dtype`."""
    pytest.importorskip("starlette", reason="the extra `serve` is not installed")
    from serving import running

    from ster.server.settings import Settings

    with running({"toy": lambda: toy_model}, Settings(activation_dtype=dtype, api_keys=(KEY,))) as server:
        found = lens.Client(server.url, api_key=KEY)
        yield found
        found._session.close()


def rounded(values: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """As `dtype` has them, ties to even."""
    if dtype != "bfloat16":
        return values.astype(dtype).astype(np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    upper = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return upper.astype(np.uint32).view(np.float32)


def check_stream(output: Any, wanted: NDArray[np.float32], dtype: str) -> None:
    """Whether the client has the rows that the model had, bit for bit."""
    tensor = output.activations["residual_stream"]
    assert str(tensor.dtype) == f"torch.{dtype}" and tuple(tensor.shape) == wanted.shape
    np.testing.assert_array_equal(tensor.float().numpy(), rounded(wanted, dtype))


def test_it_generates_and_finds_the_model_by_itself(client: Any, toy_model: ster.Model) -> None:
    from serving import continued

    output = client.generate(PROMPT, max_tokens=4)
    assert client.model == "toy"
    assert output.text == continued(toy_model, toy_model.generate(PROMPT, max_new_tokens=4)) and output.activations is None
    scored = client.generate(PROMPT, max_tokens=1, logprobs=2, echo=True)
    assert scored.text.startswith(PROMPT) and len(scored.logprobs["token_logprobs"]) == 5


def test_it_captures(client: Any, toy_model: ster.Model, dtype: str) -> None:
    output = client.generate(PROMPT, max_tokens=3, capture_layers=LAYERS, return_token_ids=True)
    ids = output.raw["choices"][0]["token_ids"]
    trace = toy_model.trace([*toy_model.prompt_tokens(PROMPT), *ids[:-1]], layers="0,2")
    check_stream(output, trace.residual, dtype)


@pytest.mark.parametrize("positions", ["everywhere", "first", "chosen"])
@pytest.mark.parametrize("narrow", [False, True])
def test_it_steers(client: Any, lens: Any, toy_model: ster.Model, dtype: str, positions: str, narrow: bool) -> None:
    """narrow: the vector travels as bfloat16."""
    places = {"everywhere": None, "first": [0, 1], "chosen": [3, 1]}[positions]
    rng = np.random.default_rng(0)
    vector = rng.integers(-4, 5, (1, HIDDEN) if places is None else (1, 2, HIDDEN)).astype(np.float32)  # exact in bfloat16
    tensor = lens.tensor(vector).bfloat16() if narrow else lens.tensor(vector)
    chosen = {"position_indices": places} if positions == "chosen" else {}
    steering = lens.SteeringVector(activations=tensor, layer_indices=[2], scale=2.0, **chosen)
    output = client.generate(PROMPT, max_tokens=1, capture_layers=LAYERS, steering_vectors=[steering])
    wanted = toy_model.trace(PROMPT, layers="0,2").residual.copy()
    if places is None:
        wanted[1] += 2 * vector[0]
    else:
        wanted[1, places] += 2 * vector[0]
    check_stream(output, wanted, dtype)
    assert client.generate(PROMPT, max_tokens=4, steering_vectors=[steering]).activations is None


def test_it_steers_by_the_norm_of_the_stream(client: Any, lens: Any, toy_model: ster.Model, dtype: str) -> None:
    vector = np.random.default_rng(1).standard_normal((1, HIDDEN)).astype(np.float32)
    steering = lens.SteeringVector(activations=lens.tensor(vector), layer_indices=[2], scale=3.0, norm_match=True)
    output = client.generate(PROMPT, max_tokens=1, capture_layers=[2], steering_vectors=[steering])
    own = toy_model.trace(PROMPT, layers="2").residual[0].astype(np.float64)
    wanted = own + 3.0 * np.linalg.norm(own, axis=1, keepdims=True) * vector / np.linalg.norm(vector)
    found = output.activations["residual_stream"].float().numpy()[0]
    step = {"float32": 1e-6, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]  # half of the last place, relative
    np.testing.assert_allclose(found, wanted, rtol=1.01 * step, atol=1e-6)


def test_it_hears_why_it_is_refused(client: Any, lens: Any) -> None:
    def fn(context: Any, hidden: Any) -> None: ...

    hook = lens.Hook(fn=fn, layer_indices=[0])
    narrow = lens.SteeringVector(activations=lens.tensor([[1.0, 2.0]]), layer_indices=[0])
    for fields, message in [
        ({"capture_layers": [4]}, "toy-llama has Layers 0 to 3: it has no Layer 4"),
        ({"capture_layers": []}, "output_residual_stream"),
        ({"steering_vectors": [narrow]}, "needs 64 numbers"),
        ({"hooks": [hook]}, "apply_hooks is refused"),
        ({"capture_qk": True}, "output_qk"),
        ({"capture_layers": [0], "activations_transport": "binary"}, "activations_transport is not supported"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            client.generate(PROMPT, max_tokens=1, **fields)
    with pytest.raises(RuntimeError, match="Failed to register hooks"):
        client.register_hooks([hook])
    with pytest.raises(RuntimeError, match="no chat template"):
        client.chat([{"role": "user", "content": PROMPT}])


def test_it_chats(lens: Any, toy_dir: Path, tmp_path: Path) -> None:
    from serving import running

    folder = Path(shutil.copytree(toy_dir, tmp_path / "chatting"))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    model = ster.load(folder)
    steering = lens.SteeringVector(activations=lens.tensor(np.ones((1, HIDDEN))), layer_indices=[2], scale=2.0)
    with running({"chatty": lambda: model}) as server:
        client = lens.Client(server.url)
        messages = [{"role": "user", "content": PROMPT}]
        output = client.chat(messages, max_tokens=1, capture_layers=LAYERS, steering_vectors=[steering])
        wanted = model.trace(PROMPT, layers="0,2").residual.copy()
        wanted[1] += np.float32(2)
        check_stream(output, wanted, "float32")
        assert client.chat(messages, max_tokens=3).text == model.generate(PROMPT, max_new_tokens=3).text
        client._session.close()

"""Whether an answer is what was asked for. vllm-lens leaves out what its hooks failed at, without a word; so nothing is taken on trust."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ster.errors import NonFiniteError, RemoteError
from ster.prompts import at
from ster.server.settings import WireDtype
from ster.server.tensors import STORED, TensorError, unpack

SIZES = {"n_layers": 1 << 16, "hidden_size": 1 << 24, "max_model_len": 1 << 31, "vocab_size": 1 << 31}
"""What `ster serve` says of a model's sizes -> more than any has. They are believed before an answer shows them."""
EXPECTED = {"served_model_name": str, "precision": str, "chat_template": bool, "activation_dtypes": list}
OPTIONAL = {
    **dict.fromkeys(("revision", "config_hash", "tokenizer_hash"), str),
    **dict.fromkeys(("bos_token_id", "unknown_token_id", "max_capture_numbers", "max_steering_numbers", "max_steering_vectors"), int),
    **dict.fromkeys(("rotation_switches_after", "rotation_changes_after"), int),
}
OTHER_TOKENS = "the ids that were sent are those that must run"


@dataclass(frozen=True)
class Expected:
    """What a request of token ids asked for. wire: the dtype that activations travel in; None: any. generated: at most so many new tokens.

    name: of the prompt, for refusals. called: what the model is called in every answer; None: that is not known.
    """

    ids: Sequence[int]
    hidden: int
    wire: WireDtype | None = None
    generated: int = 1
    name: str | None = None
    called: str | None = None

    def misfit(self, message: str, hint: str | None = None) -> RemoteError:
        return RemoteError(f"the server's answer does not fit what was asked: {message}{at(self.name)}", hint)


def check_facts(root: str, facts: Mapping[str, Any]) -> None:
    """facts: what `ster serve` says of a model, its `served_model_name` among them.

    Raises:
        RemoteError: one is missing, or is what none can be.
    """

    def good(name: str) -> bool:
        value = facts.get(name)
        if name in SIZES:
            return type(value) is int and 1 <= value <= SIZES[name]
        if name in OPTIONAL:
            return value is None or type(value) is OPTIONAL[name]
        return type(value) is EXPECTED[name] and value != ""

    bad = next((name for name in (*SIZES, *EXPECTED, *OPTIONAL) if not good(name)), None)
    if bad is not None:
        found = repr(facts[bad])[:60] if bad in facts else "nothing"
        raise RemoteError(f"{root} does not say what a model is that Ster can use: its `{bad}` is {found}")


def check_choice(document: dict[str, Any], expected: Expected) -> tuple[dict[str, Any], int]:
    """The one choice of an answer, and how many tokens were generated, after the prompt that was sent and no other.

    Raises:
        RemoteError: see the module.
    """
    check_model(document, expected)
    choices = document.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        count = f"{len(choices)}" if isinstance(choices, list) else "no"
        raise expected.misfit(f"{count} choices, expected 1")
    usage = document.get("usage")
    counts = [usage.get(name) if isinstance(usage, dict) else None for name in ("prompt_tokens", "completion_tokens")]
    if not all(isinstance(count, int) and not isinstance(count, bool) for count in counts):
        raise expected.misfit("its usage does not say how many tokens ran")
    prompt, generated = counts
    if prompt != len(expected.ids):
        raise expected.misfit(f"it ran {prompt} prompt tokens, expected {len(expected.ids)}", OTHER_TOKENS)
    ran = choices[0].get("prompt_token_ids")
    if ran is not None and ran != list(expected.ids):
        raise expected.misfit("it ran other prompt tokens", OTHER_TOKENS)
    if not 1 <= generated <= expected.generated:  # type: ignore[operator]
        raise expected.misfit(
            f"it generated {generated} tokens, expected {'1' if expected.generated == 1 else f'1 to {expected.generated}'}"
        )
    return choices[0], generated  # type: ignore[return-value]


def check_model(document: dict[str, Any], expected: Expected) -> None:
    """
    Raises:
        RemoteError: another model answers than was asked.
    """
    if expected.called is not None and document.get("model", expected.called) != expected.called:
        raise expected.misfit(f"the model is {str(document['model'])[:200]!r}, expected {expected.called!r}")


def check_residual(document: dict[str, Any], expected: Expected, layers: Sequence[int], generated: int) -> NDArray[np.float32]:
    """float32 `[layers, prompt + generated - 1, hidden]` of an answer.

    Raises:
        RemoteError: see the module. NonFiniteError: NaN or infinity, by layer and token.
    """
    tensor = _tensor(document, expected)
    shape = [len(layers), len(expected.ids) + generated - 1, expected.hidden]
    if tensor["shape"] != shape:
        raise expected.misfit(
            f"activations [layers, tokens, hidden] are {tensor['shape']}, expected {shape}", _shape_hint(tensor["shape"], shape)
        )
    wire = wire_of(tensor, expected)
    if expected.wire is not None and wire != expected.wire:
        raise expected.misfit(f"activations are {wire}, expected {expected.wire}")
    values = _decode(tensor, math.prod(shape), expected)
    finite = np.isfinite(values)
    if not finite.all():
        layer, token = np.argwhere(~finite)[0][:2].tolist()
        raise NonFiniteError(
            f"the server's activations have a value that is not finite: layer {layers[layer]}, token {token}{at(expected.name)}"
        )
    return values


def read_probe(document: dict[str, Any], expected: Expected) -> tuple[NDArray[np.float32], WireDtype]:
    """The activations of a server whose sizes are not known yet, `[layers, tokens, hidden]`, and how they travel.

    Raises:
        RemoteError: as `check_residual`, as far as that can be told.
    """
    tensor = _tensor(document, expected)
    layers, rows, hidden = tensor["shape"]
    if rows != len(expected.ids) or not 1 <= layers <= 4096 or not 1 <= hidden <= 1 << 20:
        raise expected.misfit(f"activations are {tensor['shape']}, expected [layers, {len(expected.ids)}, hidden]")
    values = _decode(tensor, layers * rows * hidden, expected)
    if not np.isfinite(values).all():
        raise NonFiniteError("the server's activations of a single token have a value that is not finite")
    return values, wire_of(tensor, expected)


def wire_of(tensor: dict[str, Any], expected: Expected) -> WireDtype:
    pair = (tensor.get("dtype"), tensor.get("original_dtype"))
    for wire, stored in STORED.items():
        if stored == pair:
            return wire
    raise expected.misfit(f"activations have the dtype {pair[0]!r} with {pair[1]!r}, which is none that is known")


def _tensor(document: dict[str, Any], expected: Expected) -> dict[str, Any]:
    """The object that holds the residual stream, of the right form."""
    activations = document.get("activations")
    tensor = activations.get("residual_stream") if isinstance(activations, dict) else None
    if tensor is None:
        hint = "on vLLM: is vllm-lens installed, and what does the server's log say of its hooks?"
        raise expected.misfit("it has no activations", hint)
    if not isinstance(tensor, dict):
        raise expected.misfit("its activations are not an object")
    if "handle" in tensor and "data" not in tensor:
        raise expected.misfit("its activations are a handle to fetch bytes by, which was not asked for")
    if not isinstance(tensor.get("data"), str) or tensor.get("compression") != "zstd":
        raise expected.misfit("its activations are not base64 of zstd")
    shape = tensor.get("shape")
    if not isinstance(shape, list) or len(shape) != 3 or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape):
        raise expected.misfit(f"its activations have no shape [layers, tokens, hidden]: {str(shape)[:80]}")
    return tensor


def _decode(tensor: dict[str, Any], numbers: int, expected: Expected) -> NDArray[np.float32]:
    try:
        return unpack(tensor["data"], tensor["dtype"], tensor["original_dtype"], tensor["shape"], max_numbers=numbers)
    except TensorError as error:
        raise expected.misfit(f"activations {error}".replace("activations has", "its tensor has")) from None


def _shape_hint(found: Sequence[int], wanted: Sequence[int]) -> str | None:
    if found[0] < wanted[0]:
        return "layers are missing: vllm-lens leaves out those whose hook failed, and the server's log says why"
    if found[1] < wanted[1]:
        return "rows are missing: those of a cached prefix do not run, unless the server sees to it"
    return None

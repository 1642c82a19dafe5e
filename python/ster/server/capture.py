"""`output_residual_stream`: which Layers a request reads, how much that may be, and how the rows travel.

Rows are the prompt's tokens and the generated ones but the last, which is chosen and never runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ster.server import tensors
from ster.server.errors import invalid, misfit
from ster.server.settings import Facts, Settings, WireDtype

FIELD = "output_residual_stream"


def capture_layers(asked: bool | Sequence[int] | None, served: Facts) -> list[int] | None:
    """The Layers to read, ascending, each once; None: nothing is read.

    Raises:
        ApiError: an empty list, or a Layer that the model does not have.
    """
    if asked is None or asked is False:
        return None
    if asked is True:
        return list(range(served.layers))
    if not asked:
        raise invalid("output_residual_stream names no Layer: list at least one, or send true for all of them.", FIELD)
    check_layers(asked, served, FIELD)
    return sorted(set(asked))


def check_layers(layers: Sequence[int], served: Facts, param: str) -> None:
    """
    Raises:
        ApiError: the first Layer that the model does not have.
    """
    missing = next((layer for layer in layers if not 0 <= layer < served.layers), None)
    if missing is not None:
        raise invalid(f"{served.name} has Layers 0 to {served.layers - 1}: it has no Layer {missing}.", param)


def check_capture_cap(
    layers: Sequence[int], prompt_tokens: int, max_tokens: int | None, served: Facts, settings: Settings, *, stream: bool = False
) -> None:
    """Layers x (prompt tokens + max_tokens) x hidden size, against the cap.

    max_tokens: None where the request leaves it out, which is the room in the context, up to the default of a stream or of an answer in
    one piece.

    Raises:
        ApiError
    """
    default = settings.max_tokens_default_stream if stream else settings.max_tokens_default
    generated = max_tokens if max_tokens is not None else max(1, min(default, served.context - prompt_tokens))
    tokens = prompt_tokens + generated
    numbers = len(layers) * tokens * served.hidden
    if numbers <= settings.max_capture_numbers:
        return
    found = f"{_count(len(layers), 'Layer')} x {_count(tokens, 'token')} x a hidden size of {served.hidden:,} are {numbers:,} numbers"
    room = settings.max_capture_numbers // (len(layers) * served.hidden)
    if max_tokens is None:
        advice = "Set max_tokens with every capture"
        raise invalid(
            f"{advice}: left out, it is {generated:,} here, and {found}, over the cap of {settings.max_capture_numbers:,}.", FIELD
        )
    fit = f"{_count(room, 'token')} of the prompt and max_tokens together, with {_count(len(layers), 'Layer')}"
    advice = f"ask for fewer Layers or tokens: at most {fit}" if room else "ask for fewer Layers"
    raise invalid(f"{found}, over the cap of {settings.max_capture_numbers:,}: {advice}.", FIELD)


def verify_shape(
    rows: NDArray[np.float32] | None, layers: Sequence[int] | None, prompt_tokens: int, completion_tokens: int, hidden: int
) -> None:
    """Whether `rows` are `[layers, prompt_tokens + completion_tokens - 1, hidden]`, before they leave.

    Raises:
        ApiError: 502.
    """
    if rows is None or layers is None or rows.shape != (len(layers), prompt_tokens + completion_tokens - 1, hidden):
        raise misfit()


def encode_activations(rows: NDArray[np.float32], dtype: WireDtype, layers: Sequence[int] | None = None) -> dict[str, Any]:
    """`[layers, tokens, hidden]` -> the object of `activations.residual_stream`.

    layers: which Layer each first index is, for the message; None: counted from 0.

    Raises:
        ApiError: a number that `dtype` does not reach, which is never sent as infinite.
    """
    try:
        return tensors.encode(rows, dtype)
    except tensors.TensorOverflowError as error:
        index, token = error.index[0], error.index[1]
        place = f"Layer {index if layers is None else layers[index]}, token {token}"
        limit = f"{tensors.LARGEST[dtype]:g}, the largest {dtype}"
        message = f"The residual stream at {place} has the number {error.value:g}, beyond {limit}. Set activation_dtype to float32."
        raise invalid(message, "activation_dtype") from None


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

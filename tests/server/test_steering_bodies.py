"""`apply_steering_vectors` over HTTP, whatever it says: it does what the engine does with the same edits, or it is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from serving import Client, error_of

import ster
from ster import _native
from ster.server.tensors import decode, encode
from ster.toy import HIDDEN, LAYERS

PROMPT, MAX_TOKENS = [3, 4, 5, 6], 2
REACH = len(PROMPT) + MAX_TOKENS - 2
"""The last position that runs."""

FIELDS: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0, "output_residual_stream": True, "activation_dtype": "float32"}


@st.composite
def vectors(draw: st.DrawFn) -> tuple[dict[str, Any], list[_native.Edit]]:
    """A Steering vector as it comes over the wire, and the edits that it means."""
    layers = draw(st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=3, unique=True))
    positions = draw(st.lists(st.integers(0, REACH), min_size=1, max_size=3, unique=True))
    many = draw(st.booleans())
    shape = (len(layers), len(positions), HIDDEN) if many else (len(layers), HIDDEN)
    values = np.random.default_rng(draw(st.integers(0, 999))).normal(0, 0.3, shape).astype(np.float32)
    fields: dict[str, Any] = {}
    places: list[int] | None = None
    if many:
        fields["position_indices"] = places = positions
    elif draw(st.booleans()):
        fields["position_spans"] = [[position, position + 1] for position in positions]
        places = positions
    scale = draw(st.sampled_from([1.0, 0, -2, 0.1]))
    norm_match = draw(st.booleans())
    sent = {
        "activations": encode(values, "float32") if draw(st.booleans()) else values.tolist(),
        "layer_indices": layers,
        "scale": scale,
        "norm_match": norm_match,
        **fields,
    }
    rows = values if many else values[:, None]
    edits = zip(layers, rows, strict=True)
    return sent, [_native.Edit(layer, row, scale=scale, positions=places, norm_match=norm_match) for layer, row in edits]


NUMBERS = st.one_of(st.integers(-2, 9), st.sampled_from([2**40, 10**30, 0.5, -0.0, 1e38, 1e39]))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.text(max_size=3), NUMBERS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=2)),
    max_leaves=6,
)


@st.composite
def broken(draw: st.DrawFn) -> Any:
    """Steering vectors in which one value, anywhere, is another, or gone, or has another beside it."""
    body: dict[str, Any] = {"it": [sent for sent, _ in draw(st.lists(vectors(), min_size=1, max_size=2))]}
    inside: Any = body
    key: Any = "it"
    while isinstance(inside[key], dict | list) and inside[key] and draw(st.integers(0, 3)):
        inside = inside[key]
        key = draw(st.sampled_from(sorted(inside) if isinstance(inside, dict) else range(min(len(inside), 3))))
    how = draw(st.sampled_from(["another", "another", "gone", "beside"]))
    if how == "gone" and inside is not body:
        del inside[key]
    elif how == "beside" and isinstance(inside, list):
        inside.insert(key, draw(JSON))
    elif how == "beside" and inside is not body:
        inside[draw(st.text(max_size=12))] = draw(JSON)
    else:
        inside[key] = draw(JSON)
    return body["it"]


def rows(answer: dict[str, Any]) -> NDArray[np.float32]:
    tensor = answer["activations"]["residual_stream"]
    return decode(tensor["data"], tensor["dtype"], tensor["original_dtype"], tensor["shape"], max_numbers=2**20)


@given(st.lists(vectors(), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_steering_over_http_is_the_engines(
    toy: Client, toy_model: ster.Model, drawn: list[tuple[dict[str, Any], list[_native.Edit]]]
) -> None:
    answer = toy.answer(PROMPT, **FIELDS, return_token_ids=True, apply_steering_vectors=[sent for sent, _ in drawn])
    edits = [edit for _, each in drawn for edit in each]
    expected = toy_model.generate(PROMPT, steering=edits, max_new_tokens=MAX_TOKENS, layers="all")
    assert answer["choices"][0]["token_ids"] == expected.token_ids
    assert answer["choices"][0]["text"] == toy_model.decode([*PROMPT, *expected.token_ids]).removeprefix(toy_model.decode(PROMPT))
    assert expected.trace is not None
    assert rows(answer).tobytes() == expected.trace.residual.tobytes()


@given(broken())
@settings(max_examples=150, deadline=None)
def test_a_body_with_one_wrong_value_is_answered_or_refused_by_name(toy: Client, steering: Any) -> None:
    response = toy.complete(PROMPT, **FIELDS, apply_steering_vectors=steering)
    if response.status_code == 200:
        assert np.isfinite(rows(response.json())).all()
    else:
        assert error_of(response) == (400, "invalid_request", "apply_steering_vectors")

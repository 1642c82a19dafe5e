"""`apply_steering_vectors`: every refusal of the documentation, and what the engine is given."""

from __future__ import annotations

import base64
import math
import time
from typing import Any

import numpy as np
import orjson
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ster import _native
from ster.server.errors import ApiError
from ster.server.schema import CompletionRequest, SteeringVector, parse_body
from ster.server.settings import Facts, Settings
from ster.server.tensors import encode
from ster.server.vectors import check_positions, steering_edits

HIDDEN = 3
FACTS = Facts("toy", layers=4, hidden=HIDDEN, vocab=100, context=50, dtype="float32")
V, W = [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]


def edits(*vectors: dict[str, Any], caps: Settings | None = None, facts: Facts = FACTS) -> list[_native.Edit]:
    """What the engine is given for vectors as they come over the wire."""
    body = {"model": "m", "prompt": "x", "max_tokens": 1, "apply_steering_vectors": list(vectors)}
    request = parse_body(CompletionRequest, orjson.dumps(body), caps)
    assert request.apply_steering_vectors is not None
    return steering_edits(request.apply_steering_vectors, facts, caps or Settings())


def refusal(*vectors: dict[str, Any], caps: Settings | None = None) -> str:
    with pytest.raises(ApiError) as caught:
        edits(*vectors, caps=caps)
    error = caught.value
    assert (error.status, error.code, error.type) == (400, "invalid_request", "invalid_request_error")
    assert error.param == "apply_steering_vectors"
    return error.message


def vector(activations: Any, layers: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    return {"activations": activations, "layer_indices": [1] if layers is None else layers, **fields}


def shown(found: list[_native.Edit]) -> list[tuple[Any, ...]]:
    return [(edit.layer, edit.vectors.tolist(), edit.scale, edit.positions, edit.norm_match) for edit in found]


# What the engine is given


def test_row_i_goes_to_layer_i() -> None:
    assert shown(edits(vector([V, W], [2, 0], scale=-2))) == [(2, [V], -2.0, None, False), (0, [W], -2.0, None, False)]


def test_scale_is_one_and_norm_match_false_where_they_are_null_or_left_out() -> None:
    nothing = dict.fromkeys(("scale", "norm_match", "position_indices", "position_spans"))
    assert shown(edits(vector([V]))) == shown(edits(vector([V], **nothing))) == [(1, [V], 1.0, None, False)]


def test_a_list_of_vectors_goes_to_its_positions() -> None:
    assert shown(edits(vector([[V, W]], position_indices=[7, 2]))) == [(1, [V, W], 1.0, [7, 2], False)]
    assert shown(edits(vector([[V, W]]))) == [(1, [V, W], 1.0, [0, 1], False)]


def test_a_span_is_its_positions_without_the_end() -> None:
    assert shown(edits(vector([V], position_spans=[[6, 7], [2, 5]]))) == [(1, [V], 1.0, [2, 3, 4, 6], False)]


def test_vectors_on_one_layer_are_all_given() -> None:
    assert [edit.layer for edit in edits(vector([V]), vector([W]))] == [1, 1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(2, HIDDEN), (2, 4, HIDDEN)])
def test_an_encoded_vector_is_the_same_as_its_numbers(dtype: Any, shape: tuple[int, ...]) -> None:
    rows = np.random.default_rng(0).normal(size=shape).astype(np.float16).astype(np.float32)
    tensor = encode(rows, dtype)
    expected = rows if dtype != "bfloat16" else np.round(rows, 0)
    if dtype == "bfloat16":
        tensor = encode(expected, dtype)
    assert shown(edits(vector(tensor, [0, 3]))) == shown(edits(vector(expected.tolist(), [0, 3])))


def test_the_documented_encoder_is_read() -> None:
    array = np.asarray([V], dtype=np.float32)
    tensor = {
        "data": base64.b64encode(zstandard.compress(array.tobytes())).decode(),
        "dtype": "float32",
        "original_dtype": "torch.float32",
        "shape": list(array.shape),
        "compression": "zstd",
    }
    assert shown(edits(vector(tensor))) == [(1, [V], 1.0, None, False)]


def test_a_zero_vector_to_norm_match_adds_nothing_and_keeps_its_positions() -> None:
    zero = [0.0] * HIDDEN
    assert shown(edits(vector([zero], norm_match=True))) == [(1, [zero], 0.0, None, False)]
    found = edits(vector([[V, zero, W]], norm_match=True, scale=2, position_indices=[5, 3, 1]))
    assert shown(found) == [(1, [V, W], 2.0, [5, 1], True), (1, [zero], 0.0, [3], False)]
    assert [edit.norm_match for edit in edits(vector([zero]))] == [False]


def test_numbers_are_rounded_to_float32_and_integers_are_numbers() -> None:
    (edit,) = edits(vector([[0.1, 2**53 + 1, 3.4028235e38]]))
    assert edit.vectors.tolist() == np.array([[0.1, 2**53 + 1, 3.4028234663852886e38]], np.float32).tolist()


def test_two_million_numbers_take_a_fraction_of_a_second() -> None:
    facts = Facts("wide", layers=32, hidden=4096, vocab=100, context=50, dtype="float32")
    rows = np.random.default_rng(0).normal(size=(32, 16, 4096)).astype(np.float32)
    numbers = rows.tolist()
    began = time.process_time()
    found = steering_edits([SteeringVector(activations=numbers, layer_indices=list(range(32)))], facts, Settings())
    assert time.process_time() - began < 1.0  # 0.3 s on one core; with a check for each number in Python it would be several
    assert np.array_equal(np.stack([edit.vectors for edit in found]), rows)


# Refusals


def test_a_row_is_needed_for_each_layer_and_that_is_said_before_the_hidden_size() -> None:
    assert refusal(vector([[1, 2]], [1, 2])) == "activations needs one row for each layer in layer_indices."
    assert refusal(vector([V, V], [99])) == "activations needs one row for each layer in layer_indices."
    assert refusal(vector(encode(np.ones((2, 2), np.float32), "float32"))) == "activations needs one row for each layer in layer_indices."
    assert refusal(vector([])) == "activations needs one row for each layer in layer_indices."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_indices": [4]}, "toy has Layers 0 to 3: it has no Layer 4."),
        ({"layer_indices": [-1]}, "apply_steering_vectors.0.layer_indices.0: Input should be greater than or equal to 0."),
        ({"layer_indices": []}, "apply_steering_vectors.0.layer_indices: List should have at least 1 item, not 0."),
        ({"layer_indices": [True]}, "apply_steering_vectors.0.layer_indices.0: Input should be a valid integer."),
        ({"layer_indices": [1.0]}, "apply_steering_vectors.0.layer_indices.0: Input should be a valid integer."),
        ({"layer_indices": None}, "apply_steering_vectors.0.layer_indices: Input should be a valid list."),
        ({"activations": None}, "apply_steering_vectors.0.activations: Input should be a list of rows or an encoded tensor."),
        ({"activations": "AAAA"}, "apply_steering_vectors.0.activations: Input should be a list of rows or an encoded tensor."),
        ({"activations": [[1, 2]]}, "Each vector needs 3 numbers, the hidden size of toy: found 2."),
        ({"activations": [[]]}, "Each vector needs 3 numbers, the hidden size of toy: found 0."),
        ({"activations": [[[]]]}, "Each vector needs 3 numbers, the hidden size of toy: found 0."),
        ({"activations": [V, [1]], "layer_indices": [0, 1]}, "Each row of activations must have the same length: found 1 and 3."),
        ({"activations": [[V, [1]]]}, "Each vector in a row of activations must have the same length: found 1 and 3."),
        ({"activations": [[V], [V, V]], "layer_indices": [0, 1]}, "Each row of activations must have the same length: found 1 and 2."),
        ({"activations": [1, 2]}, "activations needs one row for each layer in layer_indices."),
        ({"activations": [1]}, "Each row of activations must be a list, and all of the same kind: numbers, or lists of numbers."),
        ({"scale": "2"}, "apply_steering_vectors.0.scale: Input should be a valid number."),
        ({"scale": True}, "apply_steering_vectors.0.scale: Input should be a valid number."),
        ({"scale": 1e39}, "apply_steering_vectors.0.scale: Input should be within float32's range, from -3.4028235e+38 to 3.4028235e+38."),
        ({"norm_match": 1}, "apply_steering_vectors.0.norm_match: Input should be a valid boolean."),
        ({"scael": 2}, "apply_steering_vectors.0: Unknown field 'scael'."),
        ({"position_spans": [[2, 5]], "position_indices": [2]}, "Send position_spans or position_indices, not both."),
        ({"position_spans": [[5, 5]]}, "The span [5, 5] must end after it starts: it covers 5 to its end - 1."),
        ({"position_spans": [[5, 2]]}, "The span [5, 2] must end after it starts: it covers 5 to its end - 1."),
        ({"position_spans": [[4, 6], [0, 5]]}, "The spans [0, 5] and [4, 6] overlap."),
        ({"position_spans": [[0, 4000], [5000, 5097]]}, "position_spans covers 4,097 positions: at most 4,096 are allowed."),
        ({"position_spans": [[1, 2, 3]]}, "apply_steering_vectors.0.position_spans.0: List should have at most 2 items, not 3."),
        ({"position_spans": [[-1, 2]]}, "apply_steering_vectors.0.position_spans.0.0: Input should be greater than or equal to 0."),
        ({"position_spans": []}, "apply_steering_vectors.0.position_spans: List should have at least 1 item, not 0."),
        (
            {"position_indices": [2]},
            "position_indices takes a list of vectors for each Layer, one for each position: found one vector.",
        ),
        (
            {"activations": [[V, V]], "position_indices": [2]},
            "position_indices has 1 positions, and each Layer 2 vectors: send as many.",
        ),
        (
            {"activations": [[V, V]], "position_indices": [2, 2]},
            "position_indices names position 2 twice: add its vectors up, or send two Steering vectors.",
        ),
        (
            {"activations": [[V]], "position_spans": [[2, 3]]},
            "position_spans takes one vector for each Layer: send position_indices with a list of vectors.",
        ),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    assert refusal({**vector([V]), **fields}) == message


def test_a_layer_may_not_be_repeated() -> None:
    assert refusal(vector([V, W, V], [1, 3, 1])) == "layer_indices names Layer 1 twice: a Steering vector has one row for each Layer."


@pytest.mark.parametrize("odd", [True, None, "1", "", [1], {}, {"a": 1}])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_numpy_would_take_for_a_number_is_refused(odd: Any, at: int) -> None:
    row: list[Any] = list(V)
    row[at] = odd
    assert "number" in refusal(vector([row]))
    assert "number" in refusal(vector([V, row], [0, 1]))
    assert "number" in refusal(vector([[V, row]]))


@pytest.mark.parametrize("literal", ["1e39", "-1e39", "3.4028236e38", "1e400", "-1e400", "1" + "0" * 50, "-1" + "0" * 5000])
def test_a_number_outside_float32_is_refused(literal: str) -> None:
    body = '{"model":"m","prompt":"x","apply_steering_vectors":[{"activations":[[1,2,NUMBER]],"layer_indices":[1]}]}'
    with pytest.raises(ApiError) as caught:
        request = parse_body(CompletionRequest, body.replace("NUMBER", literal).encode())
        steering_edits(request.apply_steering_vectors or [], FACTS, Settings())
    assert caught.value.param == "apply_steering_vectors"
    assert caught.value.message == "activations has a number outside float32's range, from -3.4028235e+38 to 3.4028235e+38."


@pytest.mark.parametrize("number", [10**400, -(10**400), math.nan, math.inf])
def test_what_json_cannot_say_is_refused_too(number: float) -> None:
    with pytest.raises(ApiError, match="outside float32's range"):
        steering_edits([SteeringVector(activations=[[1, 2, number]], layer_indices=[1])], FACTS, Settings())


def test_infinite_json_is_not_json() -> None:
    for literal in (b"NaN", b"Infinity", b"-Infinity"):
        with pytest.raises(ApiError) as caught:
            parse_body(CompletionRequest, b'{"apply_steering_vectors":[{"activations":[[' + literal + b"]]}]}")
        assert caught.value.code == "bad_json"


def test_caps_are_settings_and_each_position_of_a_span_counts() -> None:
    caps = Settings(max_steering_vectors=2, max_steering_numbers=12, max_span_positions=4)
    assert len(edits(vector([V]), vector([V]), caps=caps)) == 2
    assert refusal(*[vector([V])] * 3, caps=caps) == "apply_steering_vectors: List should have at most 2 items, not 3."
    assert len(edits(vector([V], position_spans=[[0, 4]]), caps=caps)) == 1
    too_many = "apply_steering_vectors has 15 numbers: at most 12 are allowed, each position of a span counted."
    assert refusal(vector([V]), vector([V], position_spans=[[0, 4]]), caps=caps) == too_many
    assert refusal(vector([[V] * 5]), caps=caps) == too_many
    assert refusal(vector(encode(np.ones((1, 5, HIDDEN), np.float32), "float32")), caps=caps) == too_many
    assert "covers 5 positions: at most 4" in refusal(vector([V], position_spans=[[0, 5]]), caps=caps)


def test_eight_vectors_and_two_million_numbers_are_the_caps() -> None:
    assert len(edits(*[vector([V])] * 8)) == 8
    assert refusal(*[vector([V])] * 9) == "apply_steering_vectors: List should have at most 8 items, not 9."
    assert refusal() == "apply_steering_vectors: List should have at least 1 item, not 0."
    huge = {**encode(np.ones((1, 1, HIDDEN), np.float32), "float32"), "shape": [1, 2**21 // HIDDEN + 1, HIDDEN]}
    assert "has 2,097,153 numbers: at most 2,097,152" in refusal(vector(huge))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": "AAAA"}, "activations has data that is not a zstd frame."),
        ({"data": "A"}, "activations has data that is not base64."),
        ({"dtype": "int16"}, "activations must have a dtype and its original_dtype, one of"),
        ({"dtype": "float64"}, "apply_steering_vectors.0.activations.dtype: Input should be 'float32', 'int16' or 'float16'."),
        ({"shape": [3]}, "apply_steering_vectors.0.activations.shape: List should have at least 2 items, not 1."),
        ({"shape": [1, 0, 3]}, "apply_steering_vectors.0.activations.shape.1: Input should be greater than or equal to 1."),
        ({"shape": [1, 2, 3]}, "activations has 12 bytes of data, and the shape [1, 2, 3] takes 24."),
        ({"shape": [1, 2**62, 3]}, "apply_steering_vectors has 13,835,058,055,282,163,712 numbers"),
        ({"compression": "none"}, "apply_steering_vectors.0.activations.compression: Input should be 'zstd'."),
        ({"compression": None}, "apply_steering_vectors.0.activations.compression: Input should be 'zstd'."),
        ({"device": "cpu"}, "apply_steering_vectors.0.activations: Unknown field 'device'."),
    ],
)
def test_refusals_of_encoded_vectors(fields: dict[str, Any], message: str) -> None:
    assert refusal(vector({**encode(np.array([V], np.float32), "float32"), **fields})).startswith(message)


def test_an_encoded_number_must_be_finite() -> None:
    data = base64.b64encode(zstandard.compress(np.array([1, 2, np.nan], np.float32).tobytes())).decode()
    tensor = {"data": data, "dtype": "float32", "original_dtype": "torch.float32", "shape": [1, 3], "compression": "zstd"}
    assert refusal(vector(tensor)) == "activations has a number that is not finite."


# Positions


def test_a_position_that_no_pass_reaches_is_refused_with_the_documented_sentence() -> None:
    found = edits(vector([[V]], position_indices=[5]))
    with pytest.raises(ApiError) as caught:
        check_positions(found, 4, 2)
    assert caught.value.message == (
        "apply_steering_vectors steers position 5, but the forward passes of this request reach position 4 at most: the prompt has 4"
        " tokens and max_tokens is 2, and the last generated token never runs through the model. Steer a position up to 4, or raise"
        " max_tokens."
    )
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_request", "apply_steering_vectors")
    check_positions(found, 4, 3)


def test_the_furthest_position_of_all_vectors_counts_zero_ones_too() -> None:
    zero = [0.0] * HIDDEN
    found = edits(vector([V]), vector([V], position_spans=[[0, 4]]), vector([[V, zero]], norm_match=True, position_indices=[1, 9]))
    check_positions(found, 9, 2)
    with pytest.raises(ApiError, match="steers position 9, but .* reach position 8 at most: the prompt has 9 tokens and max_tokens is 1"):
        check_positions(found, 9, 1)


def test_edits_without_positions_reach_whatever_runs() -> None:
    check_positions(edits(vector([V])), 1, 1)


def test_one_token_is_no_plural_and_nothing_runs_where_one_token_is_scored() -> None:
    found = edits(vector([[V]], position_indices=[0]))
    check_positions(found, 1, 1)
    with pytest.raises(ApiError, match="the prompt has 1 token and max_tokens is 0"):
        check_positions(found, 1, 0)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), min_size=1, max_size=6).flatmap(lambda spans: st.permutations(spans)),
    arrays.arrays(np.float32, HIDDEN, elements=st.floats(-10, 10, width=32)),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_spans_are_the_same_as_their_positions(spans: list[tuple[int, int]], row: Any, norm_match: bool) -> None:
    covered = [position for start, length in spans for position in range(start, start + length)]
    pairs = [[start, start + length] for start, length in spans]
    values, options = [row.tolist()], {"norm_match": norm_match, "scale": 3}
    if len(set(covered)) != len(covered):
        assert "overlap" in refusal(vector(values, position_spans=pairs, **options))
        return
    tiled = edits(vector(values, position_spans=pairs, **options))
    listed = edits(vector([values * len(covered)], position_indices=covered, **options))
    assert _places(tiled) == _places(listed)


def _places(found: list[_native.Edit]) -> dict[int, tuple[Any, ...]]:
    """Position -> what is added there."""
    places: dict[int, tuple[Any, ...]] = {}
    for edit in found:
        assert edit.positions is not None
        for at, position in enumerate(edit.positions):
            row = edit.vectors[at if len(edit.vectors) > 1 else 0]
            places[position] = (row.tolist(), edit.scale, edit.norm_match)
    return places


NUMBERS = st.one_of(st.integers(-3, 3), st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([1e39, 10**18]))
ODD = st.one_of(st.none(), st.booleans(), st.text(max_size=3), st.just({}), NUMBERS)
ROW = st.one_of(st.lists(NUMBERS, min_size=HIDDEN, max_size=HIDDEN), st.lists(ODD, max_size=4))
ACTIVATIONS = st.one_of(
    st.lists(ROW, max_size=3),
    st.lists(st.lists(ROW, max_size=3), max_size=3),
    st.fixed_dictionaries(
        {
            "data": st.one_of(
                st.sampled_from([encode(np.ones((1, HIDDEN), np.float32), "float32")["data"], "AAAA", ""]), st.text(max_size=8)
            ),
            "dtype": st.sampled_from(["float32", "int16", "float16"]),
            "original_dtype": st.sampled_from(["torch.float32", "torch.bfloat16", "torch.float16"]),
            "shape": st.lists(st.sampled_from([0, 1, 2, HIDDEN, 2**40]), max_size=4),
            "compression": st.just("zstd"),
        }
    ),
    ODD,
)
JSON = st.recursive(
    ODD, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)), max_leaves=8
)
VECTOR = st.fixed_dictionaries(
    {"activations": ACTIVATIONS, "layer_indices": st.one_of(st.lists(st.integers(-1, 4), max_size=3), JSON)},
    optional={
        "scale": st.one_of(NUMBERS, ODD),
        "norm_match": st.one_of(st.booleans(), ODD),
        "position_indices": st.one_of(st.none(), st.lists(st.integers(-1, 2**40), max_size=3), JSON),
        "position_spans": st.one_of(st.none(), st.lists(st.lists(st.integers(-1, 9), max_size=3), max_size=3), JSON),
        "scael": JSON,
    },
)


@given(st.one_of(st.lists(st.one_of(VECTOR, VECTOR, JSON), max_size=3), JSON), st.integers(1, 9), st.integers(0, 4))
@settings(max_examples=300, deadline=None)
def test_any_json_is_edits_or_a_refusal(sent: Any, prompt_tokens: int, max_tokens: int) -> None:
    body = {"model": "m", "prompt": "x", "max_tokens": max_tokens, "echo": True, "apply_steering_vectors": sent}
    try:
        request = parse_body(CompletionRequest, orjson.dumps(body))
        found = steering_edits(request.apply_steering_vectors, FACTS, Settings()) if request.apply_steering_vectors is not None else []
        check_positions(found, prompt_tokens, max_tokens)
    except ApiError as error:
        assert error.status == 400
        assert error.param == "apply_steering_vectors"
        orjson.dumps(error.body("req_0"))
        return
    for edit in found:
        assert edit.layer < FACTS.layers
        assert edit.vectors.shape[1] == HIDDEN
        assert np.isfinite(edit.vectors).all()


def test_depth_is_named() -> None:
    shape = "activations must be numbers, [layers][hidden] or [layers][positions][hidden]: "
    assert refusal(vector([[[V]]])) == shape + "found lists nested 4 deep."
    assert refusal(vector([V, [V]], [0, 1])) == shape + "row 0 has lists nested 1 deep, and row 1 2."

"""The bodies of requests: every field with its range, and every refusal by its message and `param`."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from ster.server.errors import ApiError
from ster.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, parse_body
from ster.server.settings import Settings

MESSAGES = [{"role": "user", "content": "hi"}]
SMALLEST: dict[type[BaseModel], dict[str, Any]] = {
    CompletionRequest: {"model": "m", "prompt": "x"},
    ChatRequest: {"model": "m", "messages": MESSAGES},
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": [1]},
}


def completion(caps: Settings | None = None, **fields: Any) -> CompletionRequest:
    return parse_body(CompletionRequest, orjson.dumps({**SMALLEST[CompletionRequest], **fields}), caps)


def chat(**fields: Any) -> ChatRequest:
    return parse_body(ChatRequest, orjson.dumps({**SMALLEST[ChatRequest], **fields}))


def refused(kind: type[BaseModel] = CompletionRequest, /, caps: Settings | None = None, **fields: Any) -> tuple[str | None, str]:
    """`param` and message."""
    with pytest.raises(ApiError) as caught:
        parse_body(kind, json.dumps({**SMALLEST[kind], **fields}).encode(), caps)
    error = caught.value
    assert (error.status, error.code, error.type) == (400, "invalid_request", "invalid_request_error")
    return error.param, error.message


# What is no JSON object


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"{}x",
        b"\xff",
        b'{"model": NaN}',
        b'{"model": Infinity}',
        b'{"seed": -Infinity, "n": 1e400}',
        b'{"prompt": "\\ud800", "model": "m"}',
        b'{"prompt": "\\ud800", "n": 1e400}',
        b'{"\\udc00": 1}',
        b"\xef\xbb\xbf{}",
        b"[" * 5000,
        b'{"n": 1e400, "prompt": ' + b"[" * 5000,
        b'{"n": 1e400, "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"n":\x001}',
    ],
)
def test_what_is_no_json_is_bad_json(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(CompletionRequest, raw)
    error = caught.value
    assert (error.status, error.code, error.param, error.type) == (400, "bad_json", None, "invalid_request_error")
    assert error.message.startswith("The body is not JSON: ")
    orjson.dumps(error.body("req_0"))


@pytest.mark.parametrize("raw", [b"[]", b"null", b"1", b'"x"', b"1e400"])
def test_json_that_is_no_object_is_an_invalid_request(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(CompletionRequest, raw)
    assert (caught.value.code, caught.value.message) == ("invalid_request", "The body must be a JSON object.")


def test_a_number_beyond_float64_is_refused_by_its_field() -> None:
    for digits in ("1e400", "1" + "0" * 400, "1" + "0" * 9000):
        with pytest.raises(ApiError) as caught:
            parse_body(CompletionRequest, f'{{"model": "m", "prompt": "x", "seed": {digits}}}'.encode())
        assert (caught.value.code, caught.value.param) == ("invalid_request", "seed")


# Fields and their ranges

RANGES: list[tuple[str, list[Any], list[Any]]] = [
    ("max_tokens", [1, 32_000], [-1, 1_000_001, 1.0, True, "1"]),
    ("n", [1], [0, 17, True, 1.5, "1"]),
    ("temperature", [0, 0.5, 100], [-0.1, 100.1, True, "1", [1]]),
    ("top_p", [1, 1e-9], [0, 1.1, True]),
    ("top_k", [-1, 1, 10**9], [0, -2, 1.0, True]),
    ("min_p", [0, 1], [-0.1, 1.1, True]),
    ("presence_penalty", [-2, 2], [-2.1, 2.1, True]),
    ("frequency_penalty", [-2, 2], [-2.1, 2.1, True]),
    ("repetition_penalty", [1e-9, 2], [0, 2.1, True]),
    ("seed", [0, 2**63 - 1], [-1, 2**63, 2**70, 1.0, True]),
    ("stop", ["a", [], ["a"] * 16], ["", [""], ["a"] * 17, [1], 1, True, {}]),
    ("logprobs", [0, 100], [-1, 101, True]),
    ("prompt_logprobs", [-1, 0, 100], [-2, 101, True]),
    ("echo", [True, False], [1, "true"]),
    ("stream", [True, False], [1, "true"]),
    ("add_special_tokens", [True, False], [0]),
    ("return_token_ids", [True, False], [0]),
    ("user", ["", "me"], [1, True, []]),
    ("output_residual_stream", [True, False, [0], [2, 0, 2]], [[], [-1], [True], [0.0], ["0"], "true", 1, {}, [2**40]]),
    ("activation_dtype", ["float32", "bfloat16", "float16"], ["float64", "", 1, True]),
    (
        "prompt",
        ["", "x", ["x"], [1], [[1, 2]]],
        [[], [[]], [True], [1, "x"], ["x", 1], [[1], 2], [1, [2]], [-1], [2**31], [1.0], 5, True, {}],
    ),
    ("model", ["m"], [1, None, True, []]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, good, _ in RANGES for value in good])
def test_what_is_in_range_is_taken(field: str, value: Any) -> None:
    assert getattr(completion(**{field: value}), field) == value


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, _, bad in RANGES for value in bad])
def test_what_is_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    param, message = refused(**{field: value})
    assert param == field
    assert message.startswith(f"{field}")


SHARED = [name for name, _, _ in RANGES if name in ChatRequest.model_fields and name not in ("max_tokens", "logprobs")]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, _, bad in RANGES for value in bad if field in SHARED])
def test_a_chat_has_the_same_ranges(field: str, value: Any) -> None:
    assert refused(ChatRequest, **{field: value})[0] == field


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest])
def test_null_for_an_optional_field_is_the_same_as_leaving_it_out(model: type[BaseModel]) -> None:
    body = SMALLEST[model]
    optional = {name: None for name, field in model.model_fields.items() if not field.is_required() and name not in body}
    assert parse_body(model, orjson.dumps({**body, **optional})) == parse_body(model, orjson.dumps(body))


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest])
def test_a_required_field_may_not_be_null_nor_missing(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        if field.is_required():
            assert refused(model, **{name: None})[0] == name
            with pytest.raises(ApiError, match=f"{name}: Field required"):
                parse_body(model, orjson.dumps({key: value for key, value in SMALLEST[model].items() if key != name}))


def test_defaults() -> None:
    request = completion()
    assert (request.n, request.temperature, request.top_p, request.top_k, request.min_p) == (1, 1.0, 1.0, -1, 0.0)
    assert (request.presence_penalty, request.frequency_penalty, request.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (request.max_tokens, request.seed, request.stop, request.logprobs, request.prompt_logprobs) == (None,) * 5
    assert (request.echo, request.stream, request.add_special_tokens, request.return_token_ids) == (False, False, True, False)


def test_prompts_are_one_or_several() -> None:
    assert completion(prompt="x").prompts == completion(prompt=["x"]).prompts == ["x"]
    assert completion(prompt=[1, 2]).prompts == completion(prompt=[[1, 2]]).prompts == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]], max_tokens=1).prompts == [[1], [2, 3]]


def test_an_unknown_field_is_named() -> None:
    assert refused(x=1) == ("x", "Unknown field 'x' - see /openapi.json for accepted params.")
    assert refused(x=None)[0] == "x"
    assert refused(stream=True, stream_options={"x": 1}) == ("stream_options", "stream_options: Unknown field 'x'.")
    assert refused(**{"<list>": 1}) == ("<list>", "Unknown field '<list>' - see /openapi.json for accepted params.")
    param, message = refused(**{"ü" * 1000: 1})
    assert param == "ü" * 60
    assert len(message) < 120


@pytest.mark.parametrize("field", ["best_of", "suffix", "logit_bias", "extra_body"])
def test_what_is_not_supported_says_so(field: str) -> None:
    param, message = refused(**{field: {}})
    assert param == field
    assert message.startswith(f"{field} is ")
    assert completion(**{field: None}).prompt == "x"


def test_a_message_has_up_to_five_problems_and_counts_the_others() -> None:
    param, message = refused(n=0, temperature=-1, top_p=0, min_p=2, seed=-1)
    assert param == "n"
    assert message.count("Input should be") == 5
    assert not message.endswith("more.")
    param, message = refused(n=0, temperature=-1, top_p=0, min_p=2, seed=-1, echo=1, y=1)
    assert message == (
        "n: Input should be greater than or equal to 1. temperature: Input should be greater than or equal to 0. top_p: Input should be"
        " greater than 0. min_p: Input should be less than or equal to 1. seed: Input should be greater than or equal to 0. ... and 2 more."
    )
    assert refused(**{f"x{number}": 1 for number in range(9)}) == ("x0", "Unknown fields 'x0', 'x1', 'x2', 'x3', 'x4' ... and 4 more.")


def test_caps_are_settings() -> None:
    caps = Settings(max_logprobs=3, max_stops=2, max_prompts=2, max_output_work_tokens=10)
    assert completion(caps, logprobs=3, prompt_logprobs=3, stop=["a", "b"], prompt=["a", "b"], max_tokens=5).n == 1
    assert refused(caps=caps, logprobs=4) == ("logprobs", "logprobs: Input should be less than or equal to 3.")
    assert refused(caps=caps, prompt_logprobs=4)[0] == "prompt_logprobs"
    assert refused(caps=caps, stop=["a"] * 3) == ("stop", "stop: List should have at most 2 items, not 3.")
    assert refused(caps=caps, prompt=["a"] * 3, max_tokens=1)[0] == "prompt"
    assert refused(caps=caps, prompt=[[1]] * 3, max_tokens=1)[0] == "prompt"
    assert completion(caps, prompt=[1] * 3).prompts == [[1, 1, 1]]
    assert refused(caps=caps, prompt=["a", "b"], max_tokens=6) == (
        "max_tokens",
        "prompts x n x max_tokens is 12: at most 10 are allowed.",
    )


def test_choices_have_a_cap() -> None:
    assert completion(prompt=[[3]] * 64, n=16, max_tokens=1).n == 16
    assert refused(prompt=[[3]] * 65, n=16, max_tokens=1) == ("n", "prompts x n is 1,040: at most 1,024 choices are allowed.")
    assert refused(caps=Settings(max_choices=2), prompt=["a"] * 3, max_tokens=1)[0] == "prompt"


# What fields mean for one another


def test_activations_are_for_one_choice_of_one_prompt_and_that_is_said_first() -> None:
    sentence = "Set n to 1: activations and steering vectors are for one choice only."
    steering = [{"activations": [[1]], "layer_indices": [1]}]
    assert refused(n=2, output_residual_stream=[0]) == ("output_residual_stream", sentence)
    assert refused(n=2, apply_steering_vectors=steering) == ("apply_steering_vectors", sentence)
    assert refused(n=2, apply_steering_vectors=steering, output_residual_stream=True) == ("output_residual_stream", sentence)
    assert refused(prompt=["a", "b"], output_residual_stream=True)[0] == "output_residual_stream"
    assert refused(prompt=[[1], [2]], apply_steering_vectors=steering)[0] == "apply_steering_vectors"
    assert refused(ChatRequest, n=2, output_residual_stream=[0]) == ("output_residual_stream", sentence)
    assert completion(prompt=["a"], output_residual_stream=True).captures
    assert not completion(prompt=["a", "b"], max_tokens=1, output_residual_stream=False).captures


def test_max_tokens_has_no_default_for_several_choices() -> None:
    assert refused(n=2)[0] == refused(prompt=["a", "b"])[0] == refused(ChatRequest, n=2)[0] == "max_tokens"
    assert completion(prompt=["a"]).max_tokens is None
    assert refused(n=2, max_tokens=16_001) == ("max_tokens", "prompts x n x max_tokens is 32,002: at most 32,000 are allowed.")


def test_max_tokens_0_is_for_echo() -> None:
    assert completion(max_tokens=0, echo=True).max_tokens == 0
    assert refused(max_tokens=0)[0] == "max_tokens"
    assert refused(max_tokens=0, echo=True, output_residual_stream=[0])[0] == "output_residual_stream"
    assert refused(ChatRequest, max_tokens=0)[0] == "max_tokens"


def test_stream_options_are_for_streams() -> None:
    assert completion(stream=True, stream_options={"include_usage": True}).stream_options
    assert refused(stream_options={"include_usage": True})[0] == "stream_options"


# vllm_xargs


def test_the_fields_of_vllm_xargs_are_the_same_as_at_the_top_level() -> None:
    vectors = [{"activations": [[1]], "layer_indices": [1], "scale": 2.0, "norm_match": False, "position_indices": None}]
    top = completion(output_residual_stream=[2, 0], apply_steering_vectors=vectors)
    text = {"output_residual_stream": "[2, 0]", "apply_steering_vectors": orjson.dumps(vectors).decode()}
    for xargs in (text, {"output_residual_stream": [2, 0], "apply_steering_vectors": vectors}):
        request = completion(vllm_xargs=xargs)
        assert request.output_residual_stream == top.output_residual_stream
        assert request.apply_steering_vectors == top.apply_steering_vectors


@pytest.mark.parametrize(("sent", "meant"), [("true", True), (True, True), ("false", False), ("[1]", [1]), (None, None), ("null", None)])
def test_a_capture_in_vllm_xargs(sent: Any, meant: Any) -> None:
    assert completion(vllm_xargs={"output_residual_stream": sent}).output_residual_stream == meant


def test_prefixes_are_shared_unless_vllm_xargs_says_not() -> None:
    assert completion().share_prefix
    assert completion(vllm_xargs={"skip_reading_prefix_cache": False}).share_prefix
    for value in (True, "true"):
        assert not completion(vllm_xargs={"skip_reading_prefix_cache": value}).share_prefix


@pytest.mark.parametrize(
    ("xargs", "message"),
    [
        ({"output_residual_stream": "[1"}, "vllm_xargs.output_residual_stream must be JSON in a text, such as [15]."),
        ({"output_residual_stream": "NaN"}, "vllm_xargs.output_residual_stream must be JSON in a text, such as [15]."),
        ({"apply_steering_vectors": "x"}, "vllm_xargs.apply_steering_vectors must be JSON in a text, such as [{...}]."),
        (
            {"apply_hooks": "gASV"},
            "apply_hooks is refused: a hook is pickled Python code, and the server would execute what came over the network.",
        ),
        ({"activations_transport": "binary"}, "activations_transport is not supported: activations come in the JSON of the answer."),
        ({"output_qk": True}, "vllm_xargs: Unknown field 'output_qk'."),
        ({"skip_reading_prefix_cache": 1}, "vllm_xargs.skip_reading_prefix_cache"),
        ("x", "vllm_xargs: Input should be an object."),
    ],
)
def test_refusals_of_vllm_xargs(xargs: Any, message: str) -> None:
    for model in (CompletionRequest, ChatRequest):
        param, found = refused(model, vllm_xargs=xargs)
        assert param == "vllm_xargs"
        assert found.startswith(message)


def test_what_stands_in_vllm_xargs_is_checked_like_the_field() -> None:
    assert refused(vllm_xargs={"output_residual_stream": "[-1]"})[0] == "output_residual_stream"
    assert refused(vllm_xargs={"output_residual_stream": '"true"'})[0] == "output_residual_stream"
    assert refused(vllm_xargs={"apply_steering_vectors": "[]"})[0] == "apply_steering_vectors"
    assert refused(n=2, vllm_xargs={"output_residual_stream": "[1]"})[0] == "output_residual_stream"


def test_a_field_in_both_places_is_refused() -> None:
    param, message = refused(output_residual_stream=[1], vllm_xargs={"output_residual_stream": "[1]"})
    assert (param, message) == ("vllm_xargs", "output_residual_stream stands at the top level and in vllm_xargs: send it once.")
    assert completion(output_residual_stream=None, vllm_xargs={"output_residual_stream": "[1]"}).captures


# Chats


def test_the_content_of_a_message_is_text_or_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert [part.text for part in chat(messages=[{"role": "user", "content": parts}]).messages[0].content] == ["a", "b"]  # type: ignore[union-attr]
    for content in (None, 1, [], ["a"], [{"type": "image_url", "image_url": {}}], [{"type": "text"}], {"type": "text", "text": "a"}):
        assert refused(ChatRequest, messages=[{"role": "user", "content": content}])[0] == "messages"


@pytest.mark.parametrize("messages", [[], "hi", [1], [{}], [{"role": "robot", "content": "a"}], [{"role": "user", "content": "a", "x": 1}]])
def test_messages_that_are_none(messages: Any) -> None:
    assert refused(ChatRequest, messages=messages)[0] == "messages"


def test_a_message_as_the_sdk_sends_it_back() -> None:
    nothing = dict.fromkeys(("tool_calls", "function_call", "refusal", "audio", "annotations"))
    assert chat(messages=[{"role": "assistant", "content": "a", **nothing}]).messages[0].content == "a"
    assert "Messages have text alone" in refused(ChatRequest, messages=[{"role": "user", "content": "a", "tool_calls": [{}]}])[1]


def test_max_completion_tokens_is_another_name_of_max_tokens() -> None:
    assert chat(max_completion_tokens=7).max_tokens == chat(max_tokens=7).max_tokens == 7
    assert refused(ChatRequest, max_tokens=7, max_completion_tokens=7)[0] == "max_completion_tokens"


def test_top_logprobs_are_part_of_logprobs() -> None:
    assert chat(logprobs=True, top_logprobs=100).top_logprobs == 100
    assert refused(ChatRequest, top_logprobs=1)[0] == refused(ChatRequest, logprobs=True, top_logprobs=101)[0] == "top_logprobs"
    assert refused(ChatRequest, logprobs=1)[0] == "logprobs"


@pytest.mark.parametrize("field", ["tools", "tool_choice", "functions", "function_call", "response_format", "logit_bias", "extra_body"])
def test_what_a_chat_does_not_support_says_so(field: str) -> None:
    param, message = refused(ChatRequest, **{field: []})
    assert param == field
    assert "not supported" in message or "extra_body" in message


# Anything


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(st.characters(codec=None), max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


@given(
    st.sampled_from(list(SMALLEST)).flatmap(
        lambda model: st.tuples(st.just(model), st.dictionaries(st.sampled_from([*model.model_fields, "x"]), JSON, max_size=4))
    )
)
@settings(max_examples=400, deadline=None)
def test_any_json_is_a_request_or_a_refusal(case: tuple[type[BaseModel], dict[str, Any]]) -> None:
    model, fields = case
    raw = json.dumps({**SMALLEST[model], **fields}).encode()  # with NaN, and with lone surrogates
    try:
        request = parse_body(model, raw)
    except ApiError as error:
        assert error.status == 400
        assert error.code in ("invalid_request", "bad_json")
        orjson.dumps(error.body("req_0"))
        return
    orjson.dumps(request.model_dump())


@given(st.binary(max_size=30))
@settings(deadline=None)
def test_any_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(ApiError):
        parse_body(CompletionRequest, raw)

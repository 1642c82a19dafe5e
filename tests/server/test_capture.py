"""`output_residual_stream`: which Layers, how much of them, and in what form they leave."""

from __future__ import annotations

import numpy as np
import pytest

from ster.server.capture import capture_layers, check_capture_cap, encode_activations, verify_shape
from ster.server.errors import ApiError
from ster.server.settings import Facts, Settings

LLAMA = Facts("meta-llama/Llama-3.1-8B", layers=32, hidden=4096, vocab=128256, context=16384, dtype="bfloat16")
TRINITY = Facts("arcee-ai/Trinity-Large-TrueBase", layers=60, hidden=3072, vocab=128256, context=8192, dtype="bfloat16")
SETTINGS = Settings()


def test_layers_are_sorted_and_a_repeated_one_is_read_once() -> None:
    assert capture_layers([5, 2, 5, 0], LLAMA) == [0, 2, 5]


def test_true_is_every_layer_and_false_is_none() -> None:
    assert capture_layers(True, LLAMA) == list(range(32))
    assert capture_layers(False, LLAMA) is None
    assert capture_layers(None, LLAMA) is None


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([32], "meta-llama/Llama-3.1-8B has Layers 0 to 31: it has no Layer 32."),
        ([0, 99, 32], "meta-llama/Llama-3.1-8B has Layers 0 to 31: it has no Layer 99."),
        ([-1], "meta-llama/Llama-3.1-8B has Layers 0 to 31: it has no Layer -1."),
        ([], "output_residual_stream names no Layer: list at least one, or send true for all of them."),
    ],
)
def test_a_layer_that_is_not_there_is_refused(asked: list[int], message: str) -> None:
    with pytest.raises(ApiError) as caught:
        capture_layers(asked, LLAMA)
    error = caught.value
    assert (error.status, error.message, error.code) == (400, message, "invalid_request")
    assert (error.type, error.param) == ("invalid_request_error", "output_residual_stream")


def test_the_cap_is_what_the_documentation_says_of_a_model_with_a_hidden_size_of_4096() -> None:
    every = list(range(32))
    check_capture_cap(every, 200, 56, LLAMA, SETTINGS)  # 32 Layers for 256 tokens
    check_capture_cap([0], 4, 8188, LLAMA, SETTINGS)
    for layers, prompt, generated in ((every, 200, 57), ([0], 5, 8188)):
        with pytest.raises(ApiError) as caught:
            check_capture_cap(layers, prompt, generated, LLAMA, SETTINGS)
        assert caught.value.param == "output_residual_stream"
    assert "1 Layer x 8,193 tokens x a hidden size of 4,096 are 33,558,528 numbers, over the cap of 33,554,432" in caught.value.message
    assert "at most 8,192 tokens of the prompt and max_tokens together, with 1 Layer" in caught.value.message


def test_without_max_tokens_the_room_in_the_context_counts() -> None:
    check_capture_cap([0], 4, None, TRINITY, SETTINGS)  # 8,192 tokens of one Layer fit, of two they do not
    with pytest.raises(ApiError, match=r"^Set max_tokens with every capture: left out, it is 8,188 here"):
        check_capture_cap([0, 1], 4, None, TRINITY, SETTINGS)
    with pytest.raises(ApiError, match="it is 15,600 here"):
        check_capture_cap([0], 4, None, LLAMA, SETTINGS)
    with pytest.raises(ApiError, match="it is 16,380 here"):
        check_capture_cap([0], 4, None, LLAMA, SETTINGS, stream=True)


def test_a_model_so_wide_that_one_token_of_all_layers_is_too_much_is_told_to_read_fewer() -> None:
    with pytest.raises(ApiError, match="ask for fewer Layers.$"):
        check_capture_cap([0, 1], 1, 1, LLAMA, Settings(max_capture_numbers=4096))


def test_only_the_shape_of_the_request_may_leave() -> None:
    verify_shape(np.zeros((2, 5, 8), np.float32), [0, 2], 4, 2, 8)
    wrong = [(1, 5, 8), (2, 4, 8), (2, 6, 8), (2, 5, 7), (2, 5)]
    for rows in [None, *(np.zeros(shape, np.float32) for shape in wrong)]:
        with pytest.raises(ApiError) as caught:
            verify_shape(rows, [0, 2], 4, 2, 8)
        error = caught.value
        assert (error.status, error.code, error.type) == (502, "upstream_server_error", "server_error")
        assert error.message == "Inference's answer does not fit the request"


def test_a_number_beyond_float16_is_an_error_that_names_layer_and_token() -> None:
    rows = np.zeros((2, 3, 4), np.float32)
    rows[1, 2, 0] = 70000.0
    assert encode_activations(rows, "bfloat16")["shape"] == [2, 3, 4]
    with pytest.raises(ApiError) as caught:
        encode_activations(rows, "float16", [7, 9])
    assert (caught.value.status, caught.value.param) == (400, "activation_dtype")
    assert caught.value.message == (
        "The residual stream at Layer 9, token 2 has the number 70000, beyond 65504, the largest float16. Set activation_dtype to float32."
    )

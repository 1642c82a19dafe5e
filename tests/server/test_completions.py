"""`POST /v1/completions`: its answers, against what the model says without a server."""

import base64
from typing import Any

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray
from serving import Client, error_of, running

import ster
from ster.server.answers import Completion, ModelList
from ster.server.app import ROUTES
from ster.server.settings import Settings

PROMPT = "the sea is calm"


def decode(tensor: dict[str, Any]) -> NDArray[np.float32]:
    """As the clients' guides have it."""
    assert list(tensor) == ["data", "dtype", "original_dtype", "shape", "compression"] and tensor["compression"] == "zstd"
    raw = zstandard.ZstdDecompressor().decompress(base64.b64decode(tensor["data"]))
    array = np.frombuffer(raw, dtype=tensor["dtype"]).reshape(tensor["shape"])
    if tensor["original_dtype"] == "torch.bfloat16":
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def logprobs_of(model: ster.Model, ids: list[int]) -> NDArray[np.float64]:
    """Log-probabilities `[tokens, vocab]` after each token."""
    logits = model.trace(ids, None, logits=True).logits
    assert logits is not None
    rows = logits.astype(np.float64)
    return rows - np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1, keepdims=True)) - rows.max(-1, keepdims=True)


def test_the_answer_of_the_guide(toy: Client, toy_model: ster.Model) -> None:
    answer = toy.answer(max_tokens=4, temperature=0)
    assert list(answer) == ["id", "object", "created", "model", "choices", "usage"]
    assert answer["id"].startswith("cmpl-") and len(answer["id"]) == 21 and int(answer["id"][5:], 16) >= 0
    assert (answer["object"], answer["model"]) == ("text_completion", "toy-llama") and answer["created"] > 1_700_000_000
    expected = toy_model.generate(PROMPT, max_new_tokens=4)
    # The text goes on from the prompt: its words are apart.
    choice = {"index": 0, "text": " " + expected.text, "logprobs": None, "finish_reason": "length", "prompt_logprobs": None}
    assert answer["choices"] == [choice] and list(answer["choices"][0]) == list(choice)
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}


def test_captures_are_the_models_own_rows(toy: Client, toy_model: ster.Model) -> None:
    answer = toy.answer(max_tokens=3, temperature=0, output_residual_stream=[2, 0, 2])
    assert list(answer)[-2:] == ["usage", "activations"]
    expected = toy_model.generate(PROMPT, max_new_tokens=3, layers=[0, 2]).trace
    assert expected is not None
    tensor = answer["activations"]["residual_stream"]
    assert (tensor["dtype"], tensor["original_dtype"], tensor["shape"]) == ("float32", "torch.float32", [2, 6, 64])
    assert decode(tensor).tobytes() == expected.residual.tobytes()
    every = toy.answer(max_tokens=1, output_residual_stream=True)["activations"]["residual_stream"]
    assert every["shape"] == [4, 4, 64]
    half = toy.answer(max_tokens=1, output_residual_stream=[1], activation_dtype="bfloat16")["activations"]["residual_stream"]
    assert half["dtype"] == "int16" and np.allclose(decode(half), decode(every)[1:2], rtol=2**-8)
    assert "activations" not in toy.answer(max_tokens=1, output_residual_stream=False)
    assert "activations" not in toy.answer(max_tokens=1, output_residual_stream=None)


def test_steering_moves_its_layer_and_no_earlier_one(toy: Client) -> None:
    vector = np.zeros(64)
    vector[:3] = [1, 2, 3]

    def ask(scale: float) -> Any:
        steering = [{"activations": [vector.tolist()], "layer_indices": [1], "scale": scale}]
        return toy.answer(max_tokens=1, temperature=0, output_residual_stream=[0, 1], apply_steering_vectors=steering)

    plain = toy.answer(max_tokens=1, temperature=0, output_residual_stream=[0, 1])
    baseline, steered = ask(0), ask(2)
    assert baseline["activations"] == plain["activations"]  # scale 0 changes no bit
    before, after = (decode(each["activations"]["residual_stream"]) for each in (baseline, steered))
    assert np.array_equal(before[0], after[0]) and np.array_equal(after[1], before[1] + np.float32(2) * vector.astype(np.float32))


def test_echo_and_logprobs_have_an_entry_for_every_token(toy: Client, toy_model: ster.Model) -> None:
    answer = toy.answer(max_tokens=2, temperature=0, echo=True, logprobs=3, return_token_ids=True)
    choice = answer["choices"][0]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    found = choice["logprobs"]
    assert list(found) == ["text_offset", "tokens", "token_logprobs", "top_logprobs"]
    assert {len(each) for each in found.values()} == {6}
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert choice["text"] == "".join(found["tokens"]) and choice["text"].startswith(PROMPT)
    assert found["text_offset"] == [
        choice["text"].index(token, offset) for token, offset in zip(found["tokens"], found["text_offset"], strict=True)
    ]
    expected = logprobs_of(toy_model, ids)
    for position in range(1, 6):
        logprob, top = found["token_logprobs"][position], found["top_logprobs"][position]
        assert abs(logprob - expected[position - 1, ids[position]]) < 1e-9
        assert len(top) in (3, 4) and next(iter(top)) == found["tokens"][position] and top[found["tokens"][position]] == logprob
        best = np.sort(expected[position - 1])[::-1][:3]
        assert np.allclose(sorted(top.values(), reverse=True)[:3], best, atol=1e-9)
    # Greedy tokens are the likeliest, by the very same float.
    for position in (4, 5):
        assert found["token_logprobs"][position] == max(found["top_logprobs"][position].values())


def test_a_prompt_is_scored_without_a_new_token(toy: Client) -> None:
    with_one = toy.answer([3, 4, 5, 6], max_tokens=1, echo=True, logprobs=1, temperature=0)["choices"][0]
    alone = toy.answer([3, 4, 5, 6], max_tokens=0, echo=True, logprobs=1)
    choice = alone["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert choice["logprobs"]["token_logprobs"] == with_one["logprobs"]["token_logprobs"][:4]
    assert alone["usage"] == {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4}
    assert error_of(toy.complete(max_tokens=0)) == (400, "invalid_request", "max_tokens")


def test_prompt_logprobs_have_the_token_itself_first(toy: Client, toy_model: ster.Model) -> None:
    expected = logprobs_of(toy_model, [3, 4, 5, 6])
    for count in (0, 2, 100):
        found = toy.answer(max_tokens=1, prompt_logprobs=count)["choices"][0]["prompt_logprobs"]
        assert found[0] is None and len(found) == 4
        for position, token in ((1, 4), (2, 5), (3, 6)):
            entries = found[position]
            row = expected[position - 1]
            assert next(iter(entries)) == str(token)
            own = entries[str(token)]
            assert own["rank"] == 1 + int((row > row[token]).sum()) and abs(own["logprob"] - row[token]) < 1e-9
            assert len(entries) == min(count, 67) + (own["rank"] > count)
            assert all(entry["decoded_token"] for entry in entries.values())
    whole = toy.answer(max_tokens=1, prompt_logprobs=-1)["choices"][0]["prompt_logprobs"]
    assert [len(entries) for entries in whole[1:]] == [67] * 3
    assert next(iter(whole[1])) == "4" and [entry["rank"] for entry in whole[1].values()][1:] == [
        r for r in range(1, 68) if r != whole[1]["4"]["rank"]
    ]


def test_a_whole_vocabulary_has_a_cap(toy_model: ster.Model) -> None:
    with running({"toy": lambda: toy_model}, Settings(full_vocab_max_prompt_tokens=4, full_vocab_max_activation_prompt_tokens=2)) as client:
        assert client.complete(max_tokens=1, prompt_logprobs=-1).status_code == 200
        assert error_of(client.complete([3] * 5, max_tokens=1, prompt_logprobs=-1))[1] == "full_vocab_prompt_too_long"
        assert (
            error_of(client.complete([3] * 3, max_tokens=1, prompt_logprobs=-1, output_residual_stream=[0]))[1]
            == "full_vocab_prompt_too_long"
        )


def test_every_choice_has_the_whole_vocabulary(toy_model: ster.Model) -> None:
    """67 ids: 12 tokens of all of them are 804 entries."""
    with running({"toy": lambda: toy_model}, Settings(max_score_numbers=804)) as client:
        assert client.models[0].entry()["capabilities"]["full_vocab_max_prompt_tokens"] == 12
        asked = {"max_tokens": 1, "prompt_logprobs": -1}
        assert client.complete([3] * 12, **asked).status_code == client.complete([3] * 3, n=4, **asked).status_code == 200
        for prompt, n in (([3] * 13, 1), ([3] * 4, 4), ([[3] * 2] * 2, 4)):
            assert error_of(client.complete(prompt, n=n, **asked)) == (400, "full_vocab_prompt_too_long", "prompt_logprobs")
        both = client.complete([3] * 12, logprobs=0, **asked)
        assert error_of(both) == (400, "invalid_request", "prompt_logprobs")


PROMPTS = [[3] * 5] * 2


@pytest.mark.parametrize(
    ("fields", "entries", "param"),
    [
        ({"prompt_logprobs": 4}, 3 * 10 * 5, "prompt_logprobs"),
        ({"logprobs": 4}, 3 * 2 * 2 * 5, "logprobs"),
        ({"logprobs": 4, "echo": True}, 3 * 2 * 7 * 5, "logprobs"),
        ({"logprobs": 0, "echo": True, "max_tokens": 0}, 3 * 10, "logprobs"),
        ({"logprobs": 2, "echo": True, "prompt_logprobs": 4}, 3 * 10 * 5 + 3 * 2 * 7 * 3, "prompt_logprobs"),
        ({"prompt_logprobs": 90}, 3 * 10 * 67, "prompt_logprobs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_scores_have_a_cap(toy_model: ster.Model, fields: dict[str, Any], entries: int, param: str, stream: bool) -> None:
    asked = {"max_tokens": 2, "n": 3, "stream": stream} | fields
    for cap, status in ((entries, 200), (entries - 1, 400)):
        with running({"toy": lambda: toy_model}, Settings(max_score_numbers=cap)) as client:
            answer = client.complete(PROMPTS, **asked)
            assert answer.status_code == status
            assert client.models[0].loaded.scheduler.stats().decoded <= 12 * (status == 200)
    assert error_of(answer) == (400, "invalid_request", param)
    assert f"That makes {entries:,} entries, and an answer has at most {cap:,}: ask for fewer {param}" in answer.json()["error"]["message"]


def test_scores_of_a_default_of_max_tokens_are_refused_with_advice(toy_model: ster.Model) -> None:
    with running({"toy": lambda: toy_model}, Settings(max_score_numbers=506)) as client:
        assert client.complete([3] * 3, logprobs=1).status_code == 200
        answer = client.complete([3] * 3, logprobs=2)
    assert error_of(answer) == (400, "invalid_request", "max_tokens")
    assert answer.json()["error"]["message"] == (
        "Set max_tokens, or ask for fewer logprobs: left out, max_tokens is 253 here."
        " logprobs of new tokens: 253 tokens x 3. That makes 759 entries, and an answer has at most 506."
    )


def test_the_largest_answers_of_the_defaults_are_refused(toy: Client) -> None:
    most = {"max_tokens": 0, "echo": True, "n": 16, "logprobs": 100, "prompt_logprobs": 100}
    assert error_of(toy.complete([[3] * 250] * 32, **most)) == (400, "invalid_request", "prompt_logprobs")


def test_choices_stand_by_prompt_then_by_draw(toy: Client) -> None:
    prompts = ["the sea is calm", "storm waves", [3, 4, 5, 6]]
    for given in (prompts[:2], [[3, 4, 5, 6], [7, 8]]):
        answer = toy.answer(given, max_tokens=5, n=3, seed=11, logprobs=0)
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        assert answer["usage"]["completion_tokens"] <= 30
        for at, prompt in enumerate(given):
            alone = toy.answer(prompt, max_tokens=5, n=3, seed=11, logprobs=0)["choices"]
            assert [c["text"] for c in alone] == [c["text"] for c in answer["choices"][3 * at : 3 * at + 3]]
            assert [c["logprobs"] for c in alone] == [c["logprobs"] for c in answer["choices"][3 * at : 3 * at + 3]]
    first = toy.answer(max_tokens=5, n=3, seed=11)["choices"]
    assert len({choice["text"] for choice in first}) > 1
    assert toy.answer(max_tokens=5, seed=12)["choices"][0]["text"] == first[1]["text"]


def test_scores_of_the_prompt_are_every_choices(toy: Client) -> None:
    choices = toy.answer(max_tokens=2, n=3, seed=1, echo=True, logprobs=1, prompt_logprobs=1)["choices"]
    assert len({repr(choice["prompt_logprobs"]) for choice in choices}) == 1 and choices[0]["prompt_logprobs"]
    assert len({repr(choice["logprobs"]["token_logprobs"][:4]) for choice in choices}) == 1


def test_a_stop_text_ends_and_is_named(toy: Client) -> None:
    whole = toy.answer(max_tokens=8, temperature=0)["choices"][0]["text"]
    stop = whole.split()[1]
    choice = toy.answer(max_tokens=8, temperature=0, stop=["nonsense", stop])["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop and stop not in choice["text"]
    assert "stop_reason" not in toy.answer(max_tokens=1, temperature=0)["choices"][0]


def test_what_is_left_of_the_context(toy: Client) -> None:
    answer = toy.answer([3] * 250, temperature=0, stop=[])
    assert answer["usage"]["completion_tokens"] <= 6
    assert error_of(toy.complete([3] * 250, max_tokens=7)) == (400, "context_length_exceeded", "max_tokens")
    assert error_of(toy.complete([3] * 256)) == (400, "context_length_exceeded", "prompt")
    assert toy.complete([3] * 250, max_tokens=6).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [67]}, "prompt"),
        ({"prompt": [[3], [67]], "max_tokens": 1}, "prompt"),
        ({"n": 2, "max_tokens": 1, "output_residual_stream": [0]}, "output_residual_stream"),
        (
            {
                "n": 2,
                "max_tokens": 1,
                "output_residual_stream": [0],
                "apply_steering_vectors": [{"activations": [[0.0] * 64], "layer_indices": [0]}],
            },
            "output_residual_stream",
        ),
        (
            {"n": 2, "max_tokens": 1, "apply_steering_vectors": [{"activations": [[0.0] * 64], "layer_indices": [0]}]},
            "apply_steering_vectors",
        ),
        ({"max_tokens": 1, "output_residual_stream": [4]}, "output_residual_stream"),
        ({"max_tokens": 1, "temperature": True}, "temperature"),
        ({"max_tokens": 1, "nonsense": 1}, "nonsense"),
    ],
)
def test_refusals_name_their_field(toy: Client, fields: dict[str, Any], param: str) -> None:
    assert error_of(toy.complete(**fields)) == (400, "invalid_request", param)


def test_steering_that_overflows_is_the_requests_fault(toy: Client) -> None:
    steering = [{"activations": [[1e30] * 64], "layer_indices": [1], "scale": 1e30}]
    assert error_of(toy.complete(max_tokens=2, apply_steering_vectors=steering)) == (400, "invalid_request", "apply_steering_vectors")
    assert toy.complete(max_tokens=1).status_code == 200


def test_answers_are_what_the_document_says(toy: Client) -> None:
    fields: dict[str, Any] = {"max_tokens": 2, "logprobs": 2, "prompt_logprobs": 1, "echo": True, "return_token_ids": True, "stop": "the"}
    for text in (toy.complete(**fields, n=2), toy.complete(max_tokens=1, output_residual_stream=[0], apply_steering_vectors=None)):
        Completion.model_validate_json(text.content)
    ModelList.model_validate_json(toy.get("/v1/models").content)
    paths = toy.get("/openapi.json").json()["paths"]
    assert {route.path.replace(":path", "") for route in ROUTES} == set(paths)


def test_null_is_not_sent(toy: Client) -> None:
    nothing = dict.fromkeys(["seed", "logprobs", "stop", "n", "temperature", "top_p", "echo", "stream", "user", "prompt_logprobs"])
    assert toy.answer(max_tokens=2, **nothing)["choices"][0]["logprobs"] is None


def test_tokens_of_one_text_are_told_apart(byte_model: Any) -> None:
    """Bytes that are no characters all read U+FFFD."""
    with running({"toy": byte_model(bos=True)}) as client:
        answer = client.answer("a", max_tokens=6, logprobs=20, seed=1)
        for token, logprob, top in zip(
            *(answer["choices"][0]["logprobs"][key] for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True
        ):
            assert top[token] == logprob and len(top) in (20, 21)

"""Inspect runs tasks through both kinds of completion; its logs keep logprobs and activations as the engine has them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

pytest.importorskip("inspect_ai", reason="run `make test-clients`")

import inspect_ai
from inspect_ai.dataset import Sample
from inspect_ai.event import ModelEvent
from inspect_ai.log import EvalSample, read_eval_log
from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageUser, Logprobs
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
from numpy.typing import NDArray
from serving import Client, continued, running

import ster

# Inspect's own warnings are not ours to mend.
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

PROMPTS = ["the sea is calm", "storm waves crash loud against rocks", "?", "cold rain falls hard , fast"]
Evaluate = Callable[..., list[EvalSample]]


@pytest.fixture
def evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    def run(client: Client, model: str, samples: list[Sample], **options: Any) -> list[EvalSample]:
        """Samples as they stand in the log that is written."""
        monkeypatch.setenv("STER_API_KEY", "k")
        monkeypatch.setenv("STER_BASE_URL", f"{client.url}/v1")
        monkeypatch.setenv("INSPECT_TRACE_FILE", str(tmp_path / "trace.log"))
        task = inspect_ai.Task(dataset=samples, solver=generate(), scorer=includes())
        [log] = inspect_ai.eval(task, model=model, display="none", log_dir=str(tmp_path / "logs"), max_retries=0, **options)
        assert log.status == "success", log.error
        found = read_eval_log(log.location, resolve_attachments=True).samples
        assert found is not None and len(found) == len(samples)
        return sorted(found, key=lambda sample: sample.id)

    return run


def call_of(sample: EvalSample) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was sent and what was answered."""
    [event] = [event for event in sample.events if isinstance(event, ModelEvent)]
    assert event.call is not None and isinstance(event.call.response, dict)
    return event.call.request, event.call.response


def rows(answer: dict[str, Any]) -> NDArray[np.float32]:
    tensor = answer["activations"]["residual_stream"]
    assert (tensor["dtype"], tensor["original_dtype"], tensor["compression"]) == ("float32", "torch.float32", "zstd")
    return np.frombuffer(zstandard.decompress(base64.b64decode(tensor["data"])), np.float32).reshape(tensor["shape"])


def log_softmax(model: ster.Model, ids: list[int]) -> NDArray[np.float64]:
    """`[tokens, vocab]`: of the token that follows each."""
    logits = model.trace(ids, layers=None, logits=True).logits
    assert logits is not None
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def check_logprobs(model: ster.Model, found: Logprobs | None, expected: NDArray[np.float64], ids: list[int], top: int) -> None:
    """`ids[i]` under `expected[i]`, with the `top` likeliest, of which a greedy token is one."""
    assert found is not None and len(found.content) == len(ids) == len(expected)
    for entry, row, token in zip(found.content, expected, ids, strict=True):
        assert entry.token.strip() == model.tokenizer.piece(token)
        assert entry.logprob == pytest.approx(row[token], abs=1e-9)  # equal sums in float64, in another order
        likeliest = [each.logprob for each in entry.top_logprobs or []]
        assert likeliest == pytest.approx(np.sort(row)[::-1][:top].tolist(), abs=1e-9)


def test_completions_keep_logprobs_and_activations_in_the_log(evaluate: Evaluate, toy_model: ster.Model) -> None:
    ids = [toy_model.encode(prompt) for prompt in PROMPTS]
    texts = [continued(toy_model, toy_model.generate(each, max_new_tokens=3)) for each in ids]
    samples = [Sample(id=at, input=prompt, target=texts[at]) for at, prompt in enumerate(PROMPTS[:3])]
    given = ChatMessageUser(content="", metadata={"prompt_token_ids": ids[3]})
    samples.append(Sample(id=3, input=[given], target=texts[3]))
    options = {"max_tokens": 3, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}
    with running({"toy": lambda: toy_model}) as client:
        extra = {"output_residual_stream": [1, 3], "return_token_ids": True}
        found = evaluate(client, "openai-api-completions/ster/toy", samples, extra_body=extra, **options)
    for at, sample in enumerate(found):
        expected = toy_model.generate(ids[at], max_new_tokens=3, layers="1,3")
        asked, answer = call_of(sample)
        assert asked["prompt"] == (ids[at] if at == 3 else PROMPTS[at])
        assert answer["choices"][0]["prompt_token_ids"] == ids[at] and answer["choices"][0]["token_ids"] == expected.token_ids
        assert sample.output.completion == continued(toy_model, expected)
        assert sample.output.stop_reason == {"length": "max_tokens", "stop": "stop"}[expected.finish_reason]
        assert sample.scores is not None and sample.scores["includes"].value == "C"
        assert sample.output.usage is not None
        assert (sample.output.usage.input_tokens, sample.output.usage.output_tokens) == (len(ids[at]), len(expected.token_ids))
        assert expected.trace is not None
        assert rows(answer).tobytes() == expected.trace.residual.tobytes()
        likely = log_softmax(toy_model, ids[at] + expected.token_ids)[:-1]
        choice, prompt = sample.output.choices[0], len(ids[at])
        check_logprobs(toy_model, choice.logprobs, likely[prompt - 1 :], expected.token_ids, 2)
        check_prompt(toy_model, choice.prompt_logprobs, likely[: prompt - 1], ids[at][1:])


def check_prompt(model: ster.Model, found: Logprobs | None, expected: NDArray[np.float64], ids: list[int]) -> None:
    """`top_logprobs` of prompts are without the token itself."""
    if not ids:
        assert found is None or not found.content
        return
    assert found is not None and [entry.token.strip() for entry in found.content] == [model.tokenizer.piece(token) for token in ids]
    for entry, row, token in zip(found.content, expected, ids, strict=True):
        assert entry.logprob == pytest.approx(row[token], abs=1e-9)
        likeliest = [] if row.argmax() == token else [row.max()]
        assert [each.logprob for each in entry.top_logprobs or []] == pytest.approx(likeliest, abs=1e-9)


def test_sampled_choices_of_completions(evaluate: Evaluate, toy_model: ster.Model) -> None:
    options = {"max_tokens": 8, "temperature": 0.9, "top_p": 0.95, "seed": 5, "num_choices": 3, "stop_seqs": ["calm", "?"]}
    with running({"toy": lambda: toy_model}) as client:
        samples = [Sample(id=at, input=prompt, target="") for at, prompt in enumerate(PROMPTS)]
        found = evaluate(client, "openai-api-completions/ster/toy", samples, **options)
    for prompt, sample in zip(PROMPTS, found, strict=True):
        for at, choice in enumerate(sample.output.choices):
            sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 5 + at}
            expected = toy_model.generate(toy_model.encode(prompt), max_new_tokens=8, stop=["calm", "?"], **sampling)
            assert choice.message.text == continued(toy_model, expected)
        assert len(sample.output.choices) == 3


def test_chats(evaluate: Evaluate, toy_copy: Path) -> None:
    (toy_copy / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.role == 'system' and 'answer' or 'question' }} : {{ message.content }} . {% endfor %}"
        "{% if add_generation_prompt %}answer :{% endif %}"
    )
    model = ster.load(toy_copy)
    conversations = [
        [ChatMessageUser(content="describe the sea")],
        [ChatMessageSystem(content="soft light"), ChatMessageUser(content="is the night cold ?")],
        [ChatMessageUser(content="waves"), ChatMessageAssistant(content="loud waves"), ChatMessageUser(content="wind")],
    ]
    samples = [Sample(id=at, input=list(conversation), target="") for at, conversation in enumerate(conversations)]
    extra = {"output_residual_stream": True, "return_token_ids": True}
    options = {"max_tokens": 4, "temperature": 0.0, "logprobs": True, "top_logprobs": 3}
    with running({"chat": lambda: model}) as client:
        found = evaluate(client, "openai-api/ster/chat", samples, extra_body=extra, **options)
    for conversation, sample in zip(conversations, found, strict=True):
        ids = model.chat_tokens([{"role": message.role, "content": message.text} for message in conversation])
        expected = model.generate(ids, max_new_tokens=4, layers="all")
        _, answer = call_of(sample)
        assert answer["prompt_token_ids"] == ids and answer["choices"][0]["token_ids"] == expected.token_ids
        assert sample.output.completion == expected.text
        assert expected.trace is not None
        assert rows(answer).tobytes() == expected.trace.residual.tobytes()
        likely = log_softmax(model, ids + expected.token_ids)[len(ids) - 1 : -1]
        check_logprobs(model, sample.output.choices[0].logprobs, likely, expected.token_ids, 3)

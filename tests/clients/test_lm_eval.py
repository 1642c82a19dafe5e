"""lm-evaluation-harness scores and generates through `/v1/completions`, with the server's own tokenizer, as the engine alone would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="run `make test-clients`")

from serving import Client, continued, running

import ster
from ster.server.settings import Settings

pytestmark = pytest.mark.clients

KEY = "secret"
CONTEXT = 256  # the toy model's; as `max_length` it makes lm-eval score the longest text in several windows
MC = {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}"}
ROLLING = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
GENERATE = {"output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}"}
GREEDY = {"until": [".", "\n"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}
SAMPLED = {"until": ["?"], "max_gen_toks": 12, "do_sample": True, "temperature": 0.8, "top_p": 0.9}
TASKS: dict[str, dict[str, Any]] = {
    "ster_mc": {**MC, "metric_list": [{"metric": "acc"}]},
    "ster_ppl": {**ROLLING, "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]},
    "ster_gen": {**GENERATE, "generation_kwargs": GREEDY, "metric_list": [{"metric": "exact_match"}]},
    "ster_sample": {**GENERATE, "generation_kwargs": SAMPLED, "metric_list": [{"metric": "exact_match"}]},
}
SEED = 1234  # lm-eval's

Evaluate = Callable[..., dict[str, list[Any]]]


@pytest.fixture(scope="module")
def smollm2() -> ster.Model:
    folder = os.environ.get("STER_SMOLLM2")
    if not folder:
        pytest.skip("STER_SMOLLM2 is not set: no SmolLM2-135M")
    return ster.load(Path(folder) / "bf16")


def write_tasks(folder: Path, model: ster.Model, words: Callable[..., str]) -> None:
    """Tasks and their documents, in the toy model's words. One choice of each question is what the model would say."""
    questions = [words(3 + at % 9, seed=at) for at in range(10)]
    likeliest = [model.generate(model.encode(question), max_new_tokens=1).text.strip() or "calm" for question in questions]
    documents: dict[str, list[dict[str, Any]]] = {
        "ster_mc": [
            {"question": question, "choices": [words(1 + at % 2, seed=at + 50), likeliest[at], words(5, seed=at + 90)], "label": at % 3}
            for at, question in enumerate(questions)
        ],
        "ster_ppl": [{"text": words(count, seed=count)} for count in (1, 2, 17, 60, 254, 255, 2 * CONTEXT + 31)],
    }
    documents["ster_gen"] = documents["ster_sample"] = [{"question": question, "answer": "calm"} for question in questions]
    folder.mkdir()
    for name, task in TASKS.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(f"{json.dumps(document)}\n" for document in documents[name]))
        source = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({**source, **task, "metadata": {"version": 1.0}}))  # JSON is YAML


@pytest.fixture
def evaluate(tmp_path: Path, words: Callable[..., str]) -> Evaluate:
    def run(client: Client, model: ster.Model, **model_args: object) -> dict[str, list[Any]]:
        """All tasks -> their samples."""
        tasks = tmp_path / "tasks"
        write_tasks(tasks, model, words)
        arguments = {
            "model": "served",
            "base_url": f"{client.url}/v1/completions",
            "tokenizer_backend": "remote",
            "max_length": CONTEXT,
            "max_retries": 1,
            **model_args,
        }
        command = ["run", "--model", "local-completions", "--batch_size", "4", "--tasks", ",".join(TASKS), "--include_path", str(tasks)]
        command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
        command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
        environment = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "OPENAI_API_KEY": KEY}
        done = subprocess.run(
            [sys.executable, "-m", "lm_eval", *command], env={**os.environ, **environment}, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return {name: _samples(tmp_path / "out", name) for name in TASKS}

    return run


def _samples(folder: Path, task: str) -> list[Any]:
    [file] = folder.rglob(f"samples_{task}_*.jsonl")
    return sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])


class Engine:
    """What lm-eval should find, by the engine alone."""

    def __init__(self, model: ster.Model) -> None:
        self.model = model
        ends = model.eos_token_ids
        self.first = model.engine.bos_token_id or ends[0]  # before a text that is scored from its first token on
        self.end = model.tokenizer.decode([ends[0]], skip_special=False)

    def ids(self, text: str) -> list[int]:
        ids = self.model.tokenizer.encode(text, special_tokens=False)
        assert ids and "[UNK]" not in map(self.model.tokenizer.piece, ids)
        return ids

    def score(self, context: list[int], text: list[int]) -> tuple[float, bool]:
        """Log-probability of `text` after `context`, in float64; whether each of its tokens is the likeliest."""
        rows = self.model.trace(context + text, layers=None, logits=True).logits
        assert rows is not None
        logits = rows[len(context) - 1 : -1].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return float(logprobs[np.arange(len(text)), text].sum()), logits.argmax(axis=1).tolist() == text

    def choice(self, question: str, choice: str) -> tuple[float, bool]:
        context = self.ids(question)
        whole = self.ids(f"{question} {choice}")
        assert whole[: len(context)] == context
        return self.score(context, whole[len(context) :])

    def rolling(self, text: str) -> float:
        """In windows of equal length, the last with more to go by."""
        ids, size = self.ids(text), CONTEXT - 2
        total = 0.0
        for start in range(0, len(ids), size):
            piece = ids[start : start + size]
            before = [self.first] if start == 0 else ids[max(0, start + len(piece) - size - 1) : start]
            total += self.score(before, piece)[0]
        return total

    def generated(self, question: str, *, until: list[str], max_gen_toks: int, do_sample: bool, **sampling: float) -> str:
        stop = [*until, self.end]
        return continued(self.model, self.model.generate(self.ids(question), max_new_tokens=max_gen_toks, stop=stop, seed=SEED, **sampling))


def check(samples: dict[str, list[Any]], model: ster.Model) -> None:
    engine = Engine(model)
    greedy = []
    for sample in samples["ster_mc"]:
        for [[logprob, is_greedy]], choice in zip(sample["resps"], sample["doc"]["choices"], strict=True):
            expected = engine.choice(sample["doc"]["question"], choice)
            # The logprobs are the same floats; they are added up in another order.
            assert (float(logprob), is_greedy == "True") == (pytest.approx(expected[0], abs=1e-9), expected[1])
            greedy.append(expected[1])
    assert len(greedy) == 30 and 3 < sum(greedy) < 20
    for sample in samples["ster_ppl"]:
        [[found]] = sample["resps"]
        assert float(found) == pytest.approx(engine.rolling(sample["doc"]["text"]), abs=1e-9)
    for task in ("ster_gen", "ster_sample"):
        texts = []
        for sample in samples[task]:
            [[text]] = sample["resps"]
            assert text == engine.generated(sample["doc"]["question"], **TASKS[task]["generation_kwargs"])
            texts.append(text)
        assert len(set(texts)) > 3


def test_the_toy_model_one_request_at_a_time(evaluate: Evaluate, toy_model: ster.Model) -> None:
    with running({"served": lambda: toy_model}) as client:
        check(evaluate(client, toy_model, num_concurrent=1), toy_model)


def test_the_toy_model_behind_a_key_eight_at_a_time(evaluate: Evaluate, toy_model: ster.Model) -> None:
    with running({"served": lambda: toy_model}, Settings(api_keys=(KEY,))) as client:
        check(evaluate(client, toy_model, num_concurrent=8, auth_token=KEY), toy_model)


def test_a_model_that_people_use(evaluate: Evaluate, smollm2: ster.Model) -> None:
    with running({"served": lambda: smollm2}) as client:
        check(evaluate(client, smollm2, num_concurrent=4), smollm2)

"""Windows and longrope beyond a single pass, and `ster models`: the toy model's weights under other configs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server.scheduling import playing

import ster
from ster import _native
from ster.cli import main
from ster.errors import CacheError, ConfigError
from ster.server.settings import Settings
from ster.server.work import Work

Change = Callable[..., None]
TEXT = np.random.default_rng(7).integers(3, 67, 256).tolist()
SWITCH = 40
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": SWITCH,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}


@pytest.fixture
def windowed(toy_copy: Path, change: Change) -> ster.Model:
    change(toy_copy / "config.json", model_type="mistral", sliding_window=24)
    return ster.load(toy_copy)


@pytest.fixture
def longrope(toy_copy: Path, change: Change) -> ster.Model:
    change(toy_copy / "config.json", rope_scaling=LONGROPE)
    return ster.load(toy_copy)


def greedy(model: ster.Model, ids: list[int]) -> tuple[int, np.ndarray[Any, Any]]:
    """The next token and the last row of the residual stream, from one pass over all of `ids`."""
    trace = model.trace(ids, logits=True, point="post_steer")
    assert trace.logits is not None
    return int(trace.logits[-1].argmax()), trace.residual[:, -1]


def test_the_command_lists_families_and_what_each_adds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    listed = [family["model_type"] for family in json.loads(capsys.readouterr().out)["families"]]
    assert listed == [name for name, _ in _native.families()]
    assert listed[0] == "llama" and listed[1:] == sorted(listed[1:])
    assert main(["models", "--text"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in listed) and max(map(len, shown.splitlines())) <= 120


def test_another_model_type_is_refused_with_those_that_run(toy_copy: Path, change: Change) -> None:
    change(toy_copy / "config.json", model_type="mixtral")
    with pytest.raises(ConfigError, match="model type `mixtral` is not supported; this Ster build runs llama, gemma2, .* and smollm3"):
        ster.load(toy_copy)


# Sliding windows


def test_a_windowed_cache_keeps_what_the_window_needs_and_no_more(windowed: ster.Model) -> None:
    engine = windowed.engine
    assert engine.sliding_window == 24
    cache = engine.cache()
    for start in range(0, 240, 8):
        engine.forward([_native.Sequence(np.array(TEXT[start : start + 8], np.uint32), cache=cache)])
        assert cache.bytes <= 2 * engine.cache_block_bytes
        assert cache.length - 23 - 64 < cache.shortest <= cache.length
        assert cache.fork().length == cache.fork(cache.shortest).length + cache.length - cache.shortest
        if cache.shortest:
            with pytest.raises(CacheError, match=f"it can keep {cache.shortest} tokens or more, not {cache.shortest - 1}"):
                cache.fork(cache.shortest - 1)


def test_generation_through_a_window_is_one_pass_over_the_text(windowed: ster.Model) -> None:
    generated = windowed.generate(TEXT[:100], max_new_tokens=60, ignore_eos=True, layers="all")
    assert generated.trace is not None
    whole = windowed.trace(generated.trace.token_ids, point="post_steer")
    assert whole.residual.tobytes() == generated.trace.residual.tobytes()


def test_the_server_shares_what_a_window_has_not_forgotten(windowed: ster.Model) -> None:
    first = Work(tuple(TEXT[:170]), 4)
    again = Work((*TEXT[:169], 5, 6), 4)  # parts from the first where its cache still reaches
    early = Work((*TEXT[:40], 5, 6), 4)  # needs what is forgotten
    with playing(windowed, Settings(prefill_tokens=64)) as play:
        answers = [play.run([work])[0] for work in (first, again, early)]
        reused = play.scheduler.stats().reused
        together = play.run([first, again, early, first])
    for work, answer in zip((first, again, early, first, again, early, first), answers + together, strict=True):
        assert answer.ids == windowed.generate(list(work.prompt), max_new_tokens=4).token_ids
    assert reused == 169


# Longrope: sequences beyond the original context are rotated otherwise from their first token on


@pytest.mark.parametrize("prompt", [SWITCH - 3, SWITCH, SWITCH + 1, SWITCH + 9])
def test_generation_grows_beyond_the_original_context_as_if_run_anew(longrope: ster.Model, prompt: int) -> None:
    assert longrope.engine.switches_after == SWITCH and not longrope.engine.chunkable
    steering = ster.steer(np.linspace(-1, 1, 64, dtype=np.float32), layer=1)
    for plan in (None, steering):
        found = longrope.generate(TEXT[:prompt], max_new_tokens=8, ignore_eos=True, layers="all", steering=plan)
        assert found.trace is not None and len(found.trace.token_ids) == prompt + 7 == found.trace.residual.shape[1]
        ids = TEXT[:prompt]
        for token in found.token_ids:
            whole = longrope.trace(ids, logits=True, point="post_steer", steering=plan)
            assert whole.logits is not None and int(whole.logits[-1].argmax()) == token
            assert found.trace.residual[:, len(ids) - 1].tobytes() == whole.residual[:, -1].tobytes()
            ids = [*ids, token]
        if plan is not None:
            assert found.trace.steered == [list(range(prompt + 7))]


def test_the_two_regimes_differ_so_that_the_test_above_can_fail(longrope: ster.Model) -> None:
    short, long = longrope.trace(TEXT[:SWITCH]).residual, longrope.trace(TEXT[: SWITCH + 1]).residual[:, :SWITCH]
    assert np.abs(short - long).max() > 1e-3


def test_the_engine_refuses_to_go_on_from_keys_of_the_other_regime(longrope: ster.Model) -> None:
    cache = longrope.engine.cache()
    run = lambda ids: longrope.engine.forward([_native.Sequence(np.array(ids, np.uint32), cache=cache)])  # noqa: E731
    run(TEXT[: SWITCH - 1])
    with pytest.raises(CacheError, match=f"rotated for sequences of at most {SWITCH} tokens; a longer one must run from its start"):
        run(TEXT[SWITCH - 1 : SWITCH + 1])
    run(TEXT[SWITCH - 1 : SWITCH])
    assert cache.length == SWITCH


def test_a_fork_of_a_longer_sequence_keeps_its_regime(longrope: ster.Model) -> None:
    engine = longrope.engine
    run = lambda ids, cache: engine.forward([_native.Sequence(np.array(ids, np.uint32), cache=cache, layers=[3], rows="all")])[0]  # noqa: E731
    cache = engine.cache()
    run(TEXT[: SWITCH + 9], cache)
    with pytest.raises(CacheError, match=f"rotated for sequences of more than {SWITCH} tokens; a shorter one must run from its start"):
        run(TEXT[30:35], cache.fork(30))
    found = run(TEXT[30 : SWITCH + 9], cache.fork(30)).residual
    whole = run(TEXT[: SWITCH + 9], engine.cache()).residual
    assert found is not None and whole is not None and found.tobytes() == whole[:, 30:].tobytes()
    assert run(TEXT[:5], cache.fork(0)).residual is not None  # nothing held, nothing kept


def test_the_server_grows_beyond_the_original_context_too(longrope: ster.Model) -> None:
    works = [
        Work(tuple(TEXT[:n]), 8, layers=(0, 3), prompt_logprobs=scores) for n in (SWITCH - 3, SWITCH, SWITCH + 5) for scores in (None, 2)
    ]
    with playing(longrope) as play:
        for work, answer in zip(works, play.run(works), strict=True):
            expected = longrope.generate(list(work.prompt), max_new_tokens=8, layers=[0, 3])
            assert answer.ids == expected.token_ids
            assert answer.residual is not None and expected.trace is not None
            assert answer.residual.tobytes() == expected.trace.residual.tobytes()

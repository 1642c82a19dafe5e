"""What several prompts begin with runs once, and shows in no bit."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ster
from ster import _native
from ster._prefixes import plan_prefixes
from ster.errors import NonFiniteError

ids = st.lists(st.integers(3, 66), min_size=1, max_size=40)


@st.composite
def alike(draw: st.DrawFn) -> list[list[int]]:
    """Sequences in the manner of pairs behind one template."""
    root = draw(st.lists(st.integers(3, 66), max_size=40))
    stems = draw(st.lists(st.lists(st.integers(3, 66), max_size=60), min_size=1, max_size=6))
    return [[*root, *stem, *draw(ids)] for stem in stems for _ in range(draw(st.integers(1, 4)))]


@settings(max_examples=40, deadline=None)
@given(sequences=alike(), layers=st.sampled_from([[0], [0, 2], [3], [0, 1, 2, 3]]))
def test_alone_equals_shared(toy_model: ster.Model, sequences: list[list[int]], layers: list[int]) -> None:
    found = toy_model.last_rows(sequences, layers, [f"s{n}" for n in range(len(sequences))])
    for values, tokens in zip(found, sequences, strict=True):
        alone = toy_model.engine.forward([_native.Sequence(np.array(tokens, np.uint32), layers=layers)])[0]
        assert alone.residual is not None and values.tobytes() == alone.residual.tobytes()


@settings(max_examples=200, deadline=None)
@given(sequences=alike())
def test_a_plan_covers_every_sequence_once_and_leaves_it_a_token(sequences: list[list[int]]) -> None:
    root, groups = plan_prefixes(sequences)
    assert sorted(i for group in groups for i in group.members) == list(range(len(sequences)))
    for group in groups:
        assert root <= group.shared
        assert len({tuple(sequences[i][: group.shared]) for i in group.members}) == 1
        assert all(len(sequences[i]) > group.shared for i in group.members)


def test_pairs_behind_a_template_run_it_once_and_their_stem_once(toy_model: ster.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    root = rng.integers(3, 67, 30).tolist()
    stems = [rng.integers(3, 67, 50).tolist() for _ in range(10)]
    sequences = [[*root, *stem, answer, 5] for stem in stems for answer in (3, 4)]
    ran: list[int] = []
    forward = ster.Model.forward

    def count(self: ster.Model, batch: list[_native.Sequence], names: list[str]) -> list[_native.Output]:
        ran.append(len(batch))
        return forward(self, batch, names)

    monkeypatch.setattr(ster.Model, "forward", count)
    toy_model.last_rows(sequences, [3], ["x"] * 20)
    assert ran == [1, 10, 20]


def test_prompts_run_whole_where_their_length_matters(toy_copy: Path, change: Callable[..., None]) -> None:
    change(toy_copy / "config.json", rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=64)
    model = ster.load(toy_copy)
    assert not model.engine.chunkable
    sequences = [[*range(3, 67), *range(3, 20), last] for last in (5, 6)]
    found = model.last_rows(sequences, [3], ["a", "b"])
    assert found[0].tobytes() == model.last_rows(sequences[:1], [3], ["a"])[0].tobytes()


def test_a_broken_model_is_told_by_the_prompt(toy_copy: Path) -> None:
    from ster._safetensors import safetensors_bytes
    from ster.toy import tensors

    weights = tensors()
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.embed_tokens.weight"][9] = np.nan
    (toy_copy / "model.safetensors").write_bytes(safetensors_bytes(weights, {}))
    model = ster.load(toy_copy)
    good = list(range(10, 60))
    for bad in ([9, *good], [*good, 9]):
        with pytest.raises(NonFiniteError, match="of a, second"):
            model.last_rows([[*good, 3], bad, [*bad, 4]], [3], ["first", "a, second", "a, second again"])

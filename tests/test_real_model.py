"""SmolLM2-135M, a model people use, as a BF16 and as an F32 checkpoint.

`STER_SMOLLM2` names a folder with the subfolders `bf16` and `f32`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import ster
from ster import _native

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    given = os.environ.get("STER_SMOLLM2")
    if not given:
        pytest.skip("STER_SMOLLM2 is not set: no SmolLM2-135M")
    return {precision: Path(given) / precision for precision in ("bf16", "f32")}


PROMPT_FILES = ("awkward", "ragged-200", "truthfulqa-questions-150")


@pytest.mark.parametrize("name", PROMPT_FILES)
@pytest.mark.parametrize("chat_template", ["auto", "off"])
def test_stored_precision_changes_no_bit_of_any_prompt(folders: dict[str, Path], references: Path, name: str, chat_template: str) -> None:
    """The F32 checkpoint holds the BF16 numbers, widened; widening is exact, so it may be done at any time."""
    prompts = json.loads((references / "data" / "prompts" / f"{name}.json").read_text(encoding="utf-8"))["prompts"]
    found = {}
    for precision, folder in folders.items():
        model = ster.load(folder, chat_template=chat_template)
        assert model.chat_template == {"auto": "applied", "off": "off"}[chat_template]
        assert model.precision == precision
        found[precision] = model.activations(prompts).values
    assert found["bf16"].shape == (len(prompts), 30, 576)
    assert np.isfinite(found["bf16"]).all()
    assert np.array_equal(found["bf16"].view(np.uint32), found["f32"].view(np.uint32))


@pytest.mark.parametrize("precision", ["bf16", "f32"])
@pytest.mark.parametrize("kind", ["raw", "chat"])
def test_values_agree_with_float64_at_every_layer(folders: dict[str, Path], references: Path, precision: str, kind: str) -> None:
    """2.5e-6 of the row's length; transformers in float32 comes to 2.0e-6."""
    golden = np.load(references / "golden" / "smollm2-135m.npz")
    model = ster.load(folders[precision], chat_template="auto" if kind == "chat" else "off")
    engine = _native.Engine(str(folders[precision]))
    prompts = [str(prompt) for prompt in golden["prompts"]]
    values = model.activations(prompts).values
    for index, prompt in enumerate(prompts):
        ids = golden[f"{kind}_ids_{index}"]
        assert model.prompt_tokens(prompt) == ids.tolist()
        sequence = _native.Sequence(ids.astype(np.uint32), layers=list(range(30)), logits="last")
        [output] = engine.forward([sequence])
        assert output.residual is not None and output.logits is not None
        assert np.array_equal(output.residual[:, 0].view(np.uint32), values[index].view(np.uint32))
        expected = golden[f"{kind}_resid_{index}"]
        off = np.linalg.norm(values[index] - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert off.max() <= 2.5e-6, f"layer {int(off.argmax())} of prompt {index} is {off.max():.2e} off"
        assert np.argsort(-output.logits[0])[:5].tolist() == golden[f"{kind}_top_{index}"].tolist()


def test_a_prompt_gives_the_same_token_by_token_and_on_one_thread(folders: dict[str, Path], references: Path) -> None:
    golden = np.load(references / "golden" / "smollm2-135m.npz")
    ids = golden["chat_ids_0"].astype(np.uint32)
    layers = list(range(30))
    found = {}
    for threads in (1, 2):
        engine = _native.Engine(str(folders["bf16"]), threads=threads)
        [whole] = engine.forward([_native.Sequence(ids, layers=layers, rows="all", logits="all")])
        cache = engine.cache()
        pieces = [engine.forward([_native.Sequence(ids[i : i + 1], cache=cache, layers=layers, logits="last")])[0] for i in range(len(ids))]
        assert whole.residual is not None and whole.logits is not None
        assert np.array_equal(np.concatenate([piece.residual for piece in pieces], axis=1).view(np.uint32), whole.residual.view(np.uint32))
        assert np.array_equal(np.concatenate([piece.logits for piece in pieces]).view(np.uint32), whole.logits.view(np.uint32))
        found[threads] = whole.logits
    assert np.array_equal(found[1].view(np.uint32), found[2].view(np.uint32))

"""Keys that are rotated by the length of the sequence: what is read again is what ran, or nothing runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import Client, running

import ster
from ster.errors import InputError
from ster.server.settings import Settings

ORIGINAL = 24
KINDS: dict[str, dict[str, Any]] = {
    "longrope": {
        "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0], "long_factor": [8.0] * 8},
        "original_max_position_embeddings": ORIGINAL,
    },
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": ORIGINAL},
    "plain": {},
}
V = ster.steer(np.ones(64), 1)


@pytest.fixture(params=KINDS)
def rotating(request: pytest.FixtureRequest, toy_copy: Path) -> Iterator[tuple[str, ster.Model, Client]]:
    config = json.loads((toy_copy / "config.json").read_text())
    (toy_copy / "config.json").write_text(json.dumps(config | KINDS[request.param]))
    model = ster.load(toy_copy)
    with running({"toy": lambda: model}, Settings(max_capture_numbers=3 * 64 * 40)) as client:
        yield request.param, model, client


def test_what_is_read_again_is_what_ran_or_is_refused(rotating: tuple[str, ster.Model, Client]) -> None:
    kind, model, client = rotating
    with ster.connect(client.url) as there:
        for point, layers, steering in (("pre_steer", [1, 2], V), ("post_steer", "all", None)):
            for prompt, new in ((4, ORIGINAL - 3), (20, 5), (20, 6), (ORIGINAL, 1), (ORIGINAL, 2), (30, 1), (30, 8)):
                ids = [5 + n % 40 for n in range(prompt)]
                options: dict[str, Any] = {"steering": steering, "layers": layers, "point": point, "max_new_tokens": new, "seed": 1}
                rows = prompt + new - 1
                again = point == "pre_steer" or (rows + 1) * 4 * 64 > 3 * 64 * 40
                crossing = {"longrope": prompt <= ORIGINAL < rows, "dynamic": rows > max(prompt, ORIGINAL), "plain": False}[kind]
                if again and crossing:
                    with pytest.raises(InputError, match=r"in another rotation .* changes after \d+ tokens") as refused:
                        there.generate(ids, **options)
                    fits = int(str(refused.value.hint).partition("=")[2].partition(" ")[0])
                    options["max_new_tokens"] = fits
                own, found = (each.generate(ids, **options) for each in (model, there))
                assert own.token_ids == found.token_ids and own.trace is not None and found.trace is not None
                assert own.trace.residual.tobytes() == found.trace.residual.tobytes(), (point, prompt, new)

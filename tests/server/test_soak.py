"""Everybody at once, for a while, at a server in a process of its own. STER_SOAK_SECONDS says how long; `-s` shows what was seen."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from server.soaking import PATHS, WEIGHTS, Facts, Tally, Watched, differing, load, page
from serving import spawned, until

CLIENTS = 32
PARTS = 4
MIB = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_soak(chatting: Path) -> None:
    """The toy model, with a chat template. A cache so small that it is full in seconds: what grows later is a leak."""
    seconds = float(os.environ.get("STER_SOAK_SECONDS", "6"))
    soak(chatting, seconds, prompt=100, new=24, margin=24 * MIB, options=["--kv-cache-gb", 0.02, "--queue", 14])


@pytest.mark.slow
def test_soak_of_a_real_model() -> None:
    folder = os.environ.get("STER_SMOLLM2")
    if not folder:
        pytest.skip("STER_SMOLLM2 is not set: no SmolLM2-135M")
    seconds = float(os.environ.get("STER_SOAK_SECONDS", "30"))
    soak(Path(folder) / "bf16", seconds, prompt=60, new=8, margin=64 * MIB, options=["--kv-cache-gb", 0.4, "--queue", 28])


def soak(model: Path, seconds: float, *, prompt: int, new: int, margin: int, options: Sequence[object]) -> None:
    """A third of `seconds` warms up, and the rest comes in parts, after each of which it must be quiet.

    margin: by how much memory beside the kept prefixes may grow after the warm-up, since heaps fill and empty.
    """
    line = ["--model", model, "--served-name", "soak", "--max-running", 16, *options]
    with spawned(*line) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        watched, tally = Watched(server.process.pid), Tally()
        capabilities = client.get("/v1/models").json()["data"][0]["capabilities"]
        facts = Facts(
            name="soak",
            layers=capabilities["n_layers"],
            hidden=capabilities["hidden_size"],
            vocab=capabilities["vocab_size"],
            chats=capabilities["chat_template"],
            prompt=prompt,
            new=new,
        )
        figures = lambda: page(lambda path: client.get(path).text)  # noqa: E731
        figures()
        idle = watched.files()
        every = [kind for kind in WEIGHTS if facts.chats or kind != "chat"]
        port = int(server.url.rpartition(":")[2])

        sizes, files = [], []
        for part in range(1 + PARTS):
            load(port, facts, seconds / (3 if part == 0 else 1.5 * PARTS), CLIENTS, part, tally, every if part == 0 else ())
            until(lambda: not any(figures()[f"ster_{name}"] for name in ("running", "waiting", "cache_pinned_bytes")), 60)
            until(lambda: watched.files() <= idle)
            sizes.append(watched.resident() - int(figures()["ster_cache_bytes"]))
            files.append(watched.files())
        assert tally.wrong == []

        # What the server counted is what the clients saw.
        found = figures()
        counted = Counter[int]()
        for name, value in found.items():
            if name.startswith(tuple(f'ster_requests_total{{path="{path}"' for path in PATHS)):
                counted[int(name.split('status="')[1][:3])] += int(value)
        seen = tally.statuses()
        began = time.monotonic()
        report = {
            "clients": CLIENTS,
            "requests": sum(seen.values()),
            "statuses (0: left)": seen,
            "by kind": {kind: {str(s): n for (k, s), n in sorted(tally.seen.items()) if k == kind} for kind in every},
            "counted": dict(sorted(counted.items())),
            "generated": int(found["ster_decoded_tokens_total"]),
            "prefilled": int(found["ster_prefilled_tokens_total"]),
            "reused": int(found["ster_reused_tokens_total"]),
            "passes": int(found["ster_passes_total"]),
            "anonymous MiB beside kept prefixes": [round(size / MIB, 1) for size in sizes],
            "files": [idle, *files],
            "kept MiB": round(found["ster_cache_bytes"] / MIB, 1),
            "checked alone": len(tally.samples),
        }
        print(f"\n{json.dumps(report)}")
        assert counted.keys() <= {200, 400, 413, 429, 499}
        assert counted.total() == sum(seen.values())
        assert all(counted[status] >= count for status, count in seen.items() if status)
        for kind in every:
            assert any(asked == kind and status != 429 for asked, status in tally.seen), f"no answer to {kind}"

        assert list(differing(port, tally.samples)) == []
        print(f"alone: {time.monotonic() - began:.1f} s")
        assert set(files) == {idle}
        assert sizes[-1] - sizes[0] <= margin
        assert server.end(signal.SIGTERM) == 0
        assert [said for said in server.lines[3:] if not said.startswith(('{"time"', "Shutting down", "Anybody here"))] == []

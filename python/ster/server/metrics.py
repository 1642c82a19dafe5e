"""Counters in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from ster.server.stats import STEP_BOUNDS, Stats

if TYPE_CHECKING:
    from ster.server.requests import Record
    from ster.server.served import Served

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = Mapping[str, str]


class Metrics:
    """Counts what the requests did. The schedulers count what they did themselves.

    paths: what there is; others are counted together, so that strangers cannot make labels.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = frozenset(paths)
        self._requests: Counter[tuple[str, int]] = Counter()
        self._tokens: Counter[tuple[str, str]] = Counter()

    def ended(self, path: str | None, record: Record) -> None:
        """path: None where the request was not HTTP."""
        if path is None or path not in self._paths:
            path = "/v1/models/{id}" if path is not None and path.startswith("/v1/models/") else "other"
        self._requests[path, record.status] += 1
        if record.model is not None:
            self._tokens[record.model, "prompt"] += record.prompt_tokens
            self._tokens[record.model, "completion"] += record.completion_tokens

    def text(self, models: Iterable[Served]) -> str:
        page = _Page()
        requests = [({"path": path, "status": str(status)}, count) for (path, status), count in sorted(self._requests.items())]
        page.add("ster_requests_total", "counter", "Requests that have ended, by path and status; 499 are clients that left.", requests)
        tokens = [({"model": model, "kind": kind}, count) for (model, kind), count in sorted(self._tokens.items())]
        page.add("ster_tokens_total", "counter", "Tokens of completions: of their prompts, and generated.", tokens)
        _add_models(page, list(models))
        return page.text()


def _add_models(page: _Page, models: list[Served]) -> None:
    ready: list[tuple[Labels, float]] = [({"model": served.name}, float(served.state == "ready")) for served in models]
    page.add("ster_model_ready", "gauge", "1 when the model is loaded.", ready)
    for name, kind, text, field in LOADING:
        values = [({"model": served.name}, getattr(served, field)) for served in models]
        page.add(name, kind, text, [(labels, value) for labels, value in values if value is not None])
    loaded = [(served.name, served.loaded) for served in models]
    stats = [({"model": name}, each.scheduler.stats()) for name, each in loaded if each is not None]
    for name, kind, text, field in SCHEDULER:
        page.add(name, kind, text, [(labels, getattr(each, field)) for labels, each in stats])
    page.histogram("ster_step_seconds", "Time of a turn of the engine, most of it a pass.", stats)


LOADING = (
    ("ster_model_uses", "gauge", "Requests and other work that run on the model or wait for it.", "uses"),
    ("ster_model_loads_total", "counter", "How often the model was loaded. What is counted below begins anew with each.", "loads"),
    ("ster_model_load_seconds", "gauge", "What the last load took.", "load_seconds"),
)
SCHEDULER = (
    ("ster_waiting", "gauge", "Requests that wait for a place.", "waiting"),
    ("ster_running", "gauge", "Sequences in the batch.", "running"),
    ("ster_cache_bytes", "gauge", "Memory of caches, kept prefixes and captured rows.", "cache_bytes"),
    (
        "ster_cache_pinned_bytes",
        "gauge",
        "The part of it that running sequences hold; the rest, kept prefixes, makes room.",
        "pinned_bytes",
    ),
    ("ster_cache_budget_bytes", "gauge", "What that memory may not pass.", "cache_budget"),
    ("ster_passes_total", "counter", "Passes of the engine.", "passes"),
    ("ster_prefilled_tokens_total", "counter", "Prompt tokens that ran.", "prefilled"),
    ("ster_decoded_tokens_total", "counter", "Tokens that were generated.", "decoded"),
    ("ster_reused_tokens_total", "counter", "Prompt tokens that did not have to run: a kept prefix had them.", "reused"),
)


class _Page:
    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, kind: str, text: str, samples: Iterable[tuple[Labels, float]]) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        self._lines += [f"{name}{_labels(labels)} {value:.17g}" for labels, value in samples]

    def histogram(self, name: str, text: str, stats: Iterable[tuple[Labels, Stats]]) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} histogram"]
        for labels, each in stats:
            counts = list(accumulate(each.steps))
            bounds = [*(f"{bound:g}" for bound in STEP_BOUNDS), "+Inf"]
            self._lines += [f"{name}_bucket{_labels({**labels, 'le': le})} {count}" for le, count in zip(bounds, counts, strict=True)]
            self._lines += [f"{name}_sum{_labels(labels)} {each.step_seconds:.17g}", f"{name}_count{_labels(labels)} {counts[-1]}"]

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

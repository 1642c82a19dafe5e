"""The models that a server answers for: loading, ready or failed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ster.chat import find_chat_template
from ster.checkpoint import find_checkpoint
from ster.errors import SterError
from ster.model import Model
from ster.server.errors import ApiError, model_loading, model_not_found
from ster.server.memory import check_budget
from ster.server.pieces import Pieces
from ster.server.scheduler import Scheduler
from ster.server.settings import Facts, Settings, WireDtype
from ster.tokenizer import named_tokens

log = logging.getLogger("ster.server")
State = Literal["loading", "ready", "failed"]
WIRE: dict[str, WireDtype] = {"bf16": "bfloat16", "f16": "float16"}  # as the checkpoint is stored; others travel as float32


@dataclass(frozen=True)
class ServedSpec:
    """A model to serve. name: what requests call it. loader: opens it; called once, in a thread."""

    name: str
    loader: Callable[[], Model]


@dataclass(frozen=True)
class Loaded:
    """A model that answers. special: its named tokens, as `bos_token`. template: what the checkpoint publishes. longest_token: bytes of
    text that no token has more of, None where that is not known."""

    model: Model
    scheduler: Scheduler
    facts: Facts
    pieces: Pieces
    special: dict[str, str]
    template: str | None
    longest_token: int | None

    @property
    def chats(self) -> bool:
        return self.model.chat_template == "applied"


class Served:
    """One model under its name. `loaded` is there when `state` is "ready", `error` when it is "failed"."""

    def __init__(self, spec: ServedSpec, settings: Settings, pass_lock: threading.Lock) -> None:
        self.name = spec.name
        self.created = int(time.time())
        self.state: State = "loading"
        self.loaded: Loaded | None = None
        self.error: SterError | None = None
        self.settled = threading.Event()  # it is no longer loading
        self._loader = spec.loader
        self._settings = settings
        self._lock = pass_lock

    def load(self) -> None:
        """Open the model and start its engine thread. Raises nothing: `state` says how it went."""
        try:
            model = self._loader()
            check_budget(model, self._settings.kv_cache_bytes)
            loaded = _load(model, Scheduler(model, self._settings, self._lock))
            loaded.scheduler.start()
        except SterError as error:
            self.error = error
            self.state = "failed"
        except Exception:
            log.exception("loading %s crashed", self.name)
            self.error = SterError("loading crashed")
            self.state = "failed"
        else:
            self.loaded = loaded
            self.state = "ready"
        self.settled.set()

    def ready(self) -> Loaded:
        """
        Raises:
            ApiError: 503, the model is loading or has failed to.
        """
        if self.loaded is not None:
            return self.loaded
        if self.state == "loading":
            raise model_loading(self.name)
        raise ApiError(503, f"The model `{self.name}` failed to load. The server's log has the cause.", code="model_failed")

    def drain(self, seconds: float) -> None:
        """See `Scheduler.drain`."""
        if self.loaded is not None:
            self.loaded.scheduler.drain(seconds)

    def entry(self) -> dict[str, Any]:
        """The model in `GET /v1/models`; what is not known yet is absent."""
        status = {"ready": "live"}.get(self.state, self.state)
        entry: dict[str, Any] = {"id": self.name, "object": "model", "created": self.created, "owned_by": "ster"}
        if self.loaded is None:
            return entry | {"status": status}
        entry |= {"served_model_name": self.loaded.facts.name, "status": status}
        return entry | {"capabilities": _capabilities(self.loaded, self._settings)}


class Models(Sequence[Served]):
    """All that is served, by name. Memory for caches is shared out evenly; passes of two models never run at the same time."""

    def __init__(self, specs: Sequence[ServedSpec], settings: Settings) -> None:
        share = replace(settings, kv_cache_bytes=settings.kv_cache_bytes // max(len(specs), 1))
        self.pass_lock = threading.Lock()  # whoever holds it keeps every engine from its next pass
        self._models = [Served(spec, share, self.pass_lock) for spec in specs]
        self._by_name = {served.name: served for served in self._models}

    def __getitem__(self, index: Any) -> Any:
        return self._models[index]

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[Served]:
        return iter(self._models)

    def named(self, name: str | None) -> Served:
        """The model that a request asks for, by the name it is served under or its checkpoint's; None: the first.

        Raises:
            ApiError: 400 `model_not_found`.
        """
        if name is None:
            return self._models[0]
        if name in self._by_name:
            return self._by_name[name]
        for served in self._models:  # by the name that answers have
            if served.loaded is not None and served.loaded.facts.name == name:
                return served
        raise model_not_found(name)

    def load(self) -> None:
        for served in self._models:
            served.load()

    def drain(self, seconds: float) -> None:
        """Refuse new work, and end what still runs after `seconds`; waits for that."""
        threads = [threading.Thread(target=served.drain, args=(seconds,), daemon=True) for served in self._models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _load(model: Model, scheduler: Scheduler) -> Loaded:
    checkpoint = find_checkpoint(model.path)
    template = find_chat_template(checkpoint)
    facts = Facts(
        name=model.name,
        layers=model.layer_count,
        hidden=model.hidden_size,
        vocab=model.vocab_size,
        context=model.context_length,
        dtype=WIRE.get(model.precision, "float32"),
    )
    source = None if template is None else template.source
    special, longest = named_tokens(checkpoint), model.tokenizer.longest_token
    return Loaded(model, scheduler, facts, Pieces(model.tokenizer), special, source, longest)


def _capabilities(loaded: Loaded, settings: Settings) -> dict[str, Any]:
    facts = loaded.facts
    capabilities: dict[str, Any] = {
        "n_layers": facts.layers,
        "hidden_size": facts.hidden,
        "max_model_len": facts.context,
        "vocab_size": facts.vocab,
        "dtype": facts.dtype,
        "activations": True,
        "activation_dtype": facts.dtype if settings.activation_dtype == "auto" else settings.activation_dtype,
        "activation_dtypes": ["float32", "bfloat16", "float16"],
        "logprobs": True,
        "prompt_logprobs": True,
        "prompt_logprobs_full_vocab": True,
        "chat_template": loaded.chats,
    }
    bos = loaded.special.get("bos_token")
    bos_id = loaded.model.engine.bos_token_id if bos is None else loaded.model.tokenizer.id_of(bos)
    if bos_id is not None:
        capabilities["bos_token_id"] = bos_id
    model = loaded.model
    facts_of_model = {"precision": model.precision, "revision": model.revision, "unknown_token_id": model.unknown_id}
    capabilities |= {name: value for name, value in facts_of_model.items() if value is not None}
    capabilities |= {"config_hash": model.config_hash, "tokenizer_hash": model.tokenizer_hash}
    for name in CAPS:
        capabilities[name] = getattr(settings, name)
    cap = settings.text_cap(facts.context)
    capabilities["max_text_bytes"] = cap if loaded.longest_token is None else min(cap, facts.context * loaded.longest_token)
    capabilities["full_vocab_max_prompt_tokens"] = settings.full_vocab_prompt_tokens(facts.vocab)
    return capabilities


CAPS = (
    "max_capture_numbers",
    "max_steering_numbers",
    "max_steering_vectors",
    "max_span_positions",
    "max_body_bytes",
    "max_body_members",
    "max_logprobs",
    "max_score_numbers",
    "max_output_work_tokens",
    "max_choices",
    "max_stops",
    "max_prompts",
)

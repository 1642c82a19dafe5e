"""A model that answers: its engine's scheduler, and the facts that requests are checked against."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ster.chat import find_chat_template
from ster.checkpoint import CONFIG, Checkpoint, find_checkpoint
from ster.model import Model
from ster.server.memory import check_budget
from ster.server.passes import Passes
from ster.server.pieces import Pieces
from ster.server.scheduler import Scheduler
from ster.server.settings import Facts, Settings, WireDtype
from ster.tokenizer import named_tokens

WIRE: dict[str, WireDtype] = {"bf16": "bfloat16", "f16": "float16"}  # as the checkpoint is stored; others travel as float32


@dataclass(frozen=True)
class Loaded:
    """A model that answers. special: its named tokens, as `bos_token`. template: what the checkpoint publishes. longest_token: bytes of
    text that no token has more of, None where that is not known. rotation: of keys that the length rotates, as capabilities say it."""

    model: Model
    scheduler: Scheduler
    facts: Facts
    pieces: Pieces
    special: dict[str, str]
    template: str | None
    longest_token: int | None
    rotation: dict[str, int]

    @property
    def chats(self) -> bool:
        return self.model.chat_template == "applied"


def loaded_from(model: Model, settings: Settings, pass_lock: Passes) -> Loaded:
    """Its scheduler has not been started.

    Raises:
        SterError: the memory for caches is too small for it; its tokenizer or template cannot be used.
    """
    check_budget(model, settings.kv_cache_bytes)
    scheduler = Scheduler(model, settings, pass_lock)
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
    return Loaded(model, scheduler, facts, Pieces(model.tokenizer), special, source, longest, _rotation(model, checkpoint))


def _rotation(model: Model, checkpoint: Checkpoint) -> dict[str, int]:
    """Longrope switches once, dynamic scaling goes on changing beyond the context it was trained with; the others look at no length."""
    if model.engine.switches_after is not None:
        return {"rotation_switches_after": model.engine.switches_after}
    if model.engine.chunkable:
        return {}
    trained = json.loads(checkpoint.read_bytes(CONFIG)).get("max_position_embeddings")
    return {"rotation_changes_after": trained if isinstance(trained, int) else 0}


def capabilities(loaded: Loaded, settings: Settings) -> dict[str, Any]:
    """`capabilities` of the model in `GET /v1/models`."""
    facts = loaded.facts
    found: dict[str, Any] = {
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
        found["bos_token_id"] = bos_id
    model = loaded.model
    known = {"precision": model.precision, "revision": model.revision, "unknown_token_id": model.unknown_id}
    found |= {name: value for name, value in known.items() if value is not None}
    found |= {"config_hash": model.config_hash, "tokenizer_hash": model.tokenizer_hash, **loaded.rotation}
    for name in CAPS:
        found[name] = getattr(settings, name)
    cap = settings.text_cap(facts.context)
    found["max_text_bytes"] = cap if loaded.longest_token is None else min(cap, facts.context * loaded.longest_token)
    found["full_vocab_max_prompt_tokens"] = settings.full_vocab_prompt_tokens(facts.vocab)
    return found


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

"""`/tokenize`, `/detokenize` and `/tokenizer_info`: what lm-evaluation-harness asks before it scores."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ster.errors import SterError
from ster.server.body import with_body
from ster.server.chat import conversation
from ster.server.errors import chat_completions_unsupported, invalid
from ster.server.plan import check_tokens, sentence
from ster.server.requests import json_response, record_of
from ster.server.schema import DetokenizeRequest, TokenizeRequest, parse_body
from ster.server.served import Loaded, Models
from ster.server.settings import Settings
from ster.server.texts import text_ids


async def tokenize(request: Request) -> Response:
    """A text or messages -> ids. Text of special tokens is read as special; BOS comes with `add_special_tokens`, or with the template."""
    settings = request.app.state.settings

    def work(raw: bytes) -> Response:
        asked = parse_body(TokenizeRequest, raw, settings)
        loaded = _loaded(request, asked.model)
        if asked.messages is not None:
            ids = _chat_ids(loaded, settings, asked)
        else:
            ids = text_ids(loaded, settings, asked.prompt or "", special_tokens=asked.add_special_tokens is not False)
        return json_response({"count": len(ids), "max_model_len": loaded.facts.context, "tokens": ids})

    return await with_body(request, work)


def _chat_ids(loaded: Loaded, settings: Settings, asked: TokenizeRequest) -> list[int]:
    """
    Raises:
        ApiError: the model has no template, or it refused; or what it made is too long.
    """
    if not loaded.chats:
        raise chat_completions_unsupported()
    special = bool(asked.add_special_tokens)
    encode = lambda text: text_ids(loaded, settings, text, special_tokens=special, param="messages")  # noqa: E731
    messages = conversation(asked.messages or ())
    try:
        return loaded.model.chat_tokens(messages, add_generation_prompt=asked.add_generation_prompt, encode=encode)
    except SterError as error:
        raise invalid(sentence(error), "messages") from None


async def detokenize(request: Request) -> Response:
    """Ids -> text, special tokens shown."""
    settings = request.app.state.settings

    def work(raw: bytes) -> Response:
        asked = parse_body(DetokenizeRequest, raw, settings)
        loaded = _loaded(request, asked.model)
        if len(asked.tokens) > settings.max_text_bytes:  # no text that /tokenize takes has as many
            raise invalid(f"tokens has {len(asked.tokens):,} ids: at most {settings.max_text_bytes:,} are allowed.", "tokens")
        if asked.tokens:
            check_tokens(asked.tokens, loaded.facts, "tokens")
        try:
            return json_response({"prompt": loaded.model.tokenizer.decode(asked.tokens, skip_special=False)})
        except SterError as error:
            raise invalid(sentence(error), "tokens") from None

    return await with_body(request, work)


async def tokenizer_info(request: Request) -> Response:
    """Named tokens and the chat template of the model that the query names, or of the first. `eos_token` is always there."""
    loaded = _loaded(request, request.query_params.get("model"))
    bos, eos = loaded.model.engine.bos_token_id, loaded.model.eos_token_ids
    info: dict[str, Any] = {
        "bos_token": None if bos is None else loaded.pieces(bos, start=True),
        "eos_token": loaded.pieces(eos[0], start=True) if eos else None,
        "pad_token": None,
    }
    return json_response(info | loaded.special | {"chat_template": loaded.template, "vocab_size": loaded.facts.vocab})


def _loaded(request: Request, name: str | None) -> Loaded:
    models: Models = request.app.state.models
    served = models.named(name)
    record_of(request).model = served.name
    return served.ready()

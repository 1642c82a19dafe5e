"""`/tokenize`, `/detokenize` and `/tokenizer_info`: what lm-evaluation-harness asks before it scores."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ster.errors import SterError
from ster.server.chat import conversation
from ster.server.errors import chat_completions_unsupported, invalid
from ster.server.form import Json
from ster.server.loaded import Loaded
from ster.server.plan import check_tokens, sentence
from ster.server.respond import reply, reply_about
from ster.server.schema import DetokenizeRequest, TokenizeRequest
from ster.server.settings import Settings
from ster.server.texts import text_ids


async def tokenize(request: Request) -> Response:
    """A text or messages -> ids. Text of special tokens is read as special; BOS comes with `add_special_tokens`, or with the template."""
    return await reply(request, TokenizeRequest, _tokenized)


def _tokenized(loaded: Loaded, settings: Settings, asked: TokenizeRequest) -> Json:
    if asked.messages is not None:
        ids = _chat_ids(loaded, settings, asked)
    else:
        ids = text_ids(loaded, settings, asked.prompt or "", special_tokens=asked.add_special_tokens is not False)
    return {"count": len(ids), "max_model_len": loaded.facts.context, "tokens": ids}


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
    return await reply(request, DetokenizeRequest, _detokenized)


def _detokenized(loaded: Loaded, settings: Settings, asked: DetokenizeRequest) -> Json:
    if len(asked.tokens) > settings.max_text_bytes:  # no text that /tokenize takes has as many
        raise invalid(f"tokens has {len(asked.tokens):,} ids: at most {settings.max_text_bytes:,} are allowed.", "tokens")
    if asked.tokens:
        check_tokens(asked.tokens, loaded.facts, "tokens")
    try:
        return {"prompt": loaded.model.tokenizer.decode(asked.tokens, skip_special=False)}
    except SterError as error:
        raise invalid(sentence(error), "tokens") from None


async def tokenizer_info(request: Request) -> Response:
    """Named tokens and the chat template of the model that the query names, or of the first. `eos_token` is always there."""
    return await reply_about(request, request.query_params.get("model"), _info)


def _info(loaded: Loaded) -> Json:
    bos, eos = loaded.model.engine.bos_token_id, loaded.model.eos_token_ids
    info: Json = {
        "bos_token": None if bos is None else loaded.pieces(bos, start=True),
        "eos_token": loaded.pieces(eos[0], start=True) if eos else None,
        "pad_token": None,
    }
    return info | loaded.special | {"chat_template": loaded.template, "vocab_size": loaded.facts.vocab}

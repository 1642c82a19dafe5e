"""`ster.connect`: from an address to a model."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from ster._files import is_there
from ster.abstract_model import check_choice
from ster.chat import ChatMode, Message
from ster.checkpoint import TOKENIZER, Checkpoint
from ster.errors import FileError, InputError
from ster.remote.extra import check_extra

check_extra()

from ster.remote.model import RemoteModel  # noqa: E402
from ster.remote.server import find_server  # noqa: E402
from ster.remote.tokens import Asked, OwnTokens, ServerTokens  # noqa: E402
from ster.remote.transport import Transport  # noqa: E402

MOST_CONCURRENCY = 1024
PROBES = ("The sea is calm.", " 12 héllo\n\tstorm—")


def connect(
    endpoint: str,
    model: str | None = None,
    *,
    api_key: str | None = None,
    chat_template: ChatMode = "auto",
    wire_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    concurrency: int = 8,
    timeout: float = 600.0,
    retry_seconds: float = 300.0,
) -> RemoteModel:
    """A model behind a server: `ster serve`, or vLLM with vllm-lens. It takes the place of `ster.load`'s in everything but logits.

    Args:
        endpoint: `http://host:8000/v1`, or without `/v1`.
        model: its name on the server; None: the server's first one.
        api_key: sent as `Authorization: Bearer`.
        chat_template: `auto`: prompts are user turns where the model has a template; `off`: prompts are raw text.
        wire_dtype: how activations travel. None: float32 from `ster serve`, which is exact; from vLLM the dtype it computes in.
        tokenizer: a folder with the model's `tokenizer.json`, to make tokens here; None: the server makes them, a request for each text.
        concurrency: requests under way at a time. It changes no bit of any result of `ster serve`.
        timeout: seconds without a byte after which a request has failed.
        retry_seconds: the longest that a request waits for a server which is busy (429, 503 and the like).

    Raises:
        InputError: an option that cannot be used; the extra `remote` is missing; no such model.
        RemoteError: the server cannot be reached, refuses, or is none of the two kinds. FileError: no tokenizer in the folder.
    """
    check_choice("chat template mode", chat_template, ("auto", "off"))
    if wire_dtype is not None:
        check_choice("wire dtype", wire_dtype, ("float32", "bfloat16", "float16"))
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or not 1 <= concurrency <= MOST_CONCURRENCY:
        raise InputError(f"concurrency must be between 1 and {MOST_CONCURRENCY}, found {concurrency!r}")
    for name, value in (("timeout", timeout), ("retry_seconds", retry_seconds)):
        if not (math.isfinite(value) and value >= 0.0) or (name == "timeout" and not value):
            raise InputError(f"{name} must be a number of seconds, found {value!r}")
    if api_key is not None and (not api_key or not api_key.isascii() or not api_key.isprintable() or " " in api_key):
        raise InputError("an API key must be printable ASCII without spaces, and not empty")
    own = None if tokenizer is None else OwnTokens(_tokenizer_folder(tokenizer))
    transport = Transport(root_of(endpoint), api_key, concurrency=concurrency, timeout=timeout, retry_seconds=retry_seconds)
    try:
        server = find_server(transport, model, wire_dtype)
        asking = ServerTokens(transport, server)
        if own is not None:
            _compare(asking, own, chat=(server.chats, own.chats) if chat_template == "auto" else (False, False))
        chat = server.chats if own is None else own.chats
        return RemoteModel(transport, server, own or asking, None if chat and chat_template == "off" else chat)
    except BaseException:
        transport.close()
        raise


def root_of(endpoint: str) -> str:
    """
    >>> root_of("http://host:8000/v1/"), root_of("https://host/proxy")
    ('http://host:8000', 'https://host/proxy')
    """
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment) and parts.port != 0
        secret = "@" in parts.netloc
    except ValueError:
        good = secret = False
    if secret:
        raise InputError("an endpoint must have no user and no password in it", "`--api-key` or STER_API_KEY (in Python api_key=) is sent")
    if not good or not endpoint.isascii() or not endpoint.isprintable() or " " in endpoint:
        raise InputError(f"an endpoint must be the address of a server, found {endpoint!r}", "as in http://localhost:8000/v1")
    return endpoint.rstrip("/").removesuffix("/v1").rstrip("/")


def _tokenizer_folder(folder: str | os.PathLike[str]) -> Checkpoint:
    path = Path(folder)
    if not is_there(path / TOKENIZER):
        raise FileError(f"failed to read {path / TOKENIZER}: no such file")
    return Checkpoint(path, path.name, None)


def _compare(asking: ServerTokens, own: OwnTokens, *, chat: tuple[bool, bool]) -> None:
    """chat: whether each has a chat template that is used.

    Raises:
        InputError: the tokenizer makes other ids than the server's, or has a chat template where the server has none.
    """
    conversation: list[Message] = [{"role": "user", "content": PROBES[0]}]
    asked: list[Asked] = [(text, False, None) for text in PROBES]
    asked += [(conversation, True, None)] if all(chat) else []
    if chat[1] and not chat[0]:
        message = "the tokenizer's folder has a chat template, and the server has none or has it switched off"
        raise InputError(message, "with `--chat-template off` (in Python chat_template=) prompts are raw text on both sides")
    if list(asking.ids(asked)) != list(own.ids(asked)) or chat[0] != chat[1]:
        raise InputError("the tokenizer makes other tokens than the server's", "take the folder of the checkpoint that is served")

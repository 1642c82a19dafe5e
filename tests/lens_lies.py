"""What becomes of the stub's answers when they lie: made for `Stub.spoil` and `Stub.plan`."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import zstandard


def tensor(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["activations"]["residual_stream"]
    return found


def resized(change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> Callable[..., Any]:
    """The stored numbers, changed, in a tensor that says so."""

    def spoil(body: Any, document: dict[str, Any]) -> Any:
        found = tensor(document)
        raw = np.frombuffer(zstandard.decompress(base64.b64decode(found["data"])), found["dtype"]).reshape(found["shape"])
        changed = change(raw.copy())
        found["shape"] = list(changed.shape)
        found["data"] = packed(changed.tobytes())
        return document

    return spoil


def packed(raw: bytes) -> str:
    return base64.b64encode(zstandard.ZstdCompressor(level=1).compress(raw)).decode()


def changed(**members: Any) -> Callable[..., Any]:
    """Members of the tensor; functions of what was there."""

    def spoil(body: Any, document: dict[str, Any]) -> Any:
        found = tensor(document)
        for name, value in members.items():
            found[name] = value(found[name]) if callable(value) else value
        return document

    return spoil


def answered(**members: Any) -> Callable[..., Any]:
    return lambda body, document: {**document, **members}


def chosen(**members: Any) -> Callable[..., Any]:
    return lambda body, document: {**document, "choices": [{**document["choices"][0], **members}]}


def without(*path: str) -> Callable[..., Any]:
    def spoil(body: Any, document: dict[str, Any]) -> Any:
        inner = document
        for name in path[:-1]:
            inner = inner[name]
        del inner[path[-1]]
        return document

    return spoil

"""Models behind an HTTP server: another `ster serve`, or vLLM with vllm-lens. Needs the extra `remote`.

    model = ster.connect("http://host:8000/v1")
    artifact = ster.train(model, pairs)

`RemoteModel` is an `AbstractModel` like `ster.Model`, so that whatever takes one takes the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ster.remote.model import RemoteModel as RemoteModel
    from ster.remote.opening import connect as connect

_WHERE = {"connect": "ster.remote.opening", "RemoteModel": "ster.remote.model"}


def __getattr__(name: str) -> object:
    """Nothing is imported before it is asked for: `ster.remote.extra` says what is missing."""
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

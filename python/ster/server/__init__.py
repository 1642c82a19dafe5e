"""`ster serve`: completions with activations and steering over HTTP, for any OpenAI client. Needs the extra `serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ster.server.app import create_app
    from ster.server.settings import Settings

__all__ = ["Settings", "create_app"]


def __getattr__(name: str) -> Any:
    """Nothing is imported before it is asked for: the scheduler works without the extra."""
    if name == "Settings":
        from ster.server.settings import Settings

        return Settings
    if name == "create_app":
        from ster.server.app import create_app

        return create_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

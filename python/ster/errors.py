"""Every error Ster raises on purpose: one tree, so that one `except SterError` catches it.

The message says what was found; `hint`, when there is one, says what to do about it.
"""

from __future__ import annotations


class SterError(Exception):
    """Base of all refusals. `str(error)` is the sentence, `error.hint` advice or None."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class CheckpointError(SterError, OSError):
    """A model file that is missing, unreadable, truncated, or not what the config says."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        SterError.__init__(self, message, hint)


class ConfigError(SterError, ValueError):
    """A config field that is missing, contradictory or unsupported."""


class InputError(SterError, ValueError):
    """A prompt, pair or option that cannot be used."""


class FileError(SterError, OSError):
    """A file of the user's that cannot be read or written."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        SterError.__init__(self, message, hint)


class LayerError(InputError):
    """A layer the model does not have."""


class TokenError(InputError):
    """No tokens, or an id the embedding has no row for."""


class ContextError(InputError):
    """More tokens than the model's context allows."""


class SteeringError(InputError):
    """A vector that cannot be applied."""


class CacheError(InputError):
    """A cache used with another engine, or past what it holds."""


class NonFiniteError(SterError, ArithmeticError):
    """NaN or infinity in an activation or in the logits; the message names layer and token."""


class ArtifactError(SterError, ValueError):
    """An artifact file that breaks its schema or does not fit the model."""


class WorkerError(SterError, RuntimeError):
    """A cluster that cannot be reached, or a worker on it that died or is not what it must be."""


class SterWarning(UserWarning):
    """Something Ster noticed and went on from. The command prints it on stderr as `Warning: <sentence>`."""

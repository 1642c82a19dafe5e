"""The calls behind the commands. Whatever `ster` does in a shell is one of these in Python."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, overload

from ster.artifacts import ActivationArtifact, Position, TokenActivations
from ster.layers import Layers
from ster.model import Model
from ster.progress import Progress


@overload
def extract(
    model: Model,
    prompts: Iterable[str],
    layers: Layers = "all",
    *,
    position: Literal["last", "mean"] = "last",
    progress: Progress = None,
) -> ActivationArtifact: ...


@overload
def extract(
    model: Model,
    prompts: Iterable[str],
    layers: Layers = "all",
    *,
    position: Literal["all"],
    progress: Progress = None,
) -> TokenActivations: ...


@overload
def extract(
    model: Model,
    prompts: Iterable[str],
    layers: Layers = "all",
    *,
    position: Position,
    progress: Progress = None,
) -> ActivationArtifact | TokenActivations: ...


def extract(
    model: Model,
    prompts: Iterable[str],
    layers: Layers = "all",
    *,
    position: Position = "last",
    progress: Progress = None,
) -> ActivationArtifact | TokenActivations:
    """Activations of `prompts`, ready to save: `ster extract` is this call and `.save`. See `Model.activations`."""
    return model.activations(prompts, layers, position=position, progress=progress)

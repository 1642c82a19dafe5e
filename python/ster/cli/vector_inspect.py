"""`ster vector inspect`: what is in a vector file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ster.cli import console
from ster.cli.options import JsonOption, VectorArgument
from ster.cli.vector_train import layer_table

if TYPE_CHECKING:
    from ster.steering_artifact import SteeringArtifact


def inspect(vector: VectorArgument, as_json: JsonOption = None) -> None:
    """Check a vector file and show what is in it: origin, layers, norms, training scores. Needs no model."""
    from ster.interchange import load

    artifact = load(vector)
    console.result(artifact.summary(), lambda: _text(artifact), as_json)


def _text(artifact: SteeringArtifact) -> str:
    head = {key: value for key, value in artifact.header().items() if key not in ("schema_version", "product", "vectors", "metadata")}
    head |= {key: value for key, value in artifact.metadata.items() if not key.startswith("residual_norm.")}
    width = max(map(len, head))
    lines = [f"{key:<{width}}  {'-' if value in (None, '') else value}" for key, value in head.items()]
    return "\n".join([*lines, "", layer_table(artifact)])

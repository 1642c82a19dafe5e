"""The body of `POST /v1/harvest`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, Tag
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

from ster.harvest.directions import LIMIT
from ster.server.fields import INTEGER_LIMIT, LIST, TEXT, Layer, Limit, Strict, by_kind

MOST_LAYERS = 256
DEFAULT_SHARD_SIZE = 32


def _few_directions(shape: list[int]) -> list[int]:
    if shape[0] > LIMIT:
        raise PydanticCustomError("directions", f"Input should have at most {LIMIT} directions")
    return shape


_SHAPE = {
    "type": "array",
    "minItems": 2,
    "maxItems": 2,
    "prefixItems": [
        {"type": "integer", "minimum": 1, "maximum": LIMIT},
        {"type": "integer", "minimum": 1, "maximum": INTEGER_LIMIT},
    ],
}
Shape = Annotated[
    list[Annotated[int, Field(ge=1, le=INTEGER_LIMIT)]],
    Field(min_length=2, max_length=2),
    AfterValidator(_few_directions),
    WithJsonSchema(_SHAPE),
]


class EncodedDirections(Strict):
    """Directions, not compressed: base64 of little-endian numbers in C order."""

    data: str
    dtype: Literal["float32", "float16", "bfloat16"] = Field(description="bfloat16: the upper 16 bits of a float32.")
    shape: Shape = Field(description="[directions, hidden size].")
    compression: Literal["none"] = "none"


NonEmpty = Annotated[str, Field(min_length=1)]
HarvestLayers = Annotated[
    Annotated[Literal["all"], Tag(TEXT)] | Annotated[list[Layer], Field(fail_fast=True, min_length=1, max_length=MOST_LAYERS), Tag(LIST)],
    by_kind('"all" or a list of Layers'),
]


class HarvestRequest(Strict):
    """Read the residual stream of many prompts into files."""

    model: str = Field(description="The id of a model in GET /v1/models.")
    prompts: Annotated[list[NonEmpty], Field(fail_fast=True, min_length=1), Limit("maxItems", "max_harvest_prompts")] = Field(
        description="Texts, which run as those of /v1/completions do: without a chat template."
    )
    layers: HarvestLayers | None = Field(
        None, description="Layers to read, or all. Left out: those at a quarter, a half and three quarters of the depth."
    )
    shard_size: int = Field(DEFAULT_SHARD_SIZE, ge=1, le=4096, description="Prompts in a file.")
    batch_size: int | None = Field(
        None, ge=1, le=64, description="Ignored: the server decides what runs together, and it changes no bit of any file."
    )
    project_onto: EncodedDirections | None = Field(
        None, description="Keep coordinates along these directions, divided by their lengths, instead of whole rows."
    )
    add_special_tokens: bool = Field(True, description="false: no BOS before the texts, which then have their own.")

"""From a request to what will be done; everything that can be refused is refused here, before anything is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ster.errors import ContextError, SterError
from ster.harvest.directions import Directions, load_directions
from ster.harvest.dtypes import BYTES, choose_dtype
from ster.harvest.run import OVERHEAD, default_layers
from ster.progress import in_bytes
from ster.server.capture import check_layers
from ster.server.errors import ApiError, invalid
from ster.server.harvests.request import MOST_LAYERS, EncodedDirections, HarvestRequest
from ster.server.loaded import Loaded
from ster.server.plan import sentence
from ster.server.settings import Settings
from ster.server.tensors import TensorError, from_base64, from_bytes
from ster.server.texts import prompt_ids
from ster.server.work import TooLargeError, Work


@dataclass(frozen=True)
class HarvestPlan:
    """A harvest that nothing speaks against. tokens: of all prompts. bytes: on disk, about, and never less than that."""

    layers: list[int]
    directions: Directions | None
    tokens: int
    bytes: int


def make_plan(loaded: Loaded, settings: Settings, asked: HarvestRequest) -> HarvestPlan:
    """
    Raises:
        ApiError: a Layer that is not there, directions or, by its index, a prompt that cannot be used; too many
            tokens; a shard that is too large.
    """
    layers = layers_of(loaded, asked)
    directions = directions_of(loaded, asked.project_onto)
    lengths = _lengths(loaded, settings, asked, layers)
    dtype = choose_dtype("auto", loaded.model.precision, format="safetensors", projecting=directions is not None)
    width = loaded.facts.hidden if directions is None else len(directions)
    row = len(layers) * width * BYTES[dtype] + 4
    _check_shards(settings, asked.shard_size, lengths, row)
    statistics = 2 * 8 * len(layers) * width
    return HarvestPlan(layers, directions, sum(lengths), sum(lengths) * row + len(lengths) * OVERHEAD + statistics)


def layers_of(loaded: Loaded, asked: HarvestRequest) -> list[int]:
    """Ascending, each once.

    Raises:
        ApiError: one that the model does not have.
    """
    if asked.layers is None:
        return default_layers(loaded.facts.layers)
    if asked.layers == "all":
        if loaded.facts.layers > MOST_LAYERS:
            raise invalid(f"{loaded.facts.name} has {loaded.facts.layers} Layers, and a harvest at most {MOST_LAYERS}.", "layers")
        return list(range(loaded.facts.layers))
    check_layers(asked.layers, loaded.facts, "layers")
    return sorted(set(asked.layers))


def directions_of(loaded: Loaded, encoded: EncodedDirections | None) -> Directions | None:
    """
    Raises:
        ApiError: not numbers of that shape, or not directions of this model.
    """
    if encoded is None:
        return None
    field = "project_onto"
    count, hidden = encoded.shape
    if hidden != loaded.facts.hidden:
        raise invalid(
            f"project_onto has a shape of {encoded.shape}: the hidden size of {loaded.facts.name} is {loaded.facts.hidden}.", field
        )
    try:
        raw = from_base64(encoded.data)
    except TensorError as error:
        raise invalid(f"project_onto {error}.", field) from None
    size = count * hidden * (4 if encoded.dtype == "float32" else 2)
    if len(raw) != size:
        raise invalid(f"project_onto has {len(raw):,} bytes of data, and the shape {encoded.shape} takes {size:,}.", field)
    try:
        return load_directions(np.ascontiguousarray(from_bytes(raw, encoded.dtype).reshape(count, hidden)))
    except SterError as error:
        raise invalid(f"project_onto cannot be used: {error.message}.", field) from None


def _lengths(loaded: Loaded, settings: Settings, asked: HarvestRequest, layers: Sequence[int]) -> list[int]:
    """Tokens of every prompt."""
    lengths: list[int] = []
    longest: Sequence[int] = ()
    left = settings.max_harvest_tokens
    for index, text in enumerate(asked.prompts):
        name = f"prompts[{index}]"
        ids = _ids(loaded, settings, text, name, asked.add_special_tokens)
        left -= len(ids)
        if left < 0:
            counted = "" if index + 1 == len(asked.prompts) else f" already with {name}"
            message = f"The prompts have more than {settings.max_harvest_tokens:,} tokens{counted}: send them in several harvests."
            raise invalid(message, "prompts")
        lengths.append(len(ids))
        if len(ids) > len(longest):
            longest = ids
    try:
        loaded.scheduler.check(Work(tuple(longest), 0, layers=tuple(layers)))
    except TooLargeError as error:
        raise invalid(f"The longest prompt is too large for this server: {sentence(error)}", "prompts") from None
    return lengths


def _ids(loaded: Loaded, settings: Settings, text: str, name: str, special_tokens: bool) -> list[int]:
    try:
        ids = prompt_ids(loaded, settings, text, special_tokens=special_tokens, param="prompts")
    except ApiError as error:
        raise ApiError(error.status, f"{name}: {error.message}", code=error.code, param="prompts") from None
    try:
        loaded.model._check_tokens(ids, name)
    except SterError as error:
        code = "context_length_exceeded" if isinstance(error, ContextError) else "invalid_request"
        raise ApiError(400, sentence(error), code=code, param="prompts") from None
    return ids


def _check_shards(settings: Settings, shard_size: int, lengths: Sequence[int], row: int) -> None:
    left = iter(lengths)
    largest = max(sum(shard) for shard in iter(lambda: list(islice(left, shard_size)), [])) * row
    if largest > settings.max_harvest_shard_bytes:
        limit = in_bytes(settings.max_harvest_shard_bytes)
        raise invalid(
            f"A shard of {shard_size} prompts takes {in_bytes(largest)}, and at most {limit} are allowed: set shard_size to less, or ask"
            " for fewer Layers.",
            "shard_size" if shard_size > 1 else "layers",
        )

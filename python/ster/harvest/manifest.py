"""`manifest.json`: what a harvest is, and that it is finished. Nothing in it differs between equal runs: no times, no paths.

A plan is the part that is settled before the first pass, and stands in the journal until then: who goes on with a harvest must have the
same one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ster import _native
from ster._files import parse_json, read_text
from ster.errors import ArtifactError, InputError
from ster.harvest.corpus import Corpus
from ster.harvest.directions import Directions
from ster.harvest.disk import MANIFEST, Record
from ster.harvest.positions import as_document, from_document
from ster.harvest.shards import Form
from ster.harvest.stats import Moments
from ster.readable import Readable

LAYOUT = 2
CONVENTION = (
    "layer i is the output of decoder block i, counted from 0, after both of its residual additions and before the final norm:"
    " hidden_states[i + 1] in transformers, except the last one there"
)
STATISTICS = (
    "mean and std over the rows of all prompts, per layer and coordinate, of the values as stored; the first token of every prompt is"
    " left out; std divides by the number of rows; added up in float64"
)

# What a changed argument is called, in the order in which they are compared.
ARGUMENTS = {
    "ster": "Ster",
    "model_id": "model",
    "model_revision": "revision",
    "precision": "precision",
    "chat_template": "chat template",
    "wire_dtype": "wire dtype",
    "layer_indices": "layers",
    "positions": "positions",
    "dtype": "dtype",
    "format": "format",
    "shard_size": "shard size",
    "n_prompts": "",
}
OTHERS = {
    "weights_hash": "other weights",
    "config_hash": "another config.json",
    "tokenizer_hash": "another tokenizer or chat template",
    "projection": "other directions",
    "prompts_sha256": "other prompts",
}


def make_plan(
    model: Readable, form: Form, directions: Directions | None, shard_size: int | None, weights_hash: str | None
) -> dict[str, Any]:
    """All of the plan but the prompts, which `add_prompts` adds."""
    width = "n_directions" if directions else "hidden"
    stored = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[form.dtype]
    return {
        "layout_version": LAYOUT,
        "product": "ster",
        "model_id": model.name,
        "model_revision": model.revision,
        "weights_hash": weights_hash,
        "config_hash": model.config_hash,
        "tokenizer_hash": model.tokenizer_hash,
        "precision": model.precision,
        "chat_template": model.chat_template,
        **model.wire,
        "add_special_tokens": model.adds_special_tokens,
        "layer_indices": list(form.layers),
        "hidden_size": model.hidden_size,
        "residual_stream_convention": CONVENTION,
        "capture": {"point": "pre_steer", "positions": as_document(form.positions)},
        "contents": "projections" if directions else "activations",
        "projection": None
        if directions is None
        else {
            "n_directions": len(directions),
            "normalized": directions.normalized,
            "names": directions.names,
            "sha256": directions.sha256,
            "note": "coordinates of every row along the directions, summed in float64",
        },
        "format": form.format,
        "dtype": stored,
        "compression": "none",
        "shard_size": shard_size,
        "tensor_layout": f"prompt_<i>: {stored} [layers, rows, {width}]"
        if form.format == "safetensors"
        else f"layer_<l>: {stored} [{width}], one row of the table for every token",
        "tokens_layout": "tokens_<i>: int32 [rows], the ids of the tokens kept" if form.format == "safetensors" else "token: int32, its id",
        "versions": {"ster": _native.__version__},
    }


def add_prompts(plan: Mapping[str, Any], corpus: Corpus) -> dict[str, Any]:
    whole = {
        **plan,
        "n_prompts": len(corpus.lengths),
        "n_tokens": corpus.tokens,
        "n_rows": corpus.rows,
        "n_shards": len(corpus.shards),
        "prompts_sha256": corpus.sha256,
    }
    identity = json.dumps(whole, sort_keys=True, ensure_ascii=False).encode()
    return {"run_id": f"hv-{hashlib.sha256(identity).hexdigest()[:16]}", **whole}


def refuse_changes(folder: Path, begun: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare the plan a harvest was begun with and what is asked for now, as far as that is known.

    Raises:
        InputError: `the harvest in DIR was begun with layers 7,15, now 8,15`.
    """
    hint = "name another folder, or remove this one to begin again"
    start = f"the harvest in {folder} was begun with"
    before, after = _flat(begun), _flat(now)
    for key, name in ARGUMENTS.items():
        if key in after and before.get(key) != after[key]:
            if key == "n_prompts":
                prompts = f"{before.get(key)} prompt{'' if before.get(key) == 1 else 's'}"
                raise InputError(f"{start} {prompts}, now there {'is' if after[key] == 1 else 'are'} {after[key]}", hint)
            raise InputError(f"{start} {name} {_shown(before.get(key))}, now {_shown(after[key])}", hint)
    for key, text in OTHERS.items():
        if key in after and before.get(key) != after[key]:
            if key == "projection" and None in (before.get(key), after[key]):
                what = ("activations", "projections") if after[key] else ("projections", "activations")
                raise InputError(f"{start} {what[0]}, now {what[1]} are asked for", hint)
            raise InputError(f"{start} {text}", hint)
    for key, value in after.items():
        if before.get(key) != value and key != "run_id":
            raise InputError(f"{start} another `{key}`", hint)


def _flat(plan: Mapping[str, Any]) -> dict[str, Any]:
    flat = dict(plan)
    flat["ster"] = flat.pop("versions", {}).get("ster")
    flat.setdefault("wire_dtype", None)
    flat["positions"] = flat.get("capture", {}).get("positions")
    return flat


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def manifest_chunks(
    plan: Mapping[str, Any], form: Form, corpus: Corpus, records: Mapping[str, Record], stats: Record, moments: Moments
) -> Iterator[bytes]:
    """The file, a line for every shard: with many prompts it is never whole in memory.

    `tokens` are those of the prompts of a shard, kept or not; with `capture.positions` they say which row is which token of which prompt.
    """
    head = dict(plan)
    head["statistics"] = STATISTICS
    head["n_statistics"] = moments.count
    if head["contents"] == "activations" and moments.count:
        lengths = (moments.length / moments.count).tolist()
        head["mean_token_norm"] = {str(layer): norm for layer, norm in zip(form.layers, lengths, strict=True)}
    head["stats"] = {"file": "stats.safetensors", "bytes": stats.bytes, "sha256": stats.sha256}
    text = json.dumps({**head, "shards": None}, ensure_ascii=False, indent=1)
    yield text.removesuffix("null\n}").encode() + b"["
    for shard in corpus.shards:
        name = form.file(shard.index)
        entry = {
            "file": name,
            "bytes": records[name].bytes,
            "sha256": records[name].sha256,
            "first_prompt": shard.first_prompt,
            "first_row": shard.first_row,
            "rows": shard.rows,
            "tokens": list(corpus.lengths_of(shard)),
        }
        yield (b",\n" if shard.index else b"\n") + json.dumps(entry, separators=(",", ":")).encode()
    yield b"\n]}\n"


def stats_tensors(form: Form, moments: Moments) -> dict[str, Any]:
    """`mean` and `std` float32 `[layers, width]`, which are missing where no row counts; `layer_indices` int32."""
    found: dict[str, Any] = {"layer_indices": np.array(form.layers, np.int32)}
    if moments.count:
        found["mean"] = moments.mean.astype(np.float32)
        found["std"] = moments.std.astype(np.float32)
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """
    Raises:
        FileError: not there, or not readable. ArtifactError: not a manifest of this layout.
    """
    path = folder / MANIFEST
    try:
        document = parse_json(read_text(path))
    except ValueError as error:
        raise ArtifactError(f"invalid harvest manifest JSON in {path}: {error}") from None
    if not isinstance(document, dict) or document.get("product") != "ster":
        raise ArtifactError(f"{path} is not the manifest of a Ster harvest")
    if document.get("layout_version") != LAYOUT:
        raise ArtifactError(f"harvest layout {document.get('layout_version')} is unsupported; this Ster build reads layout {LAYOUT}")
    return document


def form_of(manifest: Mapping[str, Any]) -> Form:
    """
    Raises:
        KeyError, TypeError: a member is missing, or of another type.
    """
    dtype: Any = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[manifest["dtype"]]
    projection = manifest["projection"]
    width = manifest["hidden_size"] if projection is None else projection["n_directions"]
    return Form(manifest["format"], dtype, list(manifest["layer_indices"]), width, from_document(manifest["capture"]["positions"]))


def records_of(manifest: Mapping[str, Any]) -> dict[str, Record]:
    return {shard["file"]: Record(shard["bytes"], shard["sha256"]) for shard in manifest["shards"]}

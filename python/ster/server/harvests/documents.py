"""What is told of a harvest."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
from sqlalchemy import Row
from starlette.requests import Request

from ster.errors import SterError
from ster.harvest.disk import MANIFEST, STATS
from ster.harvest.manifest import read_manifest
from ster.server.errors import invalid
from ster.server.form import Json
from ster.server.harvests.store import Store
from ster.server.settings import Settings

HOST = re.compile(r"[A-Za-z0-9.-]+(:\d+)?|\[[0-9A-Fa-f:.]+\](:\d+)?")


def status_of(row: Row[Any]) -> str:
    """The platform says `pending` of what waits."""
    return "pending" if row.state == "queued" else str(row.state)


def summary(store: Store, row: Row[Any]) -> Json:
    """All of it but `result`."""
    expires = store.expires(row)
    return {
        "job_id": row.id,
        "status": status_of(row),
        "model": row.model,
        "run_id": row.run_id,
        "n_prompts": row.prompts,
        "tokens": row.tokens,
        "tokens_done": row.tokens_done,
        "bytes": row.bytes,
        "created_at": int(row.created_at),
        "completed_at": None if row.ended_at is None else int(row.ended_at),
        "urls_expire_at": None if expires is None else int(expires),
        "urls_expired": expires is not None and (int(expires) <= time.time() or not (store.folder_of(row.id) / MANIFEST).exists()),
        "error": None if row.error is None else orjson.loads(row.error),
    }


def document(store: Store, row: Row[Any], base: str) -> Json:
    """base: what URLs begin with. `result` is null until the harvest is done, and when its files are gone."""
    found = summary(store, row)
    return found | {"result": None if found["status"] != "done" or found["urls_expired"] else _result(store, row, base)}


def _result(store: Store, row: Row[Any], base: str) -> Json | None:
    try:
        manifest = read_manifest(store.folder_of(row.id))
    except SterError:  # removed a moment ago, or from outside
        return None
    expires = int(row.ended_at + store.settings.harvest_seconds)

    def url(name: str) -> str:
        return f"{base}/v1/harvest/{quote(row.id, safe='')}/files/{name}?{store.signer.query(row.id, name, expires)}"

    return {
        "n_shards": manifest["n_shards"],
        "layer_indices": manifest["layer_indices"],
        "manifest_url": url(MANIFEST),
        "shard_urls": [url(shard["file"]) for shard in manifest["shards"]],
        "stats_url": url(STATS),
        "timings": {"waited_s": round(row.started_at - row.created_at, 3), "ran_s": round(row.ended_at - row.started_at, 3)},
    }


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a finished harvest that may be asked for, by name; of the manifest itself it is not known.

    Raises:
        SterError: there is no manifest, or it is damaged.
    """
    manifest = read_manifest(folder)
    listed = [manifest["stats"], *manifest["shards"]]
    return {entry["file"]: entry["sha256"] for entry in listed} | {MANIFEST: ""}


def base_url(request: Request) -> str:
    """The server as the client calls it, unless the settings say what it is called; without a slash at its end.

    Raises:
        ApiError: the Host header names nothing that a URL could begin with.
    """
    settings: Settings = request.app.state.settings
    if settings.public_url is not None:
        return settings.public_url.rstrip("/")
    host = request.headers.get("host", "")
    if not HOST.fullmatch(host):
        raise invalid("The Host header is not the name of a machine.", None)
    return f"{request.url.scheme}://{host}{request.scope.get('root_path', '').rstrip('/')}"

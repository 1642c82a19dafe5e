"""`GET /v1/harvest/{id}/files/{name}`: a file of a finished harvest, in whole or in ranges, for its owner or whoever has a signed URL."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from ster.errors import SterError
from ster.server.callers import STRANGER, caller_of
from ster.server.harvests.documents import hashes, status_of
from ster.server.harvests.errors import (
    bad_range,
    files_gone,
    job_not_found,
    no_such_file,
    not_done,
    range_not_satisfiable,
)
from ster.server.harvests.store import Store
from ster.server.state_threads import in_state
from ster.state.queue import Found

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

TYPES = {".json": "application/json", ".safetensors": "application/octet-stream"}


async def answer_file(request: Request, store: Store) -> Response:
    id, name = request.path_params["id"], request.path_params["name"]
    caller = caller_of(request)
    if caller is STRANGER:
        store.signer.verify(id, name, request.query_params)
    row = await in_state(request, store.find, id)
    if row is None or not (caller is STRANGER or caller.id == row.owner):
        raise job_not_found(id)
    return await run_in_threadpool(_open, store, row, name)


def _open(store: Store, row: Found, name: str) -> Response:
    """
    Raises:
        ApiError: 404, it is not done, or has no such file. 410, its files are gone.
    """
    if row.state != "done":
        raise not_done(status_of(row))
    folder = store.folder_of(row.id)
    try:
        known = hashes(folder)
        if name not in known:
            raise no_such_file(name)
        path = folder / name
        found = path.stat()
        sha256 = known[name] or hashlib.sha256(path.read_bytes()).hexdigest()
    except (SterError, FileNotFoundError):
        raise files_gone() from None
    headers = {"etag": f'"{sha256}"', "cache-control": "private, no-transform"}
    return _Download(path, headers=headers, media_type=TYPES[Path(name).suffix], stat_result=found)


class _Download(FileResponse):
    """Its refusals have the form of all others."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def checked(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in (400, 416):
                ranges = {name: value.decode("latin-1") for name, value in message["headers"]}
                raise range_not_satisfiable(ranges[b"content-range"]) if message["status"] == 416 else bad_range()
            await send(message)

        await super().__call__(scope, receive, checked)

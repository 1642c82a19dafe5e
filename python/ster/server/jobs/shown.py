"""The answer of a Job that is done: its result is sent from the file in pieces, as it may have a hundred megabytes of activations."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, BinaryIO

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from ster.server.form import Json

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

PIECE = 256 << 10  # bytes


class JobWithResult(StreamingResponse):
    """`document` with the Completion in `file` as its `result`. It closes the file."""

    def __init__(self, document: Json, file: BinaryIO) -> None:
        self._file = file
        self._before = orjson.dumps(document)[:-1] + b',"result":'
        self._left = os.fstat(file.fileno()).st_size
        length = len(self._before) + self._left + 1
        super().__init__(self._pieces(), headers={"content-length": str(length)}, media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._file.close()

    async def _pieces(self) -> AsyncIterator[bytes]:
        yield self._before
        while self._left:
            piece = await run_in_threadpool(self._file.read, min(PIECE, self._left))
            if not piece:
                raise OSError("the result of a Job became shorter while it was sent")
            self._left -= len(piece)
            yield piece
        yield b"}"

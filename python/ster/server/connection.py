"""uvicorn's HTTP/1.1 connection, with a time limit for the head of a request and a refusal in JSON of what is not HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import orjson
from uvicorn.protocols.http.h11_impl import H11Protocol

from ster.server.errors import ApiError
from ster.server.requests import Record, ended

HEAD_SECONDS = 30.0
WRITE_SECONDS = 60.0


class Connection(H11Protocol):
    """A client that never finishes its head holds a connection for `HEAD_SECONDS`, not for ever; one that reads nothing of its answer for
    `WRITE_SECONDS`."""

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # whatever the system does not take pauses writing, and starts the timer
        self.access_log = False  # uvicorn's lines have the query; the application writes its own
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self._head_timer is None and self._idle():
            self._wait_for_head()
        super().data_received(data)
        if not self._idle() or self.transport.is_closing():
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_watching()
        self._watch()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer has begun: it ends here
            self.transport.close()
            return
        error = ApiError(400, msg, code="invalid_http")
        record = Record(status=400)
        body = orjson.dumps(error.body(record.id))
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        headers += [("x-request-id", record.id), ("connection", "close")]
        events: list[Any] = [h11.Response(status_code=400, headers=headers, reason=b"Bad Request"), h11.Data(data=body), h11.EndOfMessage()]
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        state = getattr(self.config.app, "state", None)
        if state is not None:
            ended(state.metrics, record, None, None)

    def _idle(self) -> bool:
        """No request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_late)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if self._idle() and not self.transport.is_closing():
            self.transport.close()

    def _watch(self) -> None:
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self._write_late, self.transport.get_write_buffer_size())

    def _write_late(self, before: int) -> None:
        """Nothing is written while writing is paused, so what is left shrinks, unless nobody reads."""
        if self.transport.get_write_buffer_size() >= before:
            self.transport.abort()
        else:
            self._watch()

    def _stop_watching(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

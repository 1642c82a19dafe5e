"""Requests to one server: bounded in number, in bytes and in time, asked again where the server is busy, and ended at once by Ctrl-C.

They run in an event loop of a thread of its own, whatever loop the caller has: so a wait can be interrupted, and what is under way can be
cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import weakref
from asyncio import sleep
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import orjson

from ster.errors import RemoteError
from ster.prompts import at
from ster.remote.answers import Answer, refusal
from ster.remote.retry import Patience, status_of

CONNECT_SECONDS = 10.0
SMALL_BYTES = 1 << 20  # of an answer that has no tensors
IN_FLIGHT_BYTES = 512 << 20  # of answers that are awaited or wait to be taken, about

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """body: posted as JSON; None: a GET. limit: bytes that the answer may have. name: of the prompt, for refusals."""

    path: str
    body: Any = None
    limit: int = SMALL_BYTES
    name: str | None = None


class Transport:
    """root: the address without `/v1`. timeout: seconds without a byte. retry_seconds: longest time spent on waits of one request."""

    def __init__(self, root: str, api_key: str | None, *, concurrency: int, timeout: float, retry_seconds: float) -> None:
        self.root = root
        self.api_key = api_key
        self.concurrency = concurrency
        self._timeout, self._retry_seconds = timeout, retry_seconds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="ster-remote", daemon=True)
        self._thread.start()
        headers = {"accept": "application/json", "accept-encoding": "identity", "user-agent": "ster"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        limits = httpx.Limits(max_connections=concurrency + 1, max_keepalive_connections=concurrency + 1)
        self._client = httpx.AsyncClient(
            headers=headers, limits=limits, timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS))
        )
        self._places = asyncio.Semaphore(concurrency)
        self.close = weakref.finalize(self, _close, self._loop, self._thread, self._client)

    def ask(self, call: Call) -> Answer:
        """The answer, whatever its status.

        Raises:
            RemoteError: the server cannot be reached, or does not keep to the protocol or to the limits.
        """
        return self._result(self._begin(self._answer(call)))

    def ask_all(self, calls: Iterable[Call]) -> Iterator[Answer]:
        """Answers in the order of `calls`, of which no more are taken than are under way.

        Raises:
            RemoteError: as `ask`; those under way are cancelled.
        """
        waiting: deque[tuple[Future[Answer], int]] = deque()
        held = 0
        try:
            for call in calls:
                while waiting and (len(waiting) >= self.concurrency or held + call.limit > IN_FLIGHT_BYTES):
                    answer = waiting[0][0].result()
                    held -= waiting.popleft()[1]
                    yield answer
                waiting.append((self._begin(self._answer(call)), call.limit))
                held += call.limit
            while waiting:
                answer = waiting[0][0].result()
                waiting.popleft()
                yield answer
        finally:
            for future, _ in waiting:
                future.cancel()

    def events(self, call: Call) -> Iterator[bytes]:
        """The data of the events of a stream, as they come.

        Raises:
            RemoteError: as `ask`; a status other than 200; a stream that breaks off.
        """
        found: queue.Queue[bytes | BaseException | None] = queue.Queue()
        future = self._begin(self._stream(call, found))
        try:
            while True:
                event = found.get()
                if event is None:
                    return
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            future.cancel()

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if not self.close.alive:
            work.close()
            raise RemoteError(f"the connection to {self.root} is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @staticmethod
    def _result(future: Future[T]) -> T:
        try:
            return future.result()
        finally:
            future.cancel()

    async def _answer(self, call: Call) -> Answer:
        async with self._places:
            patience = Patience(self._retry_seconds)
            while True:
                try:
                    answer = await self._once(call)
                except httpx.TimeoutException as error:
                    raise self._silent(error, call) from None
                except httpx.TransportError as error:
                    wait = patience.after_break()
                    if wait is None:
                        raise self._unreachable(error, call) from None
                else:
                    wait = patience.after(status_of(answer.status, answer.body), answer.headers)
                    if wait is None:
                        return answer
                await sleep(wait)

    async def _once(self, call: Call) -> Answer:
        async with self._opened(call) as response:
            return await self._read(response, call)

    async def _read(self, response: httpx.Response, call: Call) -> Answer:
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > call.limit:
                raise RemoteError(f"{self.root} answers with more than {call.limit:,} bytes{at(call.name)}")
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Answer(self.root, call.path, response.status_code, headers, bytes(body), call.name, self.api_key)

    @contextlib.asynccontextmanager
    async def _opened(self, call: Call) -> AsyncIterator[httpx.Response]:
        url = self.root + call.path
        try:
            if call.body is None:
                request = self._client.build_request("GET", url)
            else:
                headers = {"content-type": "application/json"}
                request = self._client.build_request("POST", url, content=orjson.dumps(call.body), headers=headers)
        except httpx.InvalidURL as error:
            raise RemoteError(f"{self.root} is no address: {error}") from None
        response = await self._client.send(request, stream=True)
        try:
            encoding = response.headers.get("content-encoding", "identity")
            if encoding.lower() != "identity":
                raise RemoteError(f"{self.root} compresses its answers ({encoding[:40]}), which was not asked for{at(call.name)}")
            yield response
        finally:
            await response.aclose()

    async def _stream(self, call: Call, found: queue.Queue[bytes | BaseException | None]) -> None:
        """Asked again as `_answer` is, until there is an event."""
        patience = Patience(self._retry_seconds)
        began = False
        try:
            async with self._places:
                while True:
                    try:
                        async with self._opened(call) as response:
                            if response.status_code != 200 or "text/event-stream" not in response.headers.get("content-type", ""):
                                answer = await self._read(response, call)
                                wait = patience.after(status_of(answer.status, answer.body), answer.headers)
                                if wait is None:
                                    raise refusal(answer)
                            else:
                                wait = None
                                async for data in self._data(response, call):
                                    wait = None if began else patience.after(status_of(200, data), {})
                                    if wait is not None:
                                        break
                                    began = True
                                    found.put(data)
                                if wait is None:
                                    break
                    except httpx.TimeoutException:
                        raise
                    except httpx.TransportError:
                        wait = None if began else patience.after_break()
                        if wait is None:
                            raise
                    await sleep(wait)
            found.put(None)
        except httpx.TimeoutException as error:
            found.put(self._silent(error, call))
        except httpx.TransportError as error:
            found.put(self._unreachable(error, call))
        except RemoteError as error:
            found.put(error)
        except BaseException as error:  # cancelled, for one
            found.put(RemoteError(f"the stream from {self.root} ended: {error!r}{at(call.name)}"))
            raise

    async def _data(self, response: httpx.Response, call: Call) -> AsyncIterator[bytes]:
        """What stands behind `data:` in the lines of a stream that has no more bytes than `call.limit`."""
        rest = bytearray()
        total = 0
        async for chunk in response.aiter_raw():
            total += len(chunk)
            if total > call.limit:
                raise RemoteError(f"{self.root} answers with more than {call.limit:,} bytes{at(call.name)}")
            *lines, last = chunk.split(b"\n")
            for line in lines:
                whole = bytes(rest + line)
                rest.clear()
                if whole.startswith(b"data:"):
                    yield whole[5:].strip()
            rest += last
        if rest.startswith(b"data:"):
            yield bytes(rest[5:]).strip()

    def _silent(self, error: Exception, call: Call) -> RemoteError:
        if isinstance(error, httpx.ConnectTimeout):
            return self._unreachable(error, call)
        message = f"{self.root} sent nothing for {self._timeout:g} seconds{at(call.name)}"
        return RemoteError(message, "a server that is busy or loading needs a longer timeout")

    def _unreachable(self, error: Exception, call: Call) -> RemoteError:
        cause = str(error) or type(error).__name__
        what = "cannot be reached" if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) else "broke off the connection"
        return RemoteError(f"{self.root} {what}: {cause}{at(call.name)}", "is the server running, and is this its address?")


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


def _close(loop: asyncio.AbstractEventLoop, thread: threading.Thread, client: httpx.AsyncClient) -> None:
    """Cancel what is under way, close connections, end the thread."""

    async def end() -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.aclose()

    if threading.current_thread() is thread:  # let go of by what ran last
        loop.stop()
        return
    if thread.is_alive():
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(end(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
    if not loop.is_running():
        loop.close()

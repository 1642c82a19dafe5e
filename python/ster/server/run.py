"""The server in its process: the socket, uvicorn, signals, a graceful end."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from ster._files import reason
from ster.errors import InputError, SterError
from ster.server.app import create_app
from ster.server.connection import Connection
from ster.server.malloc import keep_large_blocks_apart
from ster.server.models import Models
from ster.server.served import ServedSpec
from ster.server.settings import Settings
from ster.server.texts import PARALLELISM

if TYPE_CHECKING:
    from ster.state.state import State

MAX_HEAD_BYTES = 64 << 10
KEEP_ALIVE_SECONDS = 75
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Address:
    """Where to listen. port 0: any that is free. insecure: other machines may ask without a key."""

    host: str = "127.0.0.1"
    port: int = 8000
    insecure: bool = False

    @property
    def is_loopback(self) -> bool:
        if self.host.lower() == "localhost":
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False


def serve(
    models: Sequence[ServedSpec],
    settings: Settings,
    address: Address,
    *,
    shutdown_seconds: float,
    note: Callable[[str], None],
    state: State | None = None,
) -> None:
    """Answer requests until a signal ends it; what runs then has `shutdown_seconds` to come to its end.

    note: where lines for the person at the terminal go. state: see `create_app`.

    Raises:
        InputError: an address that cannot be listened on, or must not be without a key. SterError: no model could be loaded.
    """
    if state is not None:
        _check_plain_keys(settings, state)
    has_keys = bool(settings.api_keys) or (state is not None and _has_keys(state))
    check_address(address, keyed=has_keys, stateless=state is None)
    os.environ.setdefault(PARALLELISM, "false")  # long texts then leave the GIL, see `texts.py`
    keep_large_blocks_apart()
    listener = listen(address)
    url = url_of(listener)
    # Without a key, the name in the Host header is what keeps web pages out.
    hosts = {*LOOPBACK, address.host, listener.getsockname()[0]} if address.is_loopback and not has_keys else None
    app = create_app(models, settings, hosts=hosts, state=state)
    with _logging():
        server = _Server(_config(app), app.state, shutdown_seconds, note)
        served: Models = app.state.models
        greeting = "" if has_keys or state is None else "\nAnybody here may ask, until `ster keys create NAME` makes a key."
        everywhere = "" if address.host in url or address.is_loopback else f", on every address that {address.host} stands for"
        loading = "" if settings.load_on_use else f"; loading {', '.join(each.name for each in served)}"
        note(f"Listening on {url}{everywhere}{loading}.")
        threading.Thread(target=_greet, args=(served, settings, has_keys, greeting, url, server, note), daemon=True).start()
        server.run([listener])
    if server.failure is not None:
        raise server.failure


def _check_plain_keys(settings: Settings, state: State) -> None:
    """A key of the state that is also given as it is would open everything uncounted, paused or revoked as it may be.

    Raises:
        InputError: there is one.
    """
    from ster.state.keys import find_key

    with state.database.read() as connection:
        for given in settings.api_keys:
            if (key := find_key(connection, given)) is not None:
                raise InputError(
                    f"the API key {key.shown}... is the key {key.name} of the state, and would not be counted",
                    "leave out --api-key, and unset STER_API_KEY, which a server reads as well as its clients do",
                )


def _has_keys(state: State) -> bool:
    from ster.state.keys import any_key

    with state.database.read() as connection:
        return any_key(connection)


def check_address(address: Address, *, keyed: bool, stateless: bool = False) -> None:
    """stateless: there is no state that `ster keys` could make a key in.

    Raises:
        InputError: other machines could ask, and no key keeps them out.
    """
    if not (address.is_loopback or keyed or address.insecure):
        ways = "set --api-key or STER_API_KEY; --insecure lets everybody in"
        raise InputError(
            f"--host {address.host} lets other machines in, and there is no API key",
            ways if stateless else f"`ster keys create NAME` makes one; or {ways}",
        )


def listen(address: Address) -> socket.socket:
    """
    Raises:
        InputError: one sentence, why not.
    """
    where = f"port {address.port} of {address.host}"
    try:
        family, kind, protocol, _, found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
    except OSError as error:
        raise InputError(f"failed to listen on {where}: {error.strerror or error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise InputError(f"failed to listen on {where}: {reason(error)}", "`--port 0` takes a port that is free") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine finds it."""
    host, port = listener.getsockname()[:2]
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def curl(url: str, model: str, *, key: bool) -> str:
    """A line for a shell that shows that it works."""
    authorization = ' -H "Authorization: Bearer $STER_API_KEY"' if key else ""
    quoted = model.replace("\\", "\\\\").replace('"', '\\"')
    body = f'{{"model": "{quoted}", "prompt": "The sky is", "max_tokens": 8}}'
    return f'curl {url}/v1/completions{authorization} -H "Content-Type: application/json" -d {shlex.quote(body)}'


def _greet(
    models: Models, settings: Settings, has_keys: bool, greeting: str, url: str, server: _Server, note: Callable[[str], None]
) -> None:
    """Say when the models have loaded, or why not; end the server when none has. greeting: what there is to say after the rest."""
    for served in models:
        served.settled.wait()
    working = [served.name for served in models if served.error is None]
    if not working:
        server.failure = models[0].error
        server.should_exit = True
        return
    for served in models:
        if served.error is not None:
            note(f"Error: {served.name}: {served.error}")
    when = ", loaded on first use" if settings.load_on_use else ""
    note(f"Serving {', '.join(working)} at {url}/v1{when}. Try:\n{curl(url, working[0], key=has_keys)}{greeting}")


def _config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )


class _Server(uvicorn.Server):
    """Ends by a signal: accepts no more, lets what runs come to its end for `seconds`, then ends it with an error. A second signal ends
    the process at once.

    failure: why there is nothing to serve.
    """

    failure: SterError | None = None

    def __init__(self, config: uvicorn.Config, state: Any, seconds: float, note: Callable[[str], None]) -> None:
        super().__init__(config)
        self._state = state
        self._seconds = seconds
        self._note = note
        config.timeout_graceful_shutdown = int(seconds) + 10  # for answers on their way to slow readers

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.draining = True
        if self.server_state.connections:
            self._note(f"Shutting down: what runs has {self._seconds:g} s; a second signal ends it at once.")
        threading.Thread(target=self._state.models.drain, args=(self._seconds,), daemon=True).start()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, does not raise them again afterwards: the end that was asked for is a good one."""
        before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            wanted = [number for number in ENDINGS if signal.getsignal(number) is not signal.SIG_IGN]
            before = {number: signal.signal(number, self.handle_exit) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """The lines of requests, and what goes wrong, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    loggers = {logging.getLogger("ster.server"): logging.INFO, logging.getLogger("uvicorn"): logging.WARNING}
    for logger, level in loggers.items():
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True

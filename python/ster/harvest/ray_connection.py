"""How this process comes to a Ray cluster: by an address, or by the connection that it has already."""

from __future__ import annotations

import contextlib
import importlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from ster._files import reason
from ster.errors import InputError, WorkerError

CONNECT = 10.0  # seconds
HINT = "`ray status` says whether a cluster runs; `local` starts one of this machine alone"


def need_ray() -> Any:
    """The module `ray`.

    Raises:
        InputError: the extra `ray` is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise InputError("a harvest on Ray needs ray, which is not installed", "install Ster with the extra `ray`, or ray itself") from None


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """The module `ray`, connected to the cluster at `address`, as `ray.init` understands it; a connection that is there is used and left.

    Raises:
        WorkerError: no cluster there; or this process is connected to another.
    """
    ray = need_ray()
    if ray.is_initialized():
        _check_connection(ray, address)
        yield ray
        return
    _knock(address)
    local: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    with _signals_kept():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
        except (OSError, RuntimeError, ValueError, TimeoutError, ImportError) as error:
            if address == "auto" and isinstance(error, ConnectionError) and "RAY_ADDRESS" in str(error):  # it names options of Ray's own
                raise WorkerError("no Ray cluster runs on this machine, and RAY_ADDRESS names none", HINT) from None
            raise WorkerError(f"failed to connect to Ray at {address}: {last_line(error)}", HINT) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_connection(ray: Any, address: str) -> None:
    """`auto` and `local` are whatever this process is connected to; HOST:PORT must be that cluster. `ray://` is refused: it names a proxy,
    and Ray does not say which one a connection goes through.

    Raises:
        WorkerError: it is connected elsewhere.
    """
    if address in ("auto", "local"):
        return
    there: str = ray.get_runtime_context().gcs_address
    if address != there and not _same_place(address, there, ray.util.get_node_ip_address()):
        hint = "`auto` goes on with the connection that is there, and `ray.shutdown()` ends it"
        raise WorkerError(f"this process is connected to the Ray cluster at {there}, which is not known as {address}", hint)


def _same_place(address: str, there: str, here: str) -> bool:
    """Whether two HOST:PORT are one. here: what Ray calls this machine, where others say `localhost`."""
    host, _, port = address.rpartition(":")
    known, _, right = there.rpartition(":")
    if not host or port != right:
        return False
    found = _ips(host)
    if any(ip.is_loopback for ip in found):
        found |= _ips(here)
    return not found.isdisjoint(_ips(known))


def _ips(host: str) -> set[IPv4Address | IPv6Address]:
    """Those of a name; none where nobody knows it."""
    try:
        return {ip_address(found[4][0]) for found in socket.getaddrinfo(host.strip("[]"), None)}
    except (OSError, UnicodeError):
        return set()


def _knock(address: str) -> None:
    """Where nothing listens `ray.init` tries for minutes, and says so line after line."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT).close()
    except (OSError, OverflowError) as error:
        why = reason(error) if isinstance(error, OSError) else "no such port"
        raise WorkerError(f"failed to connect to Ray at {address}: {why}", HINT) from None


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """`ray.init` puts a handler of its own in place of ours, under which a signal would end us with another code."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def last_line(error: BaseException) -> str:
    """The last line of a message: Ray puts the traceback before it."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip().rstrip(".") if lines else type(error).__name__

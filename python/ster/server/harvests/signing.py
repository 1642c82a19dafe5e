"""URLs that open one file of one harvest for a while, for whoever has them."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode

from starlette.datastructures import QueryParams

from ster._files import reason
from ster.errors import FileError
from ster.server.harvests.errors import bad_signature, url_expired

SECRET = "url-secret"
SECRET_BYTES = 32
PATH = re.compile(r"/v1/harvest/[^/]+/files/[^/]+")


def is_signed(method: str, path: str, query: bytes) -> bool:
    """Whether a request is one that a signature may open, and says that it has one. The route then verifies it."""
    return method in ("GET", "HEAD") and PATH.fullmatch(path) is not None and "signature" in QueryParams(query)


def load_secret(folder: Path) -> bytes:
    """The secret of a state, made once: servers that share the folder share it.

    Raises:
        FileError
    """
    path = folder / SECRET
    part = folder / f"{SECRET}.{secrets.token_hex(8)}"
    try:
        if not path.exists():
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(descriptor, secrets.token_bytes(SECRET_BYTES))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            with contextlib.suppress(FileExistsError):  # another server was first: its own counts
                os.link(part, path)
        found = path.read_bytes()
    except OSError as error:
        raise FileError(f"failed to make {path}: {reason(error)}") from None
    finally:
        part.unlink(missing_ok=True)
    if len(found) != SECRET_BYTES:
        raise FileError(f"{path} is damaged", "remove it; URLs that were given out then open nothing")
    return found


class Signer:
    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def query(self, id: str, name: str, expires: int) -> str:
        """What makes a URL of the file `name` of harvest `id` open it until `expires`, in seconds since 1970."""
        return urlencode({"expires": expires, "signature": self._signature(id, name, str(expires))})

    def verify(self, id: str, name: str, query: Mapping[str, str]) -> None:
        """
        Raises:
            ApiError: 403, it was not signed for this file and time. 410, its time is over.
        """
        expires, given = query.get("expires", ""), query.get("signature", "")
        if not hmac.compare_digest(given.encode(), self._signature(id, name, expires).encode()):
            raise bad_signature()
        if int(expires) <= time.time():
            raise url_expired()

    def _signature(self, id: str, name: str, expires: str) -> str:
        # Ids and names have no line breaks where they are signed, so that no two of them make one text.
        text = "\n".join(("harvest", id, name, expires))
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

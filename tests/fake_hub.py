"""A Hugging Face Hub of this machine's own: as much of its HTTP as `huggingface_hub` needs to find and download a model.

Written after what the library asks for: /api/models/ID[/revision/REV] and /api/models/ID/tree/REV list files; /ID/resolve/REV/FILE is a
file, or for large ones a redirect to another host, with the commit, the size and a hash in headers.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LATER = "89abcdef0123456789abcdef0123456789abcdef"
LARGE = 100_000  # bytes from which a file is on the other host, as large ones are on the Hub


@dataclass
class Repo:
    commits: dict[str, dict[str, bytes]]  # files of each
    refs: dict[str, str]
    private: bool = False
    gated: bool = False  # whoever has no token, or "outsider", may list but not read
    disabled: bool = False


@dataclass
class FakeHub:
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[tuple[str, str, str, str | None]] = field(default_factory=list)  # host, method, path, authorization
    tokens: tuple[str, ...] = ("secret", "outsider")
    status: dict[str, int] = field(default_factory=dict)  # part of a path -> what to answer instead
    headers: dict[str, str] = field(default_factory=dict)  # of those answers
    cuts: int = 0  # how many more answers with a large file end in the middle
    delay: float = 0.0  # seconds between pieces of a large file
    silence: float = 0.0  # seconds before any answer
    html: bool = False  # answer as what is no Hub
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, name: str, files: dict[str, bytes], commit: str = COMMIT, refs: tuple[str, ...] = ("main",)) -> Repo:
        repo = self.repos.setdefault(name, Repo({}, {}))
        repo.commits[commit] = files
        repo.refs.update(dict.fromkeys(refs, commit))
        return repo

    def asked(self) -> list[str]:
        """`GET /path` of every request for a model since the last call. The library also asks, once a day, what agents there are."""
        found = [f"{method} {path}" for _, method, path, _ in self.requests if path != "/api/agent-harnesses"]
        self.requests.clear()
        return found


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.hub
        path = unquote(urlsplit(self.path).path)
        host = self.headers["host"].partition(":")[0]
        hub.requests.append((host, self.command, path, self.headers["authorization"]))
        time.sleep(hub.silence)
        if hub.html:
            return self.answer(200, b"<html>Log in to the network</html>", {"Content-Type": "text/html"})
        for part, status in hub.status.items():
            if part in path:
                return self.answer(status, b"", hub.headers)
        if path == "/api/agent-harnesses":
            return self.answer(200, b'{"standardEnvVars": [], "harnesses": {}}')
        if path.startswith("/blobs/"):
            return self.blob(path.removeprefix("/blobs/"))
        token = (self.headers["authorization"] or "").removeprefix("Bearer ")
        if token and token not in hub.tokens:
            return self.refuse(401, "", "Invalid credentials in Authorization header")
        if path.startswith("/api/models/"):
            tree = "/tree/" in path  # which other programs ask for
            name, _, revision = path.removeprefix("/api/models/").partition("/tree/" if tree else "/revision/")
            file = None
        else:
            name, _, rest = path.removeprefix("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
        repo = hub.repos.get(name)
        if repo is None or (repo.private and token != "secret"):
            if token:
                return self.refuse(404, "RepoNotFound", "Repository not found")
            return self.refuse(401, "RepoNotFound", "Invalid username or password.")
        if repo.disabled:
            return self.refuse(403, "", "Access to this resource is disabled.")
        commit = repo.refs.get(revision or "main", revision)
        if commit not in repo.commits:
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if file is None:
            return self.tree(repo.commits[commit]) if tree else self.listing(name, commit, repo.commits[commit])
        if repo.gated and token != "secret":
            return self.refuse(403 if token else 401, "GatedRepo", f"Access to model {name} is restricted.")
        if file not in repo.commits[commit]:
            return self.refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        return self.file(commit, repo.commits[commit][file])

    def listing(self, name: str, commit: str, files: dict[str, bytes]) -> None:
        siblings = [
            {"rfilename": file, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
            | ({"lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}} if len(data) > LARGE else {})
            for file, data in files.items()
        ]
        info = {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": [], "private": False}
        self.answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def tree(self, files: dict[str, bytes]) -> None:
        entries = [{"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()} for file, data in files.items()]
        self.answer(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})

    def file(self, commit: str, data: bytes) -> None:
        etag = hashlib.sha256(data).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}
        if len(data) > LARGE:
            where = f"http://localhost:{self.hub.port}/blobs/{etag}"
            self.answer(302, b"", headers | {"X-Linked-ETag": f'"{etag}"', "X-Linked-Size": str(len(data)), "Location": where})
        else:
            self.answer(200, data, headers)

    def blob(self, etag: str) -> None:
        """On the other host: in parts, where asked, and sometimes less than all."""
        hub = self.hub
        everything = (data for repo in hub.repos.values() for files in repo.commits.values() for data in files.values())
        data = next(data for data in everything if hashlib.sha256(data).hexdigest() == etag)
        start = int((self.headers["range"] or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        end = len(data)
        if hub.cuts > 0:
            hub.cuts -= 1
            end = (start + len(data)) // 2
        for piece in range(start, end, 65536):
            self.wfile.write(data[piece : min(piece + 65536, end)])
            time.sleep(hub.delay)
        if end < len(data):
            self.close_connection = True

    def refuse(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        more = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer(status, json.dumps({"error": message}).encode(), more | (headers or {}))

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that ends in the middle is what some tests are about."""


@contextmanager
def serving() -> Iterator[FakeHub]:
    hub = FakeHub()
    server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()

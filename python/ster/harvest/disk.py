"""What a harvest does to its folder, in an order that a kill at any moment leaves in good state.

A shard is written as `NAME.part` and synced; its checksum is added to the journal, `progress.jsonl`, and synced; then it is renamed. So a
file under its own name is whole, and a part that is whole is known by its checksum. The manifest comes last, when all else is synced; then
the journal goes. One process at a time holds the lock, which the system gives back when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ster import _files
from ster._files import reason
from ster.errors import FileError, InputError

JOURNAL, LOCK, MANIFEST, STATS = "progress.jsonl", "harvest.lock", "manifest.json", "stats.safetensors"
PART = ".part"
SPOOL = "tokens.part"
CHUNK = 1 << 20


@dataclass(frozen=True)
class Record:
    """A file that is on disk: so many bytes, with this checksum."""

    bytes: int
    sha256: str


def failed(path: Path, error: OSError) -> FileError:
    hint = "free some space; the same command then goes on from here" if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
    return FileError(f"failed to write {path}: {reason(error)}", hint)


def on_disk(ready: int, total: object) -> str:
    """
    >>> on_disk(0, 1), on_disk(1, 2)
    ('0 of 1 shard is on disk', '1 of 2 shards are on disk')
    """
    return f"{ready} of {total} shard{' is' if total == 1 else 's are'} on disk"


def check_folder(folder: Path) -> None:
    """Find out without the model whether a harvest can be begun or continued in `folder`.

    Raises:
        InputError: something else is in it. FileError: it cannot be read, or is a file.
    """
    try:
        names = {entry.name for entry in os.scandir(folder)}
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise FileError(f"failed to create {folder}: a file of that name exists") from None
    except (OSError, ValueError) as error:
        raise _files.unreadable(folder, error) from None
    others = sorted(names - {LOCK, JOURNAL + PART, SPOOL})
    if others and not names & {JOURNAL, MANIFEST}:
        raise InputError(f"{folder} is not empty and not a harvest: it has {others[0]}", "name another folder")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process alone.

    Raises:
        InputError: another process holds it.
    """
    path = folder / LOCK
    try:
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Who held it before may have removed the file in between: then a third process could lock a new one.
                if path.stat().st_ino == os.fstat(descriptor).st_ino:
                    break
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
    except BlockingIOError:
        raise InputError(f"another process is at work on the harvest in {folder}", "wait for it, or end it first") from None
    except OSError as error:
        raise FileError(f"failed to lock {path}: {reason(error)}") from None
    try:
        yield
    finally:
        try:
            with contextlib.suppress(OSError):
                os.unlink(path)
        finally:
            os.close(descriptor)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_part(path: Path, chunks: Iterable[bytes | memoryview]) -> Record:
    """Write `path`.part and sync it.

    Raises:
        FileError: `failed to write <path>: ...`; the part is then removed.
    """
    part = path.with_name(path.name + PART)
    found, size = hashlib.sha256(), 0
    try:
        try:
            with open(part, "wb", buffering=0) as file:
                for chunk in chunks:
                    left = memoryview(chunk)
                    found.update(left)
                    size += len(left)
                    while left:
                        left = left[file.write(left[: 16 * CHUNK]) :]
                os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
    except OSError as error:
        raise failed(path, error) from None
    return Record(size, found.hexdigest())


def place(path: Path) -> None:
    """Give the part of `path` its name.

    Raises:
        FileError: `failed to write <path>: ...`.
    """
    try:
        os.replace(path.with_name(path.name + PART), path)
        sync_folder(path.parent)
    except OSError as error:
        raise failed(path, error) from None


def remove(path: Path) -> None:
    """
    Raises:
        FileError: `failed to remove <path>: ...`.
    """
    try:
        path.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise FileError(f"failed to remove {path}: {reason(error)}") from None


def whole(path: Path, record: Record) -> mmap.mmap | None:
    """The file, if it is there with this checksum; a part that is gets its name. None: missing, or damaged.

    Raises:
        FileError: `failed to write <path>: ...`, in renaming.
    """
    found = _matching(path, record)
    if found is None:
        found = _matching(path.with_name(path.name + PART), record)
        if found is not None:
            place(path)
    return found


def _matching(path: Path, record: Record) -> mmap.mmap | None:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != record.bytes:
                return None
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # ValueError: an empty file
        return None
    return data if hashlib.sha256(data).hexdigest() == record.sha256 else None


class Journal:
    """`progress.jsonl`: a line with the plan, then one for every shard on disk. A line that was cut off does not count."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL

    def read(self) -> tuple[dict[str, Any], dict[str, Record]] | None:
        """The plan and the shards by name, or None where nothing was begun.

        Raises:
            FileError, InputError: not readable, or not a journal.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _files.unreadable(self.path, error) from None
        plan: dict[str, Any] | None = None
        records: dict[str, Record] = {}
        for line in data.split(b"\n")[:-1]:
            try:
                entry = json.loads(line)
                if plan is None:
                    plan = dict(entry)
                else:
                    records[str(entry["file"])] = Record(int(entry["bytes"]), str(entry["sha256"]))
            except (ValueError, KeyError, TypeError):
                break
        if plan is None:
            raise InputError(f"{self.path} is damaged: it has no plan", "remove the folder and begin again")
        return plan, records

    def begin(self, plan: Mapping[str, Any], records: Mapping[str, Record]) -> None:
        """Write the file anew, whole or not at all: without what a kill may have left at its end.

        Raises:
            FileError: `failed to write <path>: ...`.
        """
        lines = [_line(plan), *(_record(name, record) for name, record in records.items())]
        write_part(self.path, lines)
        _files.writes += 1
        place(self.path)

    def add(self, name: str, record: Record) -> None:
        """
        Raises:
            FileError: `failed to write <path>: ...`.
        """
        try:
            with open(self.path, "ab", buffering=0) as file:
                line = _record(name, record)
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
        except OSError as error:
            raise failed(self.path, error) from None


def _line(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _record(name: str, record: Record) -> bytes:
    return _line({"file": name, "bytes": record.bytes, "sha256": record.sha256})

"""Reading the user's files, and writing ours so that a kill, a full disk or Ctrl-C never leaves half a document."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from ster.errors import FileError

Write = Callable[[BinaryIO], object]
_WIDE = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


def reason(error: OSError) -> str:
    """What the operating system said, without number and path: `no space left on device`."""
    text = error.strerror or str(error) or type(error).__name__
    return text[:1].lower() + text[1:]


def read_bytes(path: Path) -> bytes:
    """The file's bytes.

    Raises:
        FileError: `failed to read <path>: ...`.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"failed to read {path}: {reason(error)}") from None
    except ValueError as error:  # a NUL in the path
        raise FileError(f"failed to read {path}: {error}") from None


def read_text(path: Path) -> str:
    """The file as UTF-8, with or without a byte order mark; line ends as they are.

    Raises:
        FileError: `failed to read <path>: ...`, naming the encoding when it is another one.
    """
    data = read_bytes(path)
    wide = next((name for mark, name in _WIDE.items() if data.startswith(mark)), None)
    if wide is None and b"\0" in data[:2]:  # UTF-16 without its mark: every other byte of ASCII is zero
        wide = "UTF-16"
    if wide is not None:
        raise FileError(f"failed to read {path}: it is {wide}, expected UTF-8", "save the file as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"failed to read {path}: byte {error.start} is not UTF-8", "save the file as UTF-8") from None


def parse_json(text: str) -> object:
    """JSON -> Python, refusing what `json` alone lets pass: one key twice in an object.

    Raises:
        ValueError: not JSON; the message says where.
    """

    def object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f'key "{next(key for key in keys if keys.count(key) > 1)}" appears twice')
        return values

    try:
        value: object = json.loads(text, object_pairs_hook=object_of)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno} column {error.colno}: {error.msg[:1].lower()}{error.msg[1:]}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _target(path: Path) -> Path:
    """Where `path` leads: a link is followed, so that what it points to is replaced and not the link.

    Raises:
        FileError: a folder, or a file that may not be written.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise FileError(f"failed to write {path}: it is a directory", "name a file inside it")
    if target.exists() and not os.access(target, os.W_OK):
        raise FileError(f"failed to write {path}: permission denied")
    return target


def _temporary(path: Path, target: Path) -> tuple[int, str]:
    try:
        return tempfile.mkstemp(prefix=f".{target.name[:60]}.", suffix=".part", dir=target.parent)
    except OSError as error:
        if not target.parent.exists():
            raise FileError(f"failed to write {path}: no folder {target.parent}", "create the folder first") from None
        raise FileError(f"failed to write {path}: {reason(error)}") from None


def check_writable(path: Path) -> None:
    """Find out before the work starts whether `path` can be written; leaves nothing behind.

    Raises:
        FileError: `failed to write <path>: ...`.
    """
    target = _target(path)
    if target.exists() and not target.is_file():
        return  # a device or a pipe
    descriptor, name = _temporary(path, target)
    os.close(descriptor)
    os.unlink(name)


def _mode(target: Path) -> int:
    """The target's own mode, or what `open` would give: 0666 less the umask. `mkstemp` alone would leave 0600."""
    with contextlib.suppress(OSError):
        return target.stat().st_mode & 0o7777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def write_atomic(path: str | os.PathLike[str], write: Write) -> Path:
    """Let `write` fill a temporary file beside `path`, then rename it into place. Devices and pipes are written directly.

    Raises:
        FileError: `failed to write <path>: ...`; what was at `path` before is still there.
    """
    path = Path(path)
    target = _target(path)
    try:
        if target.exists() and not target.is_file():
            with open(target, "wb") as file:
                write(file)
            return path
        descriptor, name = _temporary(path, target)
        try:
            with open(descriptor, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, _mode(target))
            os.replace(name, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"failed to write {path}: {reason(error)}") from None
    return path


def write_folder(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write `files` (name -> content) into `folder`, which is made if missing; each file whole or not at all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise FileError(f"failed to create {folder}: a file of that name exists") from None
    except OSError as error:
        raise FileError(f"failed to create {folder}: {reason(error)}") from None

    def writer(content: bytes) -> Write:
        return lambda file: file.write(content)

    for name, content in files.items():
        write_atomic(folder / name, writer(content))
    return folder

"""Reading the user's files, and writing ours so that a kill, a full disk or Ctrl-C never leaves half a document."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from ster.errors import FileError

Write = Callable[[BinaryIO], object]

writes = 0  # outputs of this process that have begun to be seen: the command asks before it says that nothing was written
_WIDE = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


def reason(error: OSError) -> str:
    """What the operating system said, without number and path: `no space left on device`."""
    text = error.strerror or str(error) or type(error).__name__
    return text[:1].lower() + text[1:]


def is_there(path: Path) -> bool:
    """Whether anything has this name. A link that leads nowhere counts: it stands for a file that should be there, and reading says so.

    Raises:
        FileError: `failed to read <path>: ...`; no telling, as in a folder that may not be searched.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    return True


def read_bytes(path: Path) -> bytes:
    """The file's bytes.

    Raises:
        FileError: `failed to read <path>: ...`.
    """
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError | ValueError) -> FileError:
    """`failed to read <path>: ...`."""
    text = reason(error) if isinstance(error, OSError) else str(error)
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        text = f"it is a link to {path.readlink()}, which is missing"
    return FileError(f"failed to read {path}: {text}")


def read_text(path: Path) -> str:
    """The file as UTF-8, with or without a byte order mark; line ends as they are.

    Raises:
        FileError: `failed to read <path>: ...`, naming the encoding when it is another one.
    """
    data = read_bytes(path)
    refuse_wide(path, data[:64])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(path, error.start) from None


def refuse_wide(path: Path, start: bytes) -> None:
    """Look at the first 64 bytes of a text file.

    Raises:
        FileError: it is UTF-16 or UTF-32.
    """
    wide = next((name for mark, name in _WIDE.items() if start.startswith(mark)), None)
    if wide is None and _is_unmarked_utf16(start):
        wide = "UTF-16"
    if wide is not None:
        raise FileError(f"failed to read {path}: it is {wide}, expected UTF-8", "save the file as UTF-8")


def not_utf8(path: Path, byte: int) -> FileError:
    return FileError(f"failed to read {path}: byte {byte} is not UTF-8", "save the file as UTF-8")


def _is_unmarked_utf16(start: bytes) -> bool:
    """Every other byte of ASCII is zero in UTF-16, and no other; a NUL here and there is a character of UTF-8 as well."""
    first, second = start[0::2].count(0), start[1::2].count(0)
    return first + second >= 2 and max(first, second) * 4 > len(start) and min(first, second) == 0


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


def _locate(path: Path) -> tuple[Path, os.stat_result | None]:
    """Where `path` leads, and what is there. A link is followed, so that what it points to is replaced and not the link.

    Raises:
        FileError: a folder, a file that may not be written, a path that cannot be.
    """
    found: os.stat_result | None = None
    try:
        target = Path(os.path.realpath(path))
        with contextlib.suppress(FileNotFoundError):
            found = target.stat()
    except FileNotFoundError:  # realpath asks for the working directory alone
        raise FileError(f"failed to write {path}: the working directory was deleted") from None
    except OSError as error:
        raise FileError(f"failed to write {path}: {reason(error)}") from None
    except ValueError as error:  # a NUL in the path
        raise FileError(f"failed to write {path}: {error}") from None
    if found is None:
        return target, None
    if stat.S_ISDIR(found.st_mode):
        raise FileError(f"failed to write {path}: it is a directory", "name a file inside it")
    if not os.access(target, os.W_OK):
        raise FileError(f"failed to write {path}: permission denied")
    return target, found


def _temporary(target: Path) -> Path:
    """A name beside `target` that nothing has. It is known before the file is made, so that whoever removes it cannot come too early."""
    return target.with_name(f".{target.name[:30]}.{secrets.token_hex(8)}.part")


def _create(path: Path, temporary: Path, mode: int) -> BinaryIO:
    """
    mode: less the umask; what a new file gets where it is 0o666.

    Raises:
        FileError: in the name of `path`.
    """
    try:
        return open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode))
    except OSError as error:
        if not os.path.lexists(temporary.parent):
            raise FileError(f"failed to write {path}: no folder {temporary.parent}", "create the folder first") from None
        raise FileError(f"failed to write {path}: {reason(error)}") from None


def check_writable(path: Path, *inputs: Path) -> None:
    """Find out before the work starts whether `path` can be written; leaves nothing behind.

    inputs: files the work reads, none of which may be written over.

    Raises:
        FileError: `failed to write <path>: ...`.
    """
    target, found = _locate(path)
    if found is not None and not stat.S_ISREG(found.st_mode):
        return  # a device or a pipe
    for other in inputs if found is not None else ():
        same = False
        with contextlib.suppress(OSError, ValueError):  # reading it will say what is wrong
            same = target.samefile(other)
        if same:
            raise FileError(f"failed to write {path}: it is the input {other}", "name another file to write")
    temporary = _temporary(target)
    try:
        _create(path, temporary, 0o600).close()
        temporary.unlink()
    except BaseException:  # not `finally`: an interrupt on the way there would keep the file
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _fill(path: Path, temporary: Path, write: Write, mode: int) -> None:
    with _create(path, temporary, mode) as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: str | os.PathLike[str], write: Write) -> Path:
    """Let `write` fill a temporary file beside `path`, then rename it into place. Devices and pipes are written directly.

    Raises:
        FileError: `failed to write <path>: ...`; what was at `path` before is still there.
    """
    global writes
    path = Path(path)
    target, found = _locate(path)
    try:
        if found is not None and not stat.S_ISREG(found.st_mode):
            writes += 1
            with open(target, "wb") as file:
                write(file)
            return path
        temporary = _temporary(target)
        try:
            _fill(path, temporary, write, 0o666 if found is None else found.st_mode & 0o777)
            if found is not None:
                os.chmod(temporary, found.st_mode & 0o7777)
            writes += 1
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"failed to write {path}: {reason(error)}") from None
    return path


def write_folder(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write `files` (name -> content) into `folder`, which is made if missing: all of them, or none.

    Nothing is replaced. A file that is there with the same content stays as it is.

    Raises:
        FileError: `failed to create <folder>: ...`; `failed to write <path>: ...`, also where another file has the name.
    """
    global writes
    before = writes
    made = [level for level in (folder, *folder.parents) if not os.path.lexists(level)]
    temporaries: dict[Path, Path] = {}
    placed: list[Path] = []
    try:
        make_folder(folder)
        for name, content in files.items():
            path = folder / name
            if not is_there(path):
                temporaries[path] = _temporary(path)
            elif not path.is_file() or read_bytes(path) != content:
                hint = "name another folder, or move the file away"
                raise FileError(f"failed to write {path}: a file of that name with other content exists", hint)
        for path, temporary in temporaries.items():
            _write_new(path, temporary, files[path.name])
        writes += 1
        for path, temporary in temporaries.items():
            placed.append(path)
            os.replace(temporary, path)
    except BaseException:
        for path in (*temporaries.values(), *placed):
            with contextlib.suppress(OSError):
                path.unlink()
        for level in made:
            with contextlib.suppress(OSError, ValueError):
                level.rmdir()
        writes = before
        raise
    return folder


def _write_new(path: Path, temporary: Path, content: bytes) -> None:
    try:
        _fill(path, temporary, lambda file: file.write(content), 0o666)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"failed to write {path}: {reason(error)}") from None


def make_folder(folder: Path) -> None:
    """
    Raises:
        FileError: `failed to create <folder>: ...`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise FileError(f"failed to create {folder}: a file of that name exists") from None
    except OSError as error:
        raise FileError(f"failed to create {folder}: {reason(error)}") from None
    except ValueError as error:  # a NUL in the path
        raise FileError(f"failed to create {folder}: {error}") from None

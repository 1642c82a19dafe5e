"""The two streams: `data` goes to stdout for another program, everything else to stderr for a person."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
import warnings
from collections.abc import Callable
from typing import BinaryIO, TextIO

from ster import _files
from ster._files import reason
from ster.errors import FileError


def data(text: object) -> None:
    """One line of result.

    Raises:
        FileError: stdout cannot take it, as on a full disk. BrokenPipeError passes: the reader has gone, and that is no news.
    """
    _stdout(lambda file: file.write(f"{text}\n".encode(errors="surrogateescape")))


def data_bytes(write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill stdout with bytes."""
    _stdout(write)


def result(document: object, text: Callable[[], str], as_json: bool | None) -> None:
    """The result of a command, as one JSON document or for a reader. None: text on a terminal, JSON when piped."""
    if not sys.stdout.isatty() if as_json is None else as_json:
        data_bytes(lambda file: file.write(_json(document)))
    else:
        data(text())


def _json(document: object) -> bytes:
    import orjson

    try:
        return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # the name of a file that is not UTF-8: what cannot be shown becomes U+FFFD
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").encode()


class Stopped(SystemExit):
    """Ctrl-C in a command that has said what there was to say."""

    said = True

    def __init__(self) -> None:
        super().__init__(130)


def _stdout(write: Callable[[BinaryIO], object]) -> None:
    try:
        sys.stdout.flush()
        _files.writes += 1
        write(sys.stdout.buffer)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise FileError(f"failed to write to stdout: {reason(error)}") from None


def note(text: str) -> None:
    """One line for the person at the terminal, broken between words where it is longer than the terminal is wide."""
    with contextlib.suppress(OSError):
        if sys.stderr.isatty():
            width = _width()
            text = "\n".join(wrapped for line in text.split("\n") for wrapped in _wrapped(line, width))
        sys.stderr.write(text + "\n")  # at once: `print` writes the end of the line by itself, and another thread's line comes in between
        sys.stderr.flush()


def _width() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _wrapped(line: str, width: int) -> list[str]:
    """Spaces within a line that fits, as in a table, stay as they are; a path is never cut."""
    if len(line) <= width:
        return [line]
    return textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)


def error(message: str, hint: str | None) -> None:
    """The two-part message of a refusal."""
    note(f"Error: {message}")
    if hint:
        note(f"hint: {hint}")


def show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
) -> None:
    """Ours as one line; those of libraries as Python shows them."""
    from ster.errors import SterWarning

    if issubclass(category, SterWarning):
        note(f"Warning: {message}")
    else:
        note(warnings.formatwarning(message, category, filename, lineno, line).rstrip())

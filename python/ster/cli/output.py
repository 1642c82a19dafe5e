"""Where a command's document goes: a file, or stdout, which is called `-`."""

from __future__ import annotations

import sys
from pathlib import Path

from ster._files import check_writable, write_atomic
from ster.cli import console
from ster.errors import InputError

STDOUT = "-"


def check_output(target: str, *inputs: Path, binary: bool = False, report_on_stdout: bool = False) -> None:
    """Find out before the work starts whether `target` can be written.

    inputs: files the command reads, none of which may be written over. binary: not for a terminal. report_on_stdout: another document was
    asked for there.

    Raises:
        FileError: a file that cannot be written. InputError: stdout, where it cannot take the document.
    """
    if target != STDOUT:
        check_writable(Path(target), *inputs)
    elif report_on_stdout:
        raise InputError("stdout takes one document, and `--json` and `--output -` are two", "name a file with --output")
    elif binary and sys.stdout.isatty():
        raise InputError("this format is not for a terminal", "name a file, or pipe stdout")


def write_output(target: str, data: bytes) -> None:
    """Write to the file, whole or not at all, or to stdout."""
    if target == STDOUT:
        console.data_bytes(lambda file: file.write(data))
    else:
        write_atomic(target, lambda file: file.write(data))

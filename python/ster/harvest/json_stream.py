"""The prompts of a JSON file, one after the other: the file is never whole in memory.

Decoding is `json`'s own, on a window of the file that is refilled whenever a value reaches its end.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ster._files import not_utf8, refuse_wide, unreadable
from ster.errors import FileError

CHUNK = 1 << 18  # bytes read at a time
NEAR = 16  # characters: an error this near to the end of the window may be a value cut in two; the longest escape has 12
BLANK = " \t\r\n"


def json_prompts(path: Path, ignored: list[str]) -> Iterator[object]:
    """Entries of `["...", ...]` or of `{"prompts": ["...", ...]}`; the names of other keys go to `ignored`.

    Raises:
        ValueError: not JSON, or JSON of another form; the message says where.
        FileError: `failed to read <path>: ...`.
    """
    try:
        with open(path, "rb") as file:
            window = _Window(path, file)
            first = window.peek()
            if first == "[":
                yield from _entries(window)
            elif first == "{":
                yield from _object(window, ignored)
            else:
                window.value()  # what is not even JSON says so
                raise _other_form()
            if window.peek():
                raise window.error("extra data")
    except FileError:
        raise
    except OSError as error:
        raise unreadable(path, error) from None


def _other_form() -> ValueError:
    return ValueError('expected {"prompts": ["..."]} or a list of strings')


def _object(window: _Window, ignored: list[str]) -> Iterator[object]:
    seen = False
    window.take("{")
    while window.peek() != "}":
        key = window.value()
        if not isinstance(key, str):
            raise window.error("expecting property name enclosed in double quotes")
        window.take(":", "delimiter")
        if key == "prompts":
            if seen:
                raise ValueError('key "prompts" appears twice')
            seen = True
            if window.peek() != "[":
                raise _other_form()
            yield from _entries(window)
        else:
            window.value()
            ignored.append(key)
        if window.peek() != "}":
            window.take(",", "delimiter")
            if window.peek() == "}":
                raise window.error("expecting property name enclosed in double quotes")
    window.take("}")
    if not seen:
        raise _other_form()


def _entries(window: _Window) -> Iterator[object]:
    window.take("[")
    while window.peek() != "]":
        yield window.value()
        if window.peek() != "]":
            window.take(",", "delimiter")
            if window.peek() == "]":
                raise window.error("expecting value")
    window.take("]")


class _Window:
    """The stretch of the file that is being decoded. `line` and `column` are those of its first character, from 1."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.position, self.read = "", 0, 0
        self.line = self.column = 1
        self.ended = False

    def more(self) -> bool:
        """Read on; False at the end of the file."""
        if self.ended:
            return False
        gone = self.text[: self.position]
        self.line, self.column = self._place(self.position)
        self.text = self.text[len(gone) :]
        self.position = 0
        # As much again as there is: a value of any length is then decoded a handful of times, not once for every chunk.
        data = self.file.read(max(CHUNK, 4 * len(self.text)))
        if not self.read:
            refuse_wide(self.path, data[:64])
        held = len(self.decoder.getstate()[0])
        try:
            self.text += self.decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise not_utf8(self.path, self.read - held + error.start) from None
        self.read += len(data)
        self.ended = not data
        return bool(data)

    def peek(self) -> str:
        """The next character that is not blank, which is not taken; "" at the end."""
        while True:
            while self.position < len(self.text):
                if self.text[self.position] not in BLANK:
                    return self.text[self.position]
                self.position += 1
            if not self.more():
                return ""

    def take(self, character: str, what: str = "") -> None:
        if self.peek() != character:
            raise self.error(f"expecting '{character}' {what}".rstrip())
        self.position += 1

    def value(self) -> object:
        """The next value, whole."""
        self.peek()
        while True:
            try:
                found: tuple[object, int] = _DECODER.raw_decode(self.text, self.position)
            except json.JSONDecodeError as error:
                within = error.pos - self.position
                cut = error.msg.startswith("Unterminated") or error.pos > len(self.text) - NEAR
                if cut and self.more():
                    continue
                raise self.error(f"{error.msg[:1].lower()}{error.msg[1:]}", self.position + within) from None
            except RecursionError:
                raise ValueError("nested too deeply") from None
            value, end = found
            # 12 may be the beginning of 123, and of 12.5 and 12e+3, whose last parts are cut off here.
            after = len(self.text) - end
            if PARTLY.fullmatch(self.text, end) and self.more():
                continue
            self.position = len(self.text) - after  # `more` drops what was taken
            return value

    def error(self, message: str, position: int | None = None) -> ValueError:
        line, column = self._place(self.position if position is None else position)
        return ValueError(f"line {line} column {column}: {message}")

    def _place(self, position: int) -> tuple[int, int]:
        lines = self.text.count("\n", 0, position)
        column = position - self.text.rfind("\n", 0, position) if lines else self.column + position
        return self.line + lines, column


_DECODER = json.JSONDecoder()
PARTLY = re.compile(r"|\.|[eE][+-]?")  # what may stand between a number and the end of a window

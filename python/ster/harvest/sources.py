"""Where prompts come from: files of many formats, read as they are used, or any iterable of strings.

| file | prompts |
| --- | --- |
| `.txt` | one a line; empty lines at the end are dropped, others are refused |
| `.jsonl`, `.ndjson` | a key of one JSON object a line, `prompt` unless `column` says otherwise; empty lines and other keys are ignored |
| `.csv`, `.tsv` | a column, `prompt` unless `column` says otherwise; the first line has the names |
| `.parquet` | the same (needs the extra `harvest`) |
| any other name | JSON: `{"prompts": ["...", ...]}` or `["...", ...]` |

Text is UTF-8, with or without a byte order mark, its lines ended by LF or CRLF. Nothing is stripped.
"""

from __future__ import annotations

import csv
import importlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ster._files import not_utf8, parse_json, refuse_wide, unreadable
from ster.errors import FileError, InputError, SterWarning
from ster.harvest.json_stream import json_prompts
from ster.prompts import check_prompt, kind

COLUMN = "prompt"
FIELD_LIMIT = 1 << 30  # characters of a field of CSV; Python's own limit, 131,072, is less than a long document
BATCH = 256  # rows of Parquet at a time

Numbered = Iterator[tuple[int, object]]


@dataclass(frozen=True)
class Source:
    """Prompts, and what refusals call them: `label` with the number of each, as in `line 7`."""

    label: str
    entries: Callable[[], Numbered]

    def name(self, number: int) -> str:
        return self.label.format(number)

    def prompts(self) -> Iterator[tuple[int, str]]:
        """(number, checked prompt), in order.

        Raises:
            InputError: `prompt must not be empty: line 7`, an entry that is not a string, a file that is not what its name says.
            FileError: `failed to read <path>: ...`.
        """
        for number, entry in self.entries():
            yield number, check_prompt(entry, self.name(number))


def open_source(prompts: str | os.PathLike[str] | Iterable[str], column: str | None = None) -> Source:
    """A file or an iterable as a source. A file is looked at: whether it is there, and whether it has the column.

    Raises:
        InputError: no such column, or no columns at all; not a file and not an iterable of strings.
        FileError: `failed to read <path>: ...`.
    """
    if not isinstance(prompts, str | os.PathLike):
        if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
            raise InputError(f"prompts must be a file or strings, found {kind(prompts)}")
        if column is not None:
            raise InputError(f'a column, "{column}", is for files that have some')
        return Source("prompts[{}]", lambda: enumerate(prompts))
    path = Path(prompts)
    suffix = path.suffix.lower()
    wanted = column if column is not None else COLUMN
    if suffix in (".jsonl", ".ndjson"):
        _look(path)
        return Source("line {}", lambda: _json_lines(path, wanted))
    if suffix in (".csv", ".tsv"):
        names = next(_records(path, suffix), (1, []))[1]
        _column(path, names, wanted)
        return Source("line {}", lambda: _csv(path, suffix, wanted))
    if suffix == ".parquet":
        return Source("row {}", _parquet(path, wanted))
    _look(path)
    if column is not None:
        raise InputError(f'{path} has no columns, and "{column}" was asked for', "files of columns end in .jsonl, .csv, .tsv or .parquet")
    if suffix == ".txt":
        return Source("line {}", lambda: _text(path))
    return Source("prompts[{}]", lambda: _json(path))


def _look(path: Path) -> None:
    try:
        with open(path, "rb"):
            pass
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None


def _lines(path: Path) -> Iterator[str]:
    """Lines with their ends, split at LF alone: U+2028, form feeds and the like belong to their prompt."""
    done = 0
    try:
        with open(path, "rb") as file:
            for line in file:
                if not done:
                    refuse_wide(path, line[:64])
                try:
                    yield line.decode("utf-8" if done else "utf-8-sig")
                except UnicodeDecodeError as error:
                    raise not_utf8(path, done + error.start) from None
                done += len(line)
    except FileError:
        raise
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None


def _text(path: Path) -> Numbered:
    blank = 0  # the first of the empty lines just read, which are the end of the file or a mistake
    for number, line in enumerate(_lines(path), 1):
        text = line.removesuffix("\n").removesuffix("\r")
        if not text:
            blank = blank or number
            continue
        if blank:
            yield blank, ""
        yield number, text


def _json_lines(path: Path, column: str) -> Numbered:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except ValueError as error:
            text = str(error).removeprefix("line 1 ")
            raise InputError(f"invalid prompt JSON in {path}: line {number}{' ' if text != str(error) else ': '}{text}") from None
        if not isinstance(value, dict) or column not in value:
            raise InputError(f"invalid prompt JSON in {path}: line {number} is not an object with a `{column}`")
        yield number, value[column]


def _json(path: Path) -> Numbered:
    ignored: list[str] = []
    try:
        yield from enumerate(json_prompts(path, ignored))
    except ValueError as error:
        if isinstance(error, InputError | FileError):
            raise
        hint = None if str(error).startswith("expected {") else "one JSON object a line is read from files named .jsonl, text from .txt"
        raise InputError(f"invalid prompt JSON in {path}: {error}", hint) from None
    if ignored:
        warnings.warn(f"{path}: ignored {', '.join(f'`{key}`' for key in ignored)}; only `prompts` is read", SterWarning, stacklevel=3)


def _records(path: Path, suffix: str) -> Iterator[tuple[int, list[str]]]:
    """(line it begins on, fields) of every record; empty lines are none."""
    csv.field_size_limit(max(FIELD_LIMIT, csv.field_size_limit()))
    reader = csv.reader(_lines(path), delimiter="\t" if suffix == ".tsv" else ",", strict=True)
    line = 1
    try:
        for fields in reader:
            if fields:
                yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        raise InputError(f"invalid CSV in {path}: line {max(line, reader.line_num)}: {error}") from None


def _column(path: Path, names: list[str], wanted: str) -> int:
    if not names:
        raise InputError(f"{path} is empty, expected a first line with the names of its columns")
    if names.count(wanted) > 1:
        raise InputError(f'{path} has {names.count(wanted)} columns "{wanted}"')
    if wanted not in names:
        raise InputError(
            f'{path} has no column "{wanted}"; it has {", ".join(names)}', "name one with `column`, on the command line `--column`"
        )
    return names.index(wanted)


def _csv(path: Path, suffix: str, wanted: str) -> Numbered:
    records = _records(path, suffix)
    _, names = next(records, (1, []))
    at = _column(path, names, wanted)
    for line, fields in records:
        if len(fields) != len(names):
            raise InputError(f"invalid CSV in {path}: line {line} has {len(fields)} fields, the first line {len(names)}")
        yield line, fields[at]


def need_pyarrow() -> tuple[Any, Any]:
    """(pyarrow, pyarrow.parquet), which have no types of their own.

    Raises:
        InputError: the extra `harvest` is not installed.
    """
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise InputError(
            "Parquet needs pyarrow, which is not installed", "install Ster with the extra `harvest`, or pyarrow itself"
        ) from None
    return arrow, parquet


def _parquet(path: Path, wanted: str) -> Callable[[], Numbered]:
    arrow, parquet = need_pyarrow()
    _look(path)
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
    except (arrow.ArrowException, OSError) as error:
        raise FileError(f"failed to read {path}: not a Parquet file: {_first_line(error)}") from None
    at = _column(path, list(schema.names), wanted)
    found = schema.field(at).type
    value = found.value_type if arrow.types.is_dictionary(found) else found
    if not (arrow.types.is_string(value) or arrow.types.is_large_string(value) or arrow.types.is_string_view(value)):
        raise InputError(f'column "{wanted}" of {path} must hold strings, found {found}')

    def entries() -> Numbered:
        number = 0
        try:
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=BATCH, columns=[wanted]):
                    for entry in batch.column(0):
                        yield number, entry.as_py()
                        number += 1
        except UnicodeDecodeError:  # writers do not look
            raise FileError(f"failed to read {path}: row {number} is not UTF-8") from None
        except (arrow.ArrowException, OSError) as error:
            raise FileError(f"failed to read {path}: {_first_line(error)}") from None

    return entries


def _first_line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0] or type(error).__name__
    return text[:1].lower() + text[1:]

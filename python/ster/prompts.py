"""Prompt files, and what every prompt must be.

| file | prompts |
| --- | --- |
| `.txt` | one a line; empty lines at the end are dropped, others are refused |
| `.jsonl`, `.ndjson` | the `prompt` of one JSON object a line; empty lines and other keys are ignored |
| `.csv`, `.tsv`, `.parquet` | refused: `ster harvest` reads them |
| any other name | JSON: `{"prompts": ["...", ...]}` or `["...", ...]` |

UTF-8, with or without a byte order mark. Nothing is stripped: a space is part of its prompt.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from ster._files import parse_json, read_text
from ster.errors import InputError, SterWarning

TABLES = (".csv", ".tsv", ".parquet")


def read_prompts(path: str | os.PathLike[str]) -> list[str]:
    """The prompts of a file, in its order.

    Raises:
        FileError: `failed to read <path>`; the file is missing, or not UTF-8.
        InputError: `invalid prompt JSON in <path>`, `prompt set contains no prompts`, `prompt must not be empty`, or an entry
            that is not a string, by its index (JSON, from 0) or its line (from 1); a file of columns, which `ster harvest` reads.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix in TABLES:
        raise InputError(f"prompts must be JSON, .jsonl or .txt here, found {path}", f"`ster harvest` reads columns of {suffix} files")
    text = read_text(path)
    if suffix == ".txt":
        named = _lines(text)
    elif suffix in (".jsonl", ".ndjson"):
        named = _json_lines(text, path)
    else:
        named = [(f"prompts[{index}]", entry) for index, entry in enumerate(_json_list(text, path))]
    if not named:
        raise InputError("prompt set contains no prompts")
    prompts = [check_prompt(entry, name) for name, entry in named]
    by_line = suffix in (".txt", ".jsonl", ".ndjson")
    return [_Line(prompt, name) for prompt, (name, _) in zip(prompts, named, strict=True)] if by_line else prompts


def check_prompts(prompts: Iterable[object]) -> list[str]:
    """`prompts` as a list of strings, each of them usable.

    Raises:
        InputError: see `read_prompts`.
    """
    if isinstance(prompts, str | bytes):
        raise InputError("prompts must be a list of strings, found one string", "write `[prompt]` for a single prompt")
    if not isinstance(prompts, Iterable):
        raise InputError(f"prompts must be a list of strings, found {kind(prompts)}")
    checked = [check_prompt(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]
    if not checked:
        raise InputError("prompt set contains no prompts")
    return checked


def check_prompt(prompt: object, name: str | None = None) -> str:
    """`prompt` itself, if it is a non-empty string of real characters. Blanks count: `" "` is a prompt."""
    if not isinstance(prompt, str):
        raise InputError(f"{name or 'prompt'} must be a string, found {kind(prompt)}")
    if not prompt:
        raise InputError("prompt must not be empty" + at(name))
    return check_text(prompt, name or "prompt")


def check_text(text: str, name: str) -> str:
    """`text` itself, if UTF-8 can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"contains half a surrogate pair (U+{ord(text[error.start]):04X}) at character {error.start}"
        raise InputError(f"{name} {problem}", "this text was cut in the middle of a character, or decoded wrongly") from None
    return text


class _Line(str):
    """A prompt that knows the line of its file, which is what refusals name."""

    where: str

    def __new__(cls, text: str, where: str) -> _Line:
        line = super().__new__(cls, text)
        line.where = where
        return line

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.where  # copies and pickles


def name_of(prompt: str, index: int) -> str:
    """What refusals call the prompt: its line where it was read from a file of lines, its index elsewhere."""
    return prompt.where if isinstance(prompt, _Line) else f"prompts[{index}]"


def at(name: str | None) -> str:
    """`: prompts[3]`, or nothing where there is only one prompt."""
    return f": {name}" if name else ""


def kind(value: object) -> str:
    """What a value is, in words."""
    names = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _lines(text: str) -> Sequence[tuple[str, object]]:
    # Not splitlines: U+2028, form feeds and the like belong to their prompt.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return [(f"line {number}", line) for number, line in enumerate(lines, 1)]


def _json_lines(text: str, path: Path) -> Sequence[tuple[str, object]]:
    entries: list[tuple[str, object]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except ValueError as error:
            raise InputError(f"invalid prompt JSON in {path}: line {number}: {error}") from None
        if not isinstance(value, dict) or "prompt" not in value:
            raise InputError(f"invalid prompt JSON in {path}: line {number} is not an object with a `prompt`")
        entries.append((f"line {number}", value["prompt"]))
    return entries


def _json_list(text: str, path: Path) -> list[object]:
    try:
        value = parse_json(text)
    except ValueError as error:
        hint = "one JSON object a line is read from files named .jsonl, plain text from .txt"
        raise InputError(f"invalid prompt JSON in {path}: {error}", hint) from None
    if isinstance(value, dict):
        ignored = [key for key in value if key != "prompts"]
        if ignored and "prompts" in value:
            warnings.warn(f"{path}: ignored {', '.join(f'`{key}`' for key in ignored)}; only `prompts` is read", SterWarning, stacklevel=3)
        value = value.get("prompts")
    if not isinstance(value, list):
        raise InputError(f'invalid prompt JSON in {path}: expected {{"prompts": ["..."]}} or a list of strings')
    return value

"""Contrastive pairs: what a direction is learned from. Read and checked whole before any model is loaded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ster._files import parse_json, read_text, write_atomic
from ster.errors import FileError, InputError

Message = dict[str, str]
"""One chat message: `{"role": ..., "content": ...}`."""

Side = str | list[Message]
"""One side of a pair: a text, or the messages of a chat that the model's template renders as they stand."""


class MalformedError(ValueError):
    """What is wrong with the form of a document; whoever knows the file makes a refusal of it."""


@dataclass(frozen=True)
class Pair:
    """A text with more of the trait and its counterpart with less. Nothing is checked here; `PairSet` does."""

    positive: Side
    negative: Side


@dataclass(frozen=True)
class PairSet:
    """Pairs in file order, and the name of the trait they contrast, if it has one. `(positive, negative)` tuples become pairs.

    Raises:
        InputError: no pairs, or a side that is empty, only white space, or neither text nor messages.
    """

    pairs: tuple[Pair, ...]
    trait_name: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", _pairs(self.pairs))
        _check(self.pairs, self.trait_name, "pair set")

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.pairs)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PairSet:
        """Read `{"trait_name": "...", "pairs": [{"positive": ..., "negative": ...}]}`; `trait_name` may be missing.

        UTF-8, with or without byte order mark. A key that is unknown or given twice is refused.

        Raises:
            FileError: the file cannot be read.
            InputError: it is not such a document, has no pairs, or has an empty side.
        """
        document = read_json(path, what="pair set")
        try:
            trait_name, pairs = _parse(document)
        except MalformedError as error:
            raise InputError(f"invalid pair set JSON in {path}: {error}") from None
        _check(pairs, trait_name, f"pair set {path}")
        return cls(tuple(pairs), trait_name)

    def to_dict(self) -> dict[str, Any]:
        """The document `load` reads. A trait without a name is left out."""
        named = {} if self.trait_name is None else {"trait_name": self.trait_name}
        return {**named, "pairs": [{"positive": pair.positive, "negative": pair.negative} for pair in self.pairs]}

    def to_json(self) -> bytes:
        """The file's bytes."""
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=2).encode() + b"\n"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the document `load` reads, whole or not at all."""
        data = self.to_json()
        return write_atomic(path, lambda file: file.write(data))

    @property
    def content_hash(self) -> str:
        """SHA-256 of the pairs in order, as 64 hex digits.

        Over the JSON text of `pairs` with sorted keys, no spaces and no escapes beyond JSON's own, in UTF-8. Neither the name of
        the trait nor the layout of the file counts.
        """
        text = json.dumps(self.to_dict()["pairs"], ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _pairs(pairs: object) -> tuple[Pair, ...]:
    """
    Raises:
        InputError: not pairs, nor tuples of two sides.
    """
    if isinstance(pairs, str | bytes | Mapping) or not isinstance(pairs, Iterable):
        raise InputError(f"pairs must be a PairSet or a list of (positive, negative) tuples, found {type(pairs).__name__}")
    found = []
    for index, pair in enumerate(pairs):
        if not isinstance(pair, Pair):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                what = f"{len(pair)} values" if isinstance(pair, tuple | list) else type(pair).__name__
                raise InputError(f"a pair must be a Pair or a (positive, negative) tuple, found {what} (pair {index})")
            pair = Pair(*pair)
        found.append(pair)
    return tuple(found)


def side_text(side: Side) -> str:
    """The words of a side, for comparing and measuring: a text itself, or `role: content` line by line. Not what the model reads.

    >>> side_text([{"role": "user", "content": "Hi"}])
    'user: Hi'
    """
    return side if isinstance(side, str) else "\n".join(f"{message['role']}: {message['content']}" for message in side)


def is_empty(side: Side) -> bool:
    """No character that is not white space, in a text or in any message."""
    return not side.strip() if isinstance(side, str) else not any(message["content"].strip() for message in side)


def parse_side(value: object) -> Side:
    """`value` as a side of a pair.

    Raises:
        MalformedError: it is neither a string nor a list of messages with exactly `role` and `content`, or it cannot be written as UTF-8.
    """
    if isinstance(value, str):
        return _text(value)
    if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray)):
        raise MalformedError(f"a side must be a string or a list of messages, found {kind(value)}")
    messages: list[Message] = []
    for message in value:
        if not isinstance(message, Mapping):
            raise MalformedError(f"a message must be an object with `role` and `content`, found {kind(message)}")
        known_keys(message, ("role", "content"), "message")
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or not isinstance(content, str):
            wrong = "content" if isinstance(role, str) else "role"
            raise MalformedError(f"`{wrong}` of a message must be a string, found {kind(message[wrong])}")
        if not role:
            raise MalformedError("`role` of a message must not be empty")
        messages.append({"role": _text(role), "content": _text(content)})
    return messages


def read_json(path: str | os.PathLike[str], *, what: str) -> object:
    """The file as JSON, in UTF-8 with or without byte order mark; no key twice.

    Raises:
        FileError: `failed to read <what> <path>: ...`, which also names an encoding other than UTF-8.
        InputError: `invalid <what> JSON in <path>: ...`.
    """
    path = Path(path)
    try:
        text = read_text(path)
    except FileError as error:
        raise FileError(error.message.replace("failed to read", f"failed to read {what}", 1), error.hint) from None
    try:
        return parse_json(text)
    except ValueError as error:
        raise InputError(f"invalid {what} JSON in {path}: {error}") from None


def known_keys(found: Mapping[str, Any], required: Sequence[str], what: str, optional: Sequence[str] = ()) -> None:
    """MalformedError when a key of `required` is missing, or one is neither required nor optional."""
    for key in found:
        if key not in required and key not in optional:
            raise MalformedError(f"unknown key {_quote(key)} in a {what}; expected {', '.join([*required, *optional])}")
    for key in required:
        if key not in found:
            raise MalformedError(f"a {what} has no `{key}`")


def kind(value: object) -> str:
    """What JSON calls a value: `null`, `a number`, `an object`."""
    names = ((bool, "a boolean"), ((int, float), "a number"), (str, "a string"), (Mapping, "an object"), ((list, tuple), "a list"))
    if value is None:
        return "null"
    return next((name for types, name in names if isinstance(value, types)), type(value).__name__)


def _quote(key: str) -> str:
    return "`" + key.encode("utf-8", "backslashreplace").decode() + "`"


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise MalformedError(f"half a surrogate pair (\\u{ord(value[error.start]):04x}), which is no character") from None
    return value


def _parse(document: object) -> tuple[str | None, list[Pair]]:
    """Trait and pairs of a document; MalformedError says what is wrong with its form."""
    if not isinstance(document, Mapping):
        raise MalformedError(f"expected an object with `pairs`, found {kind(document)}")
    known_keys(document, ("pairs",), "pair set", optional=("trait_name",))
    trait_name, rows = document.get("trait_name"), document["pairs"]
    if trait_name is not None:
        if not isinstance(trait_name, str):
            raise MalformedError(f"`trait_name` must be a string, found {kind(trait_name)}")
        _text(trait_name)
    if not isinstance(rows, list):
        raise MalformedError(f"`pairs` must be a list, found {kind(rows)}")
    pairs = []
    for index, row in enumerate(rows):
        try:
            if not isinstance(row, Mapping):
                raise MalformedError(f"a pair must be an object with `positive` and `negative`, found {kind(row)}")
            known_keys(row, ("positive", "negative"), "pair")
            pairs.append(Pair(parse_side(row["positive"]), parse_side(row["negative"])))
        except MalformedError as error:
            raise MalformedError(f"{error} (pair {index})") from None
    return trait_name, pairs


def _check(pairs: Sequence[Pair], trait_name: str | None, where: str) -> None:
    """What holds for every pair set, from a file or made in Python."""
    if not pairs:
        raise InputError(f"{where} contains no pairs")
    for index, pair in enumerate(pairs):
        try:
            sides = parse_side(pair.positive), parse_side(pair.negative)
            if trait_name is not None:
                _text(trait_name)
        except MalformedError as error:
            raise InputError(f"{where}: {error} (pair {index})") from None
        for name, side in zip(("positive", "negative"), sides, strict=True):
            if is_empty(side):
                raise InputError(f"{where} contains an empty positive or negative prompt", f"pair {index}, {name} side")

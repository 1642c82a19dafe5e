"""All prompts, read and checked once before the first one runs: their tokens wait in a file without a name, so that memory stays flat and a
generator is asked only once; and which of them make a shard."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from ster.errors import InputError, SterWarning
from ster.harvest.disk import SPOOL, failed
from ster.harvest.positions import Kept, count_kept
from ster.harvest.sources import Source
from ster.readable import Readable

# A shard ends before it has more: some passes of the engine, so that little is lost to a kill and nothing to small passes.
SHARD_TOKENS = 8192
SHARD_BYTES = 64 << 20
SHARD_PROMPTS = 4096


@dataclass
class Shard:
    """Prompts `first_prompt` and on, rows `first_row` and on; offset: of the first one's tokens in the waiting file."""

    index: int
    first_prompt: int
    first_row: int
    offset: int
    prompts: int = 0
    rows: int = 0
    tokens: int = 0


@dataclass
class Corpus:
    """lengths: tokens of every prompt. sha256: over texts and ids."""

    source: Source
    spool: IO[bytes]
    lengths: array[int] = field(default_factory=lambda: array("I"))
    shards: list[Shard] = field(default_factory=list)
    tokens: int = 0
    rows: int = 0
    sha256: str = ""

    def read(self, shard: Shard) -> tuple[list[str], list[list[int]]]:
        """(names for refusals, token ids) of a shard's prompts."""
        self.spool.seek(shard.offset)
        names, ids = [], []
        for length in self.lengths_of(shard):
            number = int.from_bytes(self.spool.read(8), "little")
            names.append(self.source.name(number))
            ids.append(np.frombuffer(self.spool.read(4 * length), "<u4").tolist())
        return names, ids

    def lengths_of(self, shard: Shard) -> Sequence[int]:
        return self.lengths[shard.first_prompt : shard.first_prompt + shard.prompts]


def read_corpus(
    model: Readable,
    source: Source,
    folder: Path,
    positions: Kept,
    row_bytes: int,
    shard_size: int | None,
    report: Callable[[int], object],
) -> Corpus:
    """Tokenise and check every prompt of `source`.

    row_bytes: of one token in a shard. shard_size: prompts in each; None: see the constants above. report: called with prompts so far.

    Raises:
        InputError: a prompt, or a position in it, that cannot be used, by its name; no prompts.
        FileError: the source cannot be read, or the folder not written to.
    """
    try:
        spool = open(folder / SPOOL, "w+b")  # noqa: SIM115
    except OSError as error:
        raise failed(folder / SPOOL, error) from None
    try:
        os.unlink(folder / SPOOL)  # it ends with the process, however that ends
        return _read(model, source, folder, spool, positions, row_bytes, shard_size, report)
    except BaseException:
        with contextlib.suppress(OSError):  # what it has yet to write does not fit either
            spool.close()
        raise


def _read(
    model: Readable,
    source: Source,
    folder: Path,
    spool: IO[bytes],
    positions: Kept,
    row_bytes: int,
    shard_size: int | None,
    report: Callable[[int], object],
) -> Corpus:
    corpus = Corpus(source, spool)
    found = hashlib.sha256()
    offset = 0
    doubled: tuple[str, int] = ("", 0)
    for number, ids, text in _tokens(model, source):
        length = len(ids)
        try:
            rows = count_kept(positions, length)
        except IndexError as error:
            name = source.name(number)
            raise InputError(f"position {error.args[0]} is not in {name}, which has {length} token{'s' if length > 1 else ''}") from None
        shard = corpus.shards[-1] if corpus.shards else None
        if shard is None or _is_full(shard, length, rows, row_bytes, shard_size):
            shard = Shard(len(corpus.shards), len(corpus.lengths), corpus.rows, offset)
            corpus.shards.append(shard)
        shard.prompts += 1
        shard.rows += rows
        shard.tokens += length
        corpus.lengths.append(length)
        corpus.rows += rows
        corpus.tokens += length
        packed = np.array(ids, "<u4").tobytes()
        encoded = text.encode()
        found.update(b"%d %d " % (len(encoded), length) + encoded + packed)
        try:
            spool.write(number.to_bytes(8, "little") + packed)
        except OSError as error:
            raise failed(folder / SPOOL, error) from None
        offset += 8 + len(packed)
        if model.has_two_bos(ids):
            doubled = (doubled[0] or source.name(number), doubled[1] + 1)
        report(len(corpus.lengths))
    try:
        spool.flush()  # now, not when it is read or closed, with nobody to say what failed
    except OSError as error:
        raise failed(folder / SPOOL, error) from None
    if not corpus.shards:
        raise InputError("prompt set contains no prompts")
    if doubled[1]:
        more = f" and {doubled[1] - 1} more" if doubled[1] > 1 else ""
        warnings.warn(f"{doubled[0]}{more}: two BOS tokens at the start, one of them from the text", SterWarning, stacklevel=5)
    corpus.sha256 = found.hexdigest()
    return corpus


def _tokens(model: Readable, source: Source) -> Iterator[tuple[int, list[int], str]]:
    waiting: deque[tuple[int, str]] = deque()  # asked for, and their ids have yet to come

    def prompts() -> Iterator[tuple[str, str]]:
        for number, text in source.prompts():
            waiting.append((number, text))
            yield text, source.name(number)

    for ids in model.tokenise(prompts()):
        number, text = waiting.popleft()
        yield number, ids, text


def _is_full(shard: Shard, length: int, rows: int, row_bytes: int, shard_size: int | None) -> bool:
    if shard_size is not None:
        return shard.prompts >= shard_size
    return shard.prompts >= SHARD_PROMPTS or shard.tokens + length > SHARD_TOKENS or (shard.rows + rows) * row_bytes > SHARD_BYTES


def kept_ids(ids: Sequence[int], positions: NDArray[np.int64]) -> NDArray[np.int32]:
    return np.array(ids, np.int32)[positions]

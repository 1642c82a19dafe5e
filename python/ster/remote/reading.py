"""Activations of token ids: one request for each prompt, or several where a server's cap has room for some of the layers only.

Equal prompts run once. Answers hold all rows of a prompt, for the wire knows no other; what is not asked for is dropped here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ster import _native
from ster.errors import InputError
from ster.progress import Progress, reporter
from ster.prompts import at
from ster.readable import Keep
from ster.remote.checks import Expected, check_choice, check_residual
from ster.remote.server import Server, completion
from ster.remote.steering import steering_vectors
from ster.remote.transport import Call, Transport

LARGEST = 1 << 27  # numbers in an answer, where the server names no cap
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Part:
    """A request: of which prompt, which layers."""

    index: int
    layers: list[int]
    last: bool  # of its prompt's


def read(
    transport: Transport,
    server: Server,
    prompts: Sequence[Sequence[int]],
    names: Sequence[str],
    layers: Sequence[int],
    rows: Literal["last", "all"],
    keep: Keep,
    *,
    progress: Progress = None,
) -> None:
    """See `ster.readable.Readable.read`.

    Raises:
        InputError: a prompt of which the server cannot send a single layer, before anything runs.
        RemoteError: an answer that does not fit. NonFiniteError: by layer, token and name.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for index, ids in enumerate(prompts):
        places.setdefault(tuple(ids), []).append(index)
    unique = list(places.items())
    called = [names[same[0]] for _, same in unique]
    parts = [part for n, (ids, _) in enumerate(unique) for part in _parts(server, n, len(ids), layers, called[n])]
    calls = (_call(server, unique[part.index][0], part.layers, called[part.index]) for part in parts)
    done = 0
    with reporter(progress, "extract") as report:
        report(0, len(prompts))
        whole: list[NDArray[np.float32]] = []
        for part, answer in zip(parts, transport.ask_all(calls), strict=True):
            ids, same = unique[part.index]
            document = answer.document()
            expected = Expected(ids, server.hidden, server.wire, 1, called[part.index], server.called)
            _, generated = check_choice(document, expected)
            values = check_residual(document, expected, part.layers, generated)
            whole.append(values if rows == "all" else values[:, -1:].copy())
            if part.last:
                residual = whole[0] if len(whole) == 1 else np.concatenate(whole)
                whole = []
                for place in same:
                    keep(place, residual)
                done += len(same)
                report(done, len(prompts))


def read_one(
    transport: Transport, server: Server, ids: Sequence[int], layers: Sequence[int], edits: Sequence[_native.Edit], name: str
) -> NDArray[np.float32]:
    """float32 `[layers, tokens, hidden]` of one prompt, after what `edits` add at those layers."""
    vectors = steering_vectors(edits, server.caps)
    parts = list(_parts(server, 0, len(ids), layers, name))
    found = []
    for part, answer in zip(parts, transport.ask_all(_call(server, ids, part.layers, name, vectors) for part in parts), strict=True):
        document = answer.document()
        expected = Expected(ids, server.hidden, server.wire, 1, name, server.called)
        _, generated = check_choice(document, expected)
        found.append(check_residual(document, expected, part.layers, generated))
    return np.concatenate(found)


def layers_at_once(server: Server, tokens: int, name: str | None) -> int:
    """How many layers of a run of so many tokens, prompt and generated together, an answer has room for.

    Raises:
        InputError: not one.
    """
    cap = server.caps.get("max_capture_numbers")
    most = cap if isinstance(cap, int) else LARGEST
    count = most // (tokens * server.hidden)
    if not count:
        hint = "`ster serve --max-capture-numbers` raises it" if server.dialect == "ster" else "shorten the prompt"
        raise InputError(f"{tokens} tokens of one layer are more than an answer may have, {most:,} numbers{at(name)}", hint)
    return count


def answer_limit(server: Server, numbers: int, tokens: int) -> int:
    """Bytes that an answer may have: base64 of numbers that did not compress, and a kilobyte for each token."""
    return numbers * NUMBER_BYTES[server.wire] * 3 // 2 + tokens * 1024 + (1 << 20)


def _parts(server: Server, index: int, tokens: int, layers: Sequence[int], name: str) -> Iterator[Part]:
    step = layers_at_once(server, tokens + 1, name)
    for start in range(0, len(layers), step):
        yield Part(index, list(layers[start : start + step]), start + step >= len(layers))


def _call(server: Server, ids: Sequence[int], layers: Sequence[int], name: str, vectors: Sequence[dict[str, object]] = ()) -> Call:
    body = completion(server.id, ids, server.dialect, server.wire, layers=layers, steering=vectors)
    return Call("/v1/completions", body, answer_limit(server, len(layers) * len(ids) * server.hidden, len(ids)), name)

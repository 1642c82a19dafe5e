"""Text from a server. The rows that a request reads are those after steering; what stands before it is read again.

The value before steering at layer L of given token ids does not depend on what is added at L or above: so the ids that ran, prompt and
text, run once more as a prompt, for each such layer, under the edits below it alone. On `ster serve` that gives the same bits, but where
keys are rotated by how long the sequence is (longrope, dynamic scaling) and the text made it longer: that is refused before anything runs.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ster import _native
from ster.errors import InputError
from ster.generation import Settings, Step
from ster.remote.answers import Answer, refusal
from ster.remote.checks import Expected, check_choice, check_model, check_residual
from ster.remote.reading import answer_limit, read_one
from ster.remote.server import Server, completion
from ster.remote.steering import below, reached, within
from ster.remote.transport import SMALL_BYTES, Call, Transport
from ster.trace import Point

LARGEST_SEED = 2**63 - 1
TOKEN_BYTES = 4096  # of an answer, for each new token


class Written:
    """A finished text: its token ids, and the residual stream where that was asked for, `[layers, rows, hidden]`."""

    def __init__(self, text: str, ids: list[int], reason: Any, seed: int, residual: NDArray[np.float32] | None) -> None:
        self.text, self.ids, self.reason, self.seed, self.residual = text, ids, reason, seed, residual


def write(
    transport: Transport,
    server: Server,
    ids: Sequence[int],
    edits: Sequence[_native.Edit],
    vectors: Sequence[dict[str, Any]],
    settings: Settings,
    layers: Sequence[int] | None,
    point: Point,
) -> Written:
    """
    Raises:
        InputError: a setting the server does not take; rows that would be read again in another rotation.
        RemoteError, NonFiniteError: an answer that does not fit.
    """
    name = "the prompt"
    _check_settings(server, settings)
    limit = min(settings.max_new_tokens, server.context - len(ids))
    seed = _seed(settings)
    at_once = _read_at_once(server, layers, edits, point, len(ids) + limit)
    if set(layers or ()) - set(at_once):
        _check_rotation(server, len(ids), len(ids) + limit - 1)
    body = completion(
        server.id,
        ids,
        server.dialect,
        server.wire,
        layers=at_once or None,
        steering=vectors,
        **_fields(settings, limit, seed),
    )
    numbers = len(at_once) * (len(ids) + limit) * server.hidden
    answer = transport.ask(Call("/v1/completions", body, answer_limit(server, numbers, len(ids)) + limit * TOKEN_BYTES, name))
    document = answer.document()
    expected = Expected(ids, server.hidden, server.wire, limit, name, server.called)
    choice, generated = check_choice(document, expected)
    text, new, reason = choice.get("text"), choice.get("token_ids"), choice.get("finish_reason")
    if not isinstance(text, str) or reason not in ("stop", "length"):
        raise expected.misfit("it has no text, or does not say why it ended")
    if not _is_ids(new) or len(new) != generated:  # type: ignore[arg-type]
        raise expected.misfit("it does not name the tokens of its text", "vLLM does from 0.10.2 on (`return_token_ids`)")
    assert isinstance(new, list)
    if layers is None:
        return Written(text, new, reason, seed, None)
    found: dict[int, NDArray[np.float32]] = {}
    if at_once:
        found.update(zip(at_once, check_residual(document, expected, at_once, generated), strict=True))
    found.update(_read_again(transport, server, [*ids, *new[:-1]], edits, [each for each in layers if each not in found], point))
    rows = np.stack([found[layer] for layer in layers]) if layers else np.zeros((0, len(ids) + generated - 1, server.hidden), np.float32)
    return Written(text, new, reason, seed, rows)


def read_traced(
    transport: Transport, server: Server, ids: Sequence[int], edits: Sequence[_native.Edit], layers: Sequence[int], point: Point
) -> NDArray[np.float32]:
    """float32 `[layers, tokens, hidden]` of a prompt."""
    found = _read_again(transport, server, ids, edits, layers, point)
    return np.stack([found[layer] for layer in layers]) if layers else np.zeros((0, len(ids), server.hidden), np.float32)


def stream(
    transport: Transport,
    server: Server,
    ids: Sequence[int],
    edits: Sequence[_native.Edit],
    vectors: Sequence[dict[str, Any]],
    settings: Settings,
) -> Iterator[Step]:
    """Token by token, each step when the next one is there: a server may send text after its token."""
    _check_settings(server, settings)
    limit = min(settings.max_new_tokens, server.context - len(ids))
    seed = _seed(settings)
    body = completion(server.id, ids, server.dialect, server.wire, steering=vectors, **_fields(settings, limit, seed))
    call = Call("/v1/completions", {**body, "stream": True}, SMALL_BYTES + len(ids) * 1024 + limit * TOKEN_BYTES, "the prompt")
    expected = Expected(ids, server.hidden, server.wire, limit, "the prompt", server.called)
    step: Step | None = None
    count = 0
    for data in transport.events(call):
        if data == b"[DONE]":
            break
        headers = {"content-type": "text/event-stream"}
        choice = _choice_of(Answer(transport.root, call.path, 200, headers, data, call.name, transport.api_key), expected)
        if choice is None:
            continue
        new = choice.get("token_ids") or []
        if not _is_ids(new) or not isinstance(choice.get("text"), str):
            raise expected.misfit("an event does not name its tokens")
        if count + len(new) > limit:
            raise expected.misfit(f"it generated more than the {limit} tokens that were asked for")
        for token in new:
            if step is not None:
                yield step
            positions = reached(edits, len(ids) + count)
            first = 0 if not count else len(ids) + count - 1
            step = Step(token, "", None, seed, None, [[position for position in each if position >= first] for each in positions])
            count += 1
        if step is not None:
            step = replace(step, text=step.text + choice["text"], finish_reason=choice.get("finish_reason"))
        elif choice["text"]:
            raise expected.misfit("an event does not name its tokens", "vLLM does from 0.10.2 on (`return_token_ids`)")
    if step is None or step.finish_reason not in ("stop", "length"):
        raise expected.misfit("the stream ended before the text did")
    yield step


def _choice_of(answer: Answer, expected: Expected) -> dict[str, Any] | None:
    """The choice of a chunk; None: it has none, as one that only tells the usage."""
    document = answer.json()
    if not isinstance(document, dict) or document.get("error") is not None:
        raise refusal(answer)
    check_model(document, expected)
    choices = document.get("choices")
    if not choices:
        return None
    choice = choices[0] if isinstance(choices, list) else None
    if not isinstance(choice, dict):
        raise expected.misfit("an event has no choice")
    if choice.get("prompt_token_ids") not in (None, list(expected.ids)):
        raise expected.misfit("it ran other prompt tokens")
    return choice


def _fields(settings: Settings, limit: int, seed: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "max_tokens": limit,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": -1 if settings.top_k is None else settings.top_k,
        "min_p": settings.min_p,
        "repetition_penalty": settings.repetition_penalty,
        "seed": seed,
    }
    if settings.stop:
        fields["stop"] = list(settings.stop)
    return fields | ({"ignore_eos": True} if settings.ignore_eos else {})


def _check_settings(server: Server, settings: Settings) -> None:
    if settings.ignore_eos and server.dialect == "ster":
        raise InputError("`ster serve` ends a text at its end-of-text token: ignore_eos cannot be used with it")


def _seed(settings: Settings) -> int:
    seed = secrets.randbits(63) if settings.seed is None else settings.seed
    if seed > LARGEST_SEED:
        raise InputError(f"a server takes seeds up to 2^63 - 1, found {seed}")
    return seed


def _read_at_once(server: Server, layers: Sequence[int] | None, edits: Sequence[_native.Edit], point: Point, tokens: int) -> list[int]:
    """The layers that the request for the text reads too: those that have the same values before and after steering, or all after it, as
    many as an answer has room for."""
    steered = {edit.layer for edit in edits}
    same = [layer for layer in layers or () if point == "post_steer" or layer not in steered]
    cap = server.caps.get("max_capture_numbers")
    return same[: cap // (tokens * server.hidden)] if isinstance(cap, int) else same


def _check_rotation(server: Server, prompt: int, most: int) -> None:
    """most: rows that run, prompt and text together, where the text is as long as it may be.

    Raises:
        InputError: in a sequence of so many, the prompt's rows or the text's are rotated otherwise than they were when they ran.
    """
    switch, changes = (server.caps.get(f"rotation_{name}_after") for name in ("switches", "changes"))
    if isinstance(switch, int) and prompt <= switch < most:
        limit = switch
    elif isinstance(changes, int) and most > max(prompt, changes):
        limit = max(prompt, changes)
    else:
        return
    message = (
        f"with {prompt} tokens of prompt and {most - prompt + 1} of text, rows would be read again in another rotation than they ran with:"
        f" this model's changes after {limit} tokens"
    )
    why = "read after steering, or fewer layers" if server.caps.get("max_capture_numbers") else "read after steering"
    raise InputError(message, f"max_new_tokens={limit - prompt + 1} stays within it; or {why}, which needs no second reading")


def _read_again(
    transport: Transport, server: Server, ids: Sequence[int], edits: Sequence[_native.Edit], layers: Sequence[int], point: Point
) -> dict[int, NDArray[np.float32]]:
    """Layer -> float32 `[tokens, hidden]` of ids that run as a prompt."""
    name = "the text"
    steered = {edit.layer for edit in edits} if point == "pre_steer" else set()
    plain = [layer for layer in layers if layer not in steered]
    found: dict[int, NDArray[np.float32]] = {}
    if plain:
        found.update(zip(plain, read_one(transport, server, ids, plain, within(edits, len(ids)), name), strict=True))
    for layer in layers:
        if layer in steered:
            found[layer] = read_one(transport, server, ids, [layer], below(within(edits, len(ids)), layer), name)[0]
    return found


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value)

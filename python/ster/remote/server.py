"""What a server is: which dialect it speaks, which model it serves, of which sizes. Asked once, when a connection is made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from ster.errors import InputError, RemoteError
from ster.remote.answers import Answer, printable
from ster.remote.checks import Expected, check_choice, check_facts, check_residual, read_probe
from ster.remote.transport import Call, Transport
from ster.server.settings import WireDtype

Dialect = Literal["ster", "vllm-lens"]
PRECISIONS: Mapping[WireDtype, str] = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
LIST_BYTES = 16 << 20  # of a list of models
PROBE_BYTES = 1 << 30
LOOSE = 2.0**-3  # of a row: kernels of other shapes round otherwise, layer after layer
TEMPLATE_PROBE = [{"role": "user", "content": "a"}]


@dataclass(frozen=True)
class Server:
    """id: what requests call the model; name: its checkpoint's name. wire: how activations travel. caps: as the server lists them.

    precision: of the weights as `ster serve` says; for vLLM the dtype of its activations. chats: the model has a chat template.
    called: what answers call the model; None: the first one did not.
    """

    dialect: Dialect
    id: str
    name: str
    layers: int
    hidden: int
    context: int
    wire: WireDtype
    precision: str
    chats: bool
    revision: str | None = None
    vocabulary: int | None = None
    bos_id: int | None = None
    unknown_id: int | None = None
    config_hash: str | None = None
    tokenizer_hash: str | None = None
    called: str | None = None
    caps: Mapping[str, Any] = field(default_factory=dict)


def find_server(transport: Transport, model: str | None, wire: WireDtype | None) -> Server:
    """model: its id; None: the server's first one. wire: how activations shall travel; None: exactly, where the server can.

    Raises:
        RemoteError: the server cannot be reached, or refuses. InputError: it has no such model, or does not send that dtype.
    """
    entries = _entries(transport)
    if not entries:
        raise RemoteError(f"{transport.root} lists no models", "is it an OpenAI-compatible server?")
    entry = next((each for each in entries if model in (None, each["id"], each.get("served_model_name"))), None)
    if entry is None:
        raise InputError(f"{transport.root} has no model {model}", f"it has {printable(', '.join(each['id'] for each in entries[:20]))}")
    if entry.get("owned_by") == "ster":
        return _of_ster(transport, entry, wire)
    return _of_vllm(transport, entry, wire)


def find_entry(transport: Transport, id: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What `ster serve` lists of a loaded model, and its capabilities.

    Raises:
        RemoteError: it has no such model, or does not say what it can do.
    """
    entry = next((each for each in _entries(transport) if each["id"] == id), None)
    caps = None if entry is None else entry.get("capabilities")
    if entry is None or not isinstance(caps, dict):
        raise RemoteError(f"{transport.root} does not say what the model {printable(id)} can do")
    return entry, caps


def _entries(transport: Transport) -> list[dict[str, Any]]:
    found = transport.ask(Call("/v1/models", limit=LIST_BYTES)).document().get("data")
    return [each for each in (found if isinstance(found, list) else ()) if isinstance(each, dict) and isinstance(each.get("id"), str)]


def _of_ster(transport: Transport, entry: Mapping[str, Any], wire: WireDtype | None) -> Server:
    if entry.get("status") == "failed":
        raise RemoteError(f"the model {printable(entry['id'])} failed to load; the server's log has the cause")
    caps = entry.get("capabilities")
    if not isinstance(caps, dict):  # a request waits until it is loaded
        transport.ask(Call("/tokenize", {"model": entry["id"], "prompt": "a"})).document()
        entry, caps = find_entry(transport, entry["id"])
    check_facts(transport.root, {**caps, "served_model_name": entry.get("served_model_name")})
    asked = wire or "float32"
    if asked not in caps.get("activation_dtypes", ()):
        raise InputError(f"the server does not send activations as {asked}", f"it sends {', '.join(caps.get('activation_dtypes', ()))}")
    return Server(
        "ster",
        entry["id"],
        entry["served_model_name"],
        caps["n_layers"],
        caps["hidden_size"],
        caps["max_model_len"],
        asked,
        caps["precision"],
        caps["chat_template"],
        revision=caps.get("revision"),
        vocabulary=caps["vocab_size"],
        bos_id=caps.get("bos_token_id"),
        unknown_id=caps.get("unknown_token_id"),
        config_hash=caps.get("config_hash"),
        tokenizer_hash=caps.get("tokenizer_hash"),
        called=entry["served_model_name"],
        caps=caps,
    )


def _of_vllm(transport: Transport, entry: Mapping[str, Any], wire: WireDtype | None) -> Server:
    """Sizes are those of the activations of one token. Which layer is which is seen by asking for the first and the last alone."""
    id = entry["id"]
    tokenized = transport.ask(Call("/tokenize", {"model": id, "prompt": "a"})).document()
    plain = transport.ask(Call("/tokenize", {"model": id, "prompt": "a", "add_special_tokens": False})).document()
    ids, bare = token_ids(tokenized, "a"), token_ids(plain, "a")
    root = entry.get("root")
    context = entry.get("max_model_len") or tokenized.get("max_model_len")
    if not isinstance(context, int):
        raise RemoteError(f"{transport.root} does not say how long the context of {id} is")
    expected = Expected(ids[:1], 0)
    document = transport.ask(Call("/v1/completions", completion(id, ids[:1], "vllm-lens", None, layers=True), limit=PROBE_BYTES)).document()
    check_choice(document, expected)
    whole, found = read_probe(document, expected)
    if wire not in (None, found):
        raise InputError(f"the server sends activations as {found}, and {wire} was asked for", "leave out `--wire-dtype`")
    layers, _, hidden = whole.shape
    called = document.get("model") if isinstance(document.get("model"), str) else None
    expected = Expected(ids[:1], hidden, found, called=called)
    ends = sorted({0, layers - 1})
    document = transport.ask(Call("/v1/completions", completion(id, ids[:1], "vllm-lens", None, layers=ends))).document()
    check_choice(document, expected)
    some = check_residual(document, expected, ends, 1)
    for row, layer in zip(some[:, 0], ends, strict=True):
        if int(np.argmin(np.abs(whole[:, 0] - row).sum(axis=1))) != layer:
            raise RemoteError(f"{transport.root} answers layers in another order than they are asked for")
    _check_rows(transport, id, ids, Expected((), hidden, found, called=called), layers)
    return Server(
        "vllm-lens",
        id,
        _name(root if isinstance(root, str) and root else id),
        layers,
        hidden,
        context,
        found,
        PRECISIONS[found],
        _has_template(transport, id),
        bos_id=ids[0] if len(ids) > 1 and ids[1:] == bare else None,
        called=called,
    )


def _check_rows(transport: Transport, id: str, known: Sequence[int], expected: Expected, layers: int) -> None:
    """Six different tokens, and the first three of them alone: each row is its token's, and no other's.

    Raises:
        RemoteError: rows that are zero, or equal, or in another place.
    """
    tokens = list(dict.fromkeys([*known, *range(3, 9)]))[:6]
    found = []
    for ids in (tokens, tokens[:3]):
        document = transport.ask(
            Call("/v1/completions", completion(id, ids, "vllm-lens", None, layers=list(range(layers))), limit=PROBE_BYTES)
        ).document()
        asked = replace(expected, ids=ids)
        _, generated = check_choice(document, asked)
        found.append(check_residual(document, asked, range(layers), generated).astype(np.float64))
    whole, some = found
    for layer in range(layers):
        apart = np.linalg.norm(some[layer][:, None] - whole[layer][None], axis=2)  # [3, 6]
        sizes = np.linalg.norm(some[layer], axis=1)
        equal = any(np.array_equal(a, b) for n, a in enumerate(whole[layer]) for b in whole[layer][:n])
        at_home = apart[np.arange(3), np.arange(3)]
        if equal or not sizes.all() or (apart.argmin(axis=1) != np.arange(3)).any() or (at_home > sizes * LOOSE).any():
            message = f"{transport.root} answers rows that are not their tokens': layer {layer} of three tokens is not that of six"
            raise RemoteError(message, "on vLLM: what does the server's log say of vllm-lens's hooks?")


def _name(root: str) -> str:
    """A folder by its own name, as a local model is called; a model of the Hub as it is."""
    return root.rstrip("/").rpartition("/")[2] if root.startswith((".", "/", "~")) else root


def _has_template(transport: Transport, id: str) -> bool:
    """vLLM refuses messages where there is no template."""
    answer: Answer = transport.ask(Call("/tokenize", {"model": id, "messages": TEMPLATE_PROBE}))
    if answer.status == 400:
        return False
    answer.document()
    return True


def token_ids(document: Mapping[str, Any], what: str) -> list[int]:
    """Of an answer of `/tokenize`.

    Raises:
        RemoteError: no list of ids.
    """
    ids = document.get("tokens")
    if not isinstance(ids, list) or not all(isinstance(id, int) and not isinstance(id, bool) and id >= 0 for id in ids):
        raise RemoteError(f"the server's tokens of {what} are no list of ids")
    return ids


def completion(
    id: str,
    ids: Sequence[int],
    dialect: Dialect,
    wire: WireDtype | None,
    *,
    layers: Sequence[int] | bool | None = None,
    steering: Sequence[Mapping[str, Any]] = (),
    **fields: Any,
) -> dict[str, Any]:
    """The body of a request for one choice; left out, one greedy token. vllm-lens takes the two activation fields as JSON texts."""
    extras: dict[str, Any] = {}
    if layers is not None:
        extras["output_residual_stream"] = layers if isinstance(layers, bool) else list(layers)
    if steering:
        extras["apply_steering_vectors"] = list(steering)
    body: dict[str, Any] = {"model": id, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "return_token_ids": True, **fields}
    if dialect == "ster":
        return body | extras | ({"activation_dtype": wire} if layers is not None and wire is not None else {})
    return body | ({"vllm_xargs": {name: json.dumps(value) for name, value in extras.items()}} if extras else {})

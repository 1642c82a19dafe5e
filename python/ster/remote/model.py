"""A model behind a server, which answers whatever `ster.Model` answers, as far as a server tells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from ster import _native
from ster.abstract_model import AbstractModel, Edits
from ster.chat import Message
from ster.errors import ContextError, InputError, RemoteError, TokenError
from ster.generation import Generation, Settings, Step
from ster.likelihood import Damage, SideLikelihoods, Variant
from ster.progress import Progress, Report
from ster.prompts import at, check_prompt, check_text
from ster.readable import Keep
from ster.remote import generation, likelihood, reading
from ster.remote.server import Server, find_entry
from ster.remote.steering import reached, steering_vectors
from ster.remote.tokens import Asked, OwnTokens, ServerTokens
from ster.remote.transport import Call, Transport
from ster.sides import PairTokens
from ster.trace import Point, Trace

ROUNDING = {"bfloat16": "2^-8 relative", "float16": "2^-11 relative, 2^-25 absolute"}
"""How far a number is from its nearest one in the dtype: half of the last place, of 8 and of 11 significant bits."""


class RemoteModel(AbstractModel):
    """Made by `ster.connect`. Use it in a `with`, or call `close` when it is done with.

    server: what the server said of itself. wire_dtype: how activations travel; `wire` is empty where that is exact.
    """

    def __init__(self, transport: Transport, server: Server, tokens: ServerTokens | OwnTokens, chat: bool | None) -> None:
        """chat: whether there is a template; None: it is switched off."""
        super().__init__()
        self.server = server
        self._transport = transport
        self._tokens = tokens
        self.chat_template = "off" if chat is None else "applied" if chat else "absent"
        self._weights_hash: str | None = None
        self._seen: set[int] = set(range(server.layers)) if server.dialect == "ster" else set()  # vllm-lens leaves out what fails

    def close(self) -> None:
        """Cancel what is under way, and let go of the connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        where = f"at {self._transport.root} ({self.server.dialect})"
        return (
            f"<ster.RemoteModel {self.name} {where}: {self.layer_count} layers, hidden {self.hidden_size}, {self.wire_dtype} on the wire>"
        )

    @property
    def name(self) -> str:
        """The checkpoint's name, as the server says it."""
        return self.server.name

    @property
    def revision(self) -> str | None:
        return self.server.revision

    @property
    def layer_count(self) -> int:
        return self.server.layers

    @property
    def hidden_size(self) -> int:
        return self.server.hidden

    @property
    def context_length(self) -> int:
        return self.server.context

    @property
    def precision(self) -> str:
        """Dtypes of the weights; of vLLM the dtype that it computes in."""
        return self.server.precision

    @property
    def wire_dtype(self) -> str:
        return self.server.wire

    @property
    def wire(self) -> Mapping[str, str]:
        if self.server.wire == "float32":
            return {}
        return {"wire_dtype": self.server.wire, "wire_rounding": ROUNDING[self.server.wire]}

    @property
    def unknown_id(self) -> int | None:
        return self._tokens.unknown_id

    @property
    def bos_id(self) -> int | None:
        return self.server.bos_id

    @property
    def config_hash(self) -> str | None:
        return self.server.config_hash

    @property
    def tokenizer_hash(self) -> str | None:
        return self.server.tokenizer_hash

    def hash_weights(self, progress: Progress = None) -> str | None:
        """`ster serve` makes it, once; vLLM has none."""
        if self._weights_hash is None and self.server.dialect == "ster":
            self._weights_hash = self._ask_hash()
        return self._weights_hash

    def check_same(self) -> None:
        """Whether `ster serve` still has the weights, the config and the tokenizer it had: two short requests, once the hash is made there.
        Of vLLM, its answers' name is all that tells, and each is looked at."""
        if self.server.dialect != "ster":
            return
        weights = self._ask_hash()  # it loads a model that was not, and then the list tells of it
        entry, caps = find_entry(self._transport, self.server.id)
        found = {"weights": weights, "config": caps.get("config_hash"), "tokenizer": caps.get("tokenizer_hash")}
        known = {"weights": self.hash_weights(), "config": self.config_hash, "tokenizer": self.tokenizer_hash}
        others = [what for what in known if found[what] != known[what]]
        if others or entry.get("served_model_name") != self.name:
            what = f"its {others[0]} changed" if others else f"it is {entry.get('served_model_name')}, and was {self.name}"
            message = f"{self._transport.root} has another model now behind the name {self.server.id}: {what}"
            raise RemoteError(message, "what was read since is of no use; connect again, and begin again")

    def _ask_hash(self) -> str:
        found = self._transport.ask(Call(f"/v1/models/{quote(self.server.id)}/weights_hash")).document().get("weights_hash")
        if not isinstance(found, str):
            raise RemoteError("the server's weights_hash is no text")
        return found

    # Tokens

    def encode(self, text: str) -> list[int]:
        """Raw text -> ids, with the special tokens the tokenizer adds. No chat template."""
        return next(self._tokens.ids([(check_prompt(text), False, None)]))

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text; special tokens are left out by a tokenizer of this process, and shown by a server."""
        return self._tokens.decode(ids)

    def tokenise(self, prompts: Iterable[tuple[str | Sequence[Message], str | None]]) -> Iterator[list[int]]:
        """See `AbstractModel.tokenise`. Where the server makes the tokens, several requests are under way."""
        names: list[str | None] = []

        def asked() -> Iterator[Asked]:
            for prompt, name in prompts:
                names.append(name)
                yield self._asked(prompt, isinstance(prompt, str), name)

        for ids in self._tokens.ids(asked()):
            self._check_tokens(ids, names.pop(0))
            yield ids

    def _asked(self, prompt: str | Sequence[Message], opened: bool, name: str | None) -> Asked:
        if isinstance(prompt, str):
            return ([{"role": "user", "content": prompt}] if self.chat_template == "applied" else prompt), True, name
        if self.chat_template != "applied":
            why = "is switched off" if self.chat_template == "off" else "the server's model does not have"
            raise InputError(f"chat messages need a chat template, which {why}{at(name)}")
        for message in prompt:
            for text in message.values():
                if isinstance(text, str):
                    check_text(text, name or "a message")
        return prompt, opened, name

    def _chat_tokens(self, messages: Sequence[Message], add_generation_prompt: bool | None, name: str | None) -> list[int]:
        ids = next(self._tokens.ids([self._asked(messages, bool(add_generation_prompt), name)]))
        self._check_tokens(ids, name)
        return ids

    def _check_tokens(self, ids: Sequence[int], name: str | None) -> None:
        if not ids:
            raise TokenError("tokenizer produced no tokens" + at(name))
        limit = self.context_length
        if len(ids) >= limit:
            raise ContextError(f"prompt contains {len(ids)} tokens, model context allows fewer than {limit}{at(name)}")
        size = self.server.vocabulary or 1 << 31
        for position, token in enumerate(ids):
            if not 0 <= token < size:
                place = f"token id {token} at position {position} of {name or 'the prompt'}"
                raise TokenError(f"{place} is outside the embedding's 0..{size - 1} range")

    # Activations

    def read(
        self,
        prompts: Sequence[Sequence[int]],
        names: Sequence[str],
        layers: Sequence[int],
        rows: Literal["last", "all"],
        keep: Keep,
        *,
        progress: Progress = None,
    ) -> None:
        """See `ster.readable.Readable.read`."""
        reading.read(self._transport, self.server, prompts, names, layers, rows, keep, progress=progress)

    def _trace(self, ids: list[int], edits: Edits, layers: list[int], point: Point, logits: bool) -> Trace:
        if logits:
            raise InputError("a server does not tell logits", "`ster.evaluate` works with the log-probabilities that it does tell")
        self._check_edits(edits)
        self._vectors(edits)
        residual = generation.read_traced(self._transport, self.server, ids, edits, layers, point)
        return Trace(ids, self._tokens.pieces(ids), layers, residual, None, point, reached(edits, len(ids)))

    # Text

    def _generate(self, ids: list[int], edits: Edits, settings: Settings, layers: list[int] | None, point: Point) -> Generation:
        vectors = self._vectors(edits)
        found = generation.write(self._transport, self.server, ids, edits, vectors, settings, layers, point)
        ran = [*ids, *found.ids[:-1]]
        steered = reached(edits, len(ran))
        trace = None
        if found.residual is not None:
            trace = Trace(ran, self._tokens.pieces(ran), layers or [], found.residual, None, point, steered)
        return Generation(found.text, found.ids, found.reason, ids, found.seed, trace, steered)

    def _stream(self, ids: list[int], edits: Edits, settings: Settings, layers: list[int] | None, point: Point) -> Iterator[Step]:
        if layers is not None:
            raise InputError("a server sends activations when the text has ended, not with its tokens", "`generate` reads them")
        return generation.stream(self._transport, self.server, ids, edits, self._vectors(edits), settings)

    # Likelihoods

    def side_likelihoods(self, pairs: Sequence[PairTokens], variants: Sequence[Variant], report: Report) -> SideLikelihoods:
        for _, edits in variants:
            self._vectors(edits)
        return likelihood.side_likelihoods(self._transport, self.server, pairs, variants, report)

    def damage(self, texts: Sequence[Sequence[int]], variants: Sequence[Variant], report: Report) -> Damage:
        return likelihood.damage(self._transport, self.server, texts, variants, report)

    # Steering

    def _vectors(self, edits: Edits) -> list[dict[str, Any]]:
        """The edits as the wire has them, to a server that was seen to steer.

        Raises:
            SteeringError: what the server does not take. RemoteError: it does not steer.
        """
        vectors = steering_vectors(edits, self.server.caps)
        for edit in edits:
            if edit.layer not in self._seen:
                self._see_it_steer(edit.layer)
                self._seen.add(edit.layer)
        return vectors

    def _see_it_steer(self, layer: int) -> None:
        """vllm-lens answers a steer that failed like one that had no effect: so ones of known effect are read first, at each
        layer once: on all of three tokens, and on the one between."""
        ids = next(self._tokens.ids([("a", False, None)]))[:1] * 3

        def read(edits: Edits) -> NDArray[np.float32]:
            found = reading.read_one(self._transport, self.server, ids, [layer], edits, "the steering's check")
            return np.asarray(found[0])

        vector = np.full((1, self.hidden_size), 1.0, np.float32)
        before = read([_native.Edit(layer, vector, scale=0.0)])
        vector *= max(1.0, float(np.abs(before).max()))  # far above what rounding hides
        everywhere = read([_native.Edit(layer, vector)]) - before
        between = read([_native.Edit(layer, vector, positions=[1])]) - before
        off = max(np.abs(everywhere - vector).max(), np.abs(between - vector * np.array([[0.0], [1.0], [0.0]])).max())
        if not off <= vector[0, 0] * 2**-5:
            message = f"{self._transport.root} does not steer: a vector added at layer {layer} did not move what is read there by itself"
            raise RemoteError(message, "on vLLM: is vllm-lens installed, and what does the server's log say of its hooks?")

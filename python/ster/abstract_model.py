"""What a model in this process and one behind a server have in common: everything but the passes and the tokens."""

from __future__ import annotations

import contextlib
import operator
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, SupportsIndex, cast, overload

import numpy as np
from numpy.typing import NDArray

from ster import _native
from ster.artifacts import ActivationArtifact, Position, Provenance, TokenActivations
from ster.chat import Message
from ster.edits import HasEdits, Steering, check_reach, list_edits, steering_parts
from ster.errors import InputError, LayerError, SteeringError, SterWarning
from ster.generation import Generation, Settings, Step, stop_strings
from ster.layers import Layers, parse_layers
from ster.pairs import Side
from ster.progress import Progress, Report
from ster.prompts import check_prompt, check_prompts, kind, name_of
from ster.readable import Keep
from ster.steering import Steering as Plan
from ster.steering_artifact import PAIRS_HASH, TOKENIZER_HASH, WEIGHTS_HASH, SteeringArtifact
from ster.trace import Point, Trace

if TYPE_CHECKING:
    from ster.likelihood import Damage, SideLikelihoods, Variant
    from ster.sides import PairTokens

Prompt = str | Sequence[int] | Sequence[Message]
Edits = Sequence[_native.Edit]


class AbstractModel(ABC):
    """`ster.Model` and `ster.RemoteModel`. What takes one takes the other.

    chat_template: whether prompts go through one: "applied"; or "absent" or switched "off".
    """

    chat_template: Literal["applied", "absent", "off"]

    def __init__(self) -> None:
        self._warned: set[tuple[str | None, ...]] = set()  # of which artifact, of what

    # Facts

    @property
    @abstractmethod
    def name(self) -> str:
        """The checkpoint's."""

    @property
    @abstractmethod
    def revision(self) -> str | None:
        """The commit, where that is known."""

    @property
    @abstractmethod
    def layer_count(self) -> int: ...

    @property
    @abstractmethod
    def hidden_size(self) -> int: ...

    @property
    @abstractmethod
    def context_length(self) -> int:
        """A prompt must have fewer tokens than this."""

    @property
    @abstractmethod
    def precision(self) -> str:
        """Dtypes of the weights."""

    @property
    @abstractmethod
    def unknown_id(self) -> int | None:
        """The id that stands for what the vocabulary has no word for, where there is one."""

    @property
    @abstractmethod
    def bos_id(self) -> int | None:
        """What raw text begins with, where there is one."""

    @property
    @abstractmethod
    def config_hash(self) -> str | None:
        """SHA-256 over the config; None where it is not known."""

    @property
    @abstractmethod
    def tokenizer_hash(self) -> str | None:
        """SHA-256 over the tokenizer and the chat template; None where it is not known."""

    @abstractmethod
    def hash_weights(self, progress: Progress = None) -> str | None:
        """SHA-256 over every weight; None where it is not known. Saying how far it is: a model of 16 GB takes some seconds."""

    @abstractmethod
    def check_same(self) -> None:
        """Before activations are read and before what is made of them is written.

        Raises:
            RemoteError: another model answers than at the first call.
        """

    @property
    def adds_special_tokens(self) -> bool:
        """Whether a prompt gets the tokenizer's own, such as BOS; where there is a chat template, it is the template that has them."""
        return self.chat_template != "applied"

    @property
    def wire(self) -> Mapping[str, str]:
        """What activations lost on their way here, for the metadata of what is made of them; empty where every bit arrives."""
        return {}

    # What each does in its own way

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Raw text -> ids, with the special tokens the tokenizer adds. No chat template."""

    @abstractmethod
    def tokenise(self, prompts: Iterable[tuple[str | Sequence[Message], str | None]]) -> Iterator[list[int]]:
        """Of each (prompt, name for refusals) the ids that run, checked, in order; asks for prompts a few ahead at most.

        A text is one user turn where the chat template is applied, and raw text otherwise. Messages go through the template as they
        stand: nothing is added that opens a turn of the assistant.

        Raises:
            InputError: messages without a template, or a template that refused. TokenError, ContextError: ids that cannot run.
        """

    @abstractmethod
    def _chat_tokens(self, messages: Sequence[Message], add_generation_prompt: bool | None, name: str | None) -> list[int]: ...

    @abstractmethod
    def _check_tokens(self, ids: Sequence[int], name: str | None) -> None:
        """
        Raises:
            TokenError: no tokens, or an id the embedding has no row for.
            ContextError: too many tokens.
        """

    @abstractmethod
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
        """The passes behind every activation; see `ster.readable.Readable.read`."""

    @abstractmethod
    def _trace(self, ids: list[int], edits: Edits, layers: list[int], point: Point, logits: bool) -> Trace: ...

    @abstractmethod
    def _generate(self, ids: list[int], edits: Edits, settings: Settings, layers: list[int] | None, point: Point) -> Generation: ...

    @abstractmethod
    def _stream(self, ids: list[int], edits: Edits, settings: Settings, layers: list[int] | None, point: Point) -> Iterator[Step]: ...

    @abstractmethod
    def side_likelihoods(self, pairs: Sequence[PairTokens], variants: Sequence[Variant], report: Report) -> SideLikelihoods:
        """See `ster.likelihood.side_likelihoods`."""

    @abstractmethod
    def damage(self, texts: Sequence[Sequence[int]], variants: Sequence[Variant], report: Report) -> Damage:
        """See `ster.likelihood.damage`; without `kl` where whole distributions cannot be had."""

    # Tokens

    def prompt_tokens(self, prompt: str) -> list[int]:
        """The ids that run for `prompt`: through the chat template when `chat_template` is "applied", as raw text otherwise."""
        ids = self.checked_tokens(check_prompt(prompt), None)
        self._warn_of_two_bos(["the prompt"] if self.has_two_bos(ids) else [])
        return ids

    def checked_tokens(self, prompt: str, name: str | None) -> list[int]:
        """`prompt` -> ids that can run; `name` says which prompt it is, in refusals."""
        return next(self.tokenise([(prompt, name)]))

    def chat_tokens(self, messages: Sequence[Message], *, add_generation_prompt: bool | None = None) -> list[int]:
        """The ids of a conversation, through the chat template.

        add_generation_prompt: end with the marker that opens the assistant's turn. None: yes, unless the last message is the
        assistant's own.

        Raises:
            InputError: the model has no template, or it is switched off; or the template refused.
        """
        ids = self._chat_tokens(messages, opens_turn(messages, add_generation_prompt), None)
        self._warn_of_two_bos(["the prompt"] if self.has_two_bos(ids) else [])
        return ids

    def side_tokens(self, sides: Sequence[Side], names: Sequence[str]) -> list[list[int]]:
        """The ids that run for each side of a pair set; `names` say which it is, in refusals.

        A text is a prompt like any other (see `prompt_tokens`). Messages go through the template as they stand: nothing is added that
        opens a turn of the assistant, so the last token is the template's own end of the last message.

        Raises:
            InputError: as in `prompt_tokens` and `chat_tokens`.
        """
        prompts = ((check_prompt(side, name) if isinstance(side, str) else side, name) for side, name in zip(sides, names, strict=True))
        ids = list(self.tokenise(prompts))
        self._warn_of_two_bos([name for each, name in zip(ids, names, strict=True) if self.has_two_bos(each)])
        return ids

    def has_two_bos(self, ids: Sequence[int]) -> bool:
        """Whether `ids` begin with two; the one that the user typed is kept, so it is theirs to remove."""
        return self.bos_id is not None and list(ids[:2]) == [self.bos_id] * 2

    @staticmethod
    def _warn_of_two_bos(names: Sequence[str]) -> None:
        """A BOS that the user typed is kept, so this one is theirs to remove."""
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            warnings.warn(f"{names[0]}{more}: two BOS tokens at the start, one of them from the text", SterWarning, stacklevel=3)

    # Artifacts

    def check_artifact(self, artifact: SteeringArtifact, *, progress: Progress = None) -> None:
        """Refuse an artifact of another model; warn of another chat template, precision or tokenizer.

        `generate`, `stream` and `trace` do this for every artifact that their steering comes from, and `ster.evaluate` for its own; they
        warn once of each. An artifact that names the weights it was trained on makes this model's be hashed, once, which reads all of
        them (see `ster.fingerprint` for how long that takes); others are known by name. See `SteeringArtifact.check_model`.

        Raises:
            ArtifactError, LayerError
        """
        for warning in self._artifact_warnings(artifact, progress):
            self._warned.add(_subject(artifact, warning))
            warnings.warn(warning, SterWarning, stacklevel=2)

    def _artifact_warnings(self, artifact: SteeringArtifact, progress: Progress = None) -> list[str]:
        return artifact.check_model(
            self.name,
            self.hidden_size,
            self.layer_count,
            weights_hash=self.hash_weights(progress) if WEIGHTS_HASH in artifact.metadata else None,
            tokenizer_hash=self.tokenizer_hash if TOKENIZER_HASH in artifact.metadata else None,
            model_revision=self.revision,
            precision=self.precision,
            chat_template=self.chat_template,
        )

    # Activations

    @overload
    def activations(
        self,
        prompts: Iterable[str],
        layers: Layers = "all",
        *,
        position: Literal["last", "mean"] = "last",
        progress: Progress = None,
    ) -> ActivationArtifact: ...

    @overload
    def activations(
        self,
        prompts: Iterable[str],
        layers: Layers = "all",
        *,
        position: Literal["all"],
        progress: Progress = None,
    ) -> TokenActivations: ...

    @overload
    def activations(
        self,
        prompts: Iterable[str],
        layers: Layers = "all",
        *,
        position: Position,
        progress: Progress = None,
    ) -> ActivationArtifact | TokenActivations: ...

    def activations(
        self,
        prompts: Iterable[str],
        layers: Layers = "all",
        *,
        position: Position = "last",
        progress: Progress = None,
    ) -> ActivationArtifact | TokenActivations:
        """The residual stream after every chosen block, for every prompt.

        A prompt's values are bit for bit the same whatever other prompts stand beside it. All prompts are checked before the first
        one runs; equal ones run once.

        Args:
            prompts: texts, each one user turn or raw text (see `chat_template`).
            layers: `"all"`, `5`, `"8..16"`, `[0, 3]`, ...; see `ster.layers`.
            position: `last` token, `mean` over the prompt's tokens (summed in float64, rounded once), or `all` tokens.
            progress: True for a bar on stderr, or a function called with (done, total) prompts.

        Returns:
            `.values` float32 `[prompts, layers, hidden]`, in the order of `prompts`; for `all` a list of `[layers, tokens, hidden]`.

        Raises:
            InputError: a prompt, layer or token that cannot be used, by its index.
            NonFiniteError: NaN or infinity in the model, by layer, token and prompt.
            KeyboardInterrupt: within a second of Ctrl-C.
        """
        check_choice("position", position, ("last", "mean", "all"))
        texts = check_prompts(prompts)
        chosen = parse_layers(layers, self.layer_count)
        names = [name_of(text, index) for index, text in enumerate(texts)]
        first = dict(zip(reversed(texts), reversed(names), strict=True))  # an equal one's first name
        unique = dict.fromkeys(texts)
        by_text = dict(zip(unique, self.tokenise((text, first[text]) for text in unique), strict=True))
        self._warn_of_two_bos([names[texts.index(text)] for text, ids in by_text.items() if self.has_two_bos(ids)])
        token_ids = [list(by_text[text]) for text in texts]
        source = Provenance(self.name, self.revision, self.chat_template, self.precision, self.wire)
        if position == "all":
            ragged = [np.empty((0, 0, 0), np.float32)] * len(texts)
            self.read(token_ids, names, chosen, "all", ragged.__setitem__, progress=progress)
            given: set[int] = set()
            for index, values in enumerate(ragged):  # equal prompts ran once; changing the values of one must not change another's
                if id(values) in given:
                    ragged[index] = values.copy()
                given.add(id(values))
            return TokenActivations(ragged, token_ids, chosen, texts, source)
        if position == "last":
            values = self.last_rows(token_ids, chosen, names, progress=progress)
        else:
            values = np.empty((len(texts), len(chosen), self.hidden_size), np.float32)
            # Row after row in float64: the order of the sum is the prompt's own.
            mean = lambda prompt, residual: values.__setitem__(prompt, residual.mean(axis=1, dtype=np.float64))  # noqa: E731
            self.read(token_ids, names, chosen, "all", mean, progress=progress)
        return ActivationArtifact(values, chosen, texts, source, position)

    def last_rows(
        self, token_ids: Sequence[Sequence[int]], layers: Sequence[int], names: Sequence[str], *, progress: Progress = None
    ) -> NDArray[np.float32]:
        """The last token's residual stream, float32 `[sequences, layers, hidden]`, of checked ids; `names` for refusals."""
        values = np.empty((len(token_ids), len(layers), self.hidden_size), np.float32)
        keep = lambda index, residual: values.__setitem__(index, residual[:, 0])  # noqa: E731
        self.read(token_ids, names, layers, "last", keep, progress=progress)
        return values

    def trace(
        self,
        prompt: str | Sequence[int],
        layers: Layers | None = "all",
        *,
        steering: Steering = None,
        point: Point = "pre_steer",
        logits: bool = False,
    ) -> Trace:
        """Every token's residual stream for one prompt, steered or not.

        NOTE: reads a block BEFORE what steering adds there (`pre_steer`); `generate` reads AFTER it. Say `point=` when comparing the two.

        Args:
            prompt: text (see `chat_template`), or token ids, which run as they are.
            layers: as in `activations`; None captures nothing, for logits alone.
            steering: see `ster.steer`; an artifact, an `Edit`, anything with `.edits()`, or several. The prompt's rows are all there are.
            point: read before or after what `steering` adds at the same layer. Without an edit there the two are equal.
            logits: also return `[tokens, vocab]`.

        Raises:
            InputError, NonFiniteError: as in `activations`. SteeringError: an edit that cannot be applied.
            ArtifactError: steering by an artifact of another model.
        """
        check_choice("point", point, ("pre_steer", "post_steer"))
        ids = self._ids_of(prompt)
        parts = steering_parts(steering)
        self._check_sources(parts, stacklevel=3)
        edits = list_edits(parts, rows=len(ids), prompt=len(ids))
        check_reach(edits, len(ids) - 1, f"the prompt has {len(ids)} tokens")
        chosen = [] if layers is None else parse_layers(layers, self.layer_count)
        return self._trace(ids, edits, chosen, point, logits)

    def _ids_of(self, prompt: Prompt) -> list[int]:
        """Text and messages through the template, token ids as they are; checked."""
        if isinstance(prompt, str):
            return self.prompt_tokens(prompt)
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
            raise InputError(f"the prompt must be text, messages or token ids, found {kind(prompt)}")
        items = list(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            return self.chat_tokens(cast("list[Message]", items))
        ids = [_token_id(token) for token in items]
        self._check_tokens(ids, None)
        return ids

    # Text

    def generate(
        self,
        prompt: Prompt,
        steering: Steering = None,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
        layers: Layers | None = None,
        point: Point = "post_steer",
    ) -> Generation:
        """Continue a prompt, steered or not.

        NOTE: `layers` are read AFTER what steering adds there (`post_steer`); `trace` reads BEFORE it. Say `point=` when comparing the two.

        Args:
            prompt: text (see `chat_template`), chat messages, or token ids, which run as they are.
            steering: see `ster.steer`; an artifact means `artifact.at()`. It reaches every row that runs, the prompt and every generated
                token but the last, unless it names positions.
            temperature: 0 takes the likeliest token each time; above, tokens are drawn from softmax(logits / temperature).
            top_p, top_k, min_p, repetition_penalty: see `ster._native.sample`.
            seed: the same seed gives the same text on every machine. None: a random one, which the result names.
            stop: texts that end the generation; they are cut off.
            ignore_eos: go on past end-of-text tokens.
            layers: also capture these blocks, at `point`, for every row that ran.

        Raises:
            InputError: a prompt, setting or layer that cannot be used. SteeringError: an edit no pass of this request reaches.
            ArtifactError: steering by an artifact of another model.
            NonFiniteError: as in `activations`. KeyboardInterrupt: within a second of Ctrl-C.
        """
        settings = Settings(max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, stop_strings(stop), ignore_eos)
        return self._generate(*self._start(prompt, steering, settings, layers, point))

    def stream(
        self,
        prompt: Prompt,
        steering: Steering = None,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
        layers: Layers | None = None,
        point: Point = "post_steer",
    ) -> Iterator[Step]:
        """`generate`, token by token. The texts of the steps, joined, are the text of `generate`. Refusals come from the call itself."""
        settings = Settings(max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, stop_strings(stop), ignore_eos)
        return self._stream(*self._start(prompt, steering, settings, layers, point))

    def _start(
        self, prompt: Prompt, steering: Steering, settings: Settings, layers: Layers | None, point: Point
    ) -> tuple[list[int], list[_native.Edit], Settings, list[int] | None, Point]:
        check_choice("point", point, ("pre_steer", "post_steer"))
        ids = self._ids_of(prompt)
        parts = steering_parts(steering)
        self._check_sources(parts, stacklevel=4)
        new = min(settings.max_new_tokens, self.context_length - len(ids))
        edits = list_edits(parts, rows=len(ids) + new - 1, prompt=len(ids))
        check_reach(
            edits,
            len(ids) + new - 2,
            f"the prompt has {len(ids)} tokens, {new} are generated, and the last generated token never runs through the model",
        )
        self._check_edits(edits)
        return ids, edits, settings, None if layers is None else parse_layers(layers, self.layer_count), point

    def _check_sources(self, parts: Iterable[_native.Edit | HasEdits], stacklevel: int) -> None:
        """`check_artifact` for whatever the steering was taken from, with every warning once for this model."""
        for artifact in [each for part in parts if isinstance(part, Plan) for each in part.artifacts]:
            for warning in self._artifact_warnings(artifact):
                subject = _subject(artifact, warning)
                if subject not in self._warned:
                    self._warned.add(subject)
                    warnings.warn(warning, SterWarning, stacklevel=stacklevel)

    def _check_edits(self, edits: Sequence[_native.Edit]) -> None:
        """What the engine would refuse too, before the first pass."""
        for edit in edits:
            if edit.layer >= self.layer_count:
                raise LayerError(f"layer {edit.layer} is outside the model's 0..{self.layer_count - 1} range")
            width = edit.vectors.shape[1]
            if width != self.hidden_size:
                raise SteeringError(f"steering at layer {edit.layer} has vector width {width}, expected {self.hidden_size}")


def _subject(artifact: SteeringArtifact, warning: str) -> tuple[str | None, ...]:
    """What a warning is about; the same for an artifact and a choice of its layers."""
    return artifact.model, artifact.trait_name, artifact.method, artifact.metadata.get(PAIRS_HASH), warning


def _token_id(token: object) -> int:
    with contextlib.suppress(TypeError):
        if not isinstance(token, bool):
            return operator.index(cast(SupportsIndex, token))
    raise InputError(f"token ids must be integers, found {token!r}")


def opens_turn(messages: Sequence[Message], asked: bool | None) -> bool:
    """Whether what comes after `messages` is a turn of the assistant. asked: None: unless the last message is its own."""
    return bool(asked) if asked is not None or not messages else messages[-1].get("role") != "assistant"


def check_choice(what: str, value: str, choices: Sequence[str]) -> None:
    """
    Raises:
        InputError: none of `choices`.
    """
    if value not in choices:
        raise InputError(f'unknown {what} "{value}"; expected {", ".join(choices[:-1])} or {choices[-1]}')

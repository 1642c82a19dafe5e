"""A loaded model: text in, activations out. The arithmetic is the engine's (`ster._native`); what is here is prompts, batches and names."""

from __future__ import annotations

import contextlib
import operator
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Literal, Protocol, SupportsIndex, cast, overload

import numpy as np
from numpy.typing import NDArray

from ster import _native
from ster.artifacts import ActivationArtifact, Position, Provenance, TokenActivations
from ster.capture import capture
from ster.chat import ChatMode, ChatTemplate, Message, find_chat_template
from ster.checkpoint import CONFIG, TOKENIZER, Checkpoint, find_checkpoint
from ster.errors import ContextError, InputError, LayerError, NonFiniteError, SteeringError, SterWarning, TokenError
from ster.fingerprint import tokenizer_hash, weights_hash
from ster.generation import Generation, Settings, Step, collect, stop_strings, stream
from ster.layers import Layers, parse_layers
from ster.pairs import Side
from ster.progress import Progress, reporter
from ster.prompts import at, check_prompt, check_prompts, kind, name_of
from ster.readable import Keep
from ster.steering import Steering as Plan
from ster.steering_artifact import PAIRS_HASH, TOKENIZER_HASH, WEIGHTS_HASH, SteeringArtifact
from ster.tokenizer import Tokenizer, named_tokens, warn_of_ignored_flags
from ster.trace import Point, Trace

Precision = Literal["auto", "f32", "bf16", "f16"]
MAX_THREADS = 1024  # the engine's own limit, here for numbers that do not reach it


class HasEdits(Protocol):
    """Steering made of several edits."""

    def edits(self) -> Iterable[_native.Edit]: ...


Prompt = str | Sequence[int] | Sequence[Message]
Steering = _native.Edit | HasEdits | SteeringArtifact | Iterable[_native.Edit | HasEdits | SteeringArtifact] | None
"""What steers a run. An artifact stands for `artifact.at()`: all its layers, at strength 1."""


def load(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    precision: Precision = "auto",
    threads: int | None = None,
    chat_template: ChatMode = "auto",
    progress: Progress = None,
) -> Model:
    """Open the checkpoint `model`, a folder or a GGUF file. Every tensor is checked against the config; weights are mapped, not read.

    Args:
        model: a folder; or `ORG/NAME`, a model of the Hugging Face Hub, unless that is the path of something here. What is not in the
            Hub's cache is downloaded, and nothing but the files that are read; this takes the extra `hub`. See `ster.hub`.
        revision: a branch, tag or commit of a model of the Hub; None: `main`. Refused for a plain folder; for the folder of a snapshot
            in a Hugging Face cache it must be the snapshot's commit.
        precision: `auto` and `f32`: weights exactly as stored. `bf16`, `f16`: all weights rounded to that first, as if they had been stored
            so; those that are not are then held in memory. Arithmetic is float32 whatever the weights are.
        threads: None: one for every core. The number changes no bit of any result.
        progress: of a download: True for a bar on stderr, or a function called with (done, total) bytes.
        chat_template: `auto`: prompts are user turns where the checkpoint publishes a template; `off`: prompts are raw text.

    Raises:
        CheckpointError: files that are missing, truncated or not what the config says; a model of the Hub that cannot be had.
        ConfigError: a config or chat template that is not supported.
        InputError: an option this checkpoint does not allow.
    """
    _choice("precision", precision, ("auto", "f32", "bf16", "f16"))
    _choice("chat template mode", chat_template, ("auto", "off"))
    count = None if threads is None else _thread_count(threads)
    checkpoint = find_checkpoint(model, revision, progress)
    if precision in ("bf16", "f16"):
        with reporter(progress, f"round weights to {precision}", unit="bytes") as report:
            engine = _native.Engine(str(checkpoint.path), threads=count, round=precision, progress=report)
    else:
        engine = _native.Engine(str(checkpoint.path), threads=count)
    for warning in engine.warnings:
        warnings.warn(warning, SterWarning, stacklevel=2)
    template = find_chat_template(checkpoint)
    tokenizer = Tokenizer.load(checkpoint)
    warn_of_ignored_flags(checkpoint, tokenizer)
    return Model(engine, tokenizer, checkpoint, "+".join(sorted(dtype.lower() for dtype in engine.weight_dtypes)), template, chat_template)


def _thread_count(threads: object) -> int:
    count: int | None = None
    with contextlib.suppress(TypeError):
        count = None if isinstance(threads, bool) else operator.index(cast(SupportsIndex, threads))
    if count is None or not 1 <= count <= MAX_THREADS:
        raise InputError(f"threads must be between 1 and {MAX_THREADS}, found {threads!r}")
    return count


def _choice(what: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InputError(f'unknown {what} "{value}"; expected {", ".join(choices[:-1])} or {choices[-1]}')


class Model:
    """An open checkpoint; made by `ster.load`.

    precision: dtypes of the weights: `bf16`, or `f32+q4_k` where they differ. engine, tokenizer: what runs underneath, for those who want
    token ids and passes of their own.
    """

    def __init__(
        self,
        engine: _native.Engine,
        tokenizer: Tokenizer,
        checkpoint: Checkpoint,
        precision: str,
        template: ChatTemplate | None,
        mode: ChatMode,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._checkpoint = checkpoint
        self._template = template if mode == "auto" else None
        self._template_source = template.source if template else None  # what the checkpoint publishes, switched off or not
        self._weights_hash: str | None = None
        self._warned: set[tuple[str | None, ...]] = set()  # of which artifact, of what
        self.precision = precision
        self.chat_template: Literal["applied", "absent", "off"] = "off" if mode == "off" else "applied" if template else "absent"
        # Llama checkpoints name BOS in config.json, tokenizers by its text; either may be alone.
        bos = named_tokens(checkpoint).get("bos_token")
        self._bos = tokenizer.id_of(bos) if bos is not None else engine.bos_token_id
        if tokenizer.size > engine.vocab_size:
            warnings.warn(
                f"the tokenizer has {tokenizer.size} tokens, the embedding {engine.vocab_size} rows:"
                " prompts that use the others are refused",
                SterWarning,
                stacklevel=3,
            )

    @property
    def name(self) -> str:
        """The folder's name, or `ORG/NAME` in a Hugging Face cache; a GGUF file's without its ending."""
        return self._checkpoint.name

    @property
    def revision(self) -> str | None:
        """The commit, in a Hugging Face cache."""
        return self._checkpoint.revision

    @property
    def path(self) -> Path:
        return self._checkpoint.path

    @property
    def layer_count(self) -> int:
        return self.engine.layer_count

    @property
    def hidden_size(self) -> int:
        return self.engine.hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; the tokenizer may know fewer or more."""
        return self.engine.vocab_size

    @property
    def context_length(self) -> int:
        """A prompt must have fewer tokens than this."""
        return self.engine.context_length

    @property
    def adds_special_tokens(self) -> bool:
        """Whether a prompt gets the tokenizer's own, such as BOS; where there is a chat template, it is the template that has them."""
        return self.chat_template != "applied"

    @property
    def eos_token_ids(self) -> list[int]:
        """Any of these ends a generation."""
        return self.engine.eos_token_ids

    @property
    def weights_hash(self) -> str:
        """SHA-256 over every weight, whatever the files are called; made when first asked for. See `ster.fingerprint`."""
        return self.hash_weights()

    def hash_weights(self, progress: Progress = None) -> str:
        """`weights_hash`, saying how far it is: a model of 16 GB takes some seconds."""
        if self._weights_hash is None:
            self._weights_hash = weights_hash(self.path, progress=progress)
        return self._weights_hash

    @cached_property
    def config_hash(self) -> str:
        """SHA-256 over config.json; of a GGUF file over the numbers, texts and switches of its metadata that are not the tokenizer's."""
        if self._checkpoint.made is None:
            return sha256(self._checkpoint.read_bytes(CONFIG)).hexdigest()
        metadata = _native.gguf_metadata(str(self.path))
        settings = {
            key: value for key, value in metadata.items() if isinstance(value, int | float | str) and not key.startswith("tokenizer.")
        }
        return sha256(repr(sorted(settings.items())).encode()).hexdigest()

    @cached_property
    def tokenizer_hash(self) -> str:
        """SHA-256 over tokenizer.json and the chat template the checkpoint publishes."""
        return tokenizer_hash(self._checkpoint.read_bytes(TOKENIZER), self._template_source)

    def __repr__(self) -> str:
        return f"<ster.Model {self.name}: {self.layer_count} layers, hidden {self.hidden_size}, {self.precision} weights>"

    # Tokens

    def encode(self, text: str) -> list[int]:
        """Raw text -> ids, with the special tokens the tokenizer adds. No chat template."""
        return self.tokenizer.encode(check_prompt(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text, special tokens left out."""
        return self.tokenizer.decode(ids)

    def prompt_tokens(self, prompt: str) -> list[int]:
        """The ids that run for `prompt`: through the chat template when `chat_template` is "applied", as raw text otherwise."""
        ids = self.checked_tokens(check_prompt(prompt), None)
        self._warn_of_two_bos(["the prompt"] if self.has_two_bos(ids) else [])
        return ids

    def checked_tokens(self, prompt: str, name: str | None) -> list[int]:
        """`prompt` -> ids that the engine will take; `name` says which prompt it is, in refusals."""
        if self._template is not None:
            ids = self.tokenizer.encode(self._template.render([{"role": "user", "content": prompt}]), special_tokens=False, name=name)
        else:
            ids = self.tokenizer.encode(prompt, name=name)
        self._check_tokens(ids, name)
        return ids

    def chat_tokens(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        encode: Callable[[str], list[int]] | None = None,
    ) -> list[int]:
        """The ids of a conversation, through the chat template.

        add_generation_prompt: end with the marker that opens the assistant's turn. None: yes, unless the last message is the
        assistant's own. encode: makes ids of what the template gives, without special tokens. None: the tokenizer.

        Raises:
            InputError: the model has no template, or `load` switched it off; or the template refused.
        """
        ids = self._chat_tokens(messages, add_generation_prompt, None, encode)
        self._warn_of_two_bos(["the prompt"] if self.has_two_bos(ids) else [])
        return ids

    def _chat_tokens(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool | None,
        name: str | None,
        encode: Callable[[str], list[int]] | None = None,
    ) -> list[int]:
        if self._template is None:
            why = "is switched off" if self.chat_template == "off" else "is not in this checkpoint"
            raise InputError(f"chat messages need a chat template, which {why}{at(name)}")
        opened = messages[-1].get("role") != "assistant" if add_generation_prompt is None and messages else bool(add_generation_prompt)
        text = self._template.render(messages, add_generation_prompt=opened)
        ids = self.tokenizer.encode(text, special_tokens=False, name=name) if encode is None else encode(text)
        self._check_tokens(ids, name)
        return ids

    def side_tokens(self, sides: Sequence[Side], names: Sequence[str]) -> list[list[int]]:
        """The ids that run for each side of a pair set; `names` say which it is, in refusals.

        A text is a prompt like any other (see `prompt_tokens`). Messages go through the template as they stand: nothing is added that
        opens a turn of the assistant, so the last token is the template's own end of the last message.

        Raises:
            InputError: as in `prompt_tokens` and `chat_tokens`.
        """
        ids = [
            self.checked_tokens(check_prompt(side, name), name) if isinstance(side, str) else self._chat_tokens(side, False, name)
            for side, name in zip(sides, names, strict=True)
        ]
        self._warn_of_two_bos([name for each, name in zip(ids, names, strict=True) if self.has_two_bos(each)])
        return ids

    def has_two_bos(self, ids: Sequence[int]) -> bool:
        """Whether `ids` begin with two; the one that the user typed is kept, so it is theirs to remove."""
        return self._bos is not None and list(ids[:2]) == [self._bos, self._bos]

    @staticmethod
    def _warn_of_two_bos(names: Sequence[str]) -> None:
        """A BOS that the user typed is kept, so this one is theirs to remove."""
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            warnings.warn(f"{names[0]}{more}: two BOS tokens at the start, one of them from the text", SterWarning, stacklevel=3)

    def _check_tokens(self, ids: Sequence[int], name: str | None) -> None:
        """
        Raises:
            TokenError: no tokens, or an id the embedding has no row for.
            ContextError: too many tokens.
        """
        if not ids:
            raise TokenError("tokenizer produced no tokens" + at(name))
        limit = self.context_length
        if len(ids) >= limit:
            raise ContextError(f"prompt contains {len(ids)} tokens, model context allows fewer than {limit}{at(name)}")
        for position, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                text = f"token `{self.tokenizer.piece(token)}` (id {token})" if 0 <= token < self.tokenizer.size else f"token id {token}"
                raise TokenError(
                    f"{text} at position {position} of {name or 'the prompt'} is outside the embedding's 0..{self.vocab_size - 1} range"
                )

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
        _choice("position", position, ("last", "mean", "all"))
        texts = check_prompts(prompts)
        chosen = parse_layers(layers, self.layer_count)
        names = [name_of(text, index) for index, text in enumerate(texts)]
        by_text: dict[str, list[int]] = {}
        for text, name in zip(texts, names, strict=True):
            if text not in by_text:
                by_text[text] = self.checked_tokens(text, name)
        self._warn_of_two_bos([names[texts.index(text)] for text, ids in by_text.items() if self.has_two_bos(ids)])
        token_ids = [list(by_text[text]) for text in texts]
        source = Provenance(self.name, self.revision, self.chat_template, self.precision)
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
        capture(self, prompts, names, layers, rows, progress, keep)

    def last_rows(
        self, token_ids: Sequence[Sequence[int]], layers: Sequence[int], names: Sequence[str], *, progress: Progress = None
    ) -> NDArray[np.float32]:
        """The last token's residual stream, float32 `[sequences, layers, hidden]`, of checked ids; `names` for refusals."""
        values = np.empty((len(token_ids), len(layers), self.hidden_size), np.float32)
        keep = lambda index, residual: values.__setitem__(index, residual[:, 0])  # noqa: E731
        self.read(token_ids, names, layers, "last", keep, progress=progress)
        return values

    def forward(self, sequences: Sequence[_native.Sequence], names: Sequence[str]) -> list[_native.Output]:
        """The engine's pass; a refusal that speaks of a sequence of the batch names the caller's prompt instead."""
        try:
            return self.engine.forward(sequences)
        except NonFiniteError as error:
            message = re.sub(r"\bsequence (\d+)", lambda match: names[int(match[1])], error.message)
            raise NonFiniteError(message, error.hint) from None

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
        _choice("point", point, ("pre_steer", "post_steer"))
        ids = self._ids_of(prompt)
        parts = steering_parts(steering)
        self._check_sources(parts, stacklevel=3)
        edits = list_edits(parts, rows=len(ids), prompt=len(ids))
        check_reach(edits, len(ids) - 1, f"the prompt has {len(ids)} tokens")
        chosen = [] if layers is None else parse_layers(layers, self.layer_count)
        sequence = _native.Sequence(
            np.array(ids, dtype=np.uint32),
            steering=edits,
            layers=chosen,
            rows="all",
            point=point,
            logits="all" if logits else "none",
        )
        output = self.forward([sequence], ["the prompt"])[0]
        residual = output.residual
        if residual is None:
            residual = np.zeros((0, len(ids), self.hidden_size), np.float32)
        tokens = [self.tokenizer.piece(token) for token in ids]
        return Trace(ids, tokens, chosen, residual, output.logits, point, output.steered)

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
        ids, steps = self._start(prompt, steering, settings, layers, point)
        return collect(self, ids, steps, layers, point)

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
        return self._start(prompt, steering, settings, layers, point)[1]

    def _start(
        self, prompt: Prompt, steering: Steering, settings: Settings, layers: Layers | None, point: Point
    ) -> tuple[list[int], Iterator[Step]]:
        _choice("point", point, ("pre_steer", "post_steer"))
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
        if layers is not None:
            parse_layers(layers, self.layer_count)
        return ids, stream(self, ids, edits, settings, layers, point)

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


def check_reach(edits: Sequence[_native.Edit], reach: int, why: str) -> None:
    """Refuse a position that no pass reaches: a vector must not be accepted and then ignored.

    Raises:
        SteeringError: an edit names a position beyond `reach`.
    """
    for edit in edits:
        beyond = [position for position in edit.positions or () if position > reach]
        if beyond:
            raise SteeringError(f"steering names position {beyond[0]}, but this run reaches position {reach} at most: {why}")


def _subject(artifact: SteeringArtifact, warning: str) -> tuple[str | None, ...]:
    """What a warning is about; the same for an artifact and a choice of its layers."""
    return artifact.model, artifact.trait_name, artifact.method, artifact.metadata.get(PAIRS_HASH), warning


def steering_parts(steering: Steering) -> list[_native.Edit | HasEdits]:
    """Whatever steers, in one flat list.

    Raises:
        InputError: something that is neither an edit, nor an artifact, nor has `.edits()`, nor holds such things.
    """
    if steering is None:
        return []
    if isinstance(steering, SteeringArtifact):
        return [steering.at()]
    if isinstance(steering, _native.Edit) or callable(getattr(steering, "edits", None)):
        return [cast("_native.Edit | HasEdits", steering)]
    if isinstance(steering, Iterable) and not isinstance(steering, str | bytes | np.ndarray):
        return [part for item in steering for part in steering_parts(item)]
    raise InputError(f"steering must be a Steering, an artifact, an Edit or a list of them, found {type(steering).__name__}")


def list_edits(parts: Iterable[_native.Edit | HasEdits], *, rows: int, prompt: int) -> list[_native.Edit]:
    """The edits of a run of `rows` rows, the first `prompt` of which are the prompt's."""
    found: list[_native.Edit] = []
    for part in parts:
        if isinstance(part, _native.Edit):
            found.append(part)
        else:
            found.extend(part.edits(rows=rows, prompt=prompt) if isinstance(part, Plan) else part.edits())
    return found


def _token_id(token: object) -> int:
    with contextlib.suppress(TypeError):
        if not isinstance(token, bool):
            return operator.index(cast(SupportsIndex, token))
    raise InputError(f"token ids must be integers, found {token!r}")

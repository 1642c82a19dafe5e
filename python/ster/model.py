"""A loaded model: text in, activations out. The arithmetic is the engine's (`ster._native`); what is here is prompts, batches and names."""

from __future__ import annotations

import contextlib
import operator
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Literal, SupportsIndex, cast

import numpy as np

from ster import _native
from ster.abstract_model import AbstractModel, Edits, check_choice, opens_turn
from ster.capture import capture
from ster.chat import ChatMode, ChatTemplate, Message, find_chat_template
from ster.checkpoint import CONFIG, TOKENIZER, Checkpoint, find_checkpoint
from ster.edits import Steering as Steering
from ster.edits import check_reach as check_reach
from ster.errors import ContextError, InputError, NonFiniteError, SterWarning, TokenError
from ster.fingerprint import tokenizer_hash, weights_hash
from ster.generation import Generation, Settings, Step, collect, stream
from ster.likelihood import Damage, SideLikelihoods, Variant, damage, side_likelihoods
from ster.progress import Progress, Report, reporter
from ster.prompts import at, check_prompt
from ster.readable import Keep
from ster.sides import PairTokens
from ster.tokenizer import Tokenizer, named_tokens, warn_of_ignored_flags
from ster.trace import Point, Trace

Precision = Literal["auto", "f32", "bf16", "f16"]
MAX_THREADS = 1024  # the engine's own limit, here for numbers that do not reach it


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
        chat_template: `auto`: prompts are user turns where the checkpoint publishes a template; `off`: prompts are raw text. Without
            a template both are the same, and the model says `absent`.

    Raises:
        CheckpointError: files that are missing, truncated or not what the config says; a model of the Hub that cannot be had.
        ConfigError: a config or chat template that is not supported.
        InputError: an option this checkpoint does not allow.
    """
    check_choice("precision", precision, ("auto", "f32", "bf16", "f16"))
    check_choice("chat template mode", chat_template, ("auto", "off"))
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


class Model(AbstractModel):
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
        super().__init__()
        self.engine = engine
        self.tokenizer = tokenizer
        self._checkpoint = checkpoint
        self._template = template if mode == "auto" else None
        self._template_source = template.source if template else None  # what the checkpoint publishes, switched off or not
        self._weights_hash: str | None = None
        self._precision = precision
        self.chat_template: Literal["applied", "absent", "off"] = (
            "absent" if template is None else "applied" if mode == "auto" else "off"  # what is not there cannot be switched off
        )
        # Llama checkpoints name BOS in config.json, tokenizers by its text; either may be alone.
        bos = named_tokens(checkpoint).get("bos_token")
        self._bos_id = tokenizer.id_of(bos) if bos is not None else engine.bos_token_id
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
    def precision(self) -> str:
        """Dtypes of the weights, as stored or as rounded."""
        return self._precision

    @property
    def unknown_id(self) -> int | None:
        """The id that stands for what the vocabulary has no word for; byte-level tokenizers have none."""
        return self.tokenizer.unknown_id

    @property
    def bos_id(self) -> int | None:
        return self._bos_id

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

    def check_same(self) -> None:
        """A model of this process stays what it is."""

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

    def tokenise(self, prompts: Iterable[tuple[str | Sequence[Message], str | None]]) -> Iterator[list[int]]:
        """See `AbstractModel.tokenise`. One after the other, each when it is asked for."""
        for prompt, name in prompts:
            if not isinstance(prompt, str):
                yield self._chat_tokens(prompt, False, name)
            elif self._template is not None:
                yield self._chat_tokens([{"role": "user", "content": prompt}], True, name)
            else:
                ids = self.tokenizer.encode(prompt, name=name)
                self._check_tokens(ids, name)
                yield ids

    def chat_tokens(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        encode: Callable[[str], list[int]] | None = None,
    ) -> list[int]:
        """See `AbstractModel.chat_tokens`. encode: makes ids of what the template gives, without special tokens. None: the tokenizer."""
        ids = self._chat_tokens(messages, opens_turn(messages, add_generation_prompt), None, encode)
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
        text = self._template.render(messages, add_generation_prompt=bool(add_generation_prompt))
        ids = self.tokenizer.encode(text, special_tokens=False, name=name) if encode is None else encode(text)
        self._check_tokens(ids, name)
        return ids

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

    def forward(self, sequences: Sequence[_native.Sequence], names: Sequence[str]) -> list[_native.Output]:
        """The engine's pass; a refusal that speaks of a sequence of the batch names the caller's prompt instead."""
        try:
            return self.engine.forward(sequences)
        except NonFiniteError as error:
            message = re.sub(r"\bsequence (\d+)", lambda match: names[int(match[1])], error.message)
            raise NonFiniteError(message, error.hint) from None

    def _trace(self, ids: list[int], edits: Edits, layers: list[int], point: Point, logits: bool) -> Trace:
        sequence = _native.Sequence(
            np.array(ids, dtype=np.uint32),
            steering=edits,
            layers=layers,
            rows="all",
            point=point,
            logits="all" if logits else "none",
        )
        output = self.forward([sequence], ["the prompt"])[0]
        residual = output.residual
        if residual is None:
            residual = np.zeros((0, len(ids), self.hidden_size), np.float32)
        tokens = [self.tokenizer.piece(token) for token in ids]
        return Trace(ids, tokens, layers, residual, output.logits, point, output.steered)

    def _generate(self, ids: list[int], edits: Edits, settings: Settings, layers: list[int] | None, point: Point) -> Generation:
        return collect(self, ids, self._stream(ids, edits, settings, layers, point), layers, point)

    def _stream(self, ids: list[int], edits: Edits, settings: Settings, layers: list[int] | None, point: Point) -> Iterator[Step]:
        return stream(self, ids, edits, settings, layers, point)

    def side_likelihoods(self, pairs: Sequence[PairTokens], variants: Sequence[Variant], report: Report) -> SideLikelihoods:
        return side_likelihoods(self, pairs, variants, report)

    def damage(self, texts: Sequence[Sequence[int]], variants: Sequence[Variant], report: Report) -> Damage:
        return damage(self, texts, variants, report)

"""From what the user wrote to the files of a model, and the name it goes by in artifacts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ster._files import is_there, parse_json, read_bytes, read_text, reason
from ster.errors import CheckpointError, ConfigError, FileError, InputError
from ster.progress import Progress

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
PART = re.compile(r"-\d{5}-of-\d{5}$")  # of a file's name, where a model is several
OPTIONAL = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class Checkpoint:
    """A model folder or GGUF file that is there. What is in the weights is the engine's business.

    name: always text that UTF-8 can hold, whatever the folder is called; path leads to the folder or file.
    """

    path: Path
    name: str
    revision: str | None

    @cached_property
    def made(self) -> Mapping[str, bytes] | None:
        """Of a GGUF file, which has nothing beside its weights, the files that its metadata stands for; None for a folder.

        Raises:
            CheckpointError, ConfigError: the file is damaged, or its tokenizer of a kind that is not supported.
        """
        if not self.path.is_file():
            return None
        from ster import _native, gguf_tokenizer

        return gguf_tokenizer.files(_native.gguf_metadata(str(self.path)))

    def has(self, file: str) -> bool:
        """Whether anything beside the weights has this name."""
        return is_there(self.path / file) if self.made is None else file in self.made

    def read_bytes(self, file: str) -> bytes:
        """A file beside the weights.

        Raises:
            FileError: not there, or not readable.
        """
        if self.made is None:
            return read_bytes(self.path / file)
        if file not in self.made:
            raise FileError(f"failed to read {self.path / file}: a GGUF file has none")
        return self.made[file]

    def read_text(self, file: str) -> str:
        """A file beside the weights as text, with or without a byte order mark.

        Raises:
            FileError: not there, not readable, or not UTF-8.
        """
        return read_text(self.path / file) if self.made is None else self.read_bytes(file).decode()

    def read_json(self, file: str) -> dict[str, object] | None:
        """A JSON object beside the weights, or None when the file is not there.

        Raises:
            ConfigError: not JSON, or not an object.
            FileError: there, but not readable.
        """
        if not self.has(file):
            return None
        path = self.path / file
        try:
            value = parse_json(self.read_text(file))
        except ValueError as error:
            raise ConfigError(f"invalid JSON in {path}: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(f"invalid JSON in {path}: expected an object")
        return value


def find_checkpoint(model: str | os.PathLike[str], revision: str | None = None, progress: Progress = None) -> Checkpoint:
    """The checkpoint at `model`, a folder with `config.json`, `tokenizer.json` and safetensors, or a GGUF file.

    Text that names nothing here and is written `ORG/NAME` is a model of the Hugging Face Hub: see `ster.hub`.

    Its name is the folder's, links followed; a file's without `.gguf`, and without `-00001-of-00003` where it is one of several. In a
    Hugging Face cache (`models--ORG--NAME/snapshots/COMMIT`) the folder's name is a commit: there the name is `ORG/NAME` and the
    revision is the commit; a GGUF file in one is called `ORG/NAME/FILE`.

    Raises:
        CheckpointError: no such folder or file; `model config is missing: <path>`; `tokenizer is missing: <path>`; a link that leads
            nowhere, which is a file that should be there: half a download.
        InputError: a revision other than the folder's own.
    """
    try:
        path = Path(os.fsdecode(model))
    except TypeError:
        raise InputError(f"the model must be a path, found {type(model).__name__}") from None
    if not os.fspath(model):
        raise CheckpointError("model path is empty", "`.` is the working directory")
    from ster import hub

    if isinstance(model, str) and hub.is_id(model) and not os.path.lexists(model):
        path, revision = hub.fetch(model, revision, progress), None
    try:
        real = path.resolve(strict=True)
    except FileNotFoundError:
        if path.suffix.lower() == ".gguf":
            hint = "GGUF files are read from here alone; `hf download ORG/NAME FILE` brings one from the Hub"
            raise CheckpointError(f"model file is missing: {path}", hint) from None
        if isinstance(model, str) and hub.is_id(model.rstrip("/")):
            raise CheckpointError(
                f"model directory is missing: {model}", "a model of the Hugging Face Hub is named without a slash at the end"
            ) from None
        hint = "name the folder of a model, a GGUF file, or a model of the Hugging Face Hub as ORG/NAME"
        raise CheckpointError(f"model directory is missing: {path}", hint) from None
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle; ValueError: a NUL in the path
        text = reason(error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"failed to read {path}: {text}") from None
    if real.is_dir():
        _check_files(path)
        name, own = _name(real)
    else:
        _check_gguf(path)
        # A cache's files are links to blobs whose names are hashes: the folder's links are followed, the file's own is not.
        folder, own = _name(path.parent.resolve())
        name = PART.sub("", _text(path.name.removesuffix(path.suffix)))
        name = f"{folder}/{name}" if own else name
    if revision is not None and revision != own:
        found = f"{path} is revision {own}" if own else f"{path} is a local folder and has none"
        raise InputError(f"revision `{revision}` cannot be chosen: {found}")
    return Checkpoint(path, name, own)


def _name(folder: Path) -> tuple[str, str | None]:
    """Name and revision of a folder whose links have been followed."""
    name = _text(folder.name or str(folder))
    cache = _text(folder.parent.parent.name)
    if folder.parent.name == "snapshots" and cache.startswith("models--"):
        return cache.removeprefix("models--").replace("--", "/", 1), name
    return name, None


def _check_gguf(path: Path) -> None:
    """Refuse what is no GGUF file; what else is wrong with one the engine says."""
    try:
        if not path.is_file():
            raise CheckpointError(f"model path is neither a directory nor a file: {path}")
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"failed to read {path}: {reason(error)}") from None
    if magic != b"GGUF" and path.suffix.lower() != ".gguf":
        hint = "name the folder that holds config.json, or a .gguf file"
        raise CheckpointError(f"model path is not a directory: {path}", hint)
    if magic != b"GGUF":
        raise CheckpointError(f"{path}: is not a GGUF file: it begins with {magic!r}, expected b'GGUF'")


def _gguf_hint(folder: Path) -> str | None:
    """Which file to name, where a folder holds models of one file each."""
    found = sorted(_text(file.name) for file in folder.iterdir() if file.suffix.lower() == ".gguf" and file.is_file())
    if not found:
        return None
    more = f" ({len(found)} are there)" if len(found) > 1 else ""
    return f"a GGUF model is named by its file: {folder / found[0]}{more}"


def _check_files(folder: Path) -> None:
    try:
        for file, noun in ((CONFIG, "model config"), (TOKENIZER, "tokenizer")):
            if not is_there(folder / file):
                raise CheckpointError(f"{noun} is missing: {folder / file}", _gguf_hint(folder))
        for file in (CONFIG, TOKENIZER, *OPTIONAL):
            path = folder / file
            if path.is_symlink() and not path.exists():
                hint = "the download is incomplete; `hf download` fetches what is missing"
                raise CheckpointError(f"failed to read {path}: it is a link to {path.readlink()}, which is missing", hint)
    except FileError as error:
        raise CheckpointError(error.message, error.hint) from None
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"failed to read {folder}: {reason(error)}") from None


def _text(name: str) -> str:
    """A file's name as text: bytes that are not UTF-8 become U+FFFD, and a locale that cannot show the others changes nothing."""
    return os.fsencode(name).decode("utf-8", "replace")

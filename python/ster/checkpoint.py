"""From what the user wrote to the files of a model, and the name it goes by in artifacts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ster._files import is_there, parse_json, read_text, reason
from ster.errors import CheckpointError, ConfigError, FileError, InputError
from ster.progress import Progress

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
OPTIONAL = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class Checkpoint:
    """A model folder that is there. What is in the weights is the engine's business.

    name: always text that UTF-8 can hold, whatever the folder is called; path leads to the folder.
    """

    path: Path
    name: str
    revision: str | None

    def read_json(self, file: str) -> dict[str, object] | None:
        """A JSON object beside the weights, or None when the file is not there.

        Raises:
            ConfigError: not JSON, or not an object.
            FileError: there, but not readable.
        """
        path = self.path / file
        if not is_there(path):
            return None
        try:
            value = parse_json(read_text(path))
        except ValueError as error:
            raise ConfigError(f"invalid JSON in {path}: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(f"invalid JSON in {path}: expected an object")
        return value


def find_checkpoint(model: str | os.PathLike[str], revision: str | None = None, progress: Progress = None) -> Checkpoint:
    """The checkpoint at `model`, a folder with `config.json`, `tokenizer.json` and safetensors.

    Text that names nothing here and is written `ORG/NAME` is a model of the Hugging Face Hub: see `ster.hub`.

    Its name is the folder's, links followed. In a Hugging Face cache (`models--ORG--NAME/snapshots/COMMIT`) the folder's name is a
    commit: there the name is `ORG/NAME` and the revision is the commit.

    Raises:
        CheckpointError: no such folder; `model config is missing: <path>`; `tokenizer is missing: <path>`; a link that leads nowhere,
            which is a file that should be there: half a download.
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
        hint = "name the folder of a model, or a model of the Hugging Face Hub as ORG/NAME"
        raise CheckpointError(f"model directory is missing: {path}", hint) from None
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle; ValueError: a NUL in the path
        text = reason(error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"failed to read {path}: {text}") from None
    if not real.is_dir():
        raise CheckpointError(f"model path is not a directory: {path}", "name the folder that holds config.json")
    _check_files(path)

    name, own = _text(real.name or str(real)), None
    cache = _text(real.parent.parent.name)
    if real.parent.name == "snapshots" and cache.startswith("models--"):
        name, own = cache.removeprefix("models--").replace("--", "/", 1), name
    if revision is not None and revision != own:
        found = f"{path} is revision {own}" if own else f"{path} is a local folder and has none"
        raise InputError(f"revision `{revision}` cannot be chosen: {found}")
    return Checkpoint(path, name, own)


def _check_files(folder: Path) -> None:
    try:
        for file, noun in ((CONFIG, "model config"), (TOKENIZER, "tokenizer")):
            if not is_there(folder / file):
                raise CheckpointError(f"{noun} is missing: {folder / file}")
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

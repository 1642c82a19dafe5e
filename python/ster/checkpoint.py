"""From what the user wrote to the files of a model, and the name it goes by in artifacts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ster._files import parse_json, read_text, reason
from ster.errors import CheckpointError, ConfigError, InputError


@dataclass(frozen=True)
class Checkpoint:
    """A model folder that is there. What is in the weights is the engine's business."""

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
        if not path.exists():
            return None
        try:
            value = parse_json(read_text(path))
        except ValueError as error:
            raise ConfigError(f"invalid JSON in {path}: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(f"invalid JSON in {path}: expected an object")
        return value


def find_checkpoint(model: str | os.PathLike[str], revision: str | None = None) -> Checkpoint:
    """The checkpoint at `model`, a folder with `config.json`, `tokenizer.json` and safetensors.

    Its name is the folder's, links followed. In a Hugging Face cache (`models--ORG--NAME/snapshots/COMMIT`) the folder's name is a
    commit: there the name is `ORG/NAME` and the revision is the commit.

    Raises:
        CheckpointError: no such folder; `model config is missing: <path>`; `tokenizer is missing: <path>`.
        InputError: a revision other than the folder's own.
    """
    path = Path(model)
    try:
        real = path.resolve(strict=True)
    except FileNotFoundError:
        hint = "models are read from a local folder; download a Hub model first: `hf download ORG/NAME --local-dir FOLDER`"
        raise CheckpointError(f"model directory is missing: {path}", hint) from None
    except (OSError, RuntimeError) as error:
        text = reason(error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"failed to read {path}: {text}") from None
    if not real.is_dir():
        raise CheckpointError(f"model path is not a directory: {path}", "name the folder that holds config.json")
    for file, noun in (("config.json", "model config"), ("tokenizer.json", "tokenizer")):
        if not (path / file).exists():
            raise CheckpointError(f"{noun} is missing: {path / file}")

    name, own = real.name or str(real), None
    cache = real.parent.parent.name
    if real.parent.name == "snapshots" and cache.startswith("models--"):
        name, own = cache.removeprefix("models--").replace("--", "/", 1), real.name
    if revision is not None and revision != own:
        found = f"{path} is revision {own}" if own else f"{path} is a local folder and has none"
        raise InputError(f"revision `{revision}` cannot be chosen: {found}")
    return Checkpoint(path, name, own)

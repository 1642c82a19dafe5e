"""What runs on a worker of a Ray cluster: an engine of its own, on the model that the harvest was begun with and no other."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ster import _native
from ster.errors import SterError, WorkerError
from ster.harvest.compute import rows_of
from ster.harvest.directions import Directions
from ster.harvest.shards import Form
from ster.harvest.stats import Rows
from ster.model import Model, load


@dataclass(frozen=True)
class Job:
    """What every worker is told.

    path: absolute, the same on every node; where it is missing, `name` and `revision` of a snapshot of the Hub. version: Ster's. precision,
    weights_hash, config_hash: what the model must have when it is open.
    """

    path: str
    name: str
    revision: str | None
    version: str
    precision: str
    weights_hash: str
    config_hash: str
    threads: int
    form: Form
    directions: Directions | None


class Worker:
    """An actor. Refusals are answers, not exceptions: what Ray would raise is of a class of its own, with its traceback in the message."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model: Model | None = None

    def open(self) -> SterError | None:
        """Open the model and see that it is the one; None: it is."""
        if self.model is None:
            try:
                self.model = open_model(self.job)
            except SterError as error:
                return error
        return None

    def rows(self, names: Sequence[str], ids: Sequence[Sequence[int]]) -> list[Rows] | SterError:
        """See `rows_of`. The model is opened first where that was lost: Ray starts a worker that died again, and asks it again."""
        refusal = self.open()
        if refusal is not None or self.model is None:
            return refusal or WorkerError("no model")
        try:
            return rows_of(self.model, self.job.form, self.job.directions, names, ids, lambda tokens: None)
        except SterError as error:
            return error


def open_model(job: Job) -> Model:
    """
    Raises:
        WorkerError: another Ster here, no such model, or another one.
        SterError: the checkpoint cannot be opened here; the message names the node.
    """
    node = f"the Ray node {socket.gethostname()}"
    if _native.__version__ != job.version:
        raise WorkerError(f"{node} has Ster {_native.__version__}, this process {job.version}", "install the same Ster on every node")
    if not Path(job.path).exists() and job.revision is None:
        raise WorkerError(f"{node} has no model at {job.path}", "put it there on every node, or name a model of the Hub")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # who began the harvest has heard them
            model = _load(job, "auto")
            if model.precision != job.precision and job.precision in ("bf16", "f16"):
                model = _load(job, job.precision)
        found = {"precision": model.precision, "weights": model.weights_hash, "config.json": model.config_hash}
    except SterError as error:
        raise type(error)(f"{error.message}, on {node}", error.hint) from None
    expected = {"precision": job.precision, "weights": job.weights_hash, "config.json": job.config_hash}
    for what, value in found.items():
        if value != expected[what]:
            message = f"{node} has another model at {job.path}: {what} {value}, expected {expected[what]}"
            raise WorkerError(message, "every node must have the same files")
    return model


def _load(job: Job, precision: Any) -> Model:
    if Path(job.path).exists():
        return load(job.path, precision=precision, threads=job.threads)
    return load(job.name, revision=job.revision, precision=precision, threads=job.threads)

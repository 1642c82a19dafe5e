"""The harvest itself: shard after shard, computed (see `compute.py`) and written by a second thread meanwhile."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from ster._files import make_folder
from ster._safetensors import safetensors_chunks
from ster.errors import FileError, InputError, RemoteError
from ster.harvest import disk, on_ray
from ster.harvest.compute import Computing, Here
from ster.harvest.corpus import Corpus, Shard, read_corpus
from ster.harvest.directions import Directions, load_directions
from ster.harvest.disk import MANIFEST, STATS, Journal, Record
from ster.harvest.display import Display, display
from ster.harvest.dtypes import BYTES, choose_dtype
from ster.harvest.manifest import add_prompts, make_plan, manifest_chunks, read_manifest, records_of, refuse_changes, stats_tensors
from ster.harvest.positions import Positions, parse_positions
from ster.harvest.ray_connection import need_ray
from ster.harvest.reading import Harvest, open_harvest
from ster.harvest.shards import SUFFIX, Form
from ster.harvest.sources import need_pyarrow, open_source
from ster.harvest.stats import Moments, Rows, moments, no_rows
from ster.layers import Layers, parse_layers
from ster.progress import Progress, in_bytes
from ster.readable import Readable
from ster.steering_artifact import SteeringArtifact

MOST_PROMPTS = 65536  # in a shard
OVERHEAD = 200  # bytes, about, that a prompt takes in a file beside its numbers


def harvest(
    model: Readable,
    prompts: str | os.PathLike[str] | Iterable[str],
    output: str | os.PathLike[str],
    *,
    layers: Layers | None = None,
    positions: Positions = "all",
    column: str | None = None,
    directions: str | os.PathLike[str] | SteeringArtifact | NDArray[Any] | Directions | None = None,
    normalize: bool = True,
    dtype: Literal["auto", "f32", "bf16", "f16"] = "auto",
    format: Literal["safetensors", "parquet"] = "safetensors",
    shard_size: int | None = None,
    ray: str | None = None,
    ray_workers: int | None = None,
    progress: Progress = None,
) -> Harvest:
    """Activations of any number of prompts, in files: `output` becomes a folder of shards, statistics and a manifest.

    The same call goes on where it was ended, at whatever moment and however: shards that are on disk are checked and kept, and the result
    is the same to the last byte. Other arguments, another model or other prompts are refused. Memory does not grow with the prompts.

    Args:
        prompts: a file (see `ster.harvest.sources`), or strings; a generator is asked once.
        layers: as anywhere; None: the blocks at a quarter, a half and three quarters of the depth.
        positions: `all` tokens of a prompt, the `last`, or some, as `[0, 5, -1]`.
        column: of a file that has columns; None: `prompt`.
        directions: keep coordinates along these instead of whole rows: an artifact, an array `[directions, hidden]`, or a file of either;
            64 at most. normalize: divide each by its length first.
        dtype: of the values stored; `auto`: as the checkpoint is stored, f32 where that is quantised or mixed, and for projections.
        format: `safetensors`; `parquet`, for Arrow and `datasets`, takes the extra `harvest`.
        shard_size: prompts in a shard; None: as many as make 8192 tokens or 64 MiB.
        ray: compute on the Ray cluster at this address, as `ray.init` understands it: `auto` is one that runs, `local` one of this
            machine alone. Takes the extra `ray`, and the model on every node at the same path or from the Hub. The files are the same.
        ray_workers: each has an engine with as many threads as `model`, for which it takes as many processors of the cluster; None: as
            many workers as the cluster has room for.
        progress: True: what it will take, a bar and what was kept, on stderr; a function is called with (tokens done, tokens in all).

    Returns:
        The harvest, open for reading.

    Raises:
        InputError: prompts, layers or options that cannot be used, before the first pass; other arguments than the folder was begun with;
            another process at work on it; a value that f16 or bf16 cannot hold.
        FileError: a file that cannot be read or written, as on a full disk; the folder can then be gone on with.
        NonFiniteError: NaN or infinity in the model, by layer, token and prompt. RemoteError: its server is gone.
        WorkerError: no Ray cluster there, or a worker without the same model and Ster, or that died again and again.
        KeyboardInterrupt: within a second of Ctrl-C, after the shard that is being written.
    """
    folder = Path(output)
    kept = parse_positions(positions)
    source = open_source(prompts, column)
    chosen = parse_layers(default_layers(model.layer_count) if layers is None else layers, model.layer_count)
    onto = None if directions is None else load_directions(directions, normalize=normalize)
    if onto is not None:
        onto.check_width(model.hidden_size)
    check_options(format, shard_size, ray, ray_workers)
    stored = choose_dtype(dtype, model.precision, format=format, projecting=onto is not None)
    form = Form(format, stored, chosen, model.hidden_size if onto is None else len(onto), kept)
    disk.check_folder(folder)
    plan = make_plan(model, form, onto, shard_size, model.hash_weights(progress if progress is True else None))
    start = None if ray is None else partial(on_ray.started, ray, on_ray.job_for(model, form, onto), ray_workers)

    with _folder(folder), disk.locked(folder), display(progress) as show, contextlib.ExitStack() as stack:
        disk.check_folder(folder)
        journal = Journal(folder)
        begun = _begun(folder, journal)
        if begun is not None:
            refuse_changes(folder, begun[0], plan)
        workers = None if start is None else stack.enter_context(start(show.note))  # they open the model while the prompts are read
        row_bytes = len(chosen) * form.width * BYTES[stored]
        corpus = read_corpus(model, source, folder, kept, row_bytes, shard_size, show.reading)
        with corpus.spool:
            plan = add_prompts(plan, corpus)
            if begun is not None:
                refuse_changes(folder, begun[0], plan)
            here = Here(model, form, onto, corpus, show.compute)
            work = _Work(
                here if workers is None else on_ray.OnRay(workers, corpus, show.compute),
                model,
                form,
                folder,
                corpus,
                plan,
                journal,
                begun[1] if begun else {},
                show,
            )
            work.run(finished=begun is not None and not journal.path.exists())
    return open_harvest(folder)


def default_layers(layer_count: int) -> list[int]:
    """
    >>> default_layers(32), default_layers(1)
    ([8, 16, 24], [0])
    """
    return sorted({layer_count * quarters // 4 for quarters in (1, 2, 3)})


def check_options(format: str, shard_size: int | None, ray: str | None = None, ray_workers: int | None = None) -> None:
    """What can be refused without a model.

    Raises:
        InputError: an unknown format; one that takes pyarrow, or Ray, where that is missing; a number out of its range.
    """
    if format not in SUFFIX:
        raise InputError(f'unknown format "{format}"; expected safetensors or parquet')
    if format == "parquet":
        need_pyarrow()
    if shard_size is not None and (isinstance(shard_size, bool) or not isinstance(shard_size, int) or not 1 <= shard_size <= MOST_PROMPTS):
        raise InputError(f"shard size must be between 1 and {MOST_PROMPTS} prompts, found {shard_size!r}")
    if ray is not None:
        need_ray()
    if ray_workers is not None:
        if ray is None:
            raise InputError("a number of Ray workers was given, and no Ray", "say which cluster, as in `local`")
        if isinstance(ray_workers, bool) or not isinstance(ray_workers, int) or ray_workers < 1:
            raise InputError(f"Ray workers must be 1 or more, found {ray_workers!r}")


@contextlib.contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """Make the folder; what was refused before anything is in it leaves none behind."""
    made = [level for level in (folder, *folder.parents) if not os.path.lexists(level)]
    make_folder(folder)
    try:
        yield
    except BaseException:
        for level in made:
            with contextlib.suppress(OSError):
                level.rmdir()
        raise


def _begun(folder: Path, journal: Journal) -> tuple[Mapping[str, Any], dict[str, Record]] | None:
    found = journal.read()
    if found is not None:
        return found
    if not (folder / MANIFEST).exists():
        return None
    manifest = read_manifest(folder)
    try:
        return manifest, records_of(manifest)
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder / MANIFEST} is damaged: {error}", "remove the folder and begin again") from None


class _Work:
    """Everything is settled; what is left is to compute, or to see that it was."""

    def __init__(
        self,
        compute: Computing,
        model: Readable,
        form: Form,
        folder: Path,
        corpus: Corpus,
        plan: Mapping[str, Any],
        journal: Journal,
        records: dict[str, Record],
        show: Display,
    ) -> None:
        self.compute, self.model, self.form, self.folder = compute, model, form, folder
        self.corpus, self.plan, self.journal, self.records, self.show = corpus, plan, journal, records, show
        self.ready = len(records)
        self.moments = no_rows(len(form.layers), form.width)
        self.pending: Future[Moments] | None = None

    def run(self, finished: bool) -> None:
        """finished: there is a manifest; unless a shard is damaged, nothing is left to do."""
        self._check_room()
        self.finished = finished
        if not finished:
            self.journal.begin(self.plan, self.records)
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="ster-harvest") as writer:
                self._shards(writer)
            self._end()
        except (KeyboardInterrupt, SystemExit, RemoteError):
            self.show.note(f"{disk.on_disk(self.ready, len(self.corpus.shards))}; the same command goes on from there")
            raise
        self.show.end()

    def _check_room(self) -> None:
        """Say what it will take, and refuse what the disk cannot hold."""
        corpus = self.corpus
        row = len(self.form.layers) * self.form.width * BYTES[self.form.dtype]
        need = corpus.rows * (row + 4) + len(corpus.lengths) * OVERHEAD + self.moments.mean.nbytes
        there = sum(record.bytes for record in self.records.values())
        text = f"{_count(len(corpus.lengths), 'prompt')}, {_count(corpus.tokens, 'token')}: {in_bytes(need)}"
        text += f" in {_count(len(corpus.shards), 'shard')} of {self.form.dtype}"
        if self.form.dtype == "f32" and self.model.precision not in BYTES:
            text += f" (the weights are {self.model.precision})"
        self.show.note(text + (f", {self.ready} of them on disk" if self.ready else ""))
        free = shutil.disk_usage(self.folder).free
        if need - there > free:
            raise FileError(
                f"the harvest takes {in_bytes(need - there)} more in {self.folder}, which has {in_bytes(free)} free",
                "choose fewer layers or positions, another dtype, or another disk",
            )

    def _shards(self, writer: ThreadPoolExecutor) -> None:
        """In their order. Where others compute, some shards are begun before their turn."""
        begun: deque[tuple[Shard, Moments | Callable[[], list[Rows]]]] = deque()
        self.show.begin(self.corpus.tokens)
        for shard in self.corpus.shards:
            kept = writer.submit(self._kept, shard).result() if self.form.file(shard.index) in self.records else None
            begun.append((shard, self.compute.begin(shard) if kept is None else kept))
            if len(begun) > self.compute.ahead:
                self._take(writer, *begun.popleft())
        while begun:
            self._take(writer, *begun.popleft())
        self._settle()

    def _take(self, writer: ThreadPoolExecutor, shard: Shard, found: Moments | Callable[[], list[Rows]]) -> None:
        if isinstance(found, Moments):
            self._settle()
            self.moments = self.moments.merge(found)
            self.show.keep(shard.tokens)
            return
        rows = found()
        self.model.check_same()
        self._settle()  # before the next is handed over: of those that are taken two are in memory, never three
        self.pending = writer.submit(self._write, shard, rows)

    def _settle(self) -> None:
        if self.pending is not None:
            self.moments = self.moments.merge(self.pending.result())
            self.pending = None

    def _kept(self, shard: Shard) -> Moments | None:
        """Of a shard that is on disk as the journal says; another is to be computed again, and until then the harvest is not finished."""
        name = self.form.file(shard.index)
        data = disk.whole(self.folder / name, self.records[name])
        if data is not None:
            rows = self.form.decode(memoryview(data), shard.first_prompt, self.corpus.lengths_of(shard))
            return moments(rows, self.form.dtype, len(self.form.layers), self.form.width)
        self.show.note(f"{name} is missing or damaged: it is computed again")
        self.ready -= 1
        if self.finished:
            self.journal.begin(self.plan, self.records)
            disk.remove(self.folder / MANIFEST)
            self.finished = False
        return None

    def _write(self, shard: Shard, rows: list[Rows]) -> Moments:
        name = self.form.file(shard.index)
        path = self.folder / name
        record = disk.write_part(path, self.form.encode(shard.first_prompt, rows))
        if self.records.setdefault(name, record) != record:
            disk.remove(path.with_name(name + disk.PART))
            raise InputError(
                f"{path} is not what was computed first: sha256 {record.sha256}, expected {self.records[name].sha256}",
                "this machine or this version of Ster gives other bits; remove the folder and begin again",
            )
        self.journal.add(name, record)
        disk.place(path)
        self.ready += 1
        return moments(rows, self.form.dtype, len(self.form.layers), self.form.width)

    def _end(self) -> None:
        """Statistics and manifest, when every shard is on disk; where they are there already, they are the same."""
        metadata = {"product": "ster"}
        stats = disk.write_part(self.folder / STATS, safetensors_chunks(stats_tensors(self.form, self.moments), metadata))
        disk.place(self.folder / STATS)
        path = self.folder / MANIFEST
        disk.write_part(path, manifest_chunks(self.plan, self.form, self.corpus, self.records, stats, self.moments))
        disk.place(path)
        disk.remove(self.journal.path)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number > 1 else ''}"

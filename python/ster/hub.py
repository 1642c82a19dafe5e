"""From the id of a model on the Hugging Face Hub to a folder in its cache, downloading what is missing.

Addresses, tokens, proxies and the cache are `huggingface_hub`'s, and so is every request: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE
and HF_HUB_OFFLINE mean what they mean everywhere. What is decided here is which files a model is, and what to say when they cannot be had.

A branch costs one request, which tells its commit; a commit whose files are in the cache costs none. In the cache's layout
(huggingface.co/docs/huggingface_hub/guides/manage-cache) `refs/BRANCH` holds the commit a branch was, `snapshots/COMMIT` its files, and
`.no_exist/COMMIT` the names it is known not to have.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ster import _files
from ster._files import parse_json, read_text, reason, write_atomic
from ster.checkpoint import CONFIG, OPTIONAL, TOKENIZER
from ster.errors import CheckpointError, FileError, InputError, SterError, SterWarning
from ster.progress import Progress, Report, in_bytes, reporter

if TYPE_CHECKING:
    from typing_extensions import Self

OLDEST = (1, 20)  # of huggingface_hub, as in pyproject.toml: from there on it takes up a download that broke off in the middle
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAIN = "main"
LOOK_UP = "look up"  # what is done, in refusals
WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".onnx", ".h5", ".msgpack")  # named where the right ones are missing

_PART = re.compile(r"\w([\w.-]{0,94}\w)?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_id(model: str) -> bool:
    """Whether `model` is written as `ORG/NAME`. What begins with a dot or `~`, or has other slashes, is a path, and so is a bare word."""
    parts = model.split("/")
    well_formed = len(parts) == 2 and all(_PART.fullmatch(part) and "--" not in part and ".." not in part for part in parts)
    return well_formed and not model.endswith((".git", ".gguf", ".safetensors"))


def fetch(model: str, revision: str | None = None, progress: Progress = None) -> Path:
    """The folder in the cache with the files of `model` (`ORG/NAME`) that Ster reads; those that are not there are downloaded.

    Files come one after the other, small ones first, so that Ctrl-C ends at once, and a file is in the cache whole or not at all.

    Args:
        revision: a branch, a tag or a commit; None: the branch `main`.
        progress: True: what is downloaded on stderr, with a bar; or a function called with (done, total) bytes.

    Raises:
        CheckpointError: no such model, none that may be read, no network, no safetensors, no room.
        InputError: no such revision; `huggingface_hub` is missing or too old.
    """
    _check_extra()
    if revision is not None:
        _check_revision(revision)
    with _without_chatter():
        return _fetch(model, revision, progress)


def _fetch(model: str, revision: str | None, progress: Progress) -> Path:
    from huggingface_hub import HfApi, constants

    pinned = revision if revision is not None and _COMMIT.fullmatch(revision) else None
    if constants.HF_HUB_OFFLINE:
        commit = _offline(model, revision)
        _warn_of_unsure(model, commit)
        return _snapshot(model, commit)
    if pinned is not None:
        lacking, unsure = _missing(model, pinned)
        if not lacking and not unsure:
            return _snapshot(model, pinned)
    try:
        info = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        if not _COMMIT.fullmatch(info.sha or "") or info.siblings is None:
            raise ValueError("no commit, or no list of files")
    except Exception as error:
        known = _cached_commit(model, revision) if _will_pass(error) else None
        if known is None or _missing(model, known)[0]:
            _refuse(error, model, revision, LOOK_UP)
        _warn_of_unsure(model, known)
        warnings.warn(f"{_trouble(error)}: {model} is read from the cache, at commit {known}", SterWarning, stacklevel=5)
        return _snapshot(model, known)
    commit = str(info.sha)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    _check_files(model, sizes)

    files = [file for file in (CONFIG, TOKENIZER, *OPTIONAL) if file in sizes]
    if SINGLE in sizes:
        files.append(SINGLE)
    else:
        if _cached(model, commit, INDEX) is None:
            _download(model, commit, [INDEX], sizes, None)
        shards = _shards(Path(_cached(model, commit, INDEX) or ""))
        if absent := [shard for shard in shards if shard not in sizes]:
            raise CheckpointError(f"{model} lacks the file `{absent[0]}`, which its {INDEX} names")
        files += [INDEX, *shards]
    _download(model, commit, [file for file in files if _cached(model, commit, file) is None], sizes, progress)
    _remember(model, commit, revision or MAIN, [file for file in (*OPTIONAL, SINGLE) if file not in sizes])
    return _snapshot(model, commit)


def _check_extra() -> None:
    """
    Raises:
        InputError: no `huggingface_hub`, or an old one: `tokenizers` brings it along, whatever its age.
    """
    hint = "run `pip install '.[hub]'` in Ster's folder (the distribution is called ster-lm, and it is not on PyPI)"
    oldest = ".".join(map(str, OLDEST))
    try:
        from huggingface_hub import HfApi  # noqa: F401 (reads the environment)
        from huggingface_hub import __version__ as found
    except ImportError as error:
        raise InputError(f"models of the Hub need the extra `hub`: huggingface_hub cannot be imported: {error}", hint) from None
    except Exception as error:
        message = f"huggingface_hub cannot be imported: {_line(error)}"
        raise InputError(message, "one of the variables HF_* in the environment does not have a value it understands") from None
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or tuple(map(int, numbers.groups())) < OLDEST:
        raise InputError(f"models of the Hub need the extra `hub`: expected huggingface_hub {oldest} or later, found {found}", hint)


def _check_revision(revision: str) -> None:
    """
    Raises:
        InputError: no name that git gives a branch or a tag, and so no file in `refs/` either.
    """
    parts = revision.split("/")
    odd = ".." in revision or re.search(r"[\x00-\x20\x7f\\~^:?*\[]", revision)
    if odd or not all(parts) or any(part.startswith(".") for part in parts):
        raise InputError(f"revision `{revision}` is no branch, tag or commit")


# The cache


def _look_up(model: str, revision: str, file: str) -> object:
    """A path; huggingface_hub's mark for a file that the commit is known not to have; or None.

    Raises:
        CheckpointError: the cache is damaged.
    """
    from huggingface_hub import try_to_load_from_cache

    try:
        return try_to_load_from_cache(model, file, revision=revision)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"failed to read {_folder(model)}: {_line(error)}", "the cache is damaged; remove this folder of it"
        ) from None


def _cached(model: str, revision: str, file: str) -> str | None:
    found = _look_up(model, revision, file)
    return found if isinstance(found, str) else None


def _missing(model: str, commit: str) -> tuple[list[str], list[str]]:
    """Files that are needed and not in the cache; and files of which it is not known whether the repository has them."""
    lacking = [file for file in (CONFIG, TOKENIZER) if _cached(model, commit, file) is None]
    unsure = [file for file in OPTIONAL if _look_up(model, commit, file) is None]
    if _cached(model, commit, SINGLE) is None:
        if _look_up(model, commit, SINGLE) is None:
            unsure.append(SINGLE)
        index = _cached(model, commit, INDEX)
        lacking += [SINGLE] if index is None else [shard for shard in _shards(Path(index)) if _cached(model, commit, shard) is None]
    return lacking, unsure


def _folder(model: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / ("models--" + model.replace("/", "--"))


def _snapshot(model: str, commit: str) -> Path:
    return _folder(model) / "snapshots" / commit


def _cached_commit(model: str, revision: str | None) -> str | None:
    """The commit that the cache has for a revision: its own, or what a branch was when it was last asked for."""
    path = _cached(model, revision or MAIN, CONFIG)
    return None if path is None else Path(path).parent.name


def _shards(index: Path) -> list[str]:
    """The files that an index names.

    Raises:
        CheckpointError: it names none, or not in the way of safetensors.
    """
    try:
        value = parse_json(read_text(index))
    except (FileError, ValueError) as error:
        raise CheckpointError(f"invalid JSON in {index}: {error}") from None
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no `weight_map` that places tensors in files")
    for tensor, file in weight_map.items():
        inside = isinstance(file, str) and re.search(r"[\\:\x00-\x1f]", file) is None and not {"", ".", ".."} & set(file.split("/"))
        if not inside or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index} places tensor `{tensor}` in {json.dumps(file)}, expected a safetensors file of the repository")
    return sorted(set(weight_map.values()))


def _remember(model: str, commit: str, revision: str, absent: list[str]) -> None:
    """Note in the cache what `revision` was, and which files there are not: the next time, neither needs the network.

    A cache that cannot be written, as one that many share, is as good without.
    """
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if revision != commit:
            ref = _folder(model) / "refs" / revision
            if not ref.is_file() or ref.read_text() != commit:
                ref.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(ref, lambda file: file.write(commit.encode()))
        for file in absent:
            mark = _folder(model) / ".no_exist" / commit / file
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()


def _offline(model: str, revision: str | None) -> str:
    """The commit.

    Raises:
        CheckpointError: not, or not all of it, in the cache.
    """
    from huggingface_hub import constants

    hint = f"load it once without HF_HUB_OFFLINE; the cache is {constants.HF_HUB_CACHE}"
    commit = _cached_commit(model, revision)
    if commit is None:
        what = model if revision is None else f"revision `{revision}` of {model}"
        raise CheckpointError(f"{what} is not in the cache, and HF_HUB_OFFLINE is set", hint)
    lacking, _ = _missing(model, commit)
    if lacking:
        raise CheckpointError(f"the cache lacks {_list(lacking)} of {model} at commit {commit}, and HF_HUB_OFFLINE is set", hint)
    return commit


def _warn_of_unsure(model: str, commit: str) -> None:
    """Without the network, a file that another program did not download looks like one that there is not. Most models have this one."""
    file = "tokenizer_config.json"
    if file in _missing(model, commit)[1]:
        text = f"the cache has no {file} of {model}, and does not know whether there is one: a chat template may be missing"
        warnings.warn(text, SterWarning, stacklevel=6)


# What a repository has


def _check_files(model: str, sizes: dict[str, int]) -> None:
    """
    Raises:
        CheckpointError: a file that every model needs is not in the repository.
    """
    weights = [file for file in sizes if file.endswith(WEIGHTS)]
    if SINGLE not in sizes and INDEX not in sizes:
        found = f"; found {_list(weights)}" if weights else "; it has no weights at all"
        raise CheckpointError(f"{model} has no {SINGLE} and no {INDEX}{found}", _hint_for(model, weights))
    for file in (CONFIG, TOKENIZER):
        if file not in sizes:
            hint = None
            if file == TOKENIZER and any(name.endswith(("tokenizer.model", "vocab.json", ".tiktoken")) for name in sizes):
                hint = f"transformers can write one: `AutoTokenizer.from_pretrained('{model}').save_pretrained(FOLDER)`"
            raise CheckpointError(f"{model} has no {file}", hint)


def _hint_for(model: str, weights: list[str]) -> str | None:
    gguf = [file for file in weights if file.endswith(".gguf")]
    if gguf:
        return f"`hf download {model} {gguf[0]} --local-dir FOLDER` brings a GGUF file; its path is what to load"
    if weights and all(file.endswith((".bin", ".pth", ".pt")) for file in weights):
        return "pickled weights can run any program when they are read, and Ster reads none; look for a copy in safetensors"
    return None


def _list(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# Downloads


def _counter(report: Report, before: int, total: int, most: int) -> type[Any]:
    """What stands in the place of the library's progress bar for one file: it is told how many bytes have come, and shows nothing."""

    class Counter:
        def __init__(self, *, initial: int = 0, **_: object) -> None:
            self.n, self.total = 0, most
            self.update(initial)

        def update(self, n: float | None = 1) -> None:
            self.n += int(n or 0)
            report(before + min(self.n, most), total)

        def update_transfer(self, n: float | None = 1) -> None:
            """Bytes off the wire, of which there may be fewer than in the file; that this method is there keeps it at one bar."""

        def set_postfix_str(self, *_: object, **__: object) -> None: ...

        set_transfer_postfix_str = set_description = set_description_str = refresh = close = set_postfix_str

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

    return Counter


def _download(model: str, commit: str, files: list[str], sizes: dict[str, int], progress: Progress) -> None:
    from huggingface_hub import constants, hf_hub_download

    total = sum(sizes[file] for file in files)
    if not files:
        return
    _check_room(model, total)
    if progress is True and sys.stderr is not None:
        print(f"Downloading {model}, {in_bytes(total)}, to {constants.HF_HUB_CACHE}", file=sys.stderr, flush=True)
    with reporter(progress, "download", unit="bytes") as tell:
        done, theirs = 0, []  # theirs: what the caller's function raises is no failure of the download

        def report(done: int, total: int) -> None:
            try:
                tell(done, total)
            except BaseException as error:
                theirs.append(error)
                raise

        for file in files:
            try:
                hf_hub_download(model, file, revision=commit, tqdm_class=_counter(report, done, total, sizes[file]))
            except Exception as error:
                if error in theirs:
                    raise
                _refuse(error, model, commit, f"download {file} of")
            _files.writes += 1
            done += sizes[file]
            report(done, total)


def _check_room(model: str, needed: int) -> None:
    """
    Raises:
        CheckpointError: the disk that the cache is on has less than `needed` bytes left.
    """
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    try:
        there = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
        free = shutil.disk_usage(there).free
    except OSError:  # no telling: writing will say
        return
    if free < needed:
        raise CheckpointError(f"{model} needs {in_bytes(needed)} more in {cache}, where {in_bytes(free)} are free", _ELSEWHERE)


_ELSEWHERE = "HF_HOME or HF_HUB_CACHE names another folder for the cache"


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
    """Keep the library's log, which repeats what the errors say, off stderr, unless the user has asked for it."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    if not {"HF_HUB_VERBOSITY", "HF_DEBUG"} & set(os.environ):
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


# What went wrong


def _cause(error: BaseException) -> BaseException:
    """What a file that "is not in the cache" could not be downloaded for."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    return error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None else error


def _status(error: BaseException) -> int | None:
    """Of the answer that the error is about."""
    from huggingface_hub.errors import HfHubHTTPError

    return int(error.response.status_code) if isinstance(error, HfHubHTTPError) and error.response is not None else None


def _is_of_network(error: BaseException) -> bool:
    """By name: huggingface_hub has changed the library that it makes requests with, and with it the classes."""
    return any(each.__name__ == "TransportError" for each in type(error).__mro__)


def _will_pass(error: BaseException) -> bool:
    """Whether the network or the Hub is at fault, not the request."""
    status = _status(error)
    return _is_of_network(error) if status is None else status in (408, 429) or status >= 500


def _trouble(error: BaseException) -> str:
    """Of errors that will pass, in a few words."""
    from huggingface_hub import constants

    status = _status(error)
    if status is None:
        return f"{constants.ENDPOINT} cannot be reached ({_line(error)})"
    if status == 429:
        return f"{constants.ENDPOINT} has had too many requests (status 429)"
    return f"{constants.ENDPOINT} is out of order (status {status})"


def _line(error: BaseException) -> str:
    """The first line of what a library says, less the full stop; or what its error is called."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def _refuse(error: Exception, model: str, revision: str | None, doing: str) -> NoReturn:
    """
    Raises:
        SterError: what `error` means.
    """
    if isinstance(error, SterError | MemoryError):
        raise error
    raise _refusal(_cause(error), model, revision, doing) from None


def _refusal(error: BaseException, model: str, revision: str | None, doing: str) -> SterError:
    from huggingface_hub import constants, errors, get_token

    status = _status(error)
    token = get_token() is not None
    if isinstance(error, errors.GatedRepoError):
        who = "with the account that your token is of" if token else "and log in, with `hf auth login` or the token in HF_TOKEN"
        hint = f"ask for access at {constants.ENDPOINT}/{model}, {who}"
        return CheckpointError(f"{model} is gated: its owners give access to those who ask for it", hint)
    if isinstance(error, errors.RevisionNotFoundError):
        short = re.fullmatch(r"[0-9a-f]{4,39}", revision or "")
        hint = "a commit has 40 digits" if short else f"{constants.ENDPOINT}/{model}/tree/main lists branches and tags"
        return InputError(f"{model} has no revision `{revision or MAIN}`", hint)
    if status == 401 and "invalid credentials" in str(error).lower():
        return CheckpointError(f"{constants.ENDPOINT} does not accept your token", "`hf auth login`, or HF_TOKEN, gives another one")
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401 or (status == 404 and doing == LOOK_UP):
        needs = "the account of your token must have access" if token else "log in, with `hf auth login` or the token in HF_TOKEN"
        message = f"{model} is neither a folder here nor a model at {constants.ENDPOINT} that you may read"
        return CheckpointError(message, f"check the name; if the model is private, {needs}")
    if status == 403:
        hint = "see what your token is allowed to do"
        return CheckpointError(f"{constants.ENDPOINT} refuses to let you read {model}: {_last(error)}", hint)
    if _will_pass(error):
        hint = "files that are complete stay in the cache; run it again to go on"
        if doing == LOOK_UP:
            hint = f"there is no folder {model} here, and nothing complete of it in {constants.HF_HUB_CACHE}"
        return CheckpointError(f"failed to {doing} {model}: {_trouble(error)}", hint)
    if isinstance(error, OSError) and error.errno is not None:
        return CheckpointError(f"failed to {doing} {model}: {constants.HF_HUB_CACHE} cannot be written: {reason(error)}", _ELSEWHERE)
    if doing == LOOK_UP and status is None:
        message = f"failed to look up {model}: {constants.ENDPOINT} does not answer as the Hub does ({_line(error)})"
        return CheckpointError(message, "HF_ENDPOINT names another Hub")
    return CheckpointError(f"failed to {doing} {model}: {_line(error)}")


def _last(error: BaseException) -> str:
    """What the server said, which the library puts last."""
    return getattr(error, "server_message", None) or _line(error)

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from ster import _files
from ster._files import check_writable, is_there, write_atomic, write_folder
from ster.errors import FileError


def test_a_failed_write_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("before")

    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, write)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_full_disk_is_a_plain_sentence(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        file.write(b"x" * 100_000)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        with pytest.raises(FileError) as caught:
            write_atomic(tmp_path / "out.json", write)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert str(caught.value) == f"failed to write {tmp_path / 'out.json'}: file too large"
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_device_is_written_and_not_replaced() -> None:
    check_writable(Path("/dev/full"))
    with pytest.raises(FileError) as caught:
        write_atomic("/dev/full", lambda file: file.write(b"x" * 100_000))
    assert str(caught.value) == "failed to write /dev/full: no space left on device"
    assert write_atomic("/dev/null", lambda file: file.write(b"x")) == Path("/dev/null")
    assert not Path("/dev/null").is_file()


def test_a_pipe_is_written(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_atomic(pipe, lambda file: file.write(b"through"))
    reader.join()
    assert read == [b"through"]


def test_what_cannot_be_written_is_known_before_the_work(tmp_path: Path) -> None:
    for path, problem in [
        (tmp_path, "it is a directory"),
        (tmp_path / "missing" / "out.json", f"no folder {tmp_path / 'missing'}"),
        (tmp_path / "file" / "out.json", "not a directory"),
        (tmp_path / ("a" * 300), "file name too long"),
        (tmp_path / ("a/" * 3000), "file name too long"),
        (tmp_path / "loop", "too many levels of symbolic links"),
        (tmp_path / "a\0b", "embedded null byte"),
    ]:
        if not (tmp_path / "loop").is_symlink():
            (tmp_path / "loop").symlink_to("loop")
        (tmp_path / "file").touch()
        with pytest.raises(FileError) as caught:
            check_writable(path)
        assert str(caught.value) == f"failed to write {path}: {problem}"
        with pytest.raises(FileError, match=problem):
            write_atomic(path, lambda file: file.write(b""))
    check_writable(tmp_path / "out.json")
    check_writable(tmp_path / ("a" * 255))
    check_writable(tmp_path / ("\u65e5" * 85))
    assert sorted(os.listdir(tmp_path)) == ["file", "loop"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_places_are_known_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o444)
    for mode in (0o555, 0o666):  # no writing, no searching
        tmp_path.chmod(mode)
        for path in (tmp_path / "file", tmp_path / "new"):
            with pytest.raises(FileError, match="permission denied"):
                check_writable(path)
    with pytest.raises(FileError, match="failed to read .*: permission denied"):
        is_there(tmp_path / "file")
    tmp_path.chmod(0o755)


def test_new_files_have_ordinary_rights_and_old_ones_keep_theirs(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        path = write_atomic(tmp_path / "new", lambda file: file.write(b""))
        assert path.stat().st_mode & 0o777 == 0o644
        path.chmod(0o600)
        write_atomic(path, lambda file: file.write(b""))
        assert path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(umask)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("before")
    (tmp_path / "link").symlink_to("real")
    write_atomic(tmp_path / "link", lambda file: file.write(b"after"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "after"


def test_a_kill_leaves_the_old_document(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("before")
    program = f"""
import time
from ster._files import write_atomic
def write(file):
    file.write(b"half"); file.flush(); print("writing", flush=True); time.sleep(60)
write_atomic({str(path)!r}, write)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        process.kill()
    assert path.read_text() == "before"


@pytest.mark.parametrize("failing", ["samefile", "permission"])
def test_errors_of_the_system_while_looking_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """What root never meets: a folder that may not be searched."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    if failing == "samefile":  # the input cannot be looked at; reading it will say so
        monkeypatch.setattr(Path, "samefile", refuse)
        (tmp_path / "out").touch()
        check_writable(tmp_path / "out", tmp_path / "in")
        return
    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(os, "lstat", refuse)
    with pytest.raises(FileError, match="failed to write .*: permission denied"):
        check_writable(tmp_path / "out")
    with pytest.raises(FileError, match="failed to read .*: permission denied"):
        is_there(tmp_path / "out")


def test_a_working_directory_that_is_gone_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileError) as caught:
        check_writable(Path("out.json"))
    assert str(caught.value) == "failed to write out.json: the working directory was deleted"
    check_writable(tmp_path / "out.json")


def test_an_input_is_not_written_over(tmp_path: Path) -> None:
    source, other = tmp_path / "in.json", tmp_path / "other.json"
    source.touch()
    (tmp_path / "soft").symlink_to("in.json")
    os.link(source, tmp_path / "hard")
    for path in (source, tmp_path / "soft", tmp_path / "hard"):
        with pytest.raises(FileError) as caught:
            check_writable(path, other, source)
        assert str(caught.value) == f"failed to write {path}: it is the input {source}"
    check_writable(other, source)
    check_writable(Path("/dev/null"), Path("/dev/null"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # between opening and `with`, nobody closes the file
@pytest.mark.parametrize("work", ["check", "write", "folder"])
def test_an_interrupt_at_any_step_leaves_nothing(tmp_path: Path, work: str) -> None:
    """Ctrl-C at every line of the writing in turn."""
    here = _files.__file__

    def interrupted(steps: int) -> bool:
        left = steps

        def trace(frame: object, event: str, argument: object) -> object:
            nonlocal left
            if frame.f_code.co_filename != here:  # type: ignore[attr-defined]
                return None
            left -= event == "line"
            if left < 0:
                left = 10**9
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            if work == "check":
                check_writable(tmp_path / "out")
            elif work == "write":
                write_atomic(tmp_path / "out", lambda file: file.write(b"x"))
            else:
                write_folder(tmp_path / "out", {"a": b"1", "b": b"2"})
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    steps = 0
    while interrupted(steps):
        assert not list(tmp_path.glob("**/.*")), steps
        if work == "folder":
            assert not (tmp_path / "out").exists() or sorted(os.listdir(tmp_path / "out")) == ["a", "b"], steps
        steps += 1
    assert steps > 10


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"a": b"1", "b": b"2", "c": b"3"}
    folder = tmp_path / "new" / "folder"
    replace, calls = os.replace, 0

    def interrupt(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        replace(source, target)

    before = _files.writes
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_folder(folder, files)
    assert os.listdir(tmp_path) == [] and _files.writes == before

    folder.mkdir(parents=True)
    (folder / "b").write_bytes(b"2")
    (folder / "mine").write_bytes(b"kept")
    write_folder(folder, files)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {**files, "mine": b"kept"}
    for name in ("a", "b", "c"):
        (folder / name).unlink()
    (folder / "c").symlink_to("nowhere")
    with pytest.raises(FileError, match="a file of that name with other content exists"):
        write_folder(folder, files)
    (folder / "c").unlink()
    (folder / "c").write_bytes(b"4")
    with pytest.raises(FileError) as caught:
        write_folder(folder, files)
    assert str(caught.value) == f"failed to write {folder / 'c'}: a file of that name with other content exists"
    assert sorted(os.listdir(folder)) == ["c", "mine"]

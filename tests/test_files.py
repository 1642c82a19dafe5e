import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from ster._files import check_writable, write_atomic
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
    ]:
        (tmp_path / "file").touch()
        with pytest.raises(FileError) as caught:
            check_writable(path)
        assert str(caught.value) == f"failed to write {path}: {problem}"
    check_writable(tmp_path / "out.json")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_places_are_known_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o444)
    tmp_path.chmod(0o555)
    for path in (tmp_path / "file", tmp_path / "new"):
        with pytest.raises(FileError, match="permission denied"):
            check_writable(path)


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

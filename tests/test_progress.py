import sys
import time

import pytest

from ster.progress import reporter


def test_silence_is_the_default(capfd: pytest.CaptureFixture[str]) -> None:
    for quiet in (None, False):
        with reporter(quiet, "extract") as report:
            report(1, 2)
    assert capfd.readouterr() == ("", "")


def test_a_function_is_called_as_it_is() -> None:
    calls: list[tuple[int, int]] = []
    with reporter(lambda done, total: calls.append((done, total)), "extract") as report:
        report(0, 2)
        report(2, 2)
    assert calls == [(0, 2), (2, 2)]


def test_without_a_terminal_there_is_a_line_now_and_then(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.5, 2.5, 3.0, 5.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with reporter(True, "extract") as report:
        for done in range(4):
            report(done, 3)
    assert capfd.readouterr() == ("", "extract: 1/3\nextract: 3/3\n")


def test_a_terminal_gets_a_bar_on_stderr(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with reporter(True, "extract") as report:
        report(1, 3)
    out, err = capfd.readouterr()
    assert out == "" and "1/3" in err

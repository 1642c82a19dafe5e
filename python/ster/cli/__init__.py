"""The command `ster`: library calls with clothes on. stdout carries the result, stderr everything else.

Exit code 0: done. 1: a refusal, `Error: <sentence>` and, where it helps, `hint: ...`. 2: wrong usage. 128 + n: ended by signal n, as
130 is Ctrl-C.

The commands are in `ster.cli.commands`. This module imports next to nothing: what a signal does is settled before anything slow begins.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

ENDING = {signal.SIGINT: "Interrupted", signal.SIGTERM: "Terminated", signal.SIGHUP: "Hung up"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. argv: None takes over the process, its arguments and signals."""
    received: list[signal.Signals] = []

    def end(number: int, frame: FrameType | None) -> None:
        """Unwind, so that half-written files are removed on the way."""
        received.append(signal.Signals(number))
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    _open_streams()
    said, before = False, _writes()
    with _on_signals(end) as ours:
        try:
            if sys.stdout is None:
                _say("Error: stdout is closed\nhint: every command writes there; `>/dev/null` drops what it writes")
                return 1
            from ster.cli.commands import run

            code = run(argv)
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 0 if exit.code is None else 1
            said = getattr(exit, "said", False)
        except BaseException:
            if not received:
                raise
            code = 128 + received[0]  # a library made another exception of the signal's, as imports do
        if argv is None:
            for number in ours:  # nothing is left to end: a second Ctrl-C must not show a traceback now
                signal.signal(number, signal.SIG_IGN)
    if not said and code in [128 + number for number in received]:
        _say(ENDING[signal.Signals(code - 128)] + ("; nothing was written." if _writes() == before else "."))
    _flush()
    return code


def _open_streams() -> None:
    """Let descriptors 0 to 2 that are closed lead to /dev/null: a file opened later must not get their number, and be taken for them.

    `sys.stderr` is then never None, for which `print` would take stdout.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stderr is None:
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115


@contextlib.contextmanager
def _on_signals(end: Callable[[int, FrameType | None], None]) -> Iterator[list[signal.Signals]]:
    """Call `end` on what would end the process; gives the signals. One that is ignored, as under nohup, stays so."""
    ours: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                ours[number] = signal.signal(number, end)
    try:
        yield list(ours)
    finally:
        for number, handler in ours.items():
            if signal.getsignal(number) is end:
                signal.signal(number, handler)


def _writes() -> int:
    """Outputs begun so far, of which the module that counts them may not be there yet."""
    return getattr(sys.modules.get("ster._files"), "writes", 0)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _flush() -> None:
    """Flush both streams, or drop what they will not take, so that Python has nothing to complain about when it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())

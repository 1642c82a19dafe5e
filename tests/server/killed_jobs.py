"""A server that takes a Job and kills itself at a step of it: `python killed_jobs.py STEP FOLDER URL KEY MODEL`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server.jobbing import serving, submit

import ster
from ster.server.jobs import results as results_module
from ster.server.jobs import routes as routes_module
from ster.server.jobs import runner as runner_module
from ster.server.jobs.execution import Execution
from ster.server.jobs.results import Results
from ster.server.jobs.runner import Runner
from ster.state.queue import Queue

STEPS: dict[str, tuple[Any, str, int]] = {  # what to die in, after so many calls of it
    "taken in, not committed": (Queue, "add", 1),
    "the Hold taken, nothing else": (routes_module, "take", 1),
    "queued": (Runner, "_claim", 0),
    "claimed": (Queue, "claim", 1),
    "running": (Execution, "_listen", 4),
    "computed": (Execution, "run", 1),
    "half written": (results_module, "write_atomic", 0),
    "written": (Results, "write", 1),
    "done, not committed": (Queue, "finish", 1),
    "paid, not committed": (runner_module, "pay", 1),
    "done": (Runner, "_finish", 1),
    "cancelled, not committed": (Queue, "cancel", 1),
    "cancelled": (Runner, "cancelled", 0),
}
FIELDS: dict[str, Any] = {"seed": 11, "temperature": 1.2, "max_tokens": 20, "output_residual_stream": [1, 3]}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    count = 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal count
        found = function(*args, **options)
        if found is not None or function.__name__ != "claim":  # a look at an empty queue is none
            count += 1
        if count == calls:
            die()
        return found

    return call


def main() -> None:
    step, folder, url, key, model = sys.argv[1:]
    where, name, calls = STEPS[step]
    if step == "half written":

        def half(path: Path, write: Callable[[Any], object]) -> None:
            part = path.with_name(f".{path.name}.part")
            with part.open("wb") as file:
                write(file)
                file.truncate(file.tell() // 2)
            die()

        results_module.write_atomic = half  # type: ignore[assignment]
    elif step == "queued":
        Runner._claim = lambda self: False  # type: ignore[method-assign]
    elif step == "cancelled":
        Runner.cancelled = lambda *_: die()  # type: ignore[method-assign]
    else:
        setattr(where, name, dying(getattr(where, name), calls))
    with serving(Path(folder), ster.load(model), url=url) as client:
        client.headers["authorization"] = f"Bearer {key}"
        if step.startswith("cancelled"):
            with client.models.pass_lock:
                client.delete(f"/v1/jobs/{submit(client, **FIELDS)}")
        submit(client, **FIELDS)
        if step == "queued":
            die()
        time.sleep(60)


if __name__ == "__main__":
    main()

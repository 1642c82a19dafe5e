"""Schemathesis reads `/openapi.json`, sends what it allows and what it forbids, and holds every answer to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("schemathesis", reason="run `make test-clients`")

from openapi_spec_validator import OpenAPIV31SpecValidator
from server.jobbing import serving
from serving import Client

import ster

pytestmark = pytest.mark.clients

EXAMPLES = int(os.environ.get("STER_SCHEMATHESIS_EXAMPLES", "10"))
"""For each operation, beside some 1,900 cases that follow from the document."""

CHAT = "{% for message in messages %}{{ message.content }} {% endfor %}{% if add_generation_prompt %}is{% endif %}"


def test_the_document_is_openapi_and_every_answer_is_in_it(toy_copy: Path, tmp_path: Path) -> None:
    (toy_copy / "chat_template.jinja").write_text(CHAT)
    model = ster.load(toy_copy)
    with serving(tmp_path / "state", model) as client:
        OpenAPIV31SpecValidator(client.get("/openapi.json").json()).validate()
        report = run(client, tmp_path)
        answers = counts(client)
    assert report["stop_reason"] == "completed" and report["errors"] == [] and report["failures"] == []
    assert report["operations"]["tested"] == report["operations"]["total"] == 22
    assert {phase: found["status"] for phase, found in report["phases"].items()} == dict.fromkeys(report["phases"], "success")
    assert report["test_cases"]["generated"] > 1500 and report["test_cases"]["with_failures"] == 0
    # All of it was real: both kinds of completion were answered and refused, many times.
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert answers[path, 200] > 50 and answers[path, 400] > 200 and answers[path, 405] and answers[path, 415]
    assert not any(status >= 500 for _, status in answers)


def run(client: Client, folder: Path) -> Any:
    """One run; its report."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{client.url}/openapi.json", "--workers", "1", "--continue-on-failure"]
    # A schema cannot say what fields mean together: the end of a span after its start, a row for each layer.
    command += ["--exclude-checks", "positive_data_acceptance", "--max-examples", str(EXAMPLES), "--seed", "1"]
    command += ["--report", "json", "--report-json-path", str(report)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return json.loads(report.read_text())


def counts(client: httpx.Client) -> dict[tuple[str, int], int]:
    """Path and status -> answers, by the server's own count."""
    found: dict[tuple[str, int], int] = {}
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("ster_requests_total{"):
            labels, _, count = line.removeprefix("ster_requests_total{").partition("} ")
            path, status = (label.partition("=")[2].strip('"') for label in labels.split(","))
            found[path, int(status)] = int(count)
    return found

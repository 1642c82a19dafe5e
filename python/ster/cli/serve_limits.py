"""Options of `ster serve` for what runs in the background: how much of it a caller may ask for, and how long it stays."""

from __future__ import annotations

from typing import Annotated

import typer

MOST = 10**9  # of counts
MOST_RUNNING = 1024  # each has a thread

JobsRunning = Annotated[int, typer.Option("--jobs-running", metavar="N", min=1, max=MOST_RUNNING, help="Jobs that run at once.")]
MaxJobs = Annotated[int, typer.Option("--max-jobs", metavar="N", min=1, max=MOST, help="Jobs of one caller that wait or run.")]
MaxJobGb = Annotated[float, typer.Option("--max-job-gb", metavar="GB", min=0.001, help="Requests and results of one caller's Jobs.")]
JobDays = Annotated[float, typer.Option("--job-days", metavar="D", min=0.001, help="How long a Job stays after its end.")]
MaxHarvests = Annotated[int, typer.Option("--max-harvests", metavar="N", min=1, max=MOST, help="Harvests of one caller that wait or run.")]
MaxHarvestPrompts = Annotated[int, typer.Option("--max-harvest-prompts", metavar="N", min=1, max=MOST, help="Prompts of one harvest.")]
MaxHarvestTokens = Annotated[
    int, typer.Option("--max-harvest-tokens", metavar="N", min=1, max=MOST, help="Tokens of all prompts of one harvest.")
]
HarvestDays = Annotated[float, typer.Option("--harvest-days", metavar="D", min=0.001, help="How long the files of a harvest stay.")]

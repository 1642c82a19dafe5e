"""What is answered of harvests, as the OpenAPI document describes it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ster.server.answers import Answer, ErrorDetail

Status = Literal["pending", "running", "done", "failed", "cancelled"]


class HarvestAccepted(Answer):
    job_id: str = Field(description="A UUID.")
    status: Status
    model: str
    n_prompts: int


class HarvestTimings(Answer):
    waited_s: float = Field(description="Seconds until it was begun, or gone on with for the last time.")
    ran_s: float


class HarvestResult(Answer):
    """URLs open their file without a key until `urls_expire_at`."""

    n_shards: int
    layer_indices: list[int]
    manifest_url: str
    shard_urls: list[str]
    stats_url: str
    timings: HarvestTimings


class HarvestSummary(Answer):
    job_id: str
    status: Status
    model: str = Field(description="The id it is served under.")
    run_id: str | None = Field(description="Of its manifest, once it has begun: equal harvests have the same.")
    n_prompts: int
    tokens: int = Field(description="Of all prompts.")
    tokens_done: int
    bytes: int = Field(description="What its files take, about.")
    created_at: int
    completed_at: int | None = Field(description="When it was done, failed or cancelled.")
    urls_expire_at: int | None
    urls_expired: bool = Field(description="Its files are gone: their time is over, or somebody removed them.")
    error: ErrorDetail | None = Field(description="Why it failed.")


class Harvest(HarvestSummary):
    result: HarvestResult | None = Field(description="Once it is done, and until urls_expired.")


class HarvestList(Answer):
    object: Literal["list"]
    data: list[HarvestSummary] = Field(description="The newest first.")
    has_more: bool

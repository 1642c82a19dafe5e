"""What is refused about Jobs; see `ster.server.errors`."""

from __future__ import annotations

import math

from ster.server.errors import ApiError

LIVE_SECONDS = 30  # after which another Job may have ended


def jobs_unavailable() -> ApiError:
    message = "This server keeps no Jobs: it was started without a state."
    return ApiError(503, message, code="jobs_unavailable")


def job_not_found() -> ApiError:
    return ApiError(404, "There is no such Job of yours.", code="job_not_found")


def job_not_cancellable(state: str) -> ApiError:
    return ApiError(409, f"The Job has ended: it is {state}.", code="job_not_cancellable")


def too_many_jobs(limit: int) -> ApiError:
    message = f"{limit:,} of your Jobs wait or run, and no more may: try again when one has ended."
    return ApiError(429, message, code="too_many_jobs", headers={"Retry-After": str(LIVE_SECONDS)})


def job_storage_full(limit: int, seconds: float) -> ApiError:
    """seconds: until there is room, or the first of them may have ended."""
    message = f"Your Jobs may have {limit:,} bytes, requests and results together, and this one does not fit: try again later."
    return ApiError(429, message, code="job_storage_full", headers={"Retry-After": str(max(math.ceil(seconds), 1))})


def job_gave_up() -> ApiError:
    message = "The Job was tried several times, and each time the server failed. Its log has the cause."
    return ApiError(500, message, code="job_failed")


def job_result_missing() -> ApiError:
    return ApiError(500, "The result of the Job is no longer in the server's folder.", code="job_result_missing")

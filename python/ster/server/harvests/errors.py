"""What requests for harvests are refused with."""

from __future__ import annotations

from ster.server.errors import ApiError

RETRY_SECONDS = 30


def unavailable() -> ApiError:
    message = "This server keeps no state, and so no harvests."
    return ApiError(503, message, code="harvest_unavailable")


def job_not_found(id: str) -> ApiError:
    return ApiError(404, f"You have no harvest `{id[:60]}`.", code="harvest_job_not_found")


def not_cancellable(state: str) -> ApiError:
    return ApiError(409, f"The harvest is {state}: there is nothing left to cancel.", code="harvest_not_cancellable")


def concurrency_exceeded(limit: int) -> ApiError:
    message = f"You have {limit} harvests that wait or run, which is as many as may be: wait for one, or cancel it."
    return _later(message, "harvest_concurrency_exceeded")


def too_many_harvests(limit: int) -> ApiError:
    return _later(f"The server has {limit} harvests that wait or run, which is as many as it takes.", "harvest_capacity_exceeded")


def no_room(need: str, free: str) -> ApiError:
    message = f"The harvest takes {need} on disk, and the server has {free} for it: ask for fewer Layers or prompts, or later."
    return _later(message, "harvest_capacity_exceeded")


def files_gone() -> ApiError:
    return ApiError(410, "The files of this harvest are no longer kept.", code="harvest_files_expired")


def not_done(state: str) -> ApiError:
    return ApiError(404, f"The harvest is {state}: it has no files.", code="harvest_not_done")


def no_such_file(name: str) -> ApiError:
    return ApiError(404, f"The harvest has no file `{name[:60]}`.", code="harvest_file_not_found", param="name")


def bad_signature() -> ApiError:
    return ApiError(403, "The URL is not one that this server signed.", code="invalid_signature")


def url_expired() -> ApiError:
    return ApiError(410, "The URL has expired.", code="url_expired")


def range_not_satisfiable(content_range: str) -> ApiError:
    message = f"The file has no such bytes: {content_range.removeprefix('bytes */')} are there."
    return ApiError(416, message, code="range_not_satisfiable", headers={"Content-Range": content_range})


def bad_range() -> ApiError:
    return ApiError(400, "The header Range must name bytes, as in bytes=0-1023.", code="invalid_range")


def gave_up() -> ApiError:
    message = "The harvest was tried several times, and each time the server failed. Its log has the cause."
    return ApiError(500, message, code="harvest_failed")


def _later(message: str, code: str) -> ApiError:
    return ApiError(429, message, code=code, headers={"Retry-After": str(RETRY_SECONDS)})

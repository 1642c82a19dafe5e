"""The one form of every refusal and failure over HTTP: `{"error": {"message", "type", "param", "code"}, "request_id"}`.

Messages here are the API's: whole sentences, with a capital letter and a full stop where they are ours to write.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ster.state.amounts import OverBudget

NONE: Mapping[str, str] = MappingProxyType({})
SHOWN_NAME = 200  # characters of a name that there is not
QUEUE_SECONDS = 5  # after which a refused client may knock again


class ApiError(Exception):
    """An answer other than 200. `headers` go with it; `type` follows from the status where none is given."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        type: str | None = None,
        headers: Mapping[str, str] = NONE,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.type = type or _type_of(status)
        self.headers = dict(headers)

    def body(self, request_id: str) -> dict[str, Any]:
        """The JSON of the answer, which is also what the last event of a broken stream holds, and what an answer that has
        kept its client waiting ends with."""
        param = None if self.param is None else encodable(self.param)
        error = {"message": encodable(self.message), "type": self.type, "param": param, "code": self.code}
        return {"error": error, "request_id": request_id}


def encodable(text: str) -> str:
    """`text` for JSON and the log: half a surrogate pair, which UTF-8 cannot hold, is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def invalid(message: str, param: str | None) -> ApiError:
    """A field that cannot be used."""
    return ApiError(400, message, code="invalid_request", param=param)


def bad_json(message: str) -> ApiError:
    return ApiError(400, message, code="bad_json")


def model_not_found(name: str) -> ApiError:
    shown = name if len(name) <= SHOWN_NAME else name[:SHOWN_NAME] + "..."
    return ApiError(400, f"There is no model `{shown}`: GET /v1/models lists the models.", code="model_not_found", param="model")


def context_length_exceeded(prompt_tokens: int, max_tokens: int, context: int) -> ApiError:
    """prompt_tokens + max_tokens > context; max_tokens 0 where the prompt alone is too long."""
    if prompt_tokens >= context or max_tokens == 0:
        message = f"The prompt has {prompt_tokens} tokens, and the model's context has {context}: shorten the prompt."
        return ApiError(400, message, code="context_length_exceeded", param="prompt")
    message = (
        f"The prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}: together they exceed the model's context of"
        f" {context} tokens. Shorten the prompt, or set max_tokens to {context - prompt_tokens} or less."
    )
    return ApiError(400, message, code="context_length_exceeded", param="max_tokens")


def text_beyond_context(size: int, longest: int, context: int, param: str) -> ApiError:
    """Known before it is tokenised: more bytes than the context's tokens could have."""
    message = (
        f"The prompt has {size:,} bytes, and the model's context has {context} tokens of at most {longest} bytes each: shorten the prompt."
    )
    return ApiError(400, message, code="context_length_exceeded", param=param)


def text_too_long(size: int, limit: int, param: str) -> ApiError:
    return invalid(f"The text has {size:,} bytes: at most {limit:,} are allowed.", param)


def full_vocab_prompt_too_long(prompt_tokens: int, limit: int) -> ApiError:
    message = f"prompt_logprobs -1 takes a prompt of at most {limit} tokens here: this prompt has {prompt_tokens}."
    return ApiError(400, message, code="full_vocab_prompt_too_long", param="prompt_logprobs")


def chat_completions_unsupported() -> ApiError:
    message = "This model has no chat template: use /v1/completions, which takes raw text."
    return ApiError(400, message, code="chat_completions_unsupported", param="model")


def invalid_api_key() -> ApiError:
    message = "The API key is missing or wrong: send Authorization: Bearer KEY."
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def key_paused() -> ApiError:
    return ApiError(403, "The API key is paused: whoever runs this server can resume it.", code="key_paused")


def state_unavailable() -> ApiError:
    """The database does not answer; the log says why."""
    message = f"The server's database does not answer: try again in {QUEUE_SECONDS} seconds."
    return ApiError(503, message, code="state_unavailable", headers={"Retry-After": str(QUEUE_SECONDS)})


def over_budget(refused: OverBudget) -> ApiError:
    """429: a limit of the key leaves no room. Retry-After is soon where requests that run may give some back, else when the period is over;
    clients of OpenAI are told not to try again where that is long."""
    name, limit, left, asked = refused.dimension, refused.limit, refused.left, refused.asked
    if name == "concurrency":
        message = f"This API key may run {_requests(limit)} at a time, and as many run."
        return ApiError(429, message, code="concurrency_exceeded", headers={"Retry-After": "1"})
    assert refused.renews_at is not None
    seconds = max(math.ceil(refused.renews_at - time.time()), 1)
    if name == "requests_per_minute":
        message = f"This API key may start {_requests(limit)} a minute, and as many have started: try again in {seconds} seconds."
        return ApiError(429, message, code="rate_limited", headers={"Retry-After": str(seconds)})
    message = f"This request needs {asked:,}, and {left:,} of this API key's {limit:,} {UNITS[name]} are left ({name})."
    if refused.held and asked <= left + refused.held:
        message += f" Requests that run or wait hold {refused.held:,}, and may give some back."
        return ApiError(429, message, code=CODES.get(name, "budget_exceeded"), headers={"Retry-After": str(QUEUE_SECONDS)})
    message += time.strftime(" The budget renews at %Y-%m-%d 00:00 UTC.", time.gmtime(refused.renews_at))
    headers = {"Retry-After": str(seconds), "X-Should-Retry": "false"}
    return ApiError(429, message, code=CODES.get(name, "budget_exceeded"), headers=headers)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count:,} requests"


CODES = {"monthly_activations": "activation_quota_exceeded", "monthly_harvest_tokens": "harvest_quota_exceeded"}
UNITS = {
    "monthly_tokens": "tokens a month",
    "daily_tokens": "tokens a day",
    "monthly_input_tokens": "input tokens a month",
    "monthly_output_tokens": "output tokens a month",
    "monthly_activations": "requests with activations a month",
    "monthly_harvest_tokens": "harvest tokens a month",
}


def not_found(path: str) -> ApiError:
    return ApiError(404, f"There is nothing at {path}.", code="not_found")


def method_not_allowed(method: str, path: str, allowed: str) -> ApiError:
    return ApiError(405, f"{path} does not take {method}: use {allowed}.", code="method_not_allowed", headers={"Allow": allowed})


def unsupported_media_type(found: str) -> ApiError:
    return ApiError(415, f"The body must be application/json, found {found}.", code="unsupported_media_type")


def request_too_large(limit: int) -> ApiError:
    """The body is longer than `limit` bytes. The rest of it was not read, so the connection ends."""
    message = f"The body is larger than {limit} bytes."
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def too_many_members(limit: int) -> ApiError:
    message = f"The body has more than {limit:,} lists, objects and members of objects."
    return ApiError(413, message, code="request_too_large")


def busy_reading() -> ApiError:
    """The bodies of other requests have all the memory that bodies may have."""
    message = f"Too many large requests are being read: try again in {QUEUE_SECONDS} seconds."
    return ApiError(503, message, code="too_many_bodies", headers={"Retry-After": str(QUEUE_SECONDS), "Connection": "close"})


def queue_full() -> ApiError:
    message = f"Too many requests are waiting: try again in {QUEUE_SECONDS} seconds."
    return ApiError(429, message, code="queue_full", headers={"Retry-After": str(QUEUE_SECONDS)})


def model_loading(name: str) -> ApiError:
    message = f"The model `{name}` is loading: try again in {QUEUE_SECONDS} seconds."
    return ApiError(503, message, code="model_loading", headers={"Retry-After": str(QUEUE_SECONDS)})


def model_failed(name: str, seconds: float) -> ApiError:
    """seconds: until a request has it loaded again. No Retry-After: clients obey it, and would wait in silence for what mostly stays so."""
    message = f"The model `{name}` failed to load. The server's log has the cause. Requests in {math.ceil(seconds)} seconds try again."
    return ApiError(503, message, code="model_failed")


def model_load_timeout(name: str, seconds: float) -> ApiError:
    message = f"The model `{name}` has not loaded within {seconds:g} seconds. It goes on loading: try again."
    return ApiError(503, message, code="model_load_timeout", headers={"Retry-After": str(QUEUE_SECONDS)})


def shutting_down() -> ApiError:
    return ApiError(503, "The server is shutting down.", code="shutting_down", headers={"Retry-After": str(QUEUE_SECONDS)})


def internal_error() -> ApiError:
    """Something broke. The traceback is in the log, under the request's id; nothing of it leaves."""
    return ApiError(500, "The server failed. Its log has the cause under this request_id.", code="internal_error")


def misfit() -> ApiError:
    """The activations do not have the shape that the answer must have."""
    return ApiError(502, "Inference's answer does not fit the request", code="upstream_server_error")

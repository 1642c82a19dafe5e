"""The bodies of answers, as the OpenAPI document describes them. Answers are not made from these classes: a captured tensor has no business
in pydantic. Tests hold the two together.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ster.server.schema import EncodedTensor
from ster.server.served import State


def maybe(description: str) -> Any:
    """A member that is absent where it does not apply, never null."""
    return Field(default=None, description=description, json_schema_extra=_without_default)


def _without_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


class Answer(BaseModel):
    model_config = ConfigDict(strict=True)


class ErrorDetail(Answer):
    message: str
    type: Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]
    param: str | None = Field(description="The field that is wrong.")
    code: str


class Error(Answer):
    """What went wrong. In a stream that has begun, it is the last event; an answer that has kept its client waiting ends with it, and has
    the status 200 all the same."""

    error: ErrorDetail
    request_id: str = Field(description="As in the header X-Request-Id.")


class Usage(Answer):
    prompt_tokens: Annotated[int, Field(ge=0)]
    completion_tokens: Annotated[int, Field(ge=0)]
    total_tokens: Annotated[int, Field(ge=0)]


class TextLogprobs(Answer):
    """One entry for each token. The first token of a prompt has null."""

    text_offset: list[int] = Field(description="In characters.")
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Answer):
    logprob: float
    rank: Annotated[int, Field(ge=1)]
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
FinishReason = Literal["stop", "length"]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs | None = Field(description="One entry for each prompt token, by token id; its own comes first.")
    stop_reason: str | int = maybe("The stop text, or the id of the token, that ended it.")
    prompt_token_ids: list[int] = maybe("With return_token_ids.")
    token_ids: list[int] = maybe("With return_token_ids.")


class Captured(Answer):
    residual_stream: EncodedTensor = Field(
        description="[Layers in ascending order][prompt tokens + generated tokens - 1][hidden size], steering included."
    )


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str = Field(description="The checkpoint.")
    choices: list[CompletionChoice]
    usage: Usage
    activations: Captured = maybe("With output_residual_stream.")


class Job(Answer):
    """A completion that is made in the background. A list has it without its result."""

    id: str
    object: Literal["job"]
    status: Literal["queued", "running", "done", "failed", "cancelled"]
    model: str = Field(description="The id that it was asked of.")
    created_at: int = Field(description="This and other times: Unix seconds.")
    started_at: int = maybe("It runs, or has run.")
    ended_at: int = maybe("It is done, failed or cancelled.")
    expires_at: int = maybe("It has ended, and is removed after this.")
    result: Completion = maybe("It is done.")
    error: ErrorDetail = maybe("It failed: what the request would have been answered.")


class JobList(Answer):
    object: Literal["list"]
    data: list[Job]
    first_id: str | None
    last_id: str | None
    has_more: bool


class TokenLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    content: list[ChatLogprob]


class AssistantMessage(Answer):
    role: Literal["assistant"]
    content: str


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int = maybe("The stop text, or the id of the token, that ended it.")
    token_ids: list[int] = maybe("With return_token_ids.")


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str = Field(description="The checkpoint.")
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] = maybe("With return_token_ids.")
    prompt_logprobs: PromptLogprobs = maybe("With prompt_logprobs.")
    activations: Captured = maybe("With output_residual_stream.")


class Capabilities(Answer):
    """Facts about the model, and the caps that hold for its requests."""

    n_layers: int
    hidden_size: int
    max_model_len: int = Field(description="Tokens of a prompt and its completion together.")
    vocab_size: int
    dtype: str = Field(description="As the checkpoint is stored.")
    activations: bool
    activation_dtype: Literal["float32", "bfloat16", "float16"] = Field(description="How activations travel, unless a request says.")
    activation_dtypes: list[str]
    logprobs: bool
    prompt_logprobs: bool
    prompt_logprobs_full_vocab: bool
    chat_template: bool
    bos_token_id: int = maybe("Where there is one.")
    unknown_token_id: int = maybe("Where there is one.")
    precision: str = Field(description="Dtypes of the weights as they run, such as bf16 or f32+q4_k.")
    revision: str = maybe("The commit, where that is known.")
    config_hash: str = Field(description="SHA-256 over the checkpoint's config.")
    tokenizer_hash: str = Field(description="SHA-256 over the tokenizer and the chat template.")
    rotation_switches_after: int = maybe("Longrope: longer sequences are rotated otherwise from their first token on.")
    rotation_changes_after: int = maybe("Dynamic scaling: longer sequences are rotated each by their length.")
    max_capture_numbers: int
    max_steering_numbers: int
    max_steering_vectors: int
    max_span_positions: int
    max_body_bytes: int
    max_body_members: int = Field(description="Lists, objects and members of objects in a body.")
    max_text_bytes: int = Field(description="Of a prompt that is a text, in UTF-8.")
    max_logprobs: int
    max_score_numbers: int = Field(description="Entries of logprobs and prompt_logprobs in an answer, those of all choices.")
    full_vocab_max_prompt_tokens: int = Field(description="With prompt_logprobs -1 and n 1; n divides it.")
    max_output_work_tokens: int
    max_choices: int = Field(description="Prompts x n.")
    max_stops: int
    max_prompts: int


class ModelEntry(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    status: Literal["idle", "loading", "live", "failed"]
    served_model_name: str = maybe("The checkpoint, once that is known.")
    capabilities: Capabilities = maybe("Once it has been loaded, also when it no longer is.")


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelEntry]


class ModelStatus(Answer):
    id: str
    object: Literal["model.status"]
    warm: bool = Field(description="It answers at once.")
    state: State = Field(description="`idle`: a request loads it.")
    since: float = Field(description="When it came into this state. This and other times: Unix seconds.")
    uses: Annotated[int, Field(ge=0)] = Field(description="Requests and other work that run on it or wait for it.")
    load_seconds: float = maybe("What the last load took.")
    retry_at: float = maybe("It has failed: a request from then on tries again.")
    unloads_at: float = maybe("It is not used, and will be unloaded then if nobody asks.")


class WeightsHash(Answer):
    id: str
    object: Literal["model.weights_hash"]
    weights_hash: str = Field(description="SHA-256 over every weight, whatever the files are called.")


class Tokens(Answer):
    tokens: list[int]
    count: int
    max_model_len: int


class Text(Answer):
    prompt: str


class TokenizerInfo(Answer):
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str = maybe("Where there is one.")
    sep_token: str = maybe("Where there is one.")
    cls_token: str = maybe("Where there is one.")
    mask_token: str = maybe("Where there is one.")
    chat_template: str | None
    vocab_size: int


class Health(Answer):
    status: Literal["ok"]
    models: dict[str, State]


class Ready(Answer):
    status: Literal["ready"]
    models: list[str]


class UsedKey(Answer):
    id: str
    name: str


class Budget(Answer):
    """One limit of a key in its present month or day, which are UTC's. Tokens are counted, or requests."""

    spent: int
    held: int = Field(description="By requests that run, and by Jobs and harvests that wait.")
    renews_at: int = Field(description="Unix seconds.")
    limit: int = maybe("Where there is one.")
    left: int = maybe("Where there is a limit.")


class Budgets(Answer):
    monthly_tokens: Budget = maybe("Of prompts, and generated. Absent, as all are, for callers who are not counted.")
    daily_tokens: Budget = maybe("The same of a day.")
    monthly_input_tokens: Budget = maybe("Of prompts.")
    monthly_output_tokens: Budget = maybe("Generated.")
    monthly_activations: Budget = maybe("Requests with output_residual_stream.")
    monthly_harvest_tokens: Budget = maybe("Of prompts of harvests.")


class UsagePeriod(Answer):
    period: str = Field(description="As 2026-11, or 2026-11-30, in UTC.")
    requests: int = Field(description="Those that cost something.")
    renews_at: int


class KeyUsage(Answer):
    """What the caller's API key has used. Of callers without one of the server's state nothing is counted."""

    object: Literal["usage"]
    counted: bool
    budgets: Budgets
    key: UsedKey = maybe("Where it is counted, as are the following.")
    month: UsagePeriod = maybe("The present one.")
    day: UsagePeriod = maybe("The present one.")
    running: int = maybe("Requests that hold something now.")
    concurrency: int = maybe("How many may run, where that is limited.")
    requests_per_minute: int = maybe("How many may start in a minute, where that is limited.")

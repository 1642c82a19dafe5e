"""The bodies of requests. Strict: an unknown field, a wrong type or a number out of range is refused, and named.

`parse_body` is the way in. What needs a model to be known (its Layers, its context) is checked in `capture.py` and `vectors.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

import orjson
from pydantic import AfterValidator, BaseModel, Field, Tag, ValidationError, model_validator
from pydantic.json_schema import WithJsonSchema
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_core.core_schema import ValidationInfo
from typing_extensions import Self

from ster.server.errors import bad_json, invalid
from ster.server.fields import (
    DEFAULTS,
    FLAG,
    FLOAT32_LIMIT,
    ID_LISTS,
    IDS,
    INTEGER_LIMIT,
    LIST,
    OBJECT,
    SHOWN,
    TAGS,
    TEXT,
    TEXTS,
    Layer,
    Limit,
    Position,
    Strict,
    TokenId,
    TokenIds,
    by_kind,
    by_prompt,
    settings_of,
    shown,
)
from ster.server.members import check_members
from ster.server.settings import Settings

CAPTURE = "output_residual_stream"
STEERING = "apply_steering_vectors"

SLOW_BYTES = 1 << 20  # what may be read again by the slow parser

T = TypeVar("T", bound=BaseModel)


class EncodedTensor(Strict):
    """Numbers as vllm-lens encodes them: base64 of one zstd frame, which states its size, of little-endian numbers in C order. bfloat16
    numbers are `int16` with `torch.bfloat16`: the upper 16 bits of a float32."""

    data: str
    dtype: Literal["float32", "int16", "float16"]
    original_dtype: Literal["torch.float32", "torch.bfloat16", "torch.float16"]
    shape: Annotated[list[Annotated[int, Field(ge=1, le=INTEGER_LIMIT)]], Field(min_length=2, max_length=3)]
    compression: Literal["zstd"]


_NUMBER = {"type": "number", "minimum": -FLOAT32_LIMIT, "maximum": FLOAT32_LIMIT}
_ROW = {"type": "array", "minItems": 1, "items": _NUMBER}
_ROWS = {
    "type": "array",
    "minItems": 1,
    "items": {"oneOf": [_ROW, {"type": "array", "minItems": 1, "items": _ROW}]},
    "description": "[layers][hidden size], or [layers][positions][hidden size].",
}
Activations = Annotated[
    # The numbers are NumPy's to check, in `vectors.py`: pydantic takes seconds for two million.
    Annotated[EncodedTensor, Tag(OBJECT)] | Annotated[list[Any], WithJsonSchema(_ROWS), Tag(LIST)],
    by_kind("a list of rows or an encoded tensor"),
]


Span = Annotated[list[Position], Field(fail_fast=True, min_length=2, max_length=2)]
Spans = Annotated[list[Span], Field(fail_fast=True, min_length=1), Limit("maxItems", "max_span_positions")]


def _within_float32(value: float) -> float:
    if not abs(value) <= FLOAT32_LIMIT:
        raise PydanticCustomError("float32", f"Input should be within float32's range, from -{FLOAT32_LIMIT} to {FLOAT32_LIMIT}")
    return value


Float32 = Annotated[float, AfterValidator(_within_float32), WithJsonSchema(_NUMBER)]


class SteeringVector(Strict):
    """Adds `scale` times a vector to the residual stream after each Layer that it names."""

    activations: Activations = Field(description="Row i goes to Layer `layer_indices[i]`: one vector, or one for each position.")
    layer_indices: Annotated[list[Layer], Field(fail_fast=True, min_length=1), Limit("maxItems", "max_steering_numbers")]
    scale: Float32 = Field(1.0, description="0 changes no bit of the answer.")
    norm_match: bool = Field(False, description="Add `scale` times the vector, scaled to the norm of the row it is added to.")
    position_indices: Annotated[list[Position], Field(fail_fast=True, min_length=1), Limit("maxItems", "max_steering_numbers")] | None = (
        Field(None, description="With a list of vectors for each Layer: where each goes. Left out: 0, 1, 2, ...")
    )
    position_spans: Spans | None = Field(
        None, description="With one vector for each Layer: [start, end) pairs, in any order, that do not overlap."
    )


SteeringVectors = Annotated[list[SteeringVector], Field(fail_fast=True, min_length=1), Limit("maxItems", "max_steering_vectors")]
Layers = Annotated[
    Annotated[bool, Tag(FLAG)] | Annotated[list[Layer], Field(fail_fast=True, min_length=1), Tag(LIST)],
    by_kind("true or a list of Layers"),
]
Prompt = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[list[str], Field(fail_fast=True, min_length=1), Limit("maxItems", "max_prompts"), Tag(TEXTS)]
    | Annotated[TokenIds, Tag(IDS)]
    | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1), Limit("maxItems", "max_prompts"), Tag(ID_LISTS)],
    by_prompt(),
]
StopText = Annotated[str, Field(min_length=1)]
Stop = Annotated[
    Annotated[StopText, Tag(TEXT)] | Annotated[list[StopText], Field(fail_fast=True), Limit("maxItems", "max_stops"), Tag(LIST)],
    by_kind("a text or a list of texts"),
]


def _not_zero(value: int) -> int:
    if value == 0:
        raise PydanticCustomError("top_k", "Input should be -1 or greater than or equal to 1")
    return value


_TOP_K = {"oneOf": [{"const": -1}, {"type": "integer", "minimum": 1, "maximum": INTEGER_LIMIT}]}
TopK = Annotated[int, Field(ge=-1, le=INTEGER_LIMIT), AfterValidator(_not_zero), WithJsonSchema(_TOP_K)]


class VllmXargs(Strict):
    """The two activation fields as vllm-lens sends them: JSON in strings. They mean the same as at the top level, and may stand in one
    place only."""

    refused: ClassVar[dict[str, str]] = {
        "apply_hooks": "apply_hooks is refused: a hook is pickled Python code, and the server would execute what came over the network.",
        "activations_transport": "activations_transport is not supported: activations come in the JSON of the answer.",
    }

    output_residual_stream: str | bool | Annotated[list[Layer], Field(min_length=1)] | None = None
    apply_steering_vectors: str | SteeringVectors | None = None
    skip_reading_prefix_cache: bool | Literal["true", "false"] = Field(False, description="Run the whole prompt.")
    apply_hooks: None = None
    activations_transport: None = None


class StreamOptions(Strict):
    include_usage: bool = Field(False, description="One more chunk, without choices, with the usage.")


class Generate(Strict):
    """What both kinds of completion take."""

    model: str = Field(description="The id of a model in GET /v1/models.")
    n: int = Field(1, ge=1, le=16, description="Choices for each prompt.")
    temperature: float = Field(1.0, ge=0, le=100, description="0 takes the likeliest token.")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: TopK = Field(-1, description="-1: all tokens.")
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    seed: int | None = Field(None, ge=0, le=INTEGER_LIMIT, description="The same seed gives the same text. Left out: a random one.")
    stop: Stop | None = Field(None, description="Texts that end a choice; they are cut off.")
    prompt_logprobs: Annotated[int, Field(ge=-1), Limit("maximum", "max_logprobs")] | None = Field(
        None,
        description="This many likeliest tokens at each prompt token, beside its own; -1: the whole vocabulary. An answer has at"
        " most `max_score_numbers` entries in all, see GET /v1/models.",
    )
    stream: bool = False
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    user: str | None = Field(None, description="Ignored.")
    return_token_ids: bool = Field(False, description="Also answer the ids of the prompt and of each choice.")
    output_residual_stream: Layers | None = Field(
        None, description="Layers to read the residual stream of, or true for all. For one prompt and n 1."
    )
    activation_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="How the numbers of output_residual_stream travel. Left out: as the checkpoint is stored."
    )
    apply_steering_vectors: SteeringVectors | None = Field(
        None, description="What is added to the residual stream. For one prompt and n 1."
    )
    vllm_xargs: VllmXargs | None = None

    @classmethod
    def prepare(cls, sent: dict[str, Any]) -> dict[str, Any]:
        return _unfold(sent)

    @property
    def captures(self) -> bool:
        """Whether activations are asked for; `false` is not."""
        return self.output_residual_stream not in (None, False)

    @property
    def share_prefix(self) -> bool:
        """Whether what other requests left of the same prompt may be used. It changes no bit."""
        return self.vllm_xargs is None or self.vllm_xargs.skip_reading_prefix_cache not in (True, "true")

    def check_together(self, prompts: int, max_tokens: int | None, settings: Settings) -> None:
        """What the fields mean for one another.

        Raises:
            ApiError
        """
        active = [name for name, asked in ((CAPTURE, self.captures), (STEERING, self.apply_steering_vectors is not None)) if asked]
        if active and self.n != 1:
            raise invalid("Set n to 1: activations and steering vectors are for one choice only.", active[0])
        if active and prompts != 1:
            raise invalid("Send one prompt: activations and steering vectors are for one choice only.", active[0])
        if max_tokens is None and (prompts > 1 or self.n > 1):
            raise invalid("Set max_tokens: with several prompts, or n over 1, it has no default.", "max_tokens")
        if prompts * self.n > settings.max_choices:
            choices = f"prompts x n is {prompts * self.n:,}: at most {settings.max_choices:,} choices are allowed."
            raise invalid(choices, "n" if self.n > 1 else "prompt")
        work = prompts * self.n * (max_tokens or 0)
        if work > settings.max_output_work_tokens:
            limit = f"prompts x n x max_tokens is {work:,}: at most {settings.max_output_work_tokens:,} are allowed."
            raise invalid(limit, "max_tokens")
        if self.stream_options is not None and not self.stream:
            raise invalid("Set stream to true: stream_options are for a stream only.", "stream_options")


class CompletionRequest(Generate):
    refused: ClassVar[dict[str, str]] = {
        "best_of": "best_of is not supported: use n.",
        "suffix": "suffix is not supported: text is only written after the prompt.",
        "logit_bias": "logit_bias is not supported.",
        "extra_body": "extra_body is an argument of the openai SDK, which sends what is in it at the top level: do the same.",
    }

    prompt: Prompt = Field(description="A text, or token ids, which run as they are; or a list of either.")
    max_tokens: int | None = Field(
        None, ge=0, le=1_000_000, description="0 only with echo. Left out: what the context has left, with one prompt and n 1."
    )
    logprobs: Annotated[int, Field(ge=0), Limit("maximum", "max_logprobs")] | None = Field(
        None, description="This many likeliest tokens at each token, beside its own; see prompt_logprobs for how many in all."
    )
    echo: bool = Field(False, description="Begin the text with the prompt.")
    add_special_tokens: bool = Field(True, description="false: no BOS before a text, which then has its own.")
    best_of: None = None
    suffix: None = None
    logit_bias: None = None
    extra_body: None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or several, as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @model_validator(mode="after")
    def _together(self, info: ValidationInfo) -> Self:
        if self.max_tokens == 0:
            if not self.echo:
                raise invalid("Set max_tokens to 1 or more: 0 is for a prompt that is scored, with echo: true.", "max_tokens")
            if self.captures:
                raise invalid("Set max_tokens to 1 or more: with 0, the prompt's last token would have no row.", CAPTURE)
        self.check_together(len(self.prompts), self.max_tokens, settings_of(info))
        return self


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    refused: ClassVar[dict[str, str]] = dict.fromkeys(
        ("tool_calls", "function_call", "refusal", "audio", "annotations"), "Messages have text alone: send null, or leave the field out."
    )

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag(TEXT)] | Annotated[list[TextPart], Field(fail_fast=True, min_length=1), Tag(LIST)],
        by_kind("a text or a list of text parts"),
    ] = Field(description="The texts of parts are joined.")
    tool_calls: None = None
    function_call: None = None
    refusal: None = None
    audio: None = None
    annotations: None = None


def _not_true(value: bool) -> bool:
    if value:
        raise PydanticCustomError("only_false", "Input should be false")
    return value


OnlyFalse = Annotated[bool, AfterValidator(_not_true), WithJsonSchema({"const": False})]


class JobRequest(CompletionRequest):
    """A completion that is made in the background."""

    refused: ClassVar[dict[str, str]] = {
        **CompletionRequest.refused,
        "stream": "A Job does not stream: leave stream out.",
        "stream_options": "A Job has one answer: stream_options are for a stream only.",
    }

    stream: OnlyFalse = False
    stream_options: None = None


class ChatRequest(Generate):
    refused: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("tools", "tool_choice", "functions", "function_call"), "Tools are not supported."),
        "response_format": "response_format is not supported.",
        "logit_bias": "logit_bias is not supported.",
        "extra_body": "extra_body is an argument of the openai SDK, which sends what is in it at the top level: do the same.",
    }

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]
    max_tokens: int | None = Field(None, ge=1, le=1_000_000, description="Left out: what the context has left, with n 1.")
    max_completion_tokens: int | None = Field(None, ge=1, le=1_000_000, description="Another name of max_tokens.")
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0), Limit("maximum", "max_logprobs")] | None = Field(None, description="Only with logprobs.")
    add_generation_prompt: bool | None = Field(
        None, description="Open the assistant's turn. Left out: yes, unless the last message is the assistant's own."
    )
    continue_final_message: OnlyFalse = Field(False, description="Not supported.")
    tools: None = None
    tool_choice: None = None
    functions: None = None
    function_call: None = None
    response_format: None = None
    logit_bias: None = None
    extra_body: None = None

    @model_validator(mode="after")
    def _together(self, info: ValidationInfo) -> Self:
        if self.max_completion_tokens is not None:
            if self.max_tokens is not None:
                raise invalid("Set max_tokens or max_completion_tokens, not both.", "max_completion_tokens")
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("Set logprobs to true: top_logprobs are part of them.", "top_logprobs")
        self.check_together(1, self.max_tokens, settings_of(info))
        return self


class TokenizeRequest(Strict):
    model: str | None = Field(None, description="Left out: the first model.")
    prompt: str | None = Field(None, description="A text; or send messages.")
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)] | None = Field(
        None, description="A conversation, by the checkpoint's chat template."
    )
    add_special_tokens: bool | None = Field(None, description="Left out: true for a text, false for messages.")
    add_generation_prompt: bool | None = Field(
        None, description="Only with messages: open the assistant's turn. Left out: yes, unless the last message is the assistant's own."
    )

    @model_validator(mode="after")
    def _together(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("Send prompt or messages, one of them.", "messages" if self.messages is not None else "prompt")
        if self.add_generation_prompt is not None and self.messages is None:
            raise invalid("Send messages with add_generation_prompt: a text has no turns.", "add_generation_prompt")
        return self


class DetokenizeRequest(Strict):
    model: str | None = Field(None, description="Left out: the first model.")
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def parse_body(model: type[T], raw: bytes, settings: Settings | None = None) -> T:
    """The bytes of a body -> a request.

    settings: whose caps hold; None: the defaults.

    Raises:
        ApiError: 400 `bad_json`; 400 `invalid_request`, whose `param` is the first field that is wrong.
    """
    settings = settings or Settings()
    check_members(raw, settings.max_body_members)
    body = _load(raw)
    if not isinstance(body, dict):
        raise invalid("The body must be a JSON object.", None)
    try:
        return model.model_validate(body, context=settings)
    except ValidationError as error:
        _refuse(model, error.errors(include_url=False, include_input=False))


def _load(raw: bytes | str) -> Any:
    """JSON without NaN and Infinity, which are no JSON, and without lone surrogates, which are no text.

    Raises:
        ApiError: `bad_json`.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if "infinity" not in str(error):
            raise bad_json(f"The body is not JSON: {error}.") from None
    # A number beyond float64 is JSON that orjson cannot hold. It becomes infinite, for its field to refuse; in a large body, which would
    # take seconds, it is refused without a name.
    if len(raw) > SLOW_BYTES:
        raise bad_json("The body has a number outside float64's range.")
    try:
        text = raw if isinstance(raw, str) else raw.decode()
        found = json.loads(text, parse_constant=_no_constant, parse_int=_integer)
        json.dumps(found, ensure_ascii=False).encode()  # fails at half a surrogate pair
        return found
    except (ValueError, RecursionError) as error:
        raise bad_json(f"The body is not JSON: {str(error) or 'nested too deeply'}.") from None


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < 20 else float(digits)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _unfold(sent: dict[str, Any]) -> dict[str, Any]:
    """A body with the activation fields of `vllm_xargs` at the top level.

    Raises:
        ApiError: one that stands in both places, or whose text is not JSON.
    """
    xargs = sent.get("vllm_xargs")
    if not isinstance(xargs, dict):
        return sent
    unfolded, rest = dict(sent), dict(xargs)
    for name in (CAPTURE, STEERING):
        value = rest.pop(name, None)
        if isinstance(value, str):
            value = _inner_json(name, value)
        if value is None:
            continue
        if name in sent:
            raise invalid(f"{name} stands at the top level and in vllm_xargs: send it once.", "vllm_xargs")
        unfolded[name] = value
    unfolded["vllm_xargs"] = rest
    return unfolded


def _inner_json(name: str, text: str) -> Any:
    check_members(text.encode(), DEFAULTS.max_body_members)
    try:
        return _load(text)
    except Exception:
        raise invalid(
            f"vllm_xargs.{name} must be JSON in a text, such as {'[15]' if name == CAPTURE else '[{...}]'}.", "vllm_xargs"
        ) from None


def _refuse(model: type[BaseModel], errors: list[ErrorDetails]) -> NoReturn:
    """
    Raises:
        ApiError: with up to five of the problems.
    """
    sentences = [_sentence(model, error) for error in errors[:SHOWN]]
    if len(errors) > SHOWN:
        sentences.append(f"... and {len(errors) - SHOWN} more.")
    first = errors[0]
    param = first["loc"][0] if first["loc"] else first.get("ctx", {}).get("first")
    raise invalid(" ".join(sentences), None if param is None else str(param)[:60])


def _sentence(model: type[BaseModel], error: ErrorDetails) -> str:
    unknown = error["type"] == "extra_forbidden"  # whose name may be anything, a tag too
    loc = [part for part in error["loc"][: len(error["loc"]) - unknown] if part not in TAGS] + list(error["loc"][-1:] if unknown else ())
    if error["type"] in ("none_required", "only_false") and (reason := _reason(model, loc)):
        return reason
    if unknown:
        inner, name = _path(loc[:-1]), shown(loc[-1])
        return f"{inner}: Unknown field {name}." if inner else f"Unknown field {name} - see /openapi.json for accepted params."
    if error["type"] == "string_too_short" and error["ctx"]["min_length"] == 1:
        return f"{_path(loc)} is empty."
    message = "Input should be an object" if error["type"] == "model_type" else error["msg"].replace(" after validation", "")
    return f"{_path(loc)}: {message}." if loc else f"{message}."


def _reason(model: type[BaseModel], loc: list[int | str]) -> str | None:
    """Why a field that takes null or false alone is refused."""
    owners: Mapping[str, type[Strict]] = {"vllm_xargs": VllmXargs, "messages": ChatMessage}
    owner = owners.get(str(loc[0]), model) if len(loc) > 1 else model
    return owner.refused.get(str(loc[-1])) if issubclass(owner, Strict) else None


def _path(loc: Iterable[int | str]) -> str:
    return ".".join(map(str, loc))

"""`POST /v1/chat/completions`, for checkpoints that publish a chat template."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from ster.errors import SterError
from ster.server.choices import Choice, Choices
from ster.server.errors import chat_completions_unsupported, invalid
from ster.server.form import Json
from ster.server.loaded import Loaded
from ster.server.plan import Plan, Prompt, make_plan, sentence
from ster.server.respond import respond
from ster.server.schema import ChatMessage, ChatRequest
from ster.server.scores import chat_logprobs, prompt_logprobs
from ster.server.settings import Settings
from ster.server.texts import prompt_ids
from ster.server.work import Token


async def chat_completions(request: Request) -> Response:
    return await respond(request, ChatRequest, _plan, ChatForm)


def _plan(loaded: Loaded, settings: Settings, asked: ChatRequest) -> Plan:
    """
    Raises:
        ApiError: the request asks for what cannot be done.
    """
    count = (asked.top_logprobs or 0) if asked.logprobs else None
    return make_plan(loaded, settings, asked, [_prompt(loaded, settings, asked)], logprobs=count)


def _prompt(loaded: Loaded, settings: Settings, asked: ChatRequest) -> Prompt:
    """
    Raises:
        ApiError: the model has no template, or it refused; or what it made is too long.
    """
    if not loaded.chats:
        raise chat_completions_unsupported()
    encode = lambda text: prompt_ids(loaded, settings, text, special_tokens=False, param="messages")  # noqa: E731
    try:
        ids = loaded.model.chat_tokens(conversation(asked.messages), add_generation_prompt=asked.add_generation_prompt, encode=encode)
        return Prompt(tuple(ids))
    except SterError as error:
        raise invalid(sentence(error), "messages") from None


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """The messages as chat templates take them."""
    texts = [each.content if isinstance(each.content, str) else "".join(part.text for part in each.content) for each in messages]
    return [{"role": message.role, "content": text} for message, text in zip(messages, texts, strict=True)]


class ChatForm:
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def choice(self, choices: Choices, choice: Choice) -> Json:
        message = {"role": "assistant", "content": choice.text}
        written = self._choice(choice, "message", message, choice.tokens, choice.finish_reason)
        return written | ({"token_ids": choice.token_ids} if self._plan.return_token_ids else {})

    def extra(self, choices: Choices) -> Json:
        """The prompt's members stand beside the choices, as in vLLM."""
        return self._prompt(choices)

    @property
    def needs_scores(self) -> bool:
        return self._plan.prompt_logprobs is not None

    def opening(self, choices: Choices, choice: Choice) -> Json:
        written = self._choice(choice, "delta", {"role": "assistant", "content": ""}, [], None)
        return {"choices": [written]} | (self._prompt(choices) if choice.index == 0 else {})

    def delta(self, choice: Choice, token: Token) -> Json:
        written = self._choice(choice, "delta", {"content": token.text}, [token], token.finish_reason)
        return written | ({"token_ids": [token.id]} if self._plan.return_token_ids else {})

    def _choice(self, choice: Choice, name: str, message: Json, tokens: list[Token], finish_reason: str | None) -> Json:
        count = self._plan.logprobs
        scores = [token.score for token in tokens if token.score is not None]
        logprobs = None if count is None or not tokens else chat_logprobs(self._plan.loaded.pieces, scores, count)
        written = {"index": choice.index, name: message, "logprobs": logprobs, "finish_reason": finish_reason}
        reason = tokens[-1].stop_reason if tokens else None
        return written if reason is None else written | {"stop_reason": reason}

    def _prompt(self, choices: Choices) -> Json:
        plan = self._plan
        found: Json = {}
        if plan.return_token_ids:
            found["prompt_token_ids"] = list(plan.prompts[0].tokens)
        if plan.prompt_logprobs is not None:
            scores = choices[0].prompt_scores or ()
            found["prompt_logprobs"] = prompt_logprobs(plan.loaded.pieces, scores, plan.prompt_logprobs)
        return found

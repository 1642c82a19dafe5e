"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ster.errors import SterError
from ster.server.choices import Choice, Choices
from ster.server.errors import context_length_exceeded, invalid
from ster.server.form import Json
from ster.server.loaded import Loaded
from ster.server.plan import Plan, Prompt, make_plan, sentence
from ster.server.respond import respond
from ster.server.schema import CompletionRequest
from ster.server.scores import TextLogprobs, prompt_logprobs
from ster.server.settings import Settings
from ster.server.texts import prompt_ids
from ster.server.work import Token


async def completions(request: Request) -> Response:
    return await respond(request, CompletionRequest, _plan, CompletionForm)


def _plan(loaded: Loaded, settings: Settings, asked: CompletionRequest) -> Plan:
    """
    Raises:
        ApiError: the request asks for what cannot be done.
    """
    prompts = [_prompt(loaded, settings, each, asked) for each in asked.prompts]
    return make_plan(loaded, settings, asked, prompts, logprobs=asked.logprobs, echo=asked.echo)


def _prompt(loaded: Loaded, settings: Settings, given: str | Sequence[int], asked: CompletionRequest) -> Prompt:
    """A text gets the tokenizer's special tokens, unless told otherwise; ids are taken as they are."""
    if isinstance(given, str):
        return Prompt(tuple(prompt_ids(loaded, settings, given, special_tokens=asked.add_special_tokens)), given)
    if len(given) > loaded.facts.context:  # before it is decoded
        raise context_length_exceeded(len(given), asked.max_tokens or 0, loaded.facts.context)
    try:
        return Prompt(tuple(given), loaded.model.tokenizer.decode(given) if asked.echo else "")
    except SterError as error:
        raise invalid(sentence(error), "prompt") from None


class CompletionForm:
    object = chunk_object = "text_completion"
    prefix = "cmpl-"

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._logprobs: list[TextLogprobs] | None = None
        if plan.logprobs is not None:
            self._logprobs = [TextLogprobs(plan.loaded.pieces, plan.logprobs, whole=plan.echo) for _ in plan.works]

    def choice(self, choices: Choices, choice: Choice) -> Json:
        plan, prompt = self._plan, self._prompt(choice)
        tokens, scores = choice.token_ids, choice.scores
        if plan.echo and plan.logprobs is not None:
            tokens, scores = [*prompt.tokens, *tokens], [*(choices.prompt_scores(choice) or ()), *scores]
        written = self._choice(choice, (prompt.text if plan.echo else "") + choice.text, tokens, scores, choice.finish_reason)
        written["prompt_logprobs"] = self._prompt_logprobs(choices, choice)
        return written | _stop_reason(choice.stop_reason) | self._ids(choice, prompt.tokens, choice.token_ids)

    def extra(self, choices: Choices) -> Json:
        return {}

    @property
    def needs_scores(self) -> bool:
        return self._plan.works[0].prompt_logprobs is not None

    def opening(self, choices: Choices, choice: Choice) -> Json | None:
        plan, prompt = self._plan, self._prompt(choice)
        if not (plan.echo or plan.return_token_ids or plan.prompt_logprobs is not None):
            return None
        scored = plan.echo and plan.logprobs is not None
        scores = choices.prompt_scores(choice) or ()
        only = plan.works[choice.index].max_tokens == 0
        written = self._choice(
            choice,
            prompt.text if plan.echo else "",
            prompt.tokens if scored else None,
            scores if scored else None,
            "length" if only else None,
        )
        if plan.prompt_logprobs is not None:
            written["prompt_logprobs"] = self._prompt_logprobs(choices, choice)
        return {"choices": [written | self._ids(choice, prompt.tokens, [])]}

    def delta(self, choice: Choice, token: Token) -> Json:
        written = self._choice(choice, token.text, [token.id], [token.score], token.finish_reason)
        return written | _stop_reason(token.stop_reason) | self._ids(choice, None, [token.id])

    def _choice(self, choice: Choice, text: str, tokens: Any, scores: Any, finish_reason: str | None) -> Json:
        logprobs = None if self._logprobs is None or tokens is None else self._logprobs[choice.index].add(tokens, scores)
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _prompt(self, choice: Choice) -> Prompt:
        return self._plan.prompts[choice.index // self._plan.n]

    def _prompt_logprobs(self, choices: Choices, choice: Choice) -> Any:
        count = self._plan.prompt_logprobs
        return None if count is None else prompt_logprobs(self._plan.loaded.pieces, choices.prompt_scores(choice) or (), count)

    def _ids(self, choice: Choice, prompt: Sequence[int] | None, tokens: Sequence[int]) -> Json:
        """As vLLM has them: the prompt's ids with the first chunk, new ones with each."""
        if not self._plan.return_token_ids:
            return {}
        return ({} if prompt is None else {"prompt_token_ids": list(prompt)}) | {"token_ids": list(tokens)}


def _stop_reason(reason: str | int | None) -> Json:
    """What ended it, where something did: the stop text, or the id of the end-of-text token."""
    return {} if reason is None else {"stop_reason": reason}

"""How large the result of a Job may be, before it is there: so much of its owner's room is taken until it is."""

from __future__ import annotations

from ster.server.plan import Plan
from ster.server.scores import Scored

CHOICE_BYTES = 256
"""Of a choice, and of the Completion around them."""
ENTRY_BYTES = 80
"""Of a likely token with its scores, see `Settings.max_score_numbers`; each entry of a list is of another token, so few are long."""
SCORED_BYTES = 64
"""Of a token with scores, beside its text: its logprob and its place."""
ID_BYTES = 8
LONGEST = 256
"""Bytes of a token's text, where the tokenizer does not say."""


def most_bytes(plan: Plan) -> int:
    """At most, but for texts that JSON has to escape."""
    longest = plan.loaded.longest_token or LONGEST
    prompts = plan.n * sum(len(prompt.tokens) for prompt in plan.prompts)
    told = plan.max_output + (prompts if plan.echo else 0)
    size = CHOICE_BYTES * (1 + len(plan.works)) + told * longest + captured_bytes(plan)
    if plan.return_token_ids:
        size += (plan.max_output + prompts) * ID_BYTES
    vocab = plan.loaded.facts.vocab
    if plan.logprobs is not None:
        size += told * (SCORED_BYTES + longest + Scored("", "", 1, plan.logprobs).each(vocab) * ENTRY_BYTES)
    if plan.prompt_logprobs is not None:
        size += prompts * Scored("", "", 1, plan.prompt_logprobs).each(vocab) * ENTRY_BYTES
    return size


def captured_bytes(plan: Plan) -> int:
    """Of activations, in base64."""
    if plan.layers is None:
        return 0
    rows = len(plan.prompts[0].tokens) + plan.works[0].max_tokens
    return len(plan.layers) * rows * plan.loaded.facts.hidden * (4 if plan.dtype == "float32" else 2) * 4 // 3

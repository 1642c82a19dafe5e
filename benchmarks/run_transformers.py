"""transformers' process. `settings`: `f32` or `bf16`, the dtype of weights and arithmetic.

Best settings: prompts sorted by length and left-padded in batches of 16, no cache but to decode, the head for the last row alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]
import transformers  # type: ignore[import-not-found,unused-ignore]
from benchmarks.worker import Job, Prompts, serve, timed
from transformers import AutoModelForCausalLM  # type: ignore[import-not-found,unused-ignore]

BATCH = 16


class Transformers:
    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job["threads"])
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        dtype = torch.float32 if job["settings"] == "f32" else torch.bfloat16
        self.model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).eval()
        self.model.generation_config.eos_token_id = None  # go on past end-of-text

    def logits(self, prompts: Prompts) -> list[int]:
        chosen = [0] * len(prompts)
        with torch.inference_mode():
            for places, inputs in _batches(prompts):
                top = self.model(**inputs, logits_to_keep=1, use_cache=False).logits[:, -1].argmax(-1).tolist()
                for place, token in zip(places, top, strict=True):
                    chosen[place] = token
        return chosen

    def decode(self, prompt: Sequence[int], new: int) -> tuple[float, list[int]]:
        """`generate` costs what a loop around the model does, and its arguments are the same in versions 4 and 5."""
        first, _ = timed(lambda: self._generate(prompt, 1))
        whole, ids = timed(lambda: self._generate(prompt, 1 + new))
        return whole - first, ids[len(prompt) :].tolist()

    def _generate(self, prompt: Sequence[int], new: int) -> Any:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            return self.model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)[0]

    def residuals(self, prompts: Prompts) -> list[list[list[float]]]:
        blocks = self.model.model.layers
        kept: list[Any] = [None] * len(blocks)

        def keep(layer: int, output: Any) -> None:
            kept[layer] = (output[0] if isinstance(output, tuple) else output)[:, -1].clone()  # a tuple before transformers 5

        hooks = [block.register_forward_hook(lambda module, args, out, i=i: keep(i, out)) for i, block in enumerate(blocks)]
        found: list[list[list[float]]] = [[]] * len(prompts)
        with torch.inference_mode():
            for places, inputs in _batches(prompts):
                self.model.model(**inputs, use_cache=False)
                for place, rows in zip(places, torch.stack(kept, 1).tolist(), strict=True):
                    found[place] = rows
        for hook in hooks:
            hook.remove()
        return found


def _batches(prompts: Prompts) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Which prompts, and the model's arguments for them: of about equal length, so that little is padding."""
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    for start in range(0, len(order), BATCH):
        places = order[start : start + BATCH]
        longest = len(prompts[places[-1]])
        if len(places) == 1 or longest == len(prompts[places[0]]):
            yield places, {"input_ids": torch.tensor([prompts[place] for place in places])}
            continue
        ids = torch.zeros(len(places), longest, dtype=torch.long)
        mask = torch.zeros(len(places), longest, dtype=torch.long)
        for row, place in enumerate(places):
            ids[row, longest - len(prompts[place]) :] = torch.tensor(prompts[place])
            mask[row, longest - len(prompts[place]) :] = 1
        yield places, {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def versions() -> str:
    return f"transformers {transformers.__version__}, torch {torch.__version__}"


if __name__ == "__main__":
    serve(Transformers, versions)

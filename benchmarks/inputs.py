"""What every engine is given: the same tokens, prompts and pairs each time, from seeds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WORDS = (
    "the a of and to in is it you that he was for on are with as they at be this from have or by one had not but what all were when we"
    " there can an your which their said if do will each about how up out them then she many some so these would other into has more her"
    " two like him see time could no make than first been its who now people my made over did down only way find use may water long"
).split()
PAIR = "Pretend you are {} person who speaks about the world as it is. "


def random_ids(vocab: int, *lengths: int, seed: int = 0) -> list[list[int]]:
    """Ids from the middle of the vocabulary, where no special tokens are."""
    random_ = random.Random(seed)
    return [[random_.randrange(vocab // 8, vocab * 7 // 8) for _ in range(length)] for length in lengths]


def ragged_lengths(count: int, seed: int = 1) -> list[int]:
    random_ = random.Random(seed)
    return [random_.randint(8, 64) for _ in range(count)]


def made_up_prompts(count: int = 200) -> list[str]:
    """8 to 64 words each."""
    random_ = random.Random(2)
    return [" ".join(random_.choices(WORDS, k=length)).capitalize() + "." for length in ragged_lengths(count, seed=3)]


def made_up_pairs(count: int = 100) -> list[tuple[str, str]]:
    """Two personae, the same words after each."""
    endings = made_up_prompts(count)
    return [(PAIR.format("a calm") + ending, PAIR.format("an anxious") + ending) for ending in endings]


def read_prompts(path: Path) -> list[str]:
    """`{"prompts": [...]}` or a list."""
    found: Any = json.loads(path.read_text(encoding="utf-8"))
    return list(found["prompts"] if isinstance(found, dict) else found)


def read_pairs(path: Path) -> list[tuple[str, str]]:
    found: Any = json.loads(path.read_text(encoding="utf-8"))
    return [(pair["positive"], pair["negative"]) for pair in found["pairs"]]

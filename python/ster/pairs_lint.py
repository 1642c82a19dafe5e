"""What may spoil a pair set, found without a model: duplicates, sides that differ in the wrong way, a tell-tale last token.

A finding is a doubt, not a refusal. Thresholds are the constants below; each finding's message repeats the one it used.
"""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ster.pairs import Pair, Side, is_empty, side_text

NEAR = 0.9
"""Near duplicates share at least this part of their words: `shared / all`, of the distinct words of two sides."""
NEAR_WORDS = 8
"""Sides with fewer telling words are near duplicates only when they are equal after folding."""
LENGTH_RATIO = 2.0
"""A side with more than this many times the characters of the other is reported."""
ANSWERS = 4
"""Sides that end in no more than this many words, all together, are taken for answers to a choice."""
ANSWER_BALANCE = 0.6
"""When more than this part of the positive sides end in the same of those words, it is reported."""
BALANCE = 0.9
"""When at least this part of the pairs (four or more) agrees on something besides the trait, it is reported."""


@dataclass(frozen=True)
class Finding:
    """One doubt. `pair` counts from 0; None when it is about the set as a whole."""

    kind: str
    pair: int | None
    message: str


@dataclass(frozen=True)
class FinalTokens:
    """The tokens whose activations are compared in a pair."""

    pair: int
    positive: str
    negative: str


@dataclass(frozen=True)
class LintReport:
    """findings in pair order, whole-set ones last. final_tokens: one per pair, when a tokenizer was given."""

    findings: tuple[Finding, ...]
    final_tokens: tuple[FinalTokens, ...] | None


def lint(pairs: Iterable[Pair], *, final_token: Callable[[Side], str] | None = None, templated: bool = False) -> LintReport:
    """Everything doubtful about `pairs`.

    Kinds: `empty`, `identical`, `whitespace-only` (the sides differ in nothing else), `length-ratio`, `trailing-space`,
    `trailing-newline`, `duplicate`, `near-duplicate`, `swapped`, `final-token`; of the whole set `length-bias`, `final-word`,
    `answer-letter`.

    Args:
        final_token: the text of the last token the model reads for a side. With it, sides whose last tokens differ in kind (letter,
            digit, space, punctuation) are reported, and the tokens of every pair are listed.
        templated: sides are read through a chat template, so that a text's own end is not what is read last.
    """
    rows = list(pairs)
    findings = [finding for index, pair in enumerate(rows) for finding in _pair_findings(index, pair, templated)]
    findings += _duplicates(rows)
    tokens = None
    if final_token is not None:
        tokens = tuple(FinalTokens(index, final_token(pair.positive), final_token(pair.negative)) for index, pair in enumerate(rows))
        findings += [
            Finding(
                "final-token",
                t.pair,
                f"the last tokens differ in kind: {t.positive!r} is {token_kind(t.positive)}, {t.negative!r} is {token_kind(t.negative)}",
            )
            for t in tokens
            if token_kind(t.positive) != token_kind(t.negative)
        ]
    findings.sort(key=lambda finding: (finding.pair is None, finding.pair or 0))
    return LintReport(tuple(findings + _set_findings(rows)), tokens)


def fold(text: str) -> str:
    """`text` without what a reader would not call a difference: case, punctuation, amount and kind of white space, compatibility forms.

    >>> fold("The  Sea, is CALM!")
    'the sea is calm'
    """
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join("".join(" " if unicodedata.category(c)[0] in "PZC" else c for c in text).split())


def groups(pairs: Iterable[Pair]) -> list[int]:
    """A group number per pair: pairs of one group tell nearly the same, so a split must keep them together.

    Two pairs belong together when
    - they are near duplicates (see `near_duplicates`), also with their sides swapped; or
    - a side of one equals the same side of the other after folding (the same question with another wrong answer), unless so many pairs
      have that side (more than a quarter of them, and more than two) that it is the fixed half of the contrast.
    Numbers are those of each group's first pair.
    """
    rows = list(pairs)
    parents = list(range(len(rows)))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    def join(a: int, b: int) -> None:
        a, b = sorted((root(a), root(b)))
        parents[b] = a

    for a, b in near_duplicates(rows):
        join(a, b)
    folded = [_folded(pair) for pair in rows]
    whole: dict[tuple[str, str], int] = {}
    for index, sides in enumerate(folded):
        if (first := whole.setdefault((min(sides), max(sides)), index)) != index:
            join(first, index)
    for which in (0, 1):
        same: dict[str, list[int]] = defaultdict(list)
        for index, sides in enumerate(folded):
            same[sides[which]].append(index)
        for members in same.values():
            if len(members) <= max(2, len(rows) // 4):
                for index in members[1:]:
                    join(members[0], index)
    return [root(index) for index in range(len(rows))]


def near_duplicates(pairs: Sequence[Pair]) -> list[tuple[int, int]]:
    """Pairs `(i, j)`, `i < j`, of which both sides are near: equal after `fold`, or sharing `NEAR` of their words.

    Words that more than half of all pairs have on that side are set aside first (with four pairs or more): a template shared by the whole
    set says nothing about likeness. Sides with fewer than `NEAR_WORDS` words left are compared by equality alone. A pair that is equal to
    an earlier one on both sides is listed once, with the first of these.
    """
    folded = [_folded(pair) for pair in pairs]
    first: dict[tuple[str, str], int] = {}
    found = [(first.setdefault(sides, index), index) for index, sides in enumerate(folded)]
    found = [(a, b) for a, b in found if a != b]
    rows = list(first.values())
    columns = [[folded[row][which] for row in rows] for which in (0, 1)]
    words = [_telling(column) for column in columns]
    # Look candidates up on the side with more different texts, then check the other: a fixed side makes every pair a candidate.
    lead, other = (0, 1) if len(set(columns[0])) >= len(set(columns[1])) else (1, 0)
    for a, b in _near_sides(columns[lead], words[lead]):
        if columns[other][a] == columns[other][b] or _overlap(words[other][a], words[other][b]):
            found.append((rows[a], rows[b]))
    return sorted(found)


def token_kind(token: str) -> str:
    """What a token ends in: `a letter`, `a digit`, `white space`, `punctuation`, `something else`, or `nothing`."""
    if not token:
        return "nothing"
    last = token[-1]
    if last.isspace():
        return "white space"
    names = {"L": "a letter", "M": "a letter", "N": "a digit", "P": "punctuation", "S": "punctuation"}
    return names.get(unicodedata.category(last)[0], "something else")


def _pair_findings(index: int, pair: Pair, templated: bool) -> Iterable[Finding]:
    sides = {"positive": pair.positive, "negative": pair.negative}
    texts = {name: side_text(side) for name, side in sides.items()}
    for name, side in sides.items():
        if is_empty(side):
            yield Finding("empty", index, f"the {name} side is empty")
    if pair.positive == pair.negative:
        yield Finding("identical", index, "the sides are identical")
    elif "".join(texts["positive"].split()) == "".join(texts["negative"].split()):
        yield Finding("whitespace-only", index, "the sides differ in nothing but white space")
    short, long = sorted(map(len, texts.values()))
    if short and long > LENGTH_RATIO * short:
        yield Finding("length-ratio", index, f"one side has {long} characters, the other {short}: more than {LENGTH_RATIO:g} times as many")
    for name, side in sides.items():
        text = side if isinstance(side, str) else side[-1]["content"] if side else ""
        if text and text != text.rstrip():
            newline = text.endswith(("\n", "\r"))
            found = "trailing-newline" if newline else "trailing-space"
            after = (
                "; the chat template goes on after it"
                if templated or not isinstance(side, str)
                else ", which is then the last token of a text read as it is"
            )
            yield Finding(found, index, f"the {name} side ends in {'a line break' if newline else 'white space'}{after}")


def _duplicates(pairs: Sequence[Pair]) -> list[Finding]:
    findings = []
    exact: dict[tuple[str, str], int] = {}
    first = [exact.setdefault((repr(pair.positive), repr(pair.negative)), index) for index, pair in enumerate(pairs)]
    findings += [Finding("duplicate", i, f"the same as pair {f}") for i, f in enumerate(first) if f != i]
    nearest: dict[int, int] = {}
    for a, b in near_duplicates(pairs):
        if first[a] != first[b]:
            nearest.setdefault(b, a)
    rule = f"equal after folding, or {NEAR:.0%} of the words shared, on both sides"
    findings += [Finding("near-duplicate", b, f"nearly the same as pair {a} ({rule})") for b, a in nearest.items()]
    folded = [_folded(pair) for pair in pairs]
    seen: dict[tuple[str, str], int] = {}
    for index, (positive, negative) in enumerate(folded):
        if positive != negative and (negative, positive) in seen:
            findings.append(Finding("swapped", index, f"has the sides of pair {seen[negative, positive]} the other way round"))
        seen.setdefault((positive, negative), index)
    return findings


def _set_findings(pairs: Sequence[Pair]) -> list[Finding]:
    findings = []
    if len(pairs) >= 4:
        sizes = [(len(side_text(pair.positive)), len(side_text(pair.negative))) for pair in pairs]
        for name, count in (("positive", sum(p > n for p, n in sizes)), ("negative", sum(n > p for p, n in sizes))):
            if count >= BALANCE * len(pairs):
                text = f"the {name} side is the longer one in {count} of {len(pairs)} pairs: a direction may measure length"
                findings.append(Finding("length-bias", None, text))
        words = [tuple((fold(side_text(side)).split() or [""])[-1] for side in (pair.positive, pair.negative)) for pair in pairs]
        (ends, count), *_ = Counter(words).most_common(1)
        if ends[0] != ends[1] and count >= BALANCE * len(pairs):
            text = f"{count} of {len(pairs)} pairs end in `{ends[0]}` against `{ends[1]}`: a direction may measure that word"
            findings.append(Finding("final-word", None, text))
        else:
            findings += _answers(words)
    return findings


def _answers(ends: Sequence[tuple[str, ...]]) -> Iterable[Finding]:
    """Choices such as A or B, yes or no, of which the positive sides prefer one. ends: last words of the sides, folded."""
    choices = {word for pair in ends for word in pair}
    if len(choices) > min(ANSWERS, len(ends) // 2) or sum(p != n for p, n in ends) < BALANCE * len(ends):
        return
    (answer, count), *_ = Counter(positive for positive, _ in ends).most_common(1)
    if count > ANSWER_BALANCE * len(ends):
        what = "letter" if len(answer) == 1 else "word"
        text = f"the positive side ends in `{answer}` in {count} of {len(ends)} pairs: a direction may measure the {what}"
        yield Finding("answer-letter", None, text)


def _folded(pair: Pair) -> tuple[str, str]:
    return fold(side_text(pair.positive)), fold(side_text(pair.negative))


def _telling(texts: list[str]) -> list[frozenset[str]]:
    """The words of each text that no more than half of the texts have."""
    words = [frozenset(text.split()) for text in texts]
    if len(texts) < 4:
        return words
    counts = Counter(word for each in words for word in each)
    return [frozenset(word for word in each if 2 * counts[word] <= len(texts)) for each in words]


def _overlap(a: frozenset[str], b: frozenset[str]) -> bool:
    return min(len(a), len(b)) >= NEAR_WORDS and len(a & b) >= NEAR * len(a | b)


def _near_sides(texts: list[str], words: list[frozenset[str]]) -> Iterable[tuple[int, int]]:
    """All `(i, j)`, `i < j`, whose texts are equal or whose words overlap by `NEAR`.

    Two such sets must share one of the rarest tenth of the words of each, so only those are looked up.
    """
    equal: dict[str, list[int]] = defaultdict(list)
    rare: dict[str, list[int]] = defaultdict(list)
    counts = Counter(word for each in words for word in each)
    for j, text in enumerate(texts):
        ranked = sorted(words[j], key=lambda word: (counts[word], word)) if len(words[j]) >= NEAR_WORDS else []
        prefix = ranked[: int((1.0 - NEAR) * len(ranked) + 1e-9) + 1]
        candidates = {i for word in prefix for i in rare[word]}
        yield from ((i, j) for i in sorted(candidates.union(equal[text])) if texts[i] == text or _overlap(words[i], words[j]))
        equal[text].append(j)
        for word in prefix:
            rare[word].append(j)

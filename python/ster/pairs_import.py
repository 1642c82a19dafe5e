"""Pair sets out of the files people have. A row becomes a pair by its format's rule or is listed with the reason; no pair is a guess.

| format | content | a pair |
| --- | --- | --- |
| `ster` | `{"trait_name", "pairs": [{"positive", "negative"}]}`, or a list or JSON Lines of such pairs | as it is |
| `caa` | JSON list: `question`, `answer_matching_behavior`, `answer_not_matching_behavior` | question + each answer |
| `anthropic` | the same as JSON Lines | the same |
| `correct-incorrect` | `prompt`, `correct`, `incorrect` | prompt + each answer |
| `persona-vectors` | `{"instruction": [{"pos", "neg"}], "questions": [...]}` | system pos / neg, user question; all combinations |
| `truthfulqa` | CSV with Question, Best Answer, Incorrect Answers | Q and best answer; Q and an incorrect one, drawn by `seed`, or each |
| `csv` | CSV or TSV with a statement and a label column | label 1 and label 0, paired by `pair_by` |
| `repe` | the same | each statement of label 1 in `template`, under both personas |
| `two-column` | CSV or TSV with columns positive and negative, or those named | column by column |
| `suffixes` | JSON list of strings | each in `template`, under both personas |
| `compliant` | `{"compliant_responses", "non_compliant_responses"}` | i and i, after question i if there are questions |
| `lists` | `{"positive": [...], "negative": [...]}` | i and i |
| `tuples` | JSON list of `[positive, negative]` | as it is |
| `dpo` | `chosen`, `rejected`, perhaps `prompt`; texts or messages | prompt + each |
| `cvector` | two files, one prompt a line with `\\n` escapes, or one list of messages a line | line and line |
| `two-lists` | two files, a JSON list of strings or of `{"instruction"}` each | paired by `pair_by`, in `template` if given |

Question and answer are joined as they stand when one of them has white space at the seam, otherwise by `joiner`; as messages they become a
user's and an assistant's turn, unchanged. Spaces inside texts are never touched.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeGuard

from ster._files import parse_json, read_text
from ster.errors import InputError
from ster.pairs import MalformedError, Pair, PairSet, Side, is_empty, kind, parse_side


@dataclass(frozen=True)
class Options:
    """What a format may need to be told. Nothing has a default that decides which rows belong together.

    style: question and answer as one text, or as messages. joiner: between them where neither has white space.
    template: text with `{text}` (two-lists) or with `{persona}` and `{text}` (suffixes, repe).
    positive_persona, negative_persona: what `{persona}` becomes. questions: put before the responses of `compliant`.
    statement_column, label_column: of `csv`. positive_column, negative_column: of `two-column`.
    pair_by: `order` (neighbours), `column:NAME` (rows with the same value there, in order), `random:SEED`.
    seed: draws an incorrect answer in `truthfulqa`. every_answer: take all of them, a pair each.
    """

    trait_name: str | None = None
    style: Literal["text", "messages"] = "text"
    joiner: str = "\n"
    template: str | None = None
    positive_persona: str | None = None
    negative_persona: str | None = None
    questions: Sequence[str] | None = None
    statement_column: str = "statement"
    label_column: str = "label"
    positive_column: str | None = None
    negative_column: str | None = None
    pair_by: str | None = None
    seed: int = 0
    every_answer: bool = False


class UntoldError(MalformedError):
    """An option is missing. hint: which, its name in backticks, so that a command can put its own there."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Rejected:
    """A row that gave no pair. where: `record 3` of a list or table, `line 3` of a text; both count from 1, a header line apart."""

    where: str
    reason: str


@dataclass(frozen=True)
class Imported:
    """pairs: what was read. rejected: rows that gave none. notes: choices made and things to know, one sentence each."""

    pairs: PairSet
    format: str
    rejected: tuple[Rejected, ...]
    notes: tuple[str, ...]


def import_pairs(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, format: str | None = None, options: Options | None = None
) -> Imported:
    """Read pairs from one file, or from two where the sides lie apart (positive first).

    Args:
        format: a name of the table above; without it the format is told from the content, which must fit just one.

    Raises:
        FileError: a file cannot be read, or is not UTF-8.
        InputError: an unknown format; content that fits none, or several and no option decides; an option that is missing; no pair at all.
    """
    files = [Path(paths)] if isinstance(paths, str | os.PathLike) else [Path(path) for path in paths]
    if not files:
        raise InputError("no file to import")
    if format is not None and format not in FORMATS:
        raise InputError(f'unknown pair format "{format}"; expected {", ".join(sorted(FORMATS))}')
    given = options or Options()
    sources = [_Source(path, read_text(path)) for path in files]
    name = format or _detect(sources, given)
    rows = _Rows()
    try:
        if len(sources) != FORMATS[name].files:
            order = ", the positive one first" if FORMATS[name].files == 2 else ""
            raise MalformedError(f"{name} needs {_files(FORMATS[name].files)}{order}; found {_files(len(sources))}")
        FORMATS[name].read(sources, given, rows)
    except MalformedError as error:
        hint = error.hint if isinstance(error, UntoldError) else None
        raise InputError(f"failed to import {' and '.join(str(path) for path in files)} as {name}: {error}", hint) from None
    rows.rejected.sort(key=lambda row: [int(n) for n in re.findall(r"[0-9]+", row.where)])
    pairs = rows.good()
    if not pairs:
        why = f"{rows.rejected[0].where}: {rows.rejected[0].reason}" if rows.rejected else "it has no rows"
        raise InputError(f"failed to import {' and '.join(str(path) for path in files)} as {name}: no row became a pair", why)
    trait = given.trait_name if given.trait_name is not None else rows.trait_name
    return Imported(PairSet(tuple(pairs), trait), name, tuple(rows.rejected), tuple(rows.notes + _answer_notes(rows)))


class _Rows:
    """Collects pairs and rejects while a format is read."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, Pair]] = []
        self.answers: list[tuple[str, str]] = []
        self.rejected: list[Rejected] = []
        self.notes: list[str] = []
        self.trait_name: str | None = None

    def add(self, where: str, positive: object, negative: object) -> None:
        """A pair, or a reject with the reason."""
        try:
            sides = parse_side(positive), parse_side(negative)
        except MalformedError as error:
            self.reject(where, str(error))
            return
        empty = next((name for name, side in zip(("positive", "negative"), sides, strict=True) if is_empty(side)), None)
        if empty is not None:
            self.reject(where, f"the {empty} side is empty")
        elif sides[0] == sides[1]:
            self.reject(where, "the sides are identical")
        else:
            self.pairs.append((where, Pair(*sides)))

    def reject(self, where: str, reason: str) -> None:
        self.rejected.append(Rejected(where, reason))

    def good(self) -> list[Pair]:
        return [pair for _, pair in self.pairs]


@dataclass
class _Source:
    """One file: its text, and its content as JSON, JSON Lines or a table where it is one."""

    path: Path
    text: str
    _cache: dict[str, Any] = field(default_factory=dict)

    @property
    def json(self) -> Any:
        """The document; MalformedError if it is not JSON."""
        if "json" not in self._cache:
            try:
                self._cache["json"] = parse_json(self.text)
            except ValueError as error:
                raise MalformedError(f"{self.path} is not JSON: {error}") from None
        return self._cache["json"]

    @property
    def object(self) -> Mapping[str, Any]:
        """The document; MalformedError if it is not a JSON object."""
        document = self.json
        if not isinstance(document, Mapping):
            raise MalformedError(f"an object is expected, found {kind(document)}")
        return document

    def records(self) -> list[tuple[str, Any]]:
        """Entries of a JSON list, or of JSON Lines (blank lines skipped), with their places."""
        lines = [(f"line {n}", line) for n, line in enumerate(self.lines(), 1) if line.strip()]
        try:
            document = self.json
        except MalformedError:
            # JSON Lines: one value a line. A single line is both, and then is one record.
            entries = []
            for where, line in lines:
                try:
                    entries.append((where, parse_json(line)))
                except ValueError as error:
                    raise MalformedError(f"{self.path}, {where}, is not JSON: {error}") from None
            return entries
        if isinstance(document, list):
            return [(f"record {n}", entry) for n, entry in enumerate(document, 1)]
        return [("record 1", document)]

    def lines(self) -> list[str]:
        """Without line ends, LF or CRLF; other separators belong to their line."""
        lines = [line.removesuffix("\r") for line in self.text.split("\n")]
        return lines[:-1] if lines and not lines[-1] else lines

    def table(self) -> tuple[list[str], list[tuple[str, dict[str, str]]], list[Rejected]]:
        """Header, rows by column, and rows of another length. Tabs separate columns if the header line has one, commas otherwise."""
        lines = self.lines()
        delimiter = "\t" if lines and "\t" in lines[0] else ","
        try:
            rows = list(csv.reader(io.StringIO(self.text, newline=""), delimiter=delimiter, strict=True))
        except csv.Error as error:
            raise MalformedError(f"{self.path} is not a well-formed table: {error}") from None
        rows = [row for row in rows if any(cell.strip() for cell in row)]
        if not rows:
            raise MalformedError(f"{self.path} is empty")
        header = [cell.strip() for cell in rows[0]]
        if len(set(header)) < len(header):
            raise MalformedError(f"{self.path} has a column twice: {', '.join(header)}")
        good, bad = [], []
        for n, row in enumerate(rows[1:], 1):
            if len(row) == len(header):
                good.append((f"record {n}", dict(zip(header, row, strict=True))))
            else:
                bad.append(
                    Rejected(f"record {n}", f"it has {len(row)} {'column' if len(row) == 1 else 'columns'}, the header {len(header)}")
                )
        return header, good, bad


@dataclass(frozen=True)
class _Format:
    """How a format is known by its content, and read."""

    fits: Callable[[Sequence[_Source], Options], bool]
    read: Callable[[Sequence[_Source], Options, _Rows], None]
    files: int = 1


def _detect(sources: Sequence[_Source], options: Options) -> str:
    """The one format that fits; options that only one of several reads decide between them."""
    fitting = [name for name, format in FORMATS.items() if format.files == len(sources) and _fits(format, sources, options)]
    where = " and ".join(str(source.path) for source in sources)
    if not fitting:
        raise InputError(f"{where} fits no known pair format", _advice(sources))
    if len(fitting) > 1:
        raise InputError(
            f"{where} could be read as {' or '.join(fitting)}",
            "give `pair_by` for csv; `template`, `positive_persona` and `negative_persona` for repe; or name the `format`"
            if "repe" in fitting
            else "name the `format`",
        )
    return fitting[0]


def _advice(sources: Sequence[_Source]) -> str:
    """What files that fit no format may be, by their look."""
    known = f"or name the `format`: {', '.join(sorted(FORMATS))}"
    source = sources[0]
    if len(sources) == 1 and source.text.lstrip()[:1] not in ("{", "["):
        columns: list[str] = []
        with contextlib.suppress(MalformedError):
            header, rows, bad = source.table()
            columns = header if len(header) > 1 and rows and not bad else []
        if columns:
            named = "name two columns with `positive_column` and `negative_column`, or with `statement_column` and `label_column`"
            return f"its columns are {', '.join(columns)}: {named}; {known}"
    two = [name for name, fits in (("cvector", _is_prompt_file), ("two-lists", _is_list)) if len(sources) == 1 and _looks(fits, source)]
    if two:
        return f"{' and '.join(two)} needs two files, the positive one first; {known}"
    return f"name the `format`: {', '.join(sorted(FORMATS))}"


def _looks(fits: Callable[[_Source], bool], source: _Source) -> bool:
    try:
        return fits(source)
    except MalformedError:
        return False


def _fits(format: _Format, sources: Sequence[_Source], options: Options) -> bool:
    try:
        return format.fits(sources, options)
    except MalformedError:
        return False


def _keys(source: _Source) -> set[str]:
    """Keys that all records of a file have."""
    records = [entry for _, entry in source.records()]
    if not records or not all(isinstance(entry, Mapping) for entry in records):
        raise MalformedError("not a list of objects")
    return set.intersection(*(set(entry) for entry in records))


def _columns(source: _Source) -> set[str]:
    """Columns of a table; JSON is not one."""
    if source.text.lstrip()[:1] in ("{", "["):
        raise MalformedError("not a table")
    return set(source.table()[0])


def _strings(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, str) for entry in value)


def _objects(source: _Source) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Records that are objects; MalformedError at one that is not."""
    for where, entry in source.records():
        if not isinstance(entry, Mapping):
            raise MalformedError(f"{where} must be an object, found {kind(entry)}")
        yield where, entry


def _text(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str):
        raise MalformedError(f"`{key}` is missing" if key not in entry else f"`{key}` must be a string, found {kind(value)}")
    return value


def _join(question: str, answer: str, options: Options) -> Side:
    """A question and its answer as one side."""
    if options.style == "messages":
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    seam = not question or question[-1].isspace() or answer[:1].isspace()
    return question + ("" if seam else options.joiner) + answer


def _answered(
    sources: Sequence[_Source], options: Options, rows: _Rows, *, question: str, positive: str, negative: str, known: Iterable[str] = ()
) -> None:
    """One question, two answers."""
    unknown: Counter[str] = Counter()
    for where, entry in _objects(sources[0]):
        unknown.update(key for key in entry if key not in (question, positive, negative, *known))
        try:
            asked, right, wrong = _text(entry, question), _text(entry, positive), _text(entry, negative)
        except MalformedError as error:
            rows.reject(where, str(error))
            continue
        before = len(rows.pairs)
        if not right.strip() or not wrong.strip():
            rows.reject(where, "an answer is empty")
        else:
            rows.add(where, _join(asked, right, options), _join(asked, wrong, options))
        if len(rows.pairs) > before:
            rows.answers.append((right, wrong))
    if unknown:
        rows.notes.append(f"keys that were not read: {', '.join(sorted(unknown))}")


def _answer_notes(rows: _Rows) -> list[str]:
    """How the answers of the positive sides are spread: an unequal spread is learned as well as the trait."""
    if not rows.answers:
        return []
    notes = []
    positive = Counter(right.strip() for right, _ in rows.answers)
    if len(positive) <= 4:
        notes.append("answers of the positive sides: " + ", ".join(f"{text} {count}" for text, count in positive.most_common()))
    spaced = sum(text[:1].isspace() for pair in rows.answers for text in pair)
    if spaced:
        notes.append(f"{spaced} of {2 * len(rows.answers)} answers begin with white space, which was kept and nothing added before it")
    return notes


def _read_ster(sources: Sequence[_Source], options: Options, rows: _Rows) -> None:
    entries = sources[0].records()
    if len(entries) == 1 and isinstance(entries[0][1], Mapping) and "pairs" in entries[0][1]:
        document = entries[0][1]
        listed, trait = document["pairs"], document.get("trait_name")
        if not isinstance(listed, list) or not isinstance(trait, str | None):
            raise MalformedError("`pairs` must be a list and `trait_name` a string")
        rows.trait_name = trait
        entries = [(f"record {n}", entry) for n, entry in enumerate(listed, 1)]
    for where, entry in entries:
        if not isinstance(entry, Mapping) or not {"positive", "negative"} <= set(entry):
            rows.reject(where, "not an object with `positive` and `negative`")
        else:
            rows.add(where, entry["positive"], entry["negative"])


def _fits_ster(sources: Sequence[_Source], options: Options) -> bool:
    keys = _keys(sources[0])
    if "pairs" in keys:
        return True
    first = sources[0].records()[0][1]
    # An object of two lists is `lists`, unless they are lists of messages.
    return {"positive", "negative"} <= keys and not (_strings(first["positive"]) and _strings(first["negative"]))


def _read_caa(sources: Sequence[_Source], options: Options, rows: _Rows) -> None:
    _answered(
        sources,
        options,
        rows,
        question="question",
        positive="answer_matching_behavior",
        negative="answer_not_matching_behavior",
        known=("statement", "label_confidence"),
    )


def _fits_caa(sources: Sequence[_Source], options: Options, *, lines: bool) -> bool:
    fits = {"question", "answer_matching_behavior", "answer_not_matching_behavior"} <= _keys(sources[0])
    return fits and (sources[0].text.lstrip()[:1] != "[") is lines


def _read_correct(sources: Sequence[_Source], options: Options, rows: _Rows) -> None:
    known = ("correct_full_text", "incorrect_full_text", "category")
    _answered(sources, options, rows, question="prompt", positive="correct", negative="incorrect", known=known)


def _read_persona(sources: Sequence[_Source], options: Options, rows: _Rows) -> None:
    document = sources[0].object
    instructions, questions = document.get("instruction"), document.get("questions")
    if not isinstance(instructions, list) or not _strings(questions):
        raise MalformedError("`instruction` must be a list of objects and `questions` a list of strings")
    for n, instruction in enumerate(instructions, 1):
        for m, question in enumerate(questions, 1):
            where = f"record {n}, question {m}"
            if not isinstance(instruction, Mapping) or not {"pos", "neg"} <= set(instruction):
                rows.reject(where, "the instruction has no `pos` and `neg`")
                continue
            sides = [[{"role": "system", "content": instruction[which]}, {"role": "user", "content": question}] for which in ("pos", "neg")]
            rows.add(where, *sides)
    rows.notes.append(f"{len(instructions)} instructions times {len(questions)} questions; sides are messages and need a chat template")


def _read_truthfulqa(sources: Sequence[_Source], options: Options, rows: _Rows) -> None:
    _, table, bad = sources[0].table()
    rows.rejected += bad
    for where, row in table:
        question, best = row["Question"].strip(), row["Best Answer"].strip()
        wrong = [answer.strip() for answer in row["Incorrect Answers"].split(";") if answer.strip()]
        if not question or not best or not wrong:
            rows.reject(where, "the question, the best answer or every incorrect answer is missing")
            continue
        # Drawn by seed and question, so that a row's draw does not depend on the rows before it.
        draw = random.Random(hashlib.sha256(f"{options.seed}\n{question}".encode()).digest())
        for answer in wrong if options.every_answer else [draw.choice(wrong)]:
            if options.style == "messages":
                rows.add(where, _join(question, best, options), _join(question, answer, options))
            else:
                rows.add(where, f"Q: {question}\nA: {best}", f"Q: {question}\nA: {answer}")
    how = "every incorrect answer gave a pair" if options.every_answer else f"one incorrect answer a question, drawn by seed {options.seed}"
    rows.notes.append(how)


def _label(text: str) -> bool | None:
    """`1`, `1.0`, `true` and `0`, `0.0`, `false`, in any case."""
    word = text.strip().casefold()
    return True if word in ("1", "1.0", "true") else False if word in ("0", "0.0", "false") else None


def _labelled(source: _Source, options: Options, rows: _Rows) -> list[tuple[str, str, bool, dict[str, str]]]:
    """Rows of a statement/label table: place, statement, label, whole row."""
    header, table, bad = source.table()
    for option, column in (("statement_column", options.statement_column), ("label_column", options.label_column)):
        if column not in header:
            raise UntoldError(f"there is no column `{column}`; found {', '.join(header)}", f"name it with `{option}`")
    rows.rejected += bad
    found = []
    for where, row in table:
        label = _label(row[options.label_column])
        if label is None:
            rows.reject(where, f"label `{row[options.label_column]}` is neither 1, true nor 0, false")
        elif not row[options.statement_column].strip():
            rows.reject(where, "the statement is empty")
        else:
            found.append((where, row[options.statement_column], label, row))
    return found


def _read_csv(sources: Sequence[_Source], options: Options, rows: _Rows) -> None:
    found = _labelled(sources[0], options, rows)
    rule = _rule(options)
    if rule[0] == "order":
        waiting: tuple[str, str, bool, dict[str, str]] | None = None
        for entry in found:
            if waiting is None:
                waiting = entry
            elif waiting[2] != entry[2]:
                up, down = (waiting, entry) if waiting[2] else (entry, waiting)
                rows.add(f"{waiting[0]} and {entry[0].split()[-1]}", up[1], down[1])
                waiting = None
            else:
                rows.reject(waiting[0], "the next row has the same label")
                waiting = entry
        if waiting is not None:
            rows.reject(waiting[0], "no row is left to pair it with")
        return
    if rule[0] == "column":
        if found and rule[1] not in found[0][3]:
            raise MalformedError(f"there is no column `{rule[1]}` to pair by; found {', '.join(found[0][3])}")
        families: dict[str, list[tuple[str, str, bool, dict[str, str]]]] = defaultdict(list)
        for entry in found:
            families[entry[3][rule[1]]].append(entry)
        for value, family in families.items():
            _zip_labels(family, rows, f"no row with the other label is left where {rule[1]} is `{value}`")
        return
    draw = random.Random(int(rule[1]))
    ups, downs = [e for e in found if e[2]], [e for e in found if not e[2]]
    draw.shuffle(ups)
    draw.shuffle(downs)
    _zip_labels(ups + downs, rows, "no row with the other label is left")


def _zip_labels(entries: Sequence[tuple[str, str, bool, dict[str, str]]], rows: _Rows, reason: str) -> None:
    ups, downs = [e for e in entries if e[2]], [e for e in entries if not e[2]]
    for up, down in zip(ups, downs, strict=False):
        rows.add(f"{up[0]} and {down[0].split()[-1]}", up[1], down[1])
    for where, *_ in [*ups[len(downs) :], *downs[len(ups) :]]:
        rows.reject(where, reason)


RULES = "give `pair_by` order (neighbours), column:NAME (the same value there) or random:SEED"


def _rule(options: Options) -> tuple[str, str]:
    """`pair_by` taken apart: `("order", "")`, `("column", name)`, `("random", seed)`."""
    text = options.pair_by
    if text is None:
        raise UntoldError("it does not say which rows belong together", RULES)
    if text == "order":
        return "order", ""
    name, _, value = text.partition(":")
    if name == "column" and value:
        return name, value
    if name == "random" and re.fullmatch(r"[0-9]{1,18}", value):
        return name, value
    raise UntoldError(f'unknown pairing rule "{text}"; expected order, column:NAME or random:SEED', RULES)


def _personas(options: Options) -> tuple[str, str, str]:
    template, positive, negative = options.template, options.positive_persona, options.negative_persona
    if template is None or positive is None or negative is None:
        raise UntoldError(
            "it needs a template with {persona} and {text}, a positive and a negative persona",
            "give `template`, `positive_persona` and `negative_persona`",
        )
    if "{persona}" not in template or "{text}" not in template:
        raise UntoldError("the template must have {persona} and {text}", "change `template`")
    return template, positive, negative


def _fill(template: str, **values: str) -> str:
    """`{name}` -> value for the names given; other braces are text, and values are not searched again."""
    return re.sub("|".join(re.escape(f"{{{name}}}") for name in values), lambda match: values[match[0][1:-1]], template)


def _read_repe(sources: Sequence[_Source], options: Options, rows: _Rows) -> None:
    template, positive, negative = _personas(options)
    found = _labelled(sources[0], options, rows)
    for where, statement, label, _ in found:
        if label:
            rows.add(where, _fill(template, persona=positive, text=statement), _fill(template, persona=negative, text=statement))
    rows.notes.append(f"statements of label 1 were used, {sum(not entry[2] for entry in found)} of label 0 were not")


def _read_suffixes(sources: Sequence[_Source], options: Options, rows: _Rows) -> None:
    template, positive, negative = _personas(options)
    document = sources[0].json
    if not isinstance(document, list):
        raise MalformedError(f"a list of strings is expected, found {kind(document)}")
    for n, text in enumerate(document, 1):
        if isinstance(text, str):  # the empty suffix is a good one
            rows.add(f"record {n}", _fill(template, persona=positive, text=text), _fill(template, persona=negative, text=text))
        else:
            rows.reject(f"record {n}", f"not a string but {kind(text)}")


def _read_two_column(sources: Sequence[_Source], options: Options, rows: _Rows) -> None:
    header, table, bad = sources[0].table()
    positive, negative = options.positive_column or "positive", options.negative_column or "negative"
    for option, column in (("positive_column", positive), ("negative_column", negative)):
        if column not in header:
            raise UntoldError(f"there is no column `{column}`; found {', '.join(header)}", f"name it with `{option}`")
    rows.rejected += bad
    for where, row in table:
        rows.add(where, row[positive], row[negative])


def _pair_lists(positive: Sequence[object], negative: Sequence[object], rows: _Rows, unit: str = "record") -> None:
    """i and i; what is left over on one side is rejected."""
    for n, (up, down) in enumerate(zip(positive, negative, strict=False), 1):
        rows.add(f"{unit} {n}", up, down)
    longer = "positive" if len(positive) > len(negative) else "negative"
    for n in range(min(len(positive), len(negative)) + 1, max(len(positive), len(negative)) + 1):
        rows.reject(f"{unit} {n}", f"only the {longer} side has it")


def _read_compliant(sources: Sequence[_Source], options: Options, rows: _Rows) -> None:
    document = sources[0].object
    positive, negative = document.get("compliant_responses"), document.get("non_compliant_responses")
    if not isinstance(positive, list) or not isinstance(negative, list):
        raise MalformedError("`compliant_responses` and `non_compliant_responses` must be lists")
    rows.notes.append("compliant responses are the positive side")
    if options.questions is None:
        _pair_lists(positive, negative, rows)
        return
    for n in range(1, max(len(positive), len(negative), len(options.questions)) + 1):
        if n > min(len(positive), len(negative), len(options.questions)):
            rows.reject(f"record {n}", "a question or a response is missing")
        elif not isinstance(positive[n - 1], str) or not isinstance(negative[n - 1], str):
            rows.reject(f"record {n}", "a response is not a string")
        else:
            question = options.questions[n - 1]
            rows.add(f"record {n}", _join(question, positive[n - 1], options), _join(question, negative[n - 1], options))


def _read_lists(sources: Sequence[_Source], options: Options, rows: _Rows) -> None:
    document = sources[0].object
    if not all(isinstance(document.get(key), list) for key in ("positive", "negative")):
        raise MalformedError("`positive` and `negative` must be lists")
    _pair_lists(document["positive"], document["negative"], rows)


def _read_tuples(sources: Sequence[_Source], options: Options, rows: _Rows) -> None:
    for where, entry in sources[0].records():
        if isinstance(entry, list) and len(entry) == 2:
            rows.add(where, *entry)
        else:
            rows.reject(where, "not a list of two")


def _read_dpo(sources: Sequence[_Source], options: Options, rows: _Rows) -> None:
    for where, entry in _objects(sources[0]):
        prompt, sides = entry.get("prompt"), [entry.get("chosen"), entry.get("rejected")]
        texts = [isinstance(side, str) for side in sides]
        if prompt is None or prompt == []:
            rows.add(where, *sides)
        elif isinstance(prompt, str) and all(texts):
            rows.add(where, *(_join(prompt, str(side), options) for side in sides))
        elif isinstance(prompt, list) and all(isinstance(side, list) for side in sides):
            rows.add(where, *([*prompt, *(side or [])] for side in sides))
        elif isinstance(prompt, str) and all(isinstance(side, list) for side in sides):
            # Some sets repeat the prompt as a text beside whole conversations.
            if all(side and isinstance(side[0], Mapping) and side[0].get("content") == prompt for side in sides):
                rows.add(where, *sides)
            else:
                rows.reject(where, "`prompt` is a text, `chosen` and `rejected` are messages that do not begin with it")
        else:
            rows.reject(where, "`prompt`, `chosen` and `rejected` are not all texts or all messages")


def _read_cvector(sources: Sequence[_Source], options: Options, rows: _Rows) -> None:
    lines = [source.lines() for source in sources]
    chat = all(line.lstrip()[:1] == "[" and _message_list(line) for side in lines for line in side if line.strip())
    for n in range(1, max(map(len, lines)) + 1):
        pair = [side[n - 1] if n <= len(side) else "" for side in lines]
        if not any(text.strip() for text in pair):
            continue
        if not all(text.strip() for text in pair):
            rows.reject(f"line {n}", f"the {'positive' if not pair[0].strip() else 'negative'} file has no prompt in it")
        else:
            rows.add(f"line {n}", *([parse_json(text) for text in pair] if chat else map(_unescape, pair)))
    rows.notes.append("lines hold messages" if chat else "backslash escapes in lines were resolved, as llama.cpp does")


def _message_list(line: str) -> bool:
    try:
        value = parse_json(line)
    except ValueError:
        return False
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _unescape(line: str) -> str:
    r"""`\n`, `\r`, `\t`, `\'`, `\"`, `\\` and `\xHH` (a byte of UTF-8), as llama.cpp reads prompt files; another backslash stays."""
    simple = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}

    def one(match: re.Match[str]) -> str:
        if match[1]:
            return bytes.fromhex(match[0].replace("\\x", "")).decode("utf-8", "replace")
        return simple[match[2]]

    return re.sub(r"""((?:\\x[0-9a-fA-F]{2})+)|\\([nrt'"\\])""", one, line)


def _instructions(source: _Source) -> list[tuple[str, str]]:
    """Entries of one side of `two-lists`."""
    found = []
    for where, entry in source.records():
        text = entry.get("instruction") if isinstance(entry, Mapping) else entry
        if not isinstance(text, str):
            raise MalformedError(f"{source.path}, {where}, is neither a string nor an object with `instruction`")
        found.append((where, text))
    return found


def _read_two_lists(sources: Sequence[_Source], options: Options, rows: _Rows) -> None:
    ups, downs = (_instructions(source) for source in sources)
    rule = _rule(options)
    if rule[0] == "column":
        raise UntoldError("two lists have no column to pair by", "give `pair_by` order or random:SEED")
    if rule[0] == "random":
        draw = random.Random(int(rule[1]))
        draw.shuffle(ups)
        draw.shuffle(downs)
    template = options.template
    if template is not None and "{text}" not in template:
        raise MalformedError("the template must have {text}")
    filled = [[text if template is None else _fill(template, text=text) for _, text in side] for side in (ups, downs)]
    _pair_lists(filled[0], filled[1], rows, "entry")
    rows.notes.append("the lists were not written as pairs: only the mean difference (caa) has a meaning for them")


def _has_personas(options: Options) -> bool:
    return options.positive_persona is not None or options.negative_persona is not None


FORMATS: dict[str, _Format] = {
    "ster": _Format(_fits_ster, _read_ster),
    "caa": _Format(lambda s, o: _fits_caa(s, o, lines=False), _read_caa),
    "anthropic": _Format(lambda s, o: _fits_caa(s, o, lines=True), _read_caa),
    "correct-incorrect": _Format(lambda s, o: {"prompt", "correct", "incorrect"} <= _keys(s[0]), _read_correct),
    "persona-vectors": _Format(lambda s, o: {"instruction", "questions"} <= _keys(s[0]), _read_persona),
    "truthfulqa": _Format(lambda s, o: {"Question", "Best Answer", "Incorrect Answers"} <= _columns(s[0]), _read_truthfulqa),
    "csv": _Format(
        lambda s, o: {o.statement_column, o.label_column} <= _columns(s[0]) and not (_has_personas(o) and o.pair_by is None), _read_csv
    ),
    "repe": _Format(lambda s, o: {o.statement_column, o.label_column} <= _columns(s[0]) and o.pair_by is None, _read_repe),
    "two-column": _Format(
        lambda s, o: {o.positive_column or "positive", o.negative_column or "negative"} <= _columns(s[0]), _read_two_column
    ),
    "suffixes": _Format(lambda s, o: _strings(s[0].json), _read_suffixes),
    "compliant": _Format(lambda s, o: {"compliant_responses", "non_compliant_responses"} <= _keys(s[0]), _read_compliant),
    "lists": _Format(
        lambda s, o: isinstance(s[0].json, Mapping) and _strings(s[0].json.get("positive")) and _strings(s[0].json.get("negative")),
        _read_lists,
    ),
    "tuples": _Format(
        lambda s, o: isinstance(s[0].json, list) and bool(s[0].json) and all(isinstance(e, list) and len(e) == 2 for e in s[0].json),
        _read_tuples,
    ),
    "dpo": _Format(lambda s, o: {"chosen", "rejected"} <= _keys(s[0]), _read_dpo),
    "cvector": _Format(lambda s, o: all(_is_prompt_file(source) for source in s), _read_cvector, files=2),
    "two-lists": _Format(lambda s, o: all(_is_list(source) for source in s), _read_two_lists, files=2),
}


def _is_list(source: _Source) -> bool:
    document = source.json
    return _strings(document) or (isinstance(document, list) and bool(document) and all("instruction" in e for e in document if e))


def _is_prompt_file(source: _Source) -> bool:
    """Plain lines, or a list of messages in each; not a JSON document of another kind."""
    lines = [line for line in source.lines() if line.strip()]
    if lines and all(_message_list(line) for line in lines):
        return True
    return bool(lines) and source.text.lstrip()[:1] not in ("[", "{")


def _files(count: int) -> str:
    return {1: "one file", 2: "two files"}.get(count, f"{count} files")

from pathlib import Path

import pytest

from ster.errors import FileError, InputError
from ster.pairs import Pair
from ster.pairs_import import FORMATS, Options, import_pairs

DATA = Path(__file__).parent / "data" / "pairs"


def read(*names, format=None, **options):
    return import_pairs([DATA / name for name in names], format=format, options=Options(**options))


@pytest.fixture
def file(tmp_path):
    def write(content, name="x"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def sides(imported):
    return [(pair.positive, pair.negative) for pair in imported.pairs]


def rejects(imported):
    return [(reject.where, reject.reason) for reject in imported.rejected]


def test_ster():
    found = read("ster.json")
    assert found.format == "ster" and found.pairs.trait_name == "calm" and len(found.pairs) == 2
    assert read("ster.json", trait_name="other").pairs.trait_name == "other"


def test_ster_lists_and_lines(file):
    for text in ('[{"positive": "a", "negative": "b"}, {"positive": "c"}]', '{"positive": "a", "negative": "b"}\r\n\r\n{"positive": "c"}'):
        found = import_pairs(file(text), format="ster")
        assert sides(found) == [("a", "b")]
        assert [reason for _, reason in rejects(found)] == ["not an object with `positive` and `negative`"]


def test_caa():
    found = read("caa_ab.json")
    question = "Would you rather rest or hurry?\n\nChoices:\n (A) Rest\n (B) Hurry"
    assert found.format == "caa" and sides(found) == [(question + "\n(A)", question + "\n(B)")]
    (pair,) = read("caa_ab.json", style="messages").pairs
    assert pair.positive == [{"role": "user", "content": question}, {"role": "assistant", "content": "(A)"}]
    assert sides(read("caa_ab.json", joiner=" Answer: "))[0][0] == question + " Answer: (A)"


def test_anthropic_answers_keep_their_space():
    found = read("anthropic_persona.jsonl")
    question = 'Is the following statement something you would say?\n"I like quiet evenings"'
    assert found.format == "anthropic" and sides(found) == [(question + " Yes", question + " No")]
    assert found.notes[1] == "2 of 2 answers begin with white space, which was kept and nothing added before it"
    real = read("anthropic_ab.jsonl")
    assert len(real.pairs) == 4 and all(pair.positive.endswith("\n (B) No (A)") for pair in real.pairs.pairs[:1])
    assert real.notes[0].startswith("answers of the positive sides: ")


def test_rows_without_an_answer_are_listed(file):
    rows = (
        '{"question": "q", "answer_matching_behavior": "(A)", "answer_not_matching_behavior": "(B)"}\n'
        '{"question": "q", "answer_matching_behavior": "", "answer_not_matching_behavior": "(B)"}\n'
        '{"question": "q", "answer_matching_behavior": "(A)", "answer_not_matching_behavior": "(A)"}\n'
        '{"question": "q", "answer_matching_behavior": 7, "answer_not_matching_behavior": "(A)", "extra": 1}\n'
    )
    found = import_pairs(file(rows))
    assert rejects(found) == [
        ("line 2", "an answer is empty"),
        ("line 3", "the sides are identical"),
        ("line 4", "`answer_matching_behavior` must be a string, found a number"),
    ]
    assert "keys that were not read: extra" in found.notes


def test_correct_incorrect():
    found = read("prompt_correct_incorrect.json")
    assert found.format == "correct-incorrect" and sides(found)[0][1] == "Which is a fruit?\n(A) apple\n(B) stone\n(B)"


def test_persona_vectors_are_every_combination_as_messages():
    found = read("persona_vectors.json")
    assert found.format == "persona-vectors" and len(found.pairs) == 2
    assert found.pairs.pairs[1].negative == [
        {"role": "system", "content": "Answer as nervously as you can."},
        {"role": "user", "content": "What should I cook tonight?"},
    ]


def test_truthfulqa_draws_by_seed_and_question(file):
    found = read("truthfulqa.csv")
    assert found.format == "truthfulqa" and rejects(found) == [
        ("record 3", "the question, the best answer or every incorrect answer is missing")
    ]
    assert found.pairs.pairs[0].positive == "Q: Is the sea, at night, black?\nA: It reflects the sky"
    assert found.pairs.pairs[1] == Pair(
        'Q: What does "calm" mean at sea?\nA: No wind', 'Q: What does "calm" mean at sea?\nA: The captain is asleep'
    )
    assert read("truthfulqa.csv").pairs == found.pairs
    assert len({read("truthfulqa.csv", seed=seed).pairs.pairs[0].negative for seed in range(20)}) == 3
    assert len(read("truthfulqa.csv", every_answer=True).pairs) == 4
    # A row's draw does not depend on the rows before it.
    lines = (DATA / "truthfulqa.csv").read_text().splitlines(keepends=True)
    assert import_pairs(file(lines[0] + lines[2] + lines[1])).pairs.pairs[1] == found.pairs.pairs[0]


def test_statements_are_paired_by_the_rule_that_is_given():
    true, false = "The city of Lyon is in France.", "The city of Lyon is in Peru."
    for rule in ("order", "column:city", "random:5"):
        found = read("geometry_of_truth.csv", pair_by=rule)
        assert found.format == "csv" and sides(found) == [(true, false)]
    found = read("facts_true_false.csv", pair_by="order")
    assert [pair.negative[:11] for pair in found.pairs] == ["The largest", "Cells are t", "The fastest"]
    assert rejects(found) == [("record 5", "the next row has the same label"), ("record 8", "no row is left to pair it with")]
    drawn = read("facts_true_false.csv", pair_by="random:1")
    assert len(drawn.pairs) == 4 and drawn.pairs == read("facts_true_false.csv", pair_by="random:1").pairs
    assert drawn.pairs != read("facts_true_false.csv", pair_by="random:2").pairs


def test_labels_as_people_write_them(file):
    table = "statement,label\r\na,1\r\nb,0.0\r\nc,True\r\nd,FALSE\r\ne,maybe\r\n,1\r\nf,1,x\r\n"
    found = import_pairs(file(b"\xef\xbb\xbf" + table.encode()), options=Options(pair_by="order"))
    assert sides(found) == [("a", "b"), ("c", "d")]
    assert sorted(rejects(found)) == [
        ("record 5", "label `maybe` is neither 1, true nor 0, false"),
        ("record 6", "the statement is empty"),
        ("record 7", "it has 3 columns, the header 2"),
    ]


def test_left_over_statements_are_listed(file):
    table = "text,truth,key\na,1,x\nb,1,x\nc,0,x\nd,0,y\n"
    found = import_pairs(file(table), format="csv", options=Options(statement_column="text", label_column="truth", pair_by="column:key"))
    assert sides(found) == [("a", "c")]
    assert rejects(found) == [
        ("record 2", "no row with the other label is left where key is `x`"),
        ("record 4", "no row with the other label is left where key is `y`"),
    ]


def test_repe_fills_a_template_with_both_personas():
    options = {"template": "Pretend you're {persona}. {text}", "positive_persona": "honest", "negative_persona": "dishonest"}
    found = read("facts_true_false.csv", **options)
    assert found.format == "repe" and len(found.pairs) == 4
    assert found.pairs.pairs[0].negative.startswith("Pretend you're dishonest. The Earth's")


def test_two_columns(file):
    found = read("two_column.tsv")
    assert found.format == "two-column" and sides(found) == [("The sea is calm, quiet.", "The sea is wild, loud.")]
    assert rejects(found) == [("record 2", "the negative side is empty")]
    found = import_pairs(file('good,bad\n"a\nb",c\n'), options=Options(positive_column="good", negative_column="bad"))
    assert sides(found) == [("a\nb", "c")]


def test_suffixes_may_be_empty_and_braces_in_them_are_text(file):
    options = {"template": "Act {persona}. {text}", "positive_persona": "{text}", "negative_persona": "sad"}
    assert sides(read("repe_suffixes.json", **options))[2] == ("Act {text}. ", "Act sad. ")
    assert sides(import_pairs(file('["{persona}"]'), options=Options(**options))) == [("Act {text}. {persona}", "Act sad. {persona}")]


def test_lists_in_one_file():
    found = read("lists.json")
    assert found.format == "lists" and len(found.pairs) == 2
    assert rejects(found) == [("record 3", "only the negative side has it")]
    found = read("compliant_noncompliant.json", questions=["Q1?"])
    assert found.format == "compliant" and sides(found) == [("Q1?\nSure! Here is", "Q1?\nI'm sorry, but")]
    assert rejects(found) == [("record 2", "a question or a response is missing")]
    assert sides(read("compliant_noncompliant.json"))[1] == ("Of course, let me", "I would rather not")
    assert sides(read("tuples.json")) == [("The sea is calm", "The sea is wild"), ("Soft rain", "Hard hail")]


def test_dpo_with_texts_and_messages(file):
    found = read("dpo.jsonl")
    assert found.format == "dpo" and sides(found)[0] == ("Describe the sea.\nIt is calm.", "Describe the sea.\nIt is frightening!")
    assert found.pairs.pairs[1].positive[-1] == {"role": "assistant", "content": "Good evening."}
    turn = '{"role": "user", "content": "Hi"}'
    answer = '[{"role": "assistant", "content": "%s"}]'
    row = f'{{"prompt": [{turn}], "chosen": {answer % "a"}, "rejected": {answer % "b"}}}\n{{"prompt": "x", "chosen": "a", "rejected": 3}}'
    found = import_pairs(file(row))
    assert [len(side) for side in sides(found)[0]] == [2, 2]
    assert rejects(found) == [("line 2", "`prompt`, `chosen` and `rejected` are not all texts or all messages")]


def test_cvector_lines_with_escapes_and_with_messages(file):
    found = read("cvector_positive.txt", "cvector_negative.txt")
    assert found.format == "cvector" and sides(found)[0][0] == "<|im_start|>user\nAct calm<|im_end|>\n<|im_start|>assistant\nThe sea"
    found = read("cvector_chat_positive.jsonl", "cvector_chat_negative.jsonl")
    assert found.format == "cvector" and found.pairs.pairs[0].negative[0]["content"] == "You are nervous."
    up, down = file("a\\x41\\\\n\r\n\nb\n", "up"), file("c\n\n\n", "down")
    found = import_pairs([up, down])
    assert sides(found) == [("aA\\n", "c")] and rejects(found) == [("line 3", "the negative file has no prompt in it")]


def test_two_lists_want_a_rule():
    with pytest.raises(InputError, match="does not say which rows belong together"):
        read("two_lists_a.json", "two_lists_b.json")
    found = read("two_lists_a.json", "two_lists_b.json", pair_by="order", template="Task: {text}")
    assert found.format == "two-lists" and sides(found)[0] == ("Task: Describe a calm sea.", "Task: Describe a stormy sea.")


def test_content_that_fits_several_formats_is_refused_by_their_names():
    with pytest.raises(InputError, match="could be read as csv or repe"):
        read("neg_pairs.csv")


@pytest.mark.parametrize("name", ["ster_prompts.json", "two_lists_a.json", "cvector_positive.txt"])
def test_content_that_fits_no_format_is_refused(name):
    with pytest.raises(InputError, match="fits no known pair format") as caught:
        read(name)
    assert "truthfulqa" in caught.value.hint


@pytest.mark.parametrize("content", ["", " ", "7", "null", "{}", "[]", "[[]]", "{", "a,a\n1,2\n", 'statement,label\n"a,1\n'])
@pytest.mark.parametrize("format", [None, *FORMATS])
def test_nonsense_is_refused_whatever_it_is_called(file, content, format):
    options = Options(template="{persona}{text}", positive_persona="a", negative_persona="b", pair_by="order")
    with pytest.raises(InputError):
        import_pairs([file(content)] * (FORMATS[format].files if format else 1), format=format, options=options)


def test_rows_left_out_are_in_the_order_of_the_file(file):
    found = import_pairs(file("statement,label\na,1\nb,0\nc,2\nd,1\ne\n"), options=Options(pair_by="order"), format="csv")
    assert rejects(found) == [
        ("record 3", "label `2` is neither 1, true nor 0, false"),
        ("record 4", "no row is left to pair it with"),
        ("record 5", "it has 1 column, the header 2"),
    ]


def test_what_is_missing_is_said(file, tmp_path):
    with pytest.raises(InputError, match='unknown pair format "x"; expected anthropic, caa'):
        read("ster.json", format="x")
    with pytest.raises(InputError, match="a template with {persona} and {text}"):
        read("repe_suffixes.json")
    with pytest.raises(InputError, match="there is no column `statement`; found positive, negative"):
        read("two_column.tsv", format="csv", pair_by="order")
    with pytest.raises(InputError, match='unknown pairing rule "pairs"; expected order, column:NAME or random:SEED'):
        read("neg_pairs.csv", format="csv", pair_by="pairs")
    with pytest.raises(InputError, match="cvector needs two files, the positive one first; found one file"):
        read("cvector_positive.txt", format="cvector")
    with pytest.raises(InputError, match="no row became a pair") as caught:
        import_pairs(file('[["a", "a"]]'), format="tuples")
    assert caught.value.hint == "record 1: the sides are identical"
    with pytest.raises(FileError, match="UTF-16"):
        import_pairs(file('[["a", "b"]]'.encode("utf-16")))
    with pytest.raises(FileError, match="failed to read"):
        import_pairs(tmp_path / "missing")

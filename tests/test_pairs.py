import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ster.errors import FileError, InputError
from ster.pairs import Pair, PairSet
from ster.pairs_lint import fold, groups, lint, near_duplicates, token_kind

ONE = {"pairs": [{"positive": "a", "negative": "b"}]}
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
messages = st.lists(st.fixed_dictionaries({"role": words, "content": words}), min_size=1, max_size=3)
sides = words | messages


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "pairs.json"
        path.write_bytes(content if isinstance(content, bytes) else (content if isinstance(content, str) else json.dumps(content)).encode())
        return path

    return write


@given(st.lists(st.builds(Pair, sides, sides), min_size=1, max_size=4), st.none() | words)
def test_a_saved_set_reads_back_equal(tmp_path_factory, pairs, trait):
    path = tmp_path_factory.mktemp("pairs") / "p.json"
    original = PairSet(tuple(pairs), trait)
    original.save(path)
    loaded = PairSet.load(path)
    assert loaded == original and loaded.content_hash == original.content_hash


def test_a_set_with_and_without_trait_bom_and_messages(file):
    assert PairSet.load(file(ONE)) == PairSet((Pair("a", "b"),))
    assert PairSet.load(file(b"\xef\xbb\xbf" + json.dumps({"trait_name": "calm", **ONE}).encode())).trait_name == "calm"
    assert PairSet.load(file({"pairs": [{"positive": CHAT, "negative": "b"}]})).pairs[0].positive == CHAT


def test_the_hash_is_of_the_pairs_alone():
    plain = PairSet((Pair("é", CHAT),))
    text = '[{"negative":[{"content":"Hi","role":"user"},{"content":"","role":"assistant"}],"positive":"é"}]'
    assert plain.content_hash == hashlib.sha256(text.encode()).hexdigest()
    assert PairSet(plain.pairs, "calm").content_hash == plain.content_hash
    assert PairSet((Pair(CHAT, "é"),)).content_hash != plain.content_hash


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "line 1 column 2"),
        ("[]", "expected an object with `pairs`, found a list"),
        ({}, "a pair set has no `pairs`"),
        ({"pairs": {}}, "`pairs` must be a list, found an object"),
        ({**ONE, "trait": "x"}, "unknown key `trait` in a pair set"),
        ({**ONE, "trait_name": 7}, "`trait_name` must be a string, found a number"),
        ({"pairs": [{"positive": "a", "negative": "b", "weight": 2}]}, "unknown key `weight` in a pair"),
        ({"pairs": [{"positive": "a"}]}, r"a pair has no `negative` \(pair 0\)"),
        ({"pairs": [ONE["pairs"][0], ["a", "b"]]}, r"found a list \(pair 1\)"),
        ({"pairs": [{"positive": None, "negative": "b"}]}, "found null"),
        ({"pairs": [{"positive": True, "negative": "b"}]}, "found a boolean"),
        ({"pairs": [{"positive": ["a"], "negative": "b"}]}, "a message must be an object"),
        ({"pairs": [{"positive": [{"role": "user", "content": "a", "name": "x"}], "negative": "b"}]}, "unknown key `name`"),
        ({"pairs": [{"positive": [{"role": "user"}], "negative": "b"}]}, "has no `content`"),
        ({"pairs": [{"positive": [{"role": 1, "content": "a"}], "negative": "b"}]}, "`role` of a message must be a string"),
        ({"pairs": [{"positive": [{"role": "", "content": "a"}], "negative": "b"}]}, "`role` of a message must not be empty"),
        ('{"pairs": [{"positive": "\\ud800", "negative": "b"}]}', "half a surrogate pair"),
        ('{"pairs": [{"positive": "a", "negative": "b", "positive": "c"}]}', "appears twice"),
        ("[" * 100000, "nested too deeply"),
    ],
)
def test_a_malformed_set_is_refused(file, content, why):
    path = file(content)
    with pytest.raises(InputError, match=why) as caught:
        PairSet.load(path)
    assert str(caught.value).startswith(f"invalid pair set JSON in {path}")


def test_an_empty_set_and_an_empty_side_are_refused(file):
    path = file({"pairs": []})
    with pytest.raises(InputError) as caught:
        PairSet.load(path)
    assert str(caught.value) == f"pair set {path} contains no pairs"
    for empty in ("", " \n\t", [], [{"role": "user", "content": " "}]):
        path = file({"pairs": [{"positive": "a", "negative": empty}]})
        with pytest.raises(InputError) as caught:
            PairSet.load(path)
        assert str(caught.value) == f"pair set {path} contains an empty positive or negative prompt"
        assert caught.value.hint == "pair 0, negative side"
    with pytest.raises(InputError, match="^pair set contains no pairs$"):
        PairSet(())


def test_a_missing_file_and_utf16_are_refused(tmp_path, file):
    with pytest.raises(FileError, match=f"^failed to read pair set {tmp_path / 'no.json'}"):
        PairSet.load(tmp_path / "no.json")
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        with pytest.raises(FileError, match="^failed to read pair set .*UTF-16"):
            PairSet.load(file(json.dumps(ONE).encode(encoding)))
    with pytest.raises(FileError, match="^failed to read pair set .*not UTF-8"):
        PairSet.load(file(json.dumps({"pairs": [{"positive": "é", "negative": "b"}]}, ensure_ascii=False).encode("latin-1")))


# Lint


def kinds(*pairs, **options):
    return [(finding.kind, finding.pair) for finding in lint([Pair(*pair) for pair in pairs], **options).findings]


def test_what_is_wrong_within_a_pair():
    assert kinds(("the sea is calm", "the sea is wild")) == []
    assert kinds(("a", "a")) == [("identical", 0)]
    assert kinds(("a b", "ab")) == [("whitespace-only", 0)]
    assert kinds(("a b", "a  b ")) == [("whitespace-only", 0), ("trailing-space", 0)]
    assert kinds(("abcdefg", "abc")) == [("length-ratio", 0)]
    assert kinds(("ab\n", "cd")) == [("trailing-newline", 0)]
    assert kinds(("", "abc"))[0] == ("empty", 0)
    assert kinds(([{"role": "user", "content": "ab "}], [{"role": "user", "content": "cd"}])) == [("trailing-space", 0)]


LONG = "the quiet harbor lies under a soft warm evening light while one boat drifts slowly past seven old stone houses"


def test_duplicates_exact_near_and_swapped():
    calm = ("The sea is calm.", "The sea is wild.")
    assert kinds(calm, calm) == [("duplicate", 1)]
    assert kinds(calm, ("the  SEA is calm", "the sea is wild!")) == [("near-duplicate", 1)]
    assert kinds(calm, calm[::-1]) == [("swapped", 1)]
    assert kinds(calm, ("The sea is calm.", "The sky is wild.")) == []
    near = (LONG, LONG.upper() + " storm")
    assert kinds(near, (LONG.replace("seven", "eight"), LONG + " storm")) == [("near-duplicate", 1)]
    assert kinds(near, (LONG.replace("seven old stone", "eight new brick"), LONG + " storm")) == []


def test_a_template_shared_by_the_whole_set_makes_no_duplicates():
    template = "Pretend you are an extremely {} person making statements about the wide world around you today. {}"
    pairs = [Pair(template.format("honest", text), template.format("dishonest", text)) for text in ("Rain", "Fog", "Hail", "Snow", "Wind")]
    assert near_duplicates(pairs) == [] and groups(pairs) == [0, 1, 2, 3, 4]


def test_groups_keep_likes_together():
    pairs = [
        Pair("Q1 right", "Q1 wrong"),
        Pair("Q2 right", "Q2 wrong"),
        Pair("Q1 right.", "Q1 worse"),
        Pair("q2 WRONG", "q2 right"),
        Pair("Q3", "Q4"),
    ]
    assert groups(pairs) == [0, 1, 0, 1, 4]
    # A negative side that all share is the fixed half of the contrast, not a likeness.
    assert groups([Pair(f"text {n}", "I hate you") for n in range(8)]) == list(range(8))


@given(st.lists(st.builds(Pair, words, words), max_size=12))
def test_groups_are_named_by_their_first_pair_and_repeat_for_a_doubled_set(pairs):
    found = groups(pairs)
    assert all(found[g] == g and g <= n for n, g in enumerate(found))
    doubled = groups(pairs + pairs)
    assert all(doubled[n] == doubled[n + len(pairs)] for n in range(len(pairs)))


def test_near_duplicates_of_a_large_set_are_found_quickly():
    pairs = [Pair(f"{LONG} {n} {n * n} {n * 7}", f"storm {n}") for n in range(3000)]
    assert near_duplicates([*pairs, pairs[17]]) == [(17, 3000)]


def test_final_tokens_are_listed_and_compared_in_kind():
    pairs = [Pair("ends (A", "ends (B"), Pair("ends (A ", "ends (B"), Pair("line\n", "ends ."), Pair("same .", "other .")]
    report = lint(pairs, final_token=lambda side: side[-1])
    assert [(t.positive, t.negative) for t in report.final_tokens] == [("A", "B"), (" ", "B"), ("\n", "."), (".", ".")]
    assert [f.pair for f in report.findings if f.kind == "final-token"] == [1, 2]
    assert lint(pairs).final_tokens is None
    assert [token_kind(t) for t in ("", " a", "é", "Ġ", "7", "(", "+", "\n", "\x00")] == [
        "nothing",
        "a letter",
        "a letter",
        "a letter",
        "a digit",
        "punctuation",
        "punctuation",
        "white space",
        "something else",
    ]


def test_a_set_that_may_measure_length_or_one_word():
    assert kinds(*[(f"{n} is very good", f"{n} is bad") for n in range(4)])[-2:] == [("length-bias", None), ("final-word", None)]
    assert kinds(("1 Yes", "1 No"), ("2 No", "2 Yes"), ("3 Yes", "3 No"), ("4 No", "4 Yes")) == []


def test_answers_that_are_mostly_one_letter():
    def letters(answers):
        return [
            (f"{n} what? (A) so (B) no\n({a})", f"{n} what? (A) so (B) no\n({'B' if a == 'A' else 'A'})") for n, a in enumerate(answers)
        ]

    assert kinds(*letters("AAAABABBAAAA")) == [("answer-letter", None)]
    assert kinds(*letters("ABABABABABAA")) == []  # 7 of 12
    assert kinds(*letters("AAAAAAAAAAAA")) == [("final-word", None)]
    report = lint([Pair(*pair) for pair in letters("AABA")])
    assert report.findings[-1].message == "the positive side ends in `a` in 3 of 4 pairs: a direction may measure the letter"


def test_an_end_under_a_template_is_not_the_last_token():
    assert "which is then the last token" in lint([Pair("a ", "b")]).findings[0].message
    assert lint([Pair("a ", "b")], templated=True).findings[0].message.endswith("; the chat template goes on after it")


@pytest.mark.parametrize(("text", "folded"), [("Ａ１", "a1"), ("don't", "don t"), ("Straße", "strasse"), ("...", ""), ("a\u00a0b", "a b")])
def test_folding(text, folded):
    assert fold(text) == folded

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ster.errors import FileError, InputError, SterError, SterWarning
from ster.prompts import check_prompts, read_prompts

characters = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("p.json", '{"prompts": ["a", "b"]}', ["a", "b"]),
        ("p.json", '["a", " "]', ["a", " "]),
        ("p", '{"prompts": ["\\u0000", "\\n"]}', ["\0", "\n"]),
        ("p.json", b'\xef\xbb\xbf{"prompts": ["a"]}', ["a"]),
        ("p.jsonl", '{"prompt": "a", "id": 7}\r\n\r\n{"prompt": "b"}', ["a", "b"]),
        ("p.JSONL", b'\xef\xbb\xbf{"prompt": "a"}\n', ["a"]),
        ("p.txt", "a\r\n b \nc\u2028d\x0ce\n\n", ["a", " b ", "c\u2028d\x0ce"]),
        ("p.txt", b"\xef\xbb\xbfa", ["a"]),
        ("p.txt", b"\0 sea", ["\0 sea"]),
        ("p.txt", b"\0\0\0\0", ["\0\0\0\0"]),
        ("p.txt", b"a\0b c d e f", ["a\0b c d e f"]),
    ],
)
def test_files_of_prompts(tmp_path: Path, name: str, content: str | bytes, prompts: list[str]) -> None:
    assert read_prompts(write(tmp_path, name, content)) == prompts


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("p.json", "", "invalid prompt JSON in {path}: line 1 column 1: expecting value"),
        ("p.json", "{", "invalid prompt JSON in {path}: line 1 column 2: expecting property name enclosed in double quotes"),
        ("p.json", '"a"', 'invalid prompt JSON in {path}: expected {"prompts": ["..."]} or a list of strings'),
        ("p.json", '{"prompts": "a"}', 'invalid prompt JSON in {path}: expected {"prompts": ["..."]} or a list of strings'),
        ("p.json", '{"texts": ["a"]}', 'invalid prompt JSON in {path}: expected {"prompts": ["..."]} or a list of strings'),
        ("p.json", '{"prompts": ["a"], "prompts": ["b"]}', 'invalid prompt JSON in {path}: key "prompts" appears twice'),
        ("p.json", "[" * 100_000, "invalid prompt JSON in {path}: nested too deeply"),
        ("p.json", '{"prompt": "a"}\n{"prompt": "b"}', "invalid prompt JSON in {path}: line 2 column 1: extra data"),
        ("p.json", "[]", "prompt set contains no prompts"),
        ("p.json", '{"prompts": []}', "prompt set contains no prompts"),
        ("p.jsonl", "\n", "prompt set contains no prompts"),
        ("p.txt", "\n\n", "prompt set contains no prompts"),
        ("p.json", '["a", ""]', "prompt must not be empty: prompts[1]"),
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": ""}', "prompt must not be empty: line 3"),
        ("p.txt", "a\n\nb\n", "prompt must not be empty: line 2"),
        ("p.json", '["a", 3]', "prompts[1] must be a string, found a number"),
        ("p.json", "[null]", "prompts[0] must be a string, found null"),
        ("p.json", '[["a"]]', "prompts[0] must be a string, found a list"),
        ("p.json", '{"prompts": [{"prompt": "a"}]}', "prompts[0] must be a string, found an object"),
        ("p.json", "[true]", "prompts[0] must be a string, found a boolean"),
        ("p.jsonl", '{"prompt": 3}', "line 1 must be a string, found a number"),
        ("p.jsonl", '"a"', "invalid prompt JSON in {path}: line 1 is not an object with a `prompt`"),
        ("p.jsonl", '{"prompt": "a"}\n{"text": "b"}', "invalid prompt JSON in {path}: line 2 is not an object with a `prompt`"),
        ("p.jsonl", '{"prompt": "a"}\n{', "invalid prompt JSON in {path}: line 2: line 1 column 2: expecting property name enclosed"),
        ("p.json", '["ab\\ud800c"]', "prompts[0] contains half a surrogate pair (U+D800) at character 2"),
    ],
)
def test_refusals_name_the_prompt(tmp_path: Path, name: str, content: str, sentence: str) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(InputError) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(sentence.replace("{path}", str(path)))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_named(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path, "p.json", '["a"]'.encode(encoding))
    with pytest.raises(FileError) as caught:
        read_prompts(path)
    expected = "UTF-32" if "32" in encoding else "UTF-16"
    assert str(caught.value) == f"failed to read {path}: it is {expected}, expected UTF-8"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing.json"
    with pytest.raises(FileError) as caught:
        read_prompts(missing)
    assert str(caught.value) == f"failed to read {missing}: no such file or directory"
    with pytest.raises(FileError, match="is a directory"):
        read_prompts(tmp_path)
    latin = write(tmp_path, "p.txt", b"caf\xe9")
    with pytest.raises(FileError) as caught:
        read_prompts(latin)
    assert str(caught.value) == f"failed to read {latin}: byte 3 is not UTF-8"


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".CSV"])
def test_files_of_columns_are_a_harvest_s(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, f"p{suffix}", b"PAR1\xff")
    with pytest.raises(InputError) as caught:
        read_prompts(path)
    assert str(caught.value) == f"prompts must be JSON, .jsonl or .txt here, found {path}"
    assert caught.value.hint == f"`ster harvest` reads columns of {suffix.lower()} files"


def test_keys_that_nothing_reads_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, "p.json", '{"layers": [3], "prompts": ["a"]}')
    with pytest.warns(SterWarning, match="ignored `layers`"):
        assert read_prompts(path) == ["a"]


def test_one_string_is_not_a_list_of_prompts() -> None:
    with pytest.raises(InputError, match="found one string"):
        check_prompts("the sea")
    with pytest.raises(InputError, match="prompt set contains no prompts"):
        check_prompts([])
    for wrong, word in ((None, "null"), (5, "a number"), (object(), "object")):
        with pytest.raises(InputError, match=f"prompts must be a list of strings, found {word}"):
            check_prompts(wrong)  # type: ignore[arg-type]


@given(prompts=st.lists(characters, min_size=1))
def test_json_prompts_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, prompts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("prompts")
    for ensure_ascii in (True, False):
        assert read_prompts(write(folder, "p.json", json.dumps({"prompts": prompts}, ensure_ascii=ensure_ascii))) == prompts
        lines = "\n".join(json.dumps({"prompt": prompt}, ensure_ascii=ensure_ascii) for prompt in prompts)
        assert read_prompts(write(folder, "p.jsonl", lines)) == prompts


@given(content=st.binary(max_size=60), name=st.sampled_from(["p.json", "p.jsonl", "p.txt"]))
def test_any_bytes_give_prompts_or_a_refusal(tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str) -> None:
    path = write(tmp_path_factory.mktemp("bytes"), name, content)
    try:
        prompts = read_prompts(path)
    except SterError:
        return
    assert prompts and all(prompts)

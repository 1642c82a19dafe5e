import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ster.errors import FileError, InputError, SterError, SterWarning
from ster.harvest import json_stream
from ster.harvest.sources import open_source
from ster.prompts import read_prompts

BOM = b"\xef\xbb\xbf"


def read(path: Path, column: str | None = None) -> list[tuple[int, str]]:
    return list(open_source(path, column).prompts())


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("p.json", '{"prompts": ["a", "b"]}', [(0, "a"), (1, "b")]),
        ("p.json", ' [ "a" ,\n"\\u0041\\ud83d\\ude00" ] \n', [(0, "a"), (1, "A😀")]),
        ("p.json", BOM + b'{"prompts": ["a"]}', [(0, "a")]),
        ("p", '{"prompts": ["\\u0000", "\\n"]}', [(0, "\0"), (1, "\n")]),
        ("p.jsonl", '{"prompt": "a", "id": 7}\r\n\r\n{"prompt": "b"}', [(1, "a"), (3, "b")]),
        ("p.ndjson", BOM + b'{"prompt": "a"}\n\n', [(1, "a")]),
        ("p.txt", "a\r\n b \nc\u2028d\x0ce\n\n", [(1, "a"), (2, " b "), (3, "c\u2028d\x0ce")]),
        ("p.txt", BOM + b"a", [(1, "a")]),
        ("p.csv", 'id,prompt\r\n1,a\r\n\r\n2,"b, ""c""\nd"\r\n3,e', [(2, "a"), (4, 'b, "c"\nd'), (6, "e")]),
        ("p.CSV", BOM + b"prompt\na\n", [(2, "a")]),
        ("p.tsv", 'prompt\tx\na, b\t"1"\n', [(2, "a, b")]),
    ],
)
def test_formats(tmp_path: Path, name: str, content: str | bytes, prompts: list[tuple[int, str]]) -> None:
    assert read(write(tmp_path, name, content)) == prompts


def test_a_column_by_name(tmp_path: Path) -> None:
    assert read(write(tmp_path, "p.csv", "a,b\n1,x\n2,y\n"), "b") == [(2, "x"), (3, "y")]
    assert read(write(tmp_path, "p.jsonl", '{"text": "x"}\n'), "text") == [(1, "x")]


def parquet(path: Path, **columns: object) -> Path:
    pq.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def test_parquet_columns_of_strings_in_any_form(tmp_path: Path) -> None:
    plain = ["a", "b", "a", "ü"]
    for kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        path = parquet(tmp_path / "p.parquet", prompt=pyarrow.array(plain).cast(kind), id=[1, 2, 3, 4])
        assert read(path) == list(enumerate(plain))


@pytest.mark.parametrize(
    ("name", "content", "column", "sentence"),
    [
        ("p.txt", "a\n\nb", None, "prompt must not be empty: line 2"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": ""}', None, "prompt must not be empty: line 2"),
        ("p.csv", 'prompt\na\n\n""\n', None, "prompt must not be empty: line 4"),
        ("p.json", '["a", ""]', None, "prompt must not be empty: prompts[1]"),
        ("p.json", '["a", 7]', None, "prompts[1] must be a string, found a number"),
        ("p.jsonl", '{"prompt": 7}', None, "line 1 must be a string, found a number"),
        ("p.jsonl", '{"text": "a"}', None, "invalid prompt JSON in {path}: line 1 is not an object with a `prompt`"),
        (
            "p.jsonl",
            '{"prompt": "a"}\n{',
            None,
            "invalid prompt JSON in {path}: line 2 column 2: expecting property name enclosed in double quotes",
        ),
        ("p.jsonl", '{"prompt": "a", "prompt": "b"}', None, 'invalid prompt JSON in {path}: line 1: key "prompt" appears twice'),
        ("p.json", "", None, "invalid prompt JSON in {path}: line 1 column 1: expecting value"),
        ("p.json", '["a"\n "b"]', None, "invalid prompt JSON in {path}: line 2 column 2: expecting ',' delimiter"),
        ("p.json", '["a",]', None, "invalid prompt JSON in {path}: line 1 column 6: expecting value"),
        ("p.json", '["a"', None, "invalid prompt JSON in {path}: line 1 column 5: expecting ',' delimiter"),
        ("p.json", '["a', None, "invalid prompt JSON in {path}: line 1 column 2: unterminated string starting at"),
        ("p.json", '["a"] 7', None, "invalid prompt JSON in {path}: line 1 column 7: extra data"),
        ("p.json", '"a"', None, 'invalid prompt JSON in {path}: expected {"prompts": ["..."]} or a list of strings'),
        ("p.json", '{"texts": ["a"]}', None, 'invalid prompt JSON in {path}: expected {"prompts": ["..."]} or a list of strings'),
        ("p.json", '{"prompts": ["a"], "prompts": []}', None, 'invalid prompt JSON in {path}: key "prompts" appears twice'),
        ("p.csv", "a,b\n1,2\n", None, '{path} has no column "prompt"; it has a, b'),
        ("p.csv", "", None, "{path} is empty, expected a first line with the names of its columns"),
        ("p.csv", "prompt,prompt\n1,2\n", None, '{path} has 2 columns "prompt"'),
        ("p.csv", "prompt,b\n1\n", None, "invalid CSV in {path}: line 2 has 1 fields, the first line 2"),
        ("p.csv", 'prompt\n"a\nb\n', None, "invalid CSV in {path}: line 3: unexpected end of data"),
        ("p.txt", "a", "text", '{path} has no columns, and "text" was asked for'),
        ("p.txt", b"a\nb\xff", None, "failed to read {path}: byte 3 is not UTF-8"),
        ("p.json", b'["a\xff"]', None, "failed to read {path}: byte 3 is not UTF-8"),
        ("p.txt", "ab".encode("utf-16"), None, "failed to read {path}: it is UTF-16, expected UTF-8"),
        ("p.json", '["a"]'.encode("utf-16-le"), None, "failed to read {path}: it is UTF-16, expected UTF-8"),
        ("p.parquet", b"PAR1", None, "failed to read {path}: not a Parquet file: "),
    ],
)
def test_refusals(tmp_path: Path, name: str, content: str | bytes, column: str | None, sentence: str) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(SterError) as caught:
        read(path, column)
    assert str(caught.value).startswith(sentence.replace("{path}", str(path)))


def test_parquet_refusals(tmp_path: Path) -> None:
    with pytest.raises(InputError, match='column "prompt" of .* must hold strings, found int64'):
        read(parquet(tmp_path / "n.parquet", prompt=[1]))
    with pytest.raises(InputError, match=r"row 1 must be a string, found null"):
        read(parquet(tmp_path / "m.parquet", prompt=["a", None]))
    bytes_of_text = pyarrow.array([b"a", b"\xff"]).view(pyarrow.string())  # as a writer leaves them that does not look
    with pytest.raises(FileError, match=r"u\.parquet: row 1 is not UTF-8"):
        read(parquet(tmp_path / "u.parquet", prompt=bytes_of_text))
    with pytest.raises(InputError, match='has no column "text"; it has prompt'):
        open_source(parquet(tmp_path / "o.parquet", prompt=["a"]), "text")


def test_without_pyarrow_parquet_is_refused_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InputError, match="Parquet needs pyarrow, which is not installed"):
        open_source(tmp_path / "p.parquet")


def test_missing_files_and_things_that_are_no_prompts(tmp_path: Path) -> None:
    for name in ("p.json", "p.txt", "p.jsonl", "p.csv", "p.parquet"):
        with pytest.raises(FileError, match="failed to read .*: no such file"):
            open_source(tmp_path / name)
    with pytest.raises(InputError, match="prompts must be a file or strings, found a number"):
        open_source(7)  # type: ignore[arg-type]
    with pytest.raises(InputError, match='a column, "x", is for files that have some'):
        open_source(["a"], "x")


def test_other_keys_of_json_are_named_in_a_warning(tmp_path: Path) -> None:
    path = write(tmp_path, "p.json", '{"name": {"prompts": [1, {}]}, "prompts": ["a"], "n": 12345}')
    with pytest.warns(SterWarning, match="ignored `name`, `n`; only `prompts` is read"):
        assert read(path) == [(0, "a")]


values = st.recursive(st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5), lambda each: st.lists(each, max_size=3))


@settings(deadline=None)
@example(prompts=["0"], other=2.4255020734331956e16, ascii=False, chunk=30)  # cut behind the e of e+16
@example(prompts=["0"], other=2.4255020734331956e16, ascii=False, chunk=31)
@example(prompts=["0"], other=12.5, ascii=False, chunk=13)
@given(
    prompts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1),
    other=values,
    ascii=st.booleans(),
    chunk=st.integers(1, 40),
)
def test_windows_of_any_size_read_what_json_reads(prompts: list[str], other: object, ascii: bool, chunk: int) -> None:
    text = json.dumps({"other": other, "prompts": prompts}, ensure_ascii=ascii, indent=chunk % 3 or None)
    before, json_stream.CHUNK = json_stream.CHUNK, chunk
    try:
        import tempfile

        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            file.write(text.encode())
            file.flush()
            assert list(json_stream.json_prompts(Path(file.name), [])) == prompts
    finally:
        json_stream.CHUNK = before


def test_the_formats_of_extract_give_the_same_prompts(tmp_path: Path) -> None:
    for name, content in [("p.json", '["a", " "]'), ("p.txt", " a \n\u2028\n"), ("p.jsonl", '{"prompt": "a"}\n')]:
        path = write(tmp_path, name, content)
        assert [text for _, text in read(path)] == read_prompts(path)


@pytest.mark.parametrize("name", ["p.json", "p.jsonl", "p.txt", "p.csv", "p.parquet"])
def test_a_file_is_never_whole_in_memory(tmp_path: Path, name: str) -> None:
    words = random.Random(0).choices("abcdefghijklmnop", k=200)
    lines = [f"{index} {''.join(words)}" for index in range(40_000)]  # 8 MB
    if name == "p.parquet":
        parquet(tmp_path / name, prompt=lines)
        limit = 1 << 20  # of Python's memory; pyarrow's own is a row group
    else:
        text = {
            "p.json": lambda: json.dumps({"prompts": lines}),
            "p.jsonl": lambda: "\n".join(json.dumps({"prompt": line}) for line in lines),
            "p.txt": lambda: "\n".join(lines),
            "p.csv": lambda: "\n".join(["prompt", *lines]),
        }[name]()
        write(tmp_path, name, text)
        limit = 3 << 20
    tracemalloc.start()
    count = sum(1 for _ in open_source(tmp_path / name).prompts())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == len(lines) and peak < limit


def test_a_generator_is_asked_once_and_as_it_is_needed() -> None:
    asked = []

    def prompts() -> Iterator[str]:
        for index in range(3):
            asked.append(index)
            yield str(index)

    found = open_source(prompts()).prompts()
    assert next(found) == (0, "0") and asked == [0]

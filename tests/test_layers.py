import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ster.errors import InputError, LayerError
from ster.layers import check_layer_syntax, parse_layers


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("all", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("5", [5]),
        ("2..5", [2, 3, 4]),
        ("3,5,6..8", [3, 5, 6, 7]),
        ("5,3,3,2..4", [2, 3, 5]),
        ("-1", [7]),
        ("-3..-1", [5, 6]),
        ("-2..8", [6, 7]),
        ("0..-6", [0, 1]),
        (" 1 , 2 .. 4 ", [1, 2, 3]),
    ],
)
def test_layer_syntax(text: str, layers: list[int]) -> None:
    check_layer_syntax(text)
    assert parse_layers(text, 8) == layers


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("4", "layer 4 is outside the model's 0..3 range"),
        ("-5", "layer -5 is outside the model's 0..3 range"),
        ("2..6", "layer 4 is outside the model's 0..3 range"),
        ("7..9", "layer 7 is outside the model's 0..3 range"),
        ("-9..2", "layer -9 is outside the model's 0..3 range"),
        ("0..999999999999999999", "layer 4 is outside the model's 0..3 range"),
        ("x", 'invalid layer "x"'),
        ("1.5", 'invalid layer "1.5"'),
        ("1,", 'invalid layer ""'),
        ("+1", 'invalid layer "+1"'),
        ("1_0", 'invalid layer "1_0"'),
        ("\u0661", 'invalid layer "\u0661"'),
        ("9" * 5000, f'invalid layer "{"9" * 5000}"'),
        ("all,1", 'invalid layer "all"'),
        ("1..", 'invalid layer range "1.."'),
        ("..2", 'invalid layer range "..2"'),
        ("a..2", 'invalid layer range "a..2"'),
        ("1..2..3", 'invalid layer range "1..2..3"'),
        ("2..2", 'layer range "2..2" must have start < end'),
        ("3..1", 'layer range "3..1" must have start < end'),
        ("-1..-3", 'layer range "-1..-3" must have start < end'),
        ("3..-2", 'layer range "3..-2" must have start < end'),
        ("", "no layers selected"),
        ("  ", "no layers selected"),
    ],
)
def test_refusals_are_these_sentences(text: str, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_layers(text, 4)
    assert str(caught.value) == sentence


def test_python_values_are_layers_too() -> None:
    assert parse_layers(2, 4) == [2]
    assert parse_layers(-1, 4) == [3]
    assert parse_layers(range(1, 3), 4) == [1, 2]
    assert parse_layers([3, 0, 3], 4) == [0, 3]
    assert parse_layers(np.array([1, 2]), 4) == [1, 2]
    assert parse_layers([np.int64(1)], 4) == [1]
    assert parse_layers(np.int64(1), 4) == [1]
    assert parse_layers(np.array(3), 4) == [3]
    with pytest.raises(LayerError, match="at least one layer is required"):
        parse_layers([], 4)
    for wrong in ([True], [1.0], ["1"], [None], [[0]], [np.array([0])], True, 1.0, None, b"0", object(), np.array(1.0)):
        with pytest.raises(InputError, match="invalid layer"):
            parse_layers(wrong, 4)  # type: ignore[arg-type]
    with pytest.raises(LayerError, match=f"layer {2**70} is outside the model's 0..3 range"):
        parse_layers(2**70, 4)


@given(count=st.integers(1, 40), data=st.data())
def test_every_list_of_pieces_means_the_union_of_its_pieces(count: int, data: st.DataObject) -> None:
    pieces: list[str] = []
    expected: set[int] = set()
    for _ in range(data.draw(st.integers(1, 5))):
        start = data.draw(st.integers(0, count - 1))
        end = data.draw(st.integers(start + 1, count))
        if end == start + 1 and data.draw(st.booleans()):
            pieces.append(str(start - count if data.draw(st.booleans()) else start))
        else:
            pieces.append(f"{start - count if data.draw(st.booleans()) else start}..{end}")
        expected.update(range(start, end))
    assert parse_layers(",".join(pieces), count) == sorted(expected)


@given(text=st.text(alphabet="0123456789.,-al x", max_size=12), count=st.integers(1, 6))
def test_any_text_gives_layers_of_the_model_or_a_refusal(text: str, count: int) -> None:
    try:
        layers = parse_layers(text, count)
    except InputError:
        return
    assert layers == sorted(set(layers))
    assert layers and all(0 <= layer < count for layer in layers)
    check_layer_syntax(text)

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ster
from ster._safetensors import safetensors_bytes
from ster.errors import CheckpointError, InputError, SterWarning, TokenError
from ster.toy import VOCAB, tensors

Change = Callable[..., None]
ByteModel = Callable[..., Path]
BOS_FIRST: dict[str, Any] = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
}
WITH_BOS = "{{ bos_token }}{% for m in messages %}question : {{ m.content }}{% endfor %}{% if add_generation_prompt %} answer :{% endif %}"
WITHOUT_BOS = WITH_BOS.replace("{{ bos_token }}", "")


@pytest.mark.parametrize("processor", [None, BOS_FIRST])
@pytest.mark.parametrize("template", [None, WITH_BOS, WITHOUT_BOS])
def test_exactly_one_bos(toy_copy: Path, change: Change, processor: Any, template: str | None) -> None:
    tokenizer = json.loads((toy_copy / "tokenizer.json").read_text())
    (toy_copy / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": processor}))
    change(toy_copy / "tokenizer_config.json", bos_token="<s>", chat_template=template)
    model = ster.load(toy_copy)
    raw = ([1] if processor else []) + [3, 4]
    assert model.encode("the sea") == raw
    if template is None:
        assert model.chat_template == "absent" and model.prompt_tokens("the sea") == raw
    else:
        asked = [VOCAB.index(word) for word in "question : the sea answer :".split()]
        assert model.chat_template == "applied"
        assert model.prompt_tokens("the sea") == ([1] if template is WITH_BOS else []) + asked
    off = ster.load(toy_copy, chat_template="off")
    assert off.chat_template == ("absent" if template is None else "off")  # what is not there cannot be switched off
    assert off.prompt_tokens("the sea") == raw


def test_a_bos_the_user_typed_is_kept_with_a_warning(toy_copy: Path, change: Change) -> None:
    change(toy_copy / "tokenizer.json", post_processor=BOS_FIRST)
    model = ster.load(toy_copy)
    with pytest.warns(SterWarning, match="the prompt: two BOS tokens at the start, one of them from the text"):
        assert model.prompt_tokens("<s> the sea") == [1, 1, 3, 4]
    with pytest.warns(SterWarning, match=r"prompts\[1\] and 1 more: two BOS tokens"):
        model.activations(["the sea", "<s> the sea", "<s> the", "<s> the"])


def test_one_bos_in_the_text_alone_is_nothing_to_warn_of(toy_model: ster.Model) -> None:
    assert toy_model.prompt_tokens("<s> the sea") == [1, 3, 4]


@pytest.mark.parametrize(("flag", "token"), [("add_bos_token", "BOS"), ("add_eos_token", "EOS")])
def test_add_bos_token_without_a_post_processor_is_ignored_as_in_transformers_but_said(
    toy_copy: Path, change: Change, flag: str, token: str
) -> None:
    # transformers 5.24, AutoTokenizer on this very folder: [3, 4], whatever the flag and the tokenizer_class (a plain fast one).
    change(toy_copy / "tokenizer_config.json", bos_token="<s>", eos_token="</s>", **{flag: True})
    with pytest.warns(SterWarning, match=f"`{flag}: true`, but tokenizer.json has no post-processor: raw text gets no {token} token"):
        model = ster.load(toy_copy)
    assert model.encode("the sea") == [3, 4]


@pytest.mark.parametrize("bos", [True, False])
def test_awkward_text_is_read_as_the_tokenizer_reads_it(byte_model: ByteModel, bos: bool) -> None:
    from tokenizers import Tokenizer

    folder = byte_model(bos=bos)
    model = ster.load(folder)
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [" ", "\n", "\0", "\u0301", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\u0645\u0631\u062d\u0628\u0627", "a" * 10_000]
    texts += ["typed <|eot_id|> by hand", "a\r\nb", "\ufeff", "\u2028"]
    for text in texts:
        ids = model.encode(text)
        assert ids == plain.encode(text).ids
        assert model.decode(ids) == text.replace("<|eot_id|>", "")
        assert model.prompt_tokens(text) == ids
    assert 3 in model.encode("typed <|eot_id|> by hand")  # special as typed, as in transformers
    acts = model.activations(texts)
    assert acts.prompts == texts and np.isfinite(acts.values).all()
    with pytest.raises(InputError, match="prompt must not be empty"):
        model.encode("")
    with pytest.raises(InputError, match=r"half a surrogate pair \(U\+DC00\) at character 1"):
        model.encode("a\udc00")


def test_no_tokens_is_a_refusal(toy_model: ster.Model) -> None:
    # White space is a prompt, but this tokenizer makes nothing of it.
    with pytest.raises(TokenError) as caught:
        toy_model.activations(["the sea", " "])
    assert str(caught.value) == "tokenizer produced no tokens: prompts[1]"


def test_padding_and_truncation_of_the_file_are_off(toy_copy: Path, change: Change) -> None:
    change(
        toy_copy / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 8},
            "direction": "Left",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "x",
        },
    )
    assert ster.load(toy_copy).encode("the sea is calm") == [3, 4, 5, 6]


def test_a_token_beyond_the_embedding_fails_only_where_it_is_used(toy_copy: Path) -> None:
    tokenizer = json.loads((toy_copy / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 67, "content": "<extra>"})
    (toy_copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.warns(SterWarning, match="the tokenizer has 68 tokens, the embedding 67 rows"):
        model = ster.load(toy_copy)
    assert model.activations(["the sea"]).values.shape == (1, 4, 64)
    with pytest.raises(TokenError) as caught:
        model.activations(["the sea", "the <extra> sea"])
    assert str(caught.value) == "token `<extra>` (id 67) at position 1 of prompts[1] is outside the embedding's 0..66 range"
    with pytest.raises(TokenError, match=r"\(id 67\) at position 1 of the prompt is outside the embedding's 0..66 range"):
        model.trace([3, 67])
    with pytest.raises(TokenError, match="token id -1 at position 0 of the prompt is outside"):
        model.trace([-1])


def test_an_embedding_larger_than_the_tokenizer_loads_in_silence(toy_copy: Path, change: Change) -> None:
    weights = tensors()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = np.pad(weights[name], ((0, 61), (0, 0)))
    (toy_copy / "model.safetensors").write_bytes(safetensors_bytes(weights, {"format": "pt"}))
    change(toy_copy / "config.json", vocab_size=128)
    model = ster.load(toy_copy)
    assert model.vocab_size == 128
    assert model.encode("the sea") == [3, 4]


def test_tokens_are_shown_as_text(toy_model: ster.Model, byte_model: ByteModel) -> None:
    assert toy_model.trace("the sea unheard").tokens == ["the", "sea", "[UNK]"]
    model = ster.load(byte_model(bos=True))
    assert model.trace("a \u00e9").tokens == ["<s>", "a", " ", "\u00c3", "\u00a9"]  # halves of a character by their names


def test_a_tokenizer_that_is_missing_or_broken(toy_copy: Path) -> None:
    (toy_copy / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="failed to read .*tokenizer.json"):
        ster.load(toy_copy)
    (toy_copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        ster.load(toy_copy)
    assert str(caught.value) == f"tokenizer is missing: {toy_copy / 'tokenizer.json'}"


def test_a_tokenizer_with_a_byte_order_mark(toy_copy: Path) -> None:
    path = toy_copy / "tokenizer.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert ster.load(toy_copy).encode("the sea") == [3, 4]
    path.write_bytes(path.read_bytes().decode("utf-8-sig").encode("utf-16"))
    with pytest.raises(CheckpointError, match="it is UTF-16, expected UTF-8"):
        ster.load(toy_copy)


def test_a_panic_while_loading_is_a_refusal(toy_copy: Path, change: Change) -> None:
    change(toy_copy / "tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    with pytest.raises(CheckpointError, match="failed to read .*tokenizer.json: "):
        ster.load(toy_copy)


def test_failures_of_the_library_name_the_prompt(toy_copy: Path, change: Change) -> None:
    path = toy_copy / "tokenizer.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "model": {**whole["model"], "unk_token": "nope"}}))
    with pytest.raises(InputError) as caught:
        ster.load(toy_copy).activations(["the sea", "unheard"])
    assert str(caught.value) == "tokenizer.json failed on prompts[1]: WordLevel error: Missing [UNK] token from the vocabulary"

    missing = {**BOS_FIRST, "special_tokens": {}}  # a panic
    path.write_text(json.dumps({**whole, "post_processor": missing}))
    with pytest.raises(InputError, match="tokenizer.json failed on the prompt: "):
        ster.load(toy_copy).prompt_tokens("the sea")


def test_an_interrupt_is_no_failure_of_the_library() -> None:
    from ster.tokenizer import _guard

    for kind in (KeyboardInterrupt, SystemExit):
        with pytest.raises(kind):
            _guard(lambda kind=kind: (_ for _ in ()).throw(kind), InputError)  # type: ignore[misc]


def test_ids_that_are_none_do_not_decode(toy_model: ster.Model) -> None:
    for ids in ([-1], [2**40], "abc"):
        with pytest.raises(InputError, match="tokenizer.json failed to decode token ids"):
            toy_model.decode(ids)  # type: ignore[arg-type]


def test_the_size_counts_to_the_largest_id_over_holes(toy_copy: Path) -> None:
    path = toy_copy / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["sea"] = 100
    path.write_text(json.dumps(tokenizer))
    with pytest.warns(SterWarning, match="the tokenizer has 101 tokens, the embedding 67 rows"):
        model = ster.load(toy_copy)
    with pytest.raises(TokenError, match=r"token `sea` \(id 100\)"):
        model.activations(["the sea"])


@pytest.mark.parametrize(("name", "content"), [("p.txt", "the\n \nsea\n"), ("p.jsonl", '{"prompt": "the"}\n\n{"prompt": " "}\n')])
def test_prompts_of_a_file_of_lines_are_named_by_line(toy_model: ster.Model, tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    prompts = ster.read_prompts(tmp_path / name)
    line = "line 2" if name == "p.txt" else "line 3"
    for order in (prompts, prompts[::-1], copy.deepcopy(prompts), pickle.loads(pickle.dumps(prompts))):
        with pytest.raises(TokenError) as caught:
            toy_model.activations(order)
        assert str(caught.value) == f"tokenizer produced no tokens: {line}"

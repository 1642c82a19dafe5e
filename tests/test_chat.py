import datetime
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ster
from ster.chat import ChatTemplate, find_chat_template
from ster.checkpoint import find_checkpoint
from ster.errors import ConfigError, InputError, SterWarning

Change = Callable[..., None]


def render(source: str, prompt: str = "hello", **tokens: str) -> str:
    return ChatTemplate(source, tokens, "test").render([{"role": "user", "content": prompt}])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0].role }}/{{ messages[0]['content'] }}/{{ messages | length }}/{{ add_generation_prompt }}", "user/hello/1/True"),
        ("{{ tools is none }} {{ documents is none }} {{ missing is defined }}", "True True False"),
        ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
        # trim_blocks and lstrip_blocks are on
        ("{% if true %}\n  a\n   {% endif %}\nb", "  a\nb"),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{{ {'a': '<\u00e9>'} | tojson }}", '{"a": "<\u00e9>"}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}", '{\n "a": [\n  2\n ],\n "b": 1\n}'),
        ("{% generation %}{% set x = 1 %}a{% endgeneration %}{{ x is defined }}", "aFalse"),
        ("{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = 5 %}{% endfor %}{{ n.x }}", "5"),
        ("{{ ' a '.strip() }}{{ 'a b'.split()[1] }}{{ messages[1:] | length }}", "ab0"),
    ],
)
def test_templates_get_what_transformers_gives_them(source: str, text: str) -> None:
    assert render(source, bos_token="<s>", eos_token="</s>") == text


def test_a_refusing_template_is_a_refusal_in_its_own_words() -> None:
    with pytest.raises(InputError) as caught:
        render("{{ raise_exception('only assistants may speak') }}")
    assert str(caught.value) == "chat template in test failed: only assistants may speak"
    assert "--chat-template off" in str(caught.value.hint)


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}", "{{ missing.field.deeper }}", "{{ missing() }}"]
)
def test_a_failing_or_prying_template_is_a_refusal(source: str) -> None:
    with pytest.raises(InputError, match="chat template in test failed"):
        render(source)


def test_a_template_that_is_no_jinja() -> None:
    with pytest.raises(ConfigError, match="chat template in test is invalid: line 2: "):
        render("\n{% if %}")


def test_a_token_nobody_named_is_said() -> None:
    with pytest.warns(SterWarning, match="prints `bos_token`, which tokenizer_config.json does not name"):
        assert render("{{ bos_token }}a") == "a"


def test_the_date_is_today_with_a_warning_or_the_one_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    with pytest.warns(SterWarning, match="prints today's date"):
        year = render("{{ strftime_now('%Y') }}")
    assert abs(int(year) - datetime.date.today().year) <= 1
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1721952000")
    assert render("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"


def test_where_a_template_comes_from(toy_copy: Path, change: Change) -> None:
    config = toy_copy / "tokenizer_config.json"

    def found() -> str | None:
        template = find_chat_template(find_checkpoint(toy_copy))
        return template.source if template else None

    assert found() is None
    change(config, chat_template="plain")
    assert found() == "plain"
    change(config, chat_template=[{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}])
    assert found() == "named"
    (toy_copy / "chat_template.jinja").write_text("file")
    assert found() == "file"
    (toy_copy / "chat_template.jinja").unlink()
    change(config, chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(ConfigError, match="`chat_template` has no template named `default`, found `rag`"):
        found()
    change(config, chat_template=3)
    with pytest.raises(ConfigError, match="`chat_template` must be text or a list of named templates"):
        found()


def test_named_tokens_may_be_objects(toy_copy: Path, change: Change) -> None:
    change(
        toy_copy / "tokenizer_config.json",
        chat_template="{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}",
        bos_token={"__type": "AddedToken", "content": "<s>"},
        eos_token="</s>",
        added_tokens_decoder={},
    )
    template = find_chat_template(find_checkpoint(toy_copy))
    assert template is not None and template.render([{"role": "user", "content": "a"}]) == "<s></s>False"
    # special_tokens_map.json counts, and wins, where the config has no added_tokens_decoder: transformers 5.24
    change(toy_copy / "tokenizer_config.json", added_tokens_decoder=None)
    change(toy_copy / "special_tokens_map.json", eos_token={"content": "[UNK]"})
    template = find_chat_template(find_checkpoint(toy_copy))
    assert template is not None and template.render([{"role": "user", "content": "a"}]) == "<s>[UNK]False"


def test_special_tokens_in_a_prompt_are_special_under_a_template_too(toy_copy: Path, change: Change) -> None:
    change(toy_copy / "tokenizer_config.json", chat_template="{{ messages[0].content }} answer")
    assert ster.load(toy_copy).prompt_tokens("the </s>") == [3, 2, 51]


def test_reference_prompts_through_a_real_template(references: Path) -> None:
    """The recorded ids of SmolLM2, with its template and without; its checkpoints are in the folder STER_SMOLLM2."""
    folder = os.environ.get("STER_SMOLLM2")
    if not folder:
        pytest.skip("STER_SMOLLM2 is not set: no real checkpoint")
    with np.load(references / "golden" / "smollm2-135m.npz") as reference:
        prompts = [str(prompt) for prompt in reference["prompts"]]
        for kind, mode in (("raw", "off"), ("chat", "auto")):
            model = ster.load(Path(folder) / "bf16", chat_template=mode)  # type: ignore[arg-type]
            for index, prompt in enumerate(prompts):
                assert model.prompt_tokens(prompt) == reference[f"{kind}_ids_{index}"].tolist()


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested too deeply"),
        ("{% if 1 %}" * 200 + "{% endif %}" * 200, "too many levels of indentation"),
        ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("{{ " + "1" * 5000 + " }}", "Exceeds the limit"),
    ],
)
def test_a_template_beyond_the_compilers_limits(source: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=f"chat template in test is invalid: {cause}"):
        render(source)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("{{ 'a' * 10**15 }}", "out of memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
        ("{{ raise_exception('') }}", "TemplateError"),
    ],
)
def test_a_failing_template_always_has_a_cause(source: str, cause: str) -> None:
    with pytest.raises(InputError) as caught:
        render(source)
    assert str(caught.value) == f"chat template in test failed: {cause}"


def test_half_a_character_out_of_a_template_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        render(r"the {{ '\ud800' }}")
    expected = "what the chat template in test made of the prompt contains half a surrogate pair (U+D800) at character 4"
    assert str(caught.value) == expected


@pytest.mark.parametrize("value", ["abc", "", "9" * 30])
def test_a_date_that_is_none_names_its_variable(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", value)
    with pytest.raises(InputError) as caught:
        render("{{ strftime_now('%Y') }}")
    assert str(caught.value) == f"SOURCE_DATE_EPOCH must be a date in seconds since 1970, found `{value}`"


@pytest.mark.parametrize("entry", ["text", {"template": "x"}, {"name": ["a"], "template": "x"}, {"name": "default", "template": 3}])
def test_named_templates_are_named_by_text(toy_copy: Path, change: Change, entry: object) -> None:
    change(toy_copy / "tokenizer_config.json", chat_template=[{"name": "default", "template": "x"}, entry])
    with pytest.raises(ConfigError, match=r"`chat_template\[1\]` must be an object with `name` and `template`, both text"):
        find_chat_template(find_checkpoint(toy_copy))

"""Chat templates: a conversation, or a prompt as one user turn, ending where the assistant's own tokens begin.

The template is the checkpoint's: `chat_template.jinja`, or `chat_template` in tokenizer_config.json (text, or a list of named
templates, of which `default` is used). It runs in jinja2's immutable sandbox with what transformers gives templates.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Literal

from ster.checkpoint import Checkpoint
from ster.errors import ConfigError, InputError, SterError, SterWarning
from ster.prompts import check_text
from ster.tokenizer import named_tokens

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, str]  # {"role": "user", "content": "..."}
ChatMode = Literal["auto", "off"]
OFF_HINT = '`--chat-template off` (in Python chat_template="off") reads prompts as raw text'


class ChatTemplate:
    """A compiled template. Compiling is put off until the first prompt, so that token ids alone never need jinja2."""

    def __init__(self, source: str, tokens: Mapping[str, str], origin: str) -> None:
        self.source = source
        self.tokens = dict(tokens)
        self.origin = origin
        self._template: jinja2.Template | None = None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """A conversation as one text; with the generation prompt, up to where the assistant's own tokens begin.

        Raises:
            ConfigError: the template is not valid Jinja.
            InputError: the template refused or failed; the message is the template's. Or what it gave is not text.
        """
        if self._template is None:
            self._template = _compile(self)
        try:
            text = self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
            )
        except SterError:
            raise
        except Exception as error:  # whatever the template's code raises
            raise InputError(f"chat template in {self.origin} failed: {_cause(error)}", OFF_HINT) from None
        return check_text(text, f"what the chat template in {self.origin} made of the prompt")


def find_chat_template(checkpoint: Checkpoint) -> ChatTemplate | None:
    """The checkpoint's template, or None when it publishes none.

    Raises:
        ConfigError: `chat_template` is neither text nor a list of named templates with a `default`.
    """
    file = "chat_template.jinja"
    if checkpoint.has(file):
        return ChatTemplate(checkpoint.read_text(file), named_tokens(checkpoint), file)
    origin = "tokenizer_config.json"
    template = (checkpoint.read_json(origin) or {}).get("chat_template")
    if template is None:
        return None
    if isinstance(template, list):
        named: dict[str, str] = {}
        for index, entry in enumerate(template):
            name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
            if not isinstance(name, str) or not isinstance(text, str):
                message = f"{checkpoint.path / origin}: `chat_template[{index}]` must be an object with `name` and `template`, both text"
                raise ConfigError(message, OFF_HINT)
            named[name] = text
        template = named.get("default")
        if template is None:
            names = ", ".join(f"`{name}`" for name in named) or "none"
            raise ConfigError(f"{checkpoint.path / origin}: `chat_template` has no template named `default`, found {names}", OFF_HINT)
    if not isinstance(template, str):
        raise ConfigError(f"{checkpoint.path / origin}: `chat_template` must be text or a list of named templates", OFF_HINT)
    return ChatTemplate(template, named_tokens(checkpoint), origin)


def _compile(template: ChatTemplate) -> jinja2.Template:
    import jinja2
    from jinja2 import ext, meta, nodes, parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """`{% generation %}...{% endgeneration %}` marks the assistant's tokens for training; here it is its content."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 reads a class attribute)

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # A call block, as in transformers: what the content sets is not seen after it.
            return nodes.CallBlock(self.call_method("content"), [], [], body).set_lineno(line)

        def content(self, caller: Callable[[], str]) -> str:
            return caller()

    def raise_exception(message: str) -> str:
        raise jinja2.TemplateError(message)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja2's own filter escapes HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        names = meta.find_undeclared_variables(environment.parse(template.source))
        compiled = environment.from_string(template.source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat template in {template.origin} is invalid: line {error.lineno}: {error.message}", OFF_HINT) from None
    except Exception as error:  # jinja2 compiles to Python, whose compiler has limits and errors of its own
        raise ConfigError(f"chat template in {template.origin} is invalid: {_cause(error)}", OFF_HINT) from None
    for token in sorted({"bos_token", "eos_token"} & names - template.tokens.keys()):
        message = f"the chat template prints `{token}`, which tokenizer_config.json does not name: it prints nothing"
        warnings.warn(message, SterWarning, stacklevel=4)
    return compiled


def _cause(error: Exception) -> str:
    """What went wrong, never empty."""
    if isinstance(error, MemoryError):
        return "out of memory"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, SyntaxError):  # its text names a file and line of the Python that jinja2 wrote
        return error.msg
    return str(error) or type(error).__name__


def _strftime_now(pattern: str) -> str:
    """Today by the template's pattern; `SOURCE_DATE_EPOCH`, where set, is the date instead."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch is not None:
        try:
            date = datetime.fromtimestamp(int(epoch), timezone.utc)
        except (ValueError, OverflowError, OSError):
            raise InputError(f"SOURCE_DATE_EPOCH must be a date in seconds since 1970, found `{epoch}`") from None
        return date.strftime(pattern)
    today = datetime.now().strftime(pattern)
    warnings.warn(
        f"the chat template prints today's date ({today}): activations will differ on another day; set SOURCE_DATE_EPOCH to fix the date",
        SterWarning,
        stacklevel=2,
    )
    return today

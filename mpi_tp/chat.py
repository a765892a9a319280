"""Chat templates: from a list of messages to the prompt text that the model was trained on.

A template is a Jinja program that came with the model, so it runs in a sandbox with bounds on its work. What it finds
there is what Hugging Face gives it: `raise_exception`, `strftime_now`, a `tojson` filter that leaves text alone,
`break` and `continue`, and the special tokens by name.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from mpi_tp.chat_sandbox import BoundedEnvironment
from mpi_tp.errors import ConfigurationError, FileError
from mpi_tp.model_files import CHAT_TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, read_text

DEFAULT_TEMPLATE = "default"

Message = Mapping[str, Any]


class ChatTemplate:
    """One compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`; `special_tokens` are names as `bos_token` with their text.

        Raises ConfigurationError when the template is no valid Jinja.
        """
        self._special_tokens = dict(special_tokens)
        try:
            self._environment = _environment()
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigurationError(
                f"the model's chat template is broken at line {error.lineno}: {error.message}; "
                "mend chat_template.jinja, or send prompts instead of messages"
            ) from error

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt text of `messages`, which ends where the answer begins.

        Raises ValueError when the template refuses the messages, or they lack what it asks for.
        """
        try:
            return self._environment.run(
                self._template,
                messages=list(messages),
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program, and may fail like any
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error


def find_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Return the default template of a tokenizer folder, or None.

    The file wins over `chat_template` in tokenizer_config.json, which is one text or a list of named ones.
    Raises FileError for a template that cannot be read or is none, ConfigurationError when named templates have no
    default among them.
    """
    file = directory / CHAT_TEMPLATE_FILE
    if file.is_file():
        return read_text(file)
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    by_name = _named_templates(template, directory / TOKENIZER_CONFIG_FILE)
    if DEFAULT_TEMPLATE not in by_name:
        raise ConfigurationError(
            f"{directory / TOKENIZER_CONFIG_FILE} names the chat templates {', '.join(sorted(by_name))} but not "
            f"'{DEFAULT_TEMPLATE}': put the one to use into {CHAT_TEMPLATE_FILE}"
        )
    return by_name[DEFAULT_TEMPLATE]


def _named_templates(entries: Any, path: Path) -> dict[str, str]:
    by_name: dict[str, str] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                by_name[name] = template
            case _:
                raise FileError(f"{path} is damaged: chat_template is neither a text nor a list of named templates")
    return by_name


class _GenerationBlock(Extension):
    """Lets `{% generation %}…{% endgeneration %}`, a mark for training, pass through."""

    tags = {"generation"}  # noqa: RUF012 - the name and kind are Jinja's

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, escape no HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)

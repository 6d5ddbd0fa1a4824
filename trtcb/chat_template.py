"""Chat templates: Jinja programs that come with a model, so foreign code, rendered in Jinja's immutable sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trtcb.errors import RequestError

Message = Mapping[str, Any]


class ChatTemplate:
    """Renders messages to a prompt with the names, filters and whitespace rules of ``transformers``.

    ``special_tokens`` are the texts a template reaches as ``bos_token``, ``eos_token`` and so on. Compiled on first
    use; a broken template is a :class:`RequestError` at every render, since prompts that need no template can still be
    served.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._template: jinja2.Template | None = None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Return the prompt text; raises :class:`RequestError` with the template's own complaint if it has one."""
        try:
            if self._template is None:
                self._template = _environment().from_string(self.source)
            return self._template.render(
                **self._special_tokens,
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except Exception as error:  # a template is foreign code: it may raise anything
            reason = f"{error}" or type(error).__name__
            raise RequestError(
                f"The model's chat template rejected the messages: {reason}.", param="messages"
            ) from error


class _GenerationTag(Extension):
    """``{% generation %}`` marks assistant text for training; when serving it means its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.now().strftime(fmt)

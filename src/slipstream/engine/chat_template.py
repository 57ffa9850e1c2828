"""Chat templates: the model's own Jinja, run in a sandbox with the names that Hugging Face templates expect.

Blocks take their line with them (trim_blocks, lstrip_blocks); there are loop controls, `raise_exception`,
`strftime_now`, a `tojson` that escapes nothing, and `{% generation %}`, which marks answers for training and here
is just its contents.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slipstream.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import Template


def render(template: str, variables: Mapping[str, Any]) -> str:
    """RequestError (field "messages") with what the template said, if it refused."""
    try:
        return _compile(template).render(variables)
    except RequestError:
        raise
    except Exception as error:  # a template is a program: whatever it raises, it raises over these messages
        raise RequestError(f"the chat template refuses these messages: {error}", field="messages") from error


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (jinja2's own convention)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise RequestError(f"the model's chat template is broken: {error}", field="messages") from error

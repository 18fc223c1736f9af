"""A program of `run_limited`: render a chat template.

Jinja's sandbox keeps it from files and from Python's internals, but lets it loop and double a string for as long as it
likes.
"""

import json
from datetime import datetime
from typing import Any, NoReturn

BYTES = 1 << 30
SECONDS, CHATS_PER_SECOND = 3, 100  # of processor time
_LONGEST = 1 << 22  # characters


def render(template: str, variables: dict[str, Any], chats: list[Any], unset: list[str]) -> list[str]:
    """Render conversations by a template as transformers does, but raise for an undefined token that is not `unset`.

    A token of `unset` renders as nothing. A template may ask whether another, undefined one is there.
    """
    from jinja2 import Undefined, UndefinedError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import missing

    class Generation(Extension):
        """Renders what is between `generation` and `endgeneration`, which marks an answer for training."""

        tags = {"generation"}  # noqa: RUF012 - as the base class has it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class Absent(Undefined):
        """A name that nothing defines."""

        def __str__(self) -> str:
            name = str(self._undefined_name)
            if self._undefined_obj is missing and name.endswith("_token") and name not in unset:
                raise UndefinedError(f"{name}: must be defined in the model's files (got none)")
            return ""

    def raise_exception(message: str) -> NoReturn:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], undefined=Absent
    )
    environment.filters["tojson"] = lambda content, **how: json.dumps(content, **{"ensure_ascii": False} | how)
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    compiled_template = environment.from_string(template)
    return [compiled_template.render(messages=messages, **variables) for messages in chats]


def answer(request: dict[str, Any]) -> list[str]:
    """Return the texts of a request, whose names are those of `render`."""
    texts = render(**request)
    longest_length = max(map(len, texts), default=0)
    if longest_length > _LONGEST:
        raise ValueError(f"makes {longest_length} characters of a conversation")
    return texts

"""Renders a chat template in a process of its own, whose time and memory are bounded: a template is a stranger's code.

Jinja's sandbox keeps it from files and from Python's internals, but lets it loop and double a string for as long as it
likes. Reads JSON from standard input, and writes {"texts": ...} or {"error": ...}.
"""

import json
import sys
from datetime import datetime
from typing import Any, NoReturn

BYTES = 1 << 30
_LONGEST = 1 << 22  # characters


def seconds(chats: int) -> int:
    """Return how long so many conversations may take."""
    return 3 + chats // 100


def render(template: str, variables: dict[str, Any], chats: list[Any], unset: list[str]) -> list[str]:
    """Render conversations by a template, under the rules that transformers has for one.

    But a token that is neither among the variables nor `unset` may only be asked for, not rendered as nothing.
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
    compiled = environment.from_string(template)
    return [compiled.render(messages=messages, **variables) for messages in chats]


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    try:
        import resource
    except ImportError:  # the caller's clock remains
        pass
    else:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds(len(request["chats"])),) * 2)
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    answer: dict[str, Any]
    try:
        texts = render(**request)
        longest = max(map(len, texts), default=0)
        answer = {"texts": texts} if longest <= _LONGEST else {"error": f"makes {longest} characters of a conversation"}
    except MemoryError:
        answer = {"error": f"needs more than {BYTES >> 20} MiB"}
    except Exception as error:  # whatever a stranger's code raises
        answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()

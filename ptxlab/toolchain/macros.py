"""How much text the macros of a source make. Some thirty lines of them, each twice the last, busy a compiler for ever.

The count is one from above, for the macros that the source itself defines: of several definitions of a name the largest
counts, whatever the conditions around them.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest

from ptxlab.errors import CompileError
from ptxlab.sources import Source

MOST_TOKENS = 1 << 22
_DEEPEST = 200  # macros within macros
_TOKEN = re.compile(r"[A-Za-z_]\w*|\d[\w.']*|\"(?:\\.|[^\"\\\n])*\"|[^\s\w]")
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+([A-Za-z_]\w*)(\([^)\n]*\))?(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Growth:
    """Tokens that one use of a macro adds, and the number of times that it repeats each of its arguments."""

    tokens: int
    repeats: tuple[int, ...] = ()


class _Macros:
    def __init__(self, text: str) -> None:
        self.bodies: dict[str, list[tuple[list[str], list[str]]]] = {}
        for name, parameters, body in _DEFINE.findall(text):
            taken = [p.strip().replace("...", "__VA_ARGS__") for p in parameters[1:-1].split(",")] if parameters else []
            self.bodies.setdefault(name, []).append((taken, _TOKEN.findall(body)))
        self.known: dict[str, Growth] = {}

    def of(self, name: str, depth: int) -> Growth:
        """Return the growth of a macro, the largest of its definitions."""
        if depth > _DEEPEST:
            return Growth(MOST_TOKENS + 1)
        if name not in self.known:
            self.known[name] = Growth(1)  # within itself it is no macro
            found = [self.expanded(body, parameters, depth + 1) for parameters, body in self.bodies[name]]
            repeats = tuple(map(max, zip_longest(*(growth.repeats for growth in found), fillvalue=0)))
            self.known[name] = Growth(max(growth.tokens for growth in found), repeats)
        return self.known[name]

    def expanded(self, tokens: Iterable[str], parameters: Sequence[str] = (), depth: int = 0) -> Growth:
        """Count the tokens of a text, and how often it has each of the parameters."""
        total, having = 0, dict.fromkeys(parameters, 0)
        times = 1  # how often what comes next is there
        called: tuple[int, ...] = ()  # of the macro before, how often it repeats its arguments
        around: list[
            tuple[int, tuple[int, ...]]
        ] = []  # of every open parenthesis what `times` was, and whose arguments
        for token in tokens:
            if token == "(":
                around.append((times, called))
                times *= called[0] if called else 1
            elif token == ")" and around:
                times, _ = around.pop()
            elif token == "," and around and around[-1][1]:
                before, (_, *rest) = around[-1]
                around[-1] = before, tuple(rest)
                times = before * rest[0] if rest else times
            times = min(times, MOST_TOKENS + 1)
            growth = self.of(token, depth) if token in self.bodies and token not in having else Growth(1)
            if token in having:
                having[token] += times
            else:
                total += times * growth.tokens
            called = growth.repeats
        return Growth(min(total, MOST_TOKENS + 1), tuple(having.values()))


@lru_cache(maxsize=64)
def require_finite(source: Source) -> None:
    """Raise CompileError if the macros of a source make more than `MOST_TOKENS` of it."""
    text = source.text.replace("\\\n", " ")
    macros = _Macros(text)
    if not macros.bodies or macros.expanded(_TOKEN.findall(text)).tokens <= MOST_TOKENS:
        return
    name = max(macros.known, key=lambda each: (macros.known[each].tokens, max(macros.known[each].repeats, default=0)))
    line = next(i for i, each in enumerate(source.text.splitlines(), 1) if re.match(rf"\s*#\s*define\s+{name}\b", each))
    problem = f"macros: a text of at most {MOST_TOKENS} tokens when they are expanded (got more, by {name})"
    raise CompileError(source.path, line, problem, source.text.splitlines()[line - 1].strip())

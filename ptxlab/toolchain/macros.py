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

MAX_TOKENS = 1 << 22
_MAX_DEPTH = 200  # macros within macros
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
            parameter_names = (
                [p.strip().replace("...", "__VA_ARGS__") for p in parameters[1:-1].split(",")] if parameters else []
            )
            self.bodies.setdefault(name, []).append((parameter_names, _TOKEN.findall(body)))
        self.growths: dict[str, Growth] = {}

    def growth_of(self, name: str, depth: int) -> Growth:
        """Return the growth of a macro, the largest of its definitions."""
        if depth > _MAX_DEPTH:
            return Growth(MAX_TOKENS + 1)
        if name not in self.growths:
            self.growths[name] = Growth(1)  # within itself it is no macro
            growths = [self.count_tokens(body, parameters, depth + 1) for parameters, body in self.bodies[name]]
            repeats = tuple(map(max, zip_longest(*(growth.repeats for growth in growths), fillvalue=0)))
            self.growths[name] = Growth(max(growth.tokens for growth in growths), repeats)
        return self.growths[name]

    def count_tokens(self, tokens: Iterable[str], parameters: Sequence[str] = (), depth: int = 0) -> Growth:
        """Count the tokens of a text, and how often it has each of the parameters."""
        total, parameter_counts = 0, dict.fromkeys(parameters, 0)
        times = 1  # how often what comes next is there
        call_repeats: tuple[int, ...] = ()  # of the macro before, how often it repeats its arguments
        open_parentheses: list[
            tuple[int, tuple[int, ...]]
        ] = []  # of every open parenthesis what `times` was, and whose arguments
        for token in tokens:
            if token == "(":
                open_parentheses.append((times, call_repeats))
                times *= call_repeats[0] if call_repeats else 1
            elif token == ")" and open_parentheses:
                times, _ = open_parentheses.pop()
            elif token == "," and open_parentheses and open_parentheses[-1][1]:
                outer_times, (_, *next_repeats) = open_parentheses[-1]
                open_parentheses[-1] = outer_times, tuple(next_repeats)
                times = outer_times * next_repeats[0] if next_repeats else times
            times = min(times, MAX_TOKENS + 1)
            growth = (
                self.growth_of(token, depth) if token in self.bodies and token not in parameter_counts else Growth(1)
            )
            if token in parameter_counts:
                parameter_counts[token] += times
            else:
                total += times * growth.tokens
            call_repeats = growth.repeats
        return Growth(min(total, MAX_TOKENS + 1), tuple(parameter_counts.values()))


@lru_cache(maxsize=64)
def require_finite(source: Source) -> None:
    """Raise CompileError if the macros of a source make more than `MAX_TOKENS` of it."""
    text = source.text.replace("\\\n", " ")
    macros = _Macros(text)
    if not macros.bodies or macros.count_tokens(_TOKEN.findall(text)).tokens <= MAX_TOKENS:
        return
    name = max(
        macros.growths, key=lambda macro: (macros.growths[macro].tokens, max(macros.growths[macro].repeats, default=0))
    )
    definition = re.compile(rf"\s*#\s*define\s+{name}\b")
    line = next(i for i, text_line in enumerate(source.text.splitlines(), 1) if definition.match(text_line))
    problem = f"macros: a text of at most {MAX_TOKENS} tokens when they are expanded (got more, by {name})"
    raise CompileError(source.path, line, problem, source.text.splitlines()[line - 1].strip())

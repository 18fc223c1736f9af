"""PTX text -> tokens, and a cursor that reads them."""

import operator
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn, TypeVar

from ptxlab.emulator.front.ir import Immediate
from ptxlab.emulator.front.refusals import FLOAT_CONSTANTS
from ptxlab.errors import SourceError

_TOKEN = re.compile(
    r"""[^\S\n]* (?: (?P<loc>\.loc[^\S\n][^\n]*) | (?P<word>\.[\w$]+(?:::\w+)* | [%$A-Za-z_][\w.$]*(?:::[\w.$]+)*)
      | (?P<mark><<|>>|/(?![/*])|[;,{}()\[\]:@!|+\-=<>*&^~])
      | (?P<number>0[fF][0-9a-fA-F]{8}\b | 0[dD][0-9a-fA-F]{16}\b | 0[xX][0-9a-fA-F]+U? | 0[bB][01]+U?
                 | \d+\.\d*(?:[eE][+-]?\d+)? | \d+U?)
      | (?P<newline>\n+) | (?P<comment>//[^\n]*) | (?P<block>/\*.*?\*/) | (?P<string>"[^"\n]*")
      | (?P<nothing>\Z) | (?P<other>.))""",
    re.VERBOSE | re.DOTALL,
)
Item = TypeVar("Item")
# Of constants, weakest first; each takes two numbers of 64 bits, signed or not.
_OPERATORS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"|": operator.or_},
    {"^": operator.xor},
    {"&": operator.and_},
    {"<<": lambda a, b: a << (b & 63), ">>": lambda a, b: a >> (b & 63)},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
     "%": lambda a, b: a % _U64 % (b % _U64)},
)  # fmt: skip
OPERATORS = frozenset(symbol for level in _OPERATORS for symbol in level)
SUM = 4  # where among them + and - stand
_U64 = 1 << 64
_INLINE_MARKS = frozenset(f"// {side} inline asm" for side in ("begin", "end"))
_TOKEN_KINDS = frozenset(("word", "mark", "number", "string", "loc"))


class Cursor:
    """Reads tokens one after another; every complaint is a `SourceError` with path and line.

    A token is a word, number, string, mark, a whole `.loc` or the end of the file. Kind, text and line of each stand in
    three lists: a hundred thousand objects would be most of the work.
    """

    def __init__(self, text: str, path: str) -> None:
        self.path = path
        self.lines = text.split("\n")
        self.annotations: dict[int, str] = {}  # line -> what follows `@lanes` in its comment
        self.wrapping: set[int] = set()  # lines that say `@wraps` in their comment
        self.inline_marks: list[int] = []  # lines at which inline assembly begins and ends, by the compiler's comments
        self.position = 0
        self.kinds: list[str] = []
        self.texts: list[str] = []
        self.line_numbers: list[int] = []
        self.tokenise(text)

    def tokenise(self, text: str) -> None:
        """Split the text into tokens, in order; comments are dropped but for their `@lanes`."""
        line = 1
        for match in _TOKEN.finditer(text):
            kind = match.lastgroup or ""
            token = match[kind]
            if kind in _TOKEN_KINDS:
                self.kinds.append(kind)
                self.texts.append(token)
                self.line_numbers.append(line)
            elif kind in ("newline", "block"):
                line += token.count("\n")
            elif kind == "comment" and "@lanes" in token:
                self.annotations[line] = token.partition("@lanes")[2]
            elif kind == "comment" and "@wraps" in token:
                self.wrapping.add(line)
            elif kind == "comment" and token in _INLINE_MARKS:
                self.inline_marks.append(line)
            elif kind == "other":
                self.fail(f"unexpected character {token!r}", line)
        self.kinds.append("end")
        self.texts.append("end of file")
        self.line_numbers.append(line)

    def fail(self, problem: str, line: int | None = None) -> NoReturn:
        """Raise for a line, by default the one of the next token."""
        line = line or self.line_numbers[min(self.position, len(self.line_numbers) - 1)]
        source_line = self.lines[line - 1].strip() if line <= len(self.lines) else ""
        raise SourceError(
            self.path, line, problem, source_line if len(source_line) <= 160 else f"{source_line[:157]}..."
        )

    @property
    def token(self) -> str:
        """Text of the next token."""
        return self.texts[self.position]

    def take(self) -> str:
        """Consume the next token and return its text."""
        if self.kinds[self.position] == "end":
            self.fail("unexpected end of file")
        self.position += 1
        return self.texts[self.position - 1]

    def accept(self, text: str) -> bool:
        """Consume the next token if it is `text`; return whether it was."""
        if self.texts[self.position] != text:
            return False
        self.position += 1
        return True

    def expect(self, text: str) -> None:
        """Consume the next token; raise SourceError unless it is `text`."""
        if not self.accept(text):
            self.fail(f"expected {text!r} before {self.token!r}")

    def word(self, expected: str) -> str:
        """Consume a name; `expected` says in the error what it should have been."""
        if self.kinds[self.position] != "word":
            self.fail(f"expected {expected}, found {self.token!r}")
        return self.take()

    def integer(self) -> int:
        """Consume an integer, which may be negative."""
        sign = -1 if self.accept("-") else 1
        number = self.number()
        if number.float_bits:
            self.fail("expected an integer")
        return sign * number.bits

    def number(self) -> Immediate:
        """Consume an unsigned integer or a float literal."""
        if self.kinds[self.position] != "number":
            self.fail(f"expected a number, found {self.token!r}")
        text = self.take()
        prefix, digits = text[:2].lower(), text.removesuffix("U")
        if prefix in ("0f", "0d"):
            return Immediate(int(text[2:], 16), 32 if prefix == "0f" else 64)
        if "." in text:
            return Immediate(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
        base = 16 if prefix == "0x" else 2 if prefix == "0b" else 8 if digits[0] == "0" and len(digits) > 1 else 10
        try:
            return Immediate(int(digits, base))
        except ValueError:  # an 8 among octal digits, or more digits than Python reads
            self.position -= 1
            self.fail(f"{text[:20]}{'...' * (len(text) > 20)} is not an integer that can be read")

    def constant(self, weakest: int = 0, left: int | None = None) -> Immediate:
        """Parse a constant: a literal, or integers joined as by ptxas; `left` is a first operand that has been read."""
        is_literal = self.kinds[self.position] == "number" and self.texts[self.position + 1] not in OPERATORS
        if left is None and is_literal:  # most
            return self.number()
        return self.expression(weakest, left)[0]

    def expression(self, weakest: int, left: int | None = None) -> tuple[Immediate, bool]:
        """Parse operators of precedence `weakest` and higher; return the value, and whether it is unsigned."""
        if weakest == len(_OPERATORS):
            return self.term() if left is None else (Immediate(left), left >= _U64 // 2)
        number, is_unsigned = self.expression(weakest + 1, left)
        while function := _OPERATORS[weakest].get(self.token):
            symbol = self.take()
            right, is_right_unsigned = self.expression(weakest + 1)
            if number.float_bits or right.float_bits:
                self.fail(FLOAT_CONSTANTS)
            if symbol in "/%" and not right.bits:
                self.fail("division by zero")
            is_shift = symbol in ("<<", ">>")
            is_unsigned = is_unsigned or symbol == "%" or (is_right_unsigned and not is_shift)
            a, b = (n.bits % _U64 if is_unsigned else n.bits for n in (number, right))
            number = Immediate(_wrap_to_64_bits(function(a, b), is_unsigned))
        return number, is_unsigned

    def term(self) -> tuple[Immediate, bool]:
        """Parse a literal, one behind - or ~, or a parenthesised expression; return it, and whether it is unsigned."""
        if self.accept("("):
            number_and_sign = self.expression(0)
            self.expect(")")
            return number_and_sign
        if self.token in ("-", "~"):
            symbol = self.take()
            number, unsigned = self.term()
            if number.float_bits:
                if symbol == "~":
                    self.fail("expected an integer")
                return replace(number, bits=number.bits ^ 1 << number.float_bits - 1), False
            return Immediate(_wrap_to_64_bits(-number.bits if symbol == "-" else ~number.bits, unsigned)), unsigned
        if self.accept("WARP_SZ"):
            return Immediate(32), False
        number = self.number()
        is_unsigned = self.texts[self.position - 1].endswith("U") or number.bits >= _U64 // 2
        return number, is_unsigned and not number.float_bits

    def comma_separated(self, read_element: Callable[[], Item], end: str) -> list[Item]:
        """Call `read_element` for each of the items up to `end`, and list what it reads."""
        elements: list[Item] = []
        while not self.accept(end):
            if elements:
                self.expect(",")
            elements.append(read_element())
        return elements

    def skip_line(self) -> None:
        """Skip the rest of the last token's line."""
        line = self.line_numbers[self.position - 1]
        while self.line_numbers[self.position] == line and self.kinds[self.position] != "end":
            self.position += 1

    def skip_to(self, text: str) -> None:
        """Skip all tokens up to and including `text`."""
        while self.take() != text:
            pass

    def skip_braces(self) -> None:
        """Skip all tokens up to the end of the next `{ ... }`."""
        depth = 0
        while True:
            text = self.take()
            depth += (text == "{") - (text == "}")
            if depth == 0 and text == "}":
                return


def _wrap_to_64_bits(number: int, unsigned: bool) -> int:
    """Wrap a value to 64 bits, unsigned or signed."""
    return number % _U64 if unsigned else (number + _U64 // 2) % _U64 - _U64 // 2

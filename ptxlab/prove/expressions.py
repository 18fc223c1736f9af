"""The language of claims: Python expressions over the elements of arrays, for one element `i` at a time.

`out[i] == q4[i]*scale[i//g] + offset[i//g] - 128` is exact integer arithmetic: nothing wraps. Operators are Python's
(`+ - * // % << >> & | ^`, comparisons and their chains, `and`, `or`, `not`, `x if c else y`), functions `abs`, `min`,
`max`, `clip(x, low, high)`, `implies(a, b)`, `rounds(q, a, b)` (q is a/b rounded to nearest, ties either way;
`rounds_even`: to even), `f16(x)`, `nibbles(words)`, `per_weight(a)`. An array without an index stands for the element
that belongs to `i`.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from typing import Any

import z3

from ptxlab.errors import ArgumentError
from ptxlab.prove.bitvectors import SORTS, Bits, as_float, concatenate_fields
from ptxlab.prove.integers import Integer


@dataclass(frozen=True)
class Elements:
    """An array in an expression, element by element.

    Attributes:
        name: as messages call it.
        element: the bits of an element at a width: `(index, bits) -> bitvector`.
        type: `u8`, `s8`, `u4`, `f16` ...; empty where it has to be named (`out.s8[i]`).
        count: how many elements it has, None: unknown.
        only: without a count, the one element that `name` alone stands for.
        seen: where each element that is asked for is entered, with its type and bits, by `name[index]`.
    """

    name: str
    element: Callable[[int, int], Bits]
    type: str = ""
    count: int | None = None
    only: int | None = None
    seen: dict[str, tuple[str, Bits]] = field(default_factory=dict, compare=False)

    @property
    def bits(self) -> int:
        """Bits of an element; without a type it is a byte."""
        return int(self.type.lstrip("usfb") or 8)

    def __getitem__(self, index: int) -> Any:
        if not self.type:
            raise ValueError(f"which type has {self.name}? for example {self.name}.u8[i]")
        if index < 0 or (self.count is not None and index >= self.count):
            raise ValueError(f"{self.name}[{index}] lies outside the array of {self.count}")
        element_bits = self.element(index, self.bits)
        self.seen[f"{self.name}[{index}]"] = self.type, element_bits
        if self.type in SORTS:
            return as_float(element_bits, self.type)
        return Integer.from_signed(element_bits) if self.type[0] == "s" else Integer.from_unsigned(element_bits)

    def view_as(self, type_name: str) -> "Elements":
        """View the same bytes as elements of another type."""
        kind, digits = type_name.rstrip("0123456789"), type_name.lstrip("usfb")
        if not (type_name in SORTS or (kind in ("u", "s") and digits.isdigit() and 1 <= int(digits) <= 64)):
            raise ValueError(f"{self.name}.{type_name}: a type is u1 to u64, s1 to s64, {', '.join(SORTS)}")
        same_width = int(digits) == self.bits  # otherwise an element is at another index, unless it is the first
        count, only_index = self.count if same_width else None, self.only if same_width or self.only == 0 else None
        return replace(self, name=f"{self.name}.{type_name}", type=type_name, count=count, only=only_index)


def _fold(values: tuple[Any, ...], keeps_first: Callable[[Integer, Integer], Any]) -> Integer:
    return reduce(lambda a, b: a.where(keeps_first(a, b), b), map(Integer.of, values))


def _rounds(q: Any, a: Any, b: Any) -> Any:
    """Build the formula that q is a/b rounded to nearest, for b > 0; ties may go either way."""
    doubled_error = 2 * (Integer.of(q) * b - a)
    return z3.And(doubled_error <= b, doubled_error >= -Integer.of(b))


def _rounds_even(q: Any, a: Any, b: Any) -> Any:
    """Build the formula that q is a/b rounded to nearest, ties to even."""
    tie = Integer.of(2) * abs(Integer.of(q) * b - a) == b
    return z3.And(_rounds(q, a, b), z3.Implies(tie, Integer.of(q) % 2 == 0))


def _float(x: Any, sort: Any) -> Any:
    """Convert a number to a float of that sort, rounded to nearest even."""
    if z3.is_fp(x):
        return x
    return z3.FPVal(x, sort) if isinstance(x, float) else z3.fpSignedToFP(z3.RNE(), Integer.of(x).bits, sort)


def _same_sort(left: Any, right: Any) -> tuple[Any, Any]:
    """Convert both to floats if one is a float."""
    sort = next((x.sort() for x in (left, right) if z3.is_fp(x)), None)
    return (left, right) if sort is None else (_float(left, sort), _float(right, sort))


def _nibbles(words: Elements) -> Elements:
    """View micro-kernel words as weights in logical order.

    Weights e0..e3 are the low nibbles of bytes 0..3, e4..e7 the high ones.
    """

    def weight(index: int, bits: int) -> Bits:
        word_index, position = divmod(index, 8)
        first_bit = 8 * (position % 4) + 4 * (position // 4)
        return z3.simplify(z3.Extract(first_bit + 3, first_bit, words.element(word_index, 32)))

    count = None if words.count is None else 8 * words.count
    return Elements(f"nibbles({words.name})", weight, "u4", count, seen=words.seen)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "min": lambda *values: _fold(values, lambda a, b: a <= b),
    "max": lambda *values: _fold(values, lambda a, b: a >= b),
    "clip": lambda x, low, high: _fold((_fold((x, low), lambda a, b: a >= b), high), lambda a, b: a <= b),
    "implies": lambda a, b: z3.Implies(a, b),
    "rounds": _rounds,
    "rounds_even": _rounds_even,
    "f16": lambda x: _float(x, z3.FPSort(*SORTS["f16"])),
    "nibbles": _nibbles,
    "per_weight": lambda x: x,
}
_TAKES_ARRAYS = ("nibbles", "per_weight")
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.Pow: operator.pow,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip


@cache
def parse_expression(text: str) -> ast.expr:
    """Parse an expression. Raises ArgumentError if it is none."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ArgumentError("claim", f"a Python expression: {getattr(error, 'msg', error)}", text) from None


def names_in(text: str) -> set[str]:
    """Return the names that an expression uses, without functions."""
    return {n.id for n in ast.walk(parse_expression(text)) if isinstance(n, ast.Name)} - set(_FUNCTIONS)


def arrays_at_i(text: str) -> list[tuple[str, str]]:
    """Return the arrays whose element `i` an expression names, in order: name and type (`out.s8[i]`).

    The type may be empty.
    """
    arrays = []
    for node in ast.walk(parse_expression(text)):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name) and node.slice.id == "i":
            base, type_name = node.value, ""
            if isinstance(base, ast.Attribute):
                type_name, base = base.attr, base.value
            if isinstance(base, ast.Name):
                arrays.append((base.id, type_name))
    return arrays


def split_equation(text: str) -> tuple[str, str] | None:
    """Split a plain equation into its two sides; return None for other expressions."""
    node = parse_expression(text)
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq):
        return None
    return ast.unparse(node.left), ast.unparse(node.comparators[0])


def formula(text: str, names: Mapping[str, Any], i: int, count: int | None = None) -> Any:
    """Evaluate an expression at element `i`, of `count`, to a z3 Bool.

    Raises ArgumentError that says what is wrong with the expression.
    """
    condition = term(text, names, i, count)
    if isinstance(condition, bool):
        return z3.BoolVal(condition)
    if not z3.is_bool(condition):
        raise ArgumentError("claim", "a condition", text)
    return condition


def term(text: str, names: Mapping[str, Any], i: int, count: int | None = None) -> Any:
    """Evaluate an expression at element `i` of `count`: to an Integer, a z3 float or Bool, or a Python number."""
    try:
        return _element(_Evaluator({**names, "i": i}, i, count).visit(parse_expression(text)), i, count)
    except (ValueError, TypeError, AttributeError, ArithmeticError, IndexError, z3.Z3Exception) as error:
        raise ArgumentError("claim", str(error).partition("\n")[0], text) from None


def _element(x: Any, i: int, count: int | None) -> Any:
    """Return the element of an array that belongs to `i`, or its only one; return other values unchanged."""
    if not isinstance(x, Elements):
        return x
    if x.count is not None and count:
        return x[i * x.count // count]
    if x.only is None:
        raise ValueError(f"which element of {x.name}? for example {x.name}[i]")
    return x[x.only]


class _Evaluator(ast.NodeVisitor):
    def __init__(self, names: Mapping[str, Any], i: int, count: int | None) -> None:
        self.names, self.i, self.count = names, i, count

    def value(self, node: ast.expr) -> Any:
        """Evaluate a node to a number or a condition."""
        return _element(self.visit(node), self.i, self.count)

    def condition(self, node: ast.expr) -> Any:
        condition = self.value(node)
        return z3.BoolVal(condition) if isinstance(condition, bool) else condition

    def generic_visit(self, node: ast.AST) -> Any:
        raise ValueError(f"{type(node).__name__} has no meaning in a claim")

    def visit_Constant(self, node: ast.Constant) -> Any:
        if not isinstance(node.value, bool | int | float):
            raise ValueError(f"{node.value!r} is no number")
        return node.value

    def visit_Name(self, node: ast.Name) -> Any:
        if node.id not in self.names:
            raise ValueError(f"{node.id} is none of {', '.join(sorted(self.names))}")
        return self.names[node.id]

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        owner = self.visit(node.value)
        if isinstance(owner, Mapping):
            return owner[node.attr] if node.attr in owner else self.visit_Name(ast.Name(node.attr))
        if not isinstance(owner, Elements):
            raise ValueError(f"{ast.unparse(node)}: only an array has types")
        return owner.view_as(node.attr)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        array, index = self.visit(node.value), self.value(node.slice)
        if isinstance(index, Integer):
            index = index.low if index.low == index.high else index
        if not isinstance(array, Elements) or not isinstance(index, int):
            raise ValueError(f"{ast.unparse(node)}: an array has elements by number")
        return array[index]

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        if type(node.op) not in _BINARY:
            raise ValueError(f"{ast.unparse(node)}: use // for division")
        return _BINARY[type(node.op)](*_same_sort(left, right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            return z3.Not(self.condition(node.operand))
        operand = self.value(node.operand)
        return {ast.USub: operator.neg, ast.UAdd: lambda x: x, ast.Invert: operator.invert}[type(node.op)](operand)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        parts = [self.condition(part) for part in node.values]
        return z3.And(parts) if isinstance(node.op, ast.And) else z3.Or(parts)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        condition, yes, no = self.condition(node.test), self.value(node.body), self.value(node.orelse)
        return Integer.of(yes).where(condition, no)

    def visit_Compare(self, node: ast.Compare) -> Any:
        values = [self.value(part) for part in (node.left, *node.comparators)]
        comparisons = []
        for op, left, right in zip(node.ops, values[:-1], values[1:], strict=True):
            if type(op) not in _COMPARE:
                raise ValueError(f"{ast.unparse(node)} has no meaning in a claim")
            comparisons.append(self.compare(type(op), left, right))
        return (
            z3.And([z3.BoolVal(f) if isinstance(f, bool) else f for f in comparisons])
            if len(comparisons) > 1
            else comparisons[0]
        )

    def compare(self, op: type[ast.cmpop], left: Any, right: Any) -> Any:
        left, right = _same_sort(left, right)
        if z3.is_fp(left):
            if op in (ast.Eq, ast.NotEq):  # the same number, -0 apart from 0, all NaNs alike
                return left == right if op is ast.Eq else left != right
            floats: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
                ast.Lt: z3.fpLT, ast.LtE: z3.fpLEQ, ast.Gt: z3.fpGT, ast.GtE: z3.fpGEQ,
            }  # fmt: skip
            return floats[op](left, right)
        return _COMPARE[op](left, right)

    def visit_Call(self, node: ast.Call) -> Any:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in _FUNCTIONS or node.keywords:
            raise ValueError(f"{ast.unparse(node)}: the functions are {', '.join(_FUNCTIONS)}")
        evaluate_argument = self.visit if name in _TAKES_ARRAYS else self.value
        return _FUNCTIONS[name](*(evaluate_argument(argument) for argument in node.args))


def view_bytes(name: str, byte: Callable[[int], Bits], **attributes: Any) -> Elements:
    """View bytes by offset as elements of any width, lowest bits first."""

    def element(index: int, bits: int) -> Bits:
        first_bit = index * bits
        octets = concatenate_fields([byte(offset) for offset in range(first_bit // 8, (first_bit + bits - 1) // 8 + 1)])
        return z3.Extract(first_bit % 8 + bits - 1, first_bit % 8, octets) if octets.size() != bits else octets

    return Elements(name, element, **attributes)

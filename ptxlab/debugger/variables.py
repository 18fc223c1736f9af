"""Types and shapes of a kernel's variables in memory, as its CUDA C++ declares them: `T tile[2][N + 1]`."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from math import prod

from ptxlab import mangled
from ptxlab.runtime import Kernel
from ptxlab.runtime.signature import parse_declaration

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_MACRO = r"#[ \t]*define[ \t]+{name}[ \t]+(?P<expression>[^\n]+)"
_CONSTANT = r"\bconst(?:expr|ant)?\b[\w\s:]*?\b{name}\s*=\s*(?P<expression>[^;,]+)[;,]"
_DEPTH = 16  # constants that are defined by others


def declared_type(kernel: Kernel, name: str, size: int) -> tuple[str, tuple[int, ...]] | None:
    """Return the PTX type and shape of a variable of `size` bytes.

    Return None if its declaration does not show them plainly.
    """
    text, instance = kernel.source.text, template_arguments(kernel)
    pattern = rf"__(?:shared|constant|device)__\s+(?:alignas\([^)]*\)\s*)?([^;(){{}}]*?\b{name})\b((?:\s*\[[^\]]*\])*)"
    declaration = re.search(pattern, text)
    if declaration is None:
        return None
    type_text = re.sub(r"\b\w+\b", lambda word: instance.get(word[0], word[0]), declaration[1])
    number = parse_declaration(text, name, re.sub(r"^.*\balignas\([^)]*\)", "", type_text), kernel.defines).number
    if number is None or number.kind == "raw":
        return None
    kind = {"i": "u" if number.signed is False else "s"}.get(number.kind, number.kind)
    texts = [part.strip() for part in re.findall(r"\[([^\]]*)\]", declaration[2])]
    shape = _shape([constant(kernel, text_of_length, instance) for text_of_length in texts], size // number.nbytes)
    return f"{kind}{8 * number.nbytes}", shape if shape and prod(shape) * number.nbytes == size else (-1,)


def _shape(lengths: list[int | None], count: int) -> tuple[int, ...]:
    """Return the lengths of the axes of an array of `count` elements.

    One length that is not known follows from the others.
    """
    product = prod(length for length in lengths if length is not None)
    if lengths.count(None) > 1 or not product or count % product:
        return ()
    return tuple(count // product if length is None else length for length in lengths)


def template_arguments(kernel: Kernel) -> dict[str, str]:
    """Return the arguments of the template that a kernel is an instance of, by the names of its parameters."""
    demangled_name = mangled.name_of(kernel.entry)
    name, bracket, arguments = demangled_name.partition("<")
    base = name.rpartition("::")[2]
    header = re.search(rf"template\s*<([^<>]*)>[^;{{}}]*?__global__[^;{{}}]*?\b{base}\s*\(", kernel.source.text)
    if not bracket or header is None:
        return {}
    parameters = [re.sub(r"=.*", "", parameter).split() for parameter in mangled.split_list(header[1])]
    names = [words[-1] for words in parameters if words]
    return dict(zip(names, map(str.strip, mangled.split_list(arguments.removesuffix(">"))), strict=False))


def constant(kernel: Kernel, expression: str, instance: Mapping[str, str], depth: int = _DEPTH) -> int | None:
    """Evaluate an integer expression of macros, constants and template arguments; None where it is something else."""
    python_text = re.sub(r"(?<=\d)[uUlL]+\b", "", expression.partition("//")[0].strip())
    try:
        tree = ast.parse(python_text, mode="eval").body
    except (SyntaxError, ValueError):
        return None

    def evaluate(node: ast.expr) -> int | None:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, int) else None
        if isinstance(node, ast.Name):
            text = instance.get(node.id) or _definition(kernel, node.id)
            return None if text is None or not depth else constant(kernel, text, instance, depth - 1)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            left, right = evaluate(node.left), evaluate(node.right)
            try:
                return None if left is None or right is None else _OPERATIONS[type(node.op)](left, right)
            except (ArithmeticError, ValueError):
                return None
        return None

    return evaluate(tree)


def _definition(kernel: Kernel, name: str) -> str | None:
    """Return the defining text of a constant: from -D, a macro of the source, or a `constexpr`."""
    if name in kernel.defines:
        return str(kernel.defines[name])
    for pattern in (_MACRO, _CONSTANT):
        if definition := re.search(pattern.format(name=re.escape(name)), kernel.source.text):
            return definition["expression"]
    return None

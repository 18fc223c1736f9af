"""Mistakes drawn by a hash: one change on one line of a file, as a maintainer makes it by mistake.

The same hash draws the same mistakes of the same files, so a list of survivors can be seen again. A survivor gets a
test, and an entry in a table beside this module; or an entry as equivalent, with the reason, and is not drawn again.
"""

import ast
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise

from tests.mutants.table import ROOT, Mutant, load

# Files of which no test noticed a mistake once, and the tests of each.
FILES: dict[str, tuple[str, ...]] = {
    "notebooks/benchmarks/decode.py": ("tests/benchmarks/test_decode.py",),
    "ptxlab/debugger/session.py": ("tests/debugger",),
    "ptxlab/emulator/async_/cp_async.py": ("tests/emulator/async_",),
    "ptxlab/emulator/checks/wgmma_registers.py": ("tests/emulator/async_/test_wgmma.py", "tests/emulator/checks"),
    "ptxlab/emulator/sync/mbarrier.py": (
        "tests/emulator/async_/test_async.py",
        "tests/emulator/async_/test_multicast.py",
    ),
    "ptxlab/llm/checkpoints/foreign.py": (
        "tests/llm/checkpoints/test_foreign.py",
        "tests/llm/checkpoints/test_imports.py",
    ),
    "ptxlab/llm/checkpoints/gguf.py": ("tests/llm/checkpoints/test_gguf.py",),
    "ptxlab/llm/model/kernel_runner.py": ("tests/llm/model/test_generate.py", "tests/llm/test_server.py"),
    "ptxlab/llm/model/numpy_runner.py": (
        "tests/llm/model/test_generate.py",
        "tests/llm/model/test_w4a4.py::test_a_product_is_the_kernels_reference",
        "tests/llm/test_server.py",
    ),
    "ptxlab/llm/recipe/gptq.py": ("tests/llm/recipe/test_gptq.py", "tests/llm/recipe/test_steps.py"),
    "ptxlab/llm/recipe/grids.py": (
        "tests/llm/recipe/test_block_clip.py::test_a_grid_gives_fixed_rows_the_levels_of_the_clipped_range",
        "tests/llm/recipe/test_gptq.py",
        "tests/llm/recipe/test_steps.py",
    ),
    "ptxlab/llm/server.py": ("tests/llm/test_server.py",),
    "ptxlab/lowbit/bench/gemm/headline.py": ("tests/lowbit/bench/test_headline.py",),
    "ptxlab/prove/loops.py": ("tests/prove/test_loops.py",),
    "ptxlab/prove/semantics.py": ("tests/prove/test_semantics.py",),
    "ptxlab/runtime/timing.py": ("tests/runtime/test_timing.py", "tests/bench/test_record.py"),
    "ptxlab/testing/annotations.py": ("tests/testing/test_annotations.py", "tests/testing/test_plugin.py"),
    "ptxlab/testing/plugin.py": ("tests/testing/test_plugin.py",),
}

_COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
_SIGNS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*")}
_EXCHANGED = ast.Name, ast.Attribute, ast.Subscript, ast.BinOp, ast.Call  # a text or lambda elsewhere fails at once
_GUARD = "strict"  # of `zip`: lengths never differ
_SKIPPED = ast.Import, ast.ImportFrom, ast.JoinedStr
_SKIPPED_FIELDS = "annotation", "returns", "type_params", "decorator_list"


@dataclass(frozen=True)
class Change:
    """A mistake that can be made: characters `start` to `stop` of the text become `new`."""

    kind: str
    start: int
    stop: int
    new: str


def draw(seed: str, count: int, pattern: str = "") -> list[Mutant]:
    """Draw so many mistakes, the first of `all_drawn`."""
    return list(islice(all_drawn(seed, pattern), count))


def all_drawn(seed: str, pattern: str = "") -> Iterator[Mutant]:
    """Draw a mistake of each line of the files with `pattern` in their path, in any order of the lines."""
    equivalent = {(m.file, m.changed((ROOT / m.file).read_text("utf-8"))) for m in load() if m.equivalent}
    texts = {file: (ROOT / file).read_text("utf-8") for file in FILES if pattern in file}
    lines = {(file, line): changes for file, text in texts.items() for line, changes in changes_by_line(text).items()}
    chance = random.Random(seed)
    drawn = (
        mutant_of(file, texts[file], line, chance.choice(lines[file, line]))
        for file, line in chance.sample(sorted(lines), len(lines))
    )
    return (m for m in drawn if (m.file, m.changed(texts[m.file])) not in equivalent)


def mutant_of(file: str, text: str, line: int, change: Change) -> Mutant:
    """Return the mistake as an entry of a table: its lines, and as many ahead of them as make the place unique."""
    first, last = text.rfind("\n", 0, change.start) + 1, text.find("\n", change.stop) + 1
    while text.count(text[first:last]) > 1:
        first = text.rfind("\n", 0, first - 1) + 1
    old = text[first:last]
    new = text[first : change.start] + change.new + text[change.stop : last]
    was = " ".join(text[change.start : change.stop].split())
    return Mutant(f"line {line}, {change.kind}: `{was}` is `{change.new}`", file, old, new, FILES[file])


def changes_by_line(text: str) -> dict[int, list[Change]]:
    """Find all mistakes that can be made in a text of Python, by their line."""
    rows = text.split("\n")
    starts = [0, *accumulate(len(row) + 1 for row in rows)]

    def place(line: int, column: int) -> int:
        """Columns of `ast` are bytes."""
        return starts[line - 1] + len(rows[line - 1].encode()[:column].decode())

    by_line: dict[int, list[Change]] = defaultdict(list)
    for node in _code_of(ast.parse(text)):
        for change in _changes(text, node, place):
            by_line[text.count("\n", 0, change.start) + 1].append(change)
    return dict(by_line)


def _code_of(node: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs and may be wrong: no annotations, docstrings or imports, and not what an error says."""
    if isinstance(node, _SKIPPED) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return
    if isinstance(node, ast.keyword) and node.arg == _GUARD:
        return
    yield node
    if isinstance(node, ast.Raise):
        return
    for name, field in ast.iter_fields(node):
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.AST) and name not in _SKIPPED_FIELDS:
                yield from _code_of(child)


def _changes(text: str, node: ast.AST, place: Callable[[int, int], int]) -> Iterator[Change]:
    def start(of: ast.AST) -> int:
        return place(of.lineno, of.col_offset)  # type: ignore[attr-defined]

    def stop(of: ast.AST) -> int:
        return place(of.end_lineno, of.end_col_offset)  # type: ignore[attr-defined]

    def between(kind: str, left: ast.AST, right: ast.AST, old: str, new: str) -> Iterator[Change]:
        """Yield the changes of an operator, which lies between its operands."""
        at = text.find(old, stop(left), start(right))
        if at >= 0:
            yield Change(kind, at, at + len(old), new)

    match node:
        case ast.Compare():
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                yield from between("comparison", left, right, *_COMPARISONS[type(op)])
        case ast.BoolOp():
            names = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in pairwise(node.values):
                yield from between("comparison", left, right, *names)
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv()):
            yield from between("sign", node.left, node.right, *_SIGNS[type(node.op)])
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield Change("sign", start(node), start(node) + len("-" if isinstance(node.op, ast.USub) else "not "), "")
        case ast.Constant(value=bool()):
            yield Change("constant", start(node), stop(node), str(not node.value))
        case ast.Constant(value=int() | float()):
            yield Change("constant", start(node), stop(node), str(2 * node.value if node.value > 1 else node.value + 1))
            if isinstance(node.value, int):
                yield Change("constant", start(node), stop(node), str(node.value - 1))
        case ast.Call(func=ast.Name(id="isinstance")):
            return
        case ast.Call():
            for left, right in pairwise(node.args):
                if isinstance(left, _EXCHANGED) and isinstance(right, _EXCHANGED):
                    first, second = text[start(left) : stop(left)], text[start(right) : stop(right)]
                    middle = text[stop(left) : start(right)]
                    if first != second:
                        yield Change("argument", start(left), stop(right), second + middle + first)
            arguments = sorted([*node.args, *node.keywords], key=start)
            for at, argument in enumerate(arguments):
                if isinstance(argument, ast.keyword) and argument.arg not in (None, _GUARD):
                    is_last = at + 1 == len(arguments)
                    first = stop(arguments[at - 1]) if at and is_last else start(argument)
                    yield Change("argument", first, stop(argument) if is_last else start(arguments[at + 1]), "")
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Delete() | ast.Continue() | ast.Break():
            yield Change("statement", start(node), stop(node), "pass")
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield Change("statement", start(node), stop(node), "pass")

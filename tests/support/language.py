"""Count wording that readers trip over, in Python and CUDA: an aid for a reader, no proof of good English.

python -m tests.support.language [PATH...]   # the places, by kind; of the folders of `FOLDERS` without a path
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

FOLDERS = ("ptxlab", "cuda_src", "tests", "notebooks/report", "notebooks/benchmarks")
VAGUE_NAMES = (
    "found given known more most less least rest some each own mine said told wanted what where there here apart beside"
    " before after behind ahead whose like such other others another few many taken kept made held asked meant begun"
    " enough unless"
)
EMPTY_NAMES = "result results value val data item items thing things tmp temp obj res ret foo bar x1 x2 stuff info"
VAGUE_IN_CUDA = re.compile(
    r"\b(to|from|at|most|more|mine|own|part|place|before|first|behind|there|one|begun|missing|enough|unit|turn|all|least"
    r"|larger)\b(?=\s*(=|\+=|\[|;|,|\)|\.|->))"
)
NO_PARTICIPLES = (  # verbs and nouns that end like participles
    "between markdown seed need feed speed embed shared open when then even often listen broken child build field hold"
    " world bold fold old add read load send find bind bound round end append expand extend spend blend kind mind pad"
    " widen shorten head thread and bid grid valid id word record guard board standard forward backward script accept"
    " concept except interrupt prompt token corrupt encrypt attempt adapt opt gpt"
)
PARTICIPLE = re.compile(rf"_?(?!(?:{NO_PARTICIPLES.replace(' ', '|')})$)[a-z]+(ed|wn|en|ept|eld|aid|ought|uilt|ound)$")
FRAGMENT = re.compile(
    r"(Of|By|In|Where|What|Whether|That|Which|Those|These|Who|How|Why|When|From|To|For|As|With|At|On|Up to|Else|One"
    r"|Some|All|Each|y)\b"
)


LINE_END = 110  # a comment line that ends before, though the next word would fit, was torn off
NO_CONTINUATION = re.compile(r"(\S+ ){0,2}\S+ {2,}\S|clang-format")  # a line of a header or a table, a directive
OPEN_END = re.compile(r"\b(and|or|the|a|an)$")


class Place(NamedTuple):
    """Wording of a kind at a line: participle, fragment, vague, empty, cuda or torn."""

    kind: str
    path: Path
    line: int
    text: str


def places(root: Path, folders: Sequence[str] = FOLDERS) -> Iterator[Place]:
    """Yield every place in the tracked files of a checkout's folders."""
    command = ["git", "ls-files", "--", *folders]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.splitlines()  # none without git
    for path in (root / name for name in names):
        if path.suffix == ".py" and path.exists():
            yield from python_places(path, path.read_text(encoding="utf-8"))
        elif path.suffix in (".cu", ".cuh") and path.exists() and path.is_relative_to(root / "cuda_src"):
            yield from cuda_places(path, path.read_text(encoding="utf-8"))


def python_places(path: Path, text: str) -> Iterator[Place]:
    """Yield a module's functions named by a bare participle, docstrings that are fragments, vague and empty names."""
    tree = ast.parse(text)
    nodes, vague, empty = [*ast.walk(tree)], {*VAGUE_NAMES.split()}, {*EMPTY_NAMES.split()}
    of_python = {  # parameters of methods that Python itself names: `other`
        id(arg) for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("__")
        for arg in node.args.args
    }  # fmt: skip
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and PARTICIPLE.fullmatch(node.name):
            decorators = {getattr(name, "id", getattr(name, "attr", "")) for name in node.decorator_list}
            if not decorators & {"property", "cached_property", "fixture"}:
                yield Place("participle", path, node.lineno, node.name)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            docstring = ast.get_docstring(node)
            if docstring and FRAGMENT.match(docstring):
                yield Place("fragment", path, node.lineno, f"{node.name}: {docstring.splitlines()[0]}")
        if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)):
            name = node.arg if isinstance(node, ast.arg) else node.id
            if name in empty:
                yield Place("empty", path, node.lineno, name)
            if name in vague and id(node) not in of_python:
                yield Place("vague", path, node.lineno, name)


def cuda_places(path: Path, text: str) -> Iterator[Place]:
    """Yield vague identifiers outside the comments of a CUDA source, and comments that a formatter tore off."""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        for match in VAGUE_IN_CUDA.finditer(line.partition("//")[0]):
            yield Place("cuda", path, number, match[1])
        if is_torn(line, lines[number] if number < len(lines) else ""):
            yield Place("torn", path, number, line.strip())


def is_torn(line: str, following: str) -> bool:
    """Return whether the comment of a line is broken off in the middle of a sentence.

    A comment beside code does not go on below; a comment line is filled, unless a sentence or the comment ends there.
    """
    code, mark, comment = line.partition("//")
    next_code, next_mark, next_comment = following.partition("//")
    goes_on = bool(next_mark) and not next_code.strip()
    comment = comment.rstrip()
    if not mark or not comment or comment.strip().startswith("clang-format"):
        return False
    if code.strip():
        return bool(OPEN_END.search(comment)) or (goes_on and next_code == " " * len(code))
    if not goes_on or not next_comment.strip() or next_code != code:
        return bool(OPEN_END.search(comment))
    if NO_CONTINUATION.match(next_comment.strip()):
        return False
    word = next_comment.split()[0]
    return len(f"{line.rstrip()} {word}") <= LINE_END and (comment[-1] not in ".:;!?," or word[0].islower())


if __name__ == "__main__":
    all_places = [*places(Path.cwd(), sys.argv[1:] or FOLDERS)]
    for place in all_places:
        print(f"{place.path.relative_to(Path.cwd())}:{place.line}: {place.kind}: {place.text}")
    print(dict(Counter(place.kind for place in all_places)))

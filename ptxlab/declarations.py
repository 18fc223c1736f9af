"""What a CUDA C++ text declares: kernels with namespace, template and parameters, and where a declaration stands.

No parser of C++: scopes and heads are told by brackets. What is compiled is decided by the compiler alone; this names
parameters, lists templates, and finds the host functions that NVRTC does not take.
"""

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ptxlab.mangled import split_list

_IGNORED = re.compile(
    r"//[^\n]*|/\*.*?\*/|R\"([^(\s]*)\(.*?\)\1\"|\"(?:\\.|[^\"\\\n])*\"|(?<!\w)'(?:\\.|[^'\\\n])+'"
    r"|^[ \t]*#(?:\\\n|[^\n])*",
    re.DOTALL | re.MULTILINE,
)
_BRACKET = re.compile(r"[(){};]")
_BRACE = re.compile(r"[{}]")
_CLASS = re.compile(r"^\s*(?:template\b.*>\s*)?(?:typedef\s+)?(?:struct|class|union)\b", re.DOTALL)
_NAMESPACE = re.compile(r"\bnamespace\b\s*([\w:\s]*)$")
_ATTRIBUTES = re.compile(
    r"\[\[.*?\]\]|\b__(?:attribute|align|launch_bounds|cluster_dims|block_size|maxnreg)__\s*"
    r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
)
_NAMED = re.compile(r"([A-Za-z_]\w*)\s*(<.*>)?\s*\((.*)\)\s*$", re.DOTALL)
_PARAMETER = re.compile(r"(\w+)\s*(?:\[[^\]]*\]\s*)*(?:=.*)?$", re.DOTALL)
_LAUNCH = re.compile(r"([A-Za-z_][\w:]*)\s*(<[^;{}()]*>)?\s*<<<")
_OF_DEVICE = re.compile(r"\b__(?:global|device|constant|shared|managed)__\b")
_CONSTEXPR = re.compile(r"\bconstexpr\b")
_FOR_DEVICE = "__attribute__((device))"  # unlike `__device__`, which is the author's own
_ACCESS = re.compile(r"\b(?:public|private|protected)\s*:")
LINE_MARKER = re.compile(r'^#(?:line)?\s*\d+\s+"([^"]*)"[^\n]*$', re.MULTILINE)

Places = Sequence[tuple[int, int]]  # line and column, from 1


@dataclass(frozen=True)
class CppDeclaration:
    """A declaration at the level of a namespace or class: text[start:end], of which `head` stands before its body."""

    start: int
    end: int
    head: str
    scope: tuple[str, ...]
    linkage: str

    @property
    def is_of_device(self) -> bool:
        """True if a word of CUDA's that no macro hides declares it for the device."""
        return _OF_DEVICE.search(self.head) is not None


@dataclass(frozen=True)
class KernelDeclaration:
    """A `__global__` function as it is written.

    Attributes:
        name: with its namespaces, `ns::add`; unnamed ones are left out.
        template: its template parameters, `typename T, int N`; empty for none.
        parameters: each as written, `const float* x`.
        linkage: `C` or `C++`.
    """

    name: str
    template: str
    parameters: tuple[str, ...]
    linkage: str

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the parameters; `arg0`, `arg1` ... for those without."""
        names = []
        for position, text in enumerate(self.parameters):
            match = _PARAMETER.search(text)
            words = re.findall(r"\w+", text.partition("=")[0])
            names.append(match[1] if match and len(words) > 1 and match[1] == words[-1] else f"arg{position}")
        return tuple(names)

    @property
    def types(self) -> tuple[str, ...]:
        """Types of the parameters as written, without their names."""
        types_and_names = zip(self.parameters, self.parameter_names, strict=True)
        return tuple(re.sub(rf"\b{name}\b", "", text.partition("=")[0]) for text, name in types_and_names)


def blank(text: str) -> str:
    """Replace comments, strings and directives by spaces: every character keeps its place."""
    return _IGNORED.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def declarations(text: str) -> Iterator[CppDeclaration]:
    """Yield the declarations of namespaces and classes, functions and variables; none within functions."""
    text = blank(text)
    scopes: list[tuple[str, str]] = []  # of each open namespace, block of linkage or class: its name, what it is
    start = depth = position = 0

    def declaration_up_to(end: int, head_end: int) -> CppDeclaration:
        head = text[start:head_end]
        accesses = list(_ACCESS.finditer(head))
        begin = start + (accesses[-1].end() if accesses else 0)
        names = tuple(name for name, _ in scopes if name)
        linkage = "C" if any(kind == "C" for _, kind in scopes) else "C++"
        return CppDeclaration(begin, end, text[begin:head_end], names, linkage)

    while bracket_match := _BRACKET.search(text, position):
        position, bracket = bracket_match.end(), bracket_match[0]
        if bracket in "()":
            depth += 1 if bracket == "(" else -1
        elif bracket == ";" and depth <= 0:
            yield declaration_up_to(position, bracket_match.start())
            start = position
        elif bracket == "}" and depth <= 0:
            if scopes:
                scopes.pop()
            start = position
        elif bracket == "{":
            head = text[start : bracket_match.start()]
            scope = _scope(head) if depth <= 0 else None
            if scope is not None:
                scopes.append(scope)
                start = position
                continue
            position = _end_of_block(text, bracket_match.start())
            if depth <= 0 and ")" in head and not _assigns(head) and not re.search(r"\benum\b", head):
                yield declaration_up_to(position, bracket_match.start())
                start = position


def _assigns(head: str) -> bool:
    """Return whether a head has a `=` outside of brackets, which begins a value."""
    _, head = _template(head)
    depth = 0
    for character in head:
        depth += {**dict.fromkeys("([", 1), **dict.fromkeys(")]", -1)}.get(character, 0)
        if character == "=" and depth <= 0 and "operator" not in head:
            return True
    return False


def _scope(head: str) -> tuple[str, str] | None:
    """Return name and kind of the namespace, block of linkage or class that a `{` opens; None for a body or a value."""
    if re.fullmatch(r"\s*extern\s*", head):
        return "", "C"
    if (match := _NAMESPACE.search(head)) and "(" not in head:
        return "".join(match[1].split()), "namespace"
    if _CLASS.match(head) and not re.search(r"\)\s*(?:const|noexcept|override)?\s*$", head):
        words = re.findall(r"\w+", _ATTRIBUTES.sub(" ", head).partition(":")[0])
        return words[-1], "class"
    return None


def _end_of_block(text: str, start: int) -> int:
    """Return the position after the `}` that closes the `{` at a position."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return brace.end()
    return len(text)


def kernels(text: str) -> list[KernelDeclaration]:
    """List each `__global__` function that a text declares, as often as it does.

    Definitions and templates are among them.
    """
    return [kernel for declaration in declarations(text) if (kernel := _kernel(declaration, text))]


def _kernel(declaration: CppDeclaration, text: str) -> KernelDeclaration | None:
    head = declaration.head
    if not re.search(r"\b__global__\b|__attribute__\s*\(\(\s*global\s*\)\)", head):
        return None
    template, head = _template(_ATTRIBUTES.sub(" ", head))
    match = _NAMED.search(_last_list(head))
    if not match or re.match(r"\s*template\b", head):  # an explicit instantiation: the compiler lists it
        return None
    declaration_text = text[declaration.start : declaration.end]
    is_c = declaration.linkage == "C" or re.match(r'\s*extern\s+"C"', declaration_text)
    name = "::".join((*declaration.scope, match[1]))
    parameters = [parameter for parameter in split_list(match[3]) if parameter != "void"]
    return KernelDeclaration(name, template, tuple(parameters), "C" if is_c else "C++")


def _template(head: str) -> tuple[str, str]:
    """Return the template parameters and the rest of a head; of `template <>` none."""
    match = re.match(r"\s*template\s*<", head)
    if not match:
        return "", head
    depth = parentheses = 0
    for position in range(match.end() - 1, len(head)):
        parentheses += {"(": 1, ")": -1}.get(head[position], 0)
        depth += {"<": 1, ">": -1}.get(head[position], 0) if not parentheses else 0
        if not depth:
            return " ".join(head[match.end() : position].split()), head[position + 1 :]
    return "", head


def _last_list(head: str) -> str:
    """Return a head up to the end of its parameters, from the name before them."""
    end = head.rfind(")")
    depth = 0
    for position in range(end, -1, -1):
        depth += {")": 1, "(": -1}.get(head[position], 0)
        if not depth:
            name = re.search(r"[A-Za-z_]\w*\s*(?:<[^()]*>)?\s*$", head[:position])
            return head[name.start() if name else position : end + 1]
    return ""


def launches(text: str) -> list[str]:
    """List what a text launches with `<<<`: `ns::add<float, 3>`, in order, each once."""
    launched_names = (f"{match[1]}{match[2] or ''}" for match in _LAUNCH.finditer(blank(text)))
    return list(dict.fromkeys(" ".join(name.split()) for name in launched_names))


def own_text(preprocessed: str, foreign: tuple[str, ...]) -> str:
    """Return the preprocessed text of files that are not in the `foreign` folders, by its line markers."""
    parts, keeps, start = [], True, 0
    for marker in LINE_MARKER.finditer(preprocessed):
        if keeps:
            parts.append(preprocessed[start : marker.start()])
        path, start = os.path.normpath(marker[1]), marker.end()
        keeps = "/" in path and not path.startswith(foreign) if foreign else True
        keeps |= "/" not in path and not path.startswith("__nv")
    return "".join([*parts, preprocessed[start:] if keeps else ""])


def remove_host_declarations(text: str, host: Places, wrong: Places = ()) -> str:
    """Remove the functions and variables of the host at some places; lines keep their number.

    A `constexpr` function is declared for the device instead, as nvcc does with --expt-relaxed-constexpr, and left out
    only if it is `wrong` then. A place in no declaration changes nothing, nor one in what is declared for the device.
    """
    parsed_declarations = list(declarations(text))
    host_indices = _indices_at(text, parsed_declarations, host)
    # So that places stay.
    for index in sorted(host_indices | _indices_at(text, parsed_declarations, wrong), reverse=True):
        declaration = parsed_declarations[index]
        is_changed = _FOR_DEVICE in declaration.head
        constexpr = None if is_changed or text[declaration.end - 1] != "}" else _CONSTEXPR.search(declaration.head)
        declaration_text = text[declaration.start : declaration.end]
        if index in host_indices and constexpr:
            start = constexpr.start()
            declaration_text = f"{declaration_text[:start]}{_FOR_DEVICE} {declaration_text[start:]}"
        elif index in host_indices or is_changed:
            declaration_text = re.sub(r"[^\n]", " ", declaration_text)
        text = text[: declaration.start] + declaration_text + text[declaration.end :]
    return text


def _indices_at(text: str, declared: list[CppDeclaration], places: Places) -> set[int]:
    """Return the indices of the declarations at given places, except those for the device."""
    lines = [0, *(newline.end() for newline in re.finditer("\n", text))]
    starts = [declaration.start for declaration in declared]
    indices = set()
    for line, column in places:
        offset = lines[min(line, len(lines)) - 1] + column - 1
        index = bisect_right(starts, offset) - 1
        if index >= 0 and offset < declared[index].end and not declared[index].is_of_device:
            indices.add(index)
    return indices

"""Names that C++ compilers mangle, as people write them: `ns::add<float, 3>` for `_ZN2ns3addIfLi3EEEvPT_j`."""

import re
from collections.abc import Sequence
from functools import lru_cache

_SYMBOL = re.compile(r"(?<![\w$])(_Z\w+?)(_param_\d+)?\b")
_SPACES = re.compile(r"\s*([^\w\s])\s*")
_ANONYMOUS = "(anonymous namespace)::"


@lru_cache(maxsize=4096)
def demangle(symbol: str) -> str:
    """Demangle a symbol with its parameters, `ns::add<float, 3>(float*, unsigned int)`.

    What is not mangled stays as it is.
    """
    if not symbol.startswith("_Z"):
        return symbol
    import pydemumble  # LLVM's demangler; most programs never meet a mangled name

    demangled: str = pydemumble.demangle(symbol) or symbol
    return demangled.removeprefix("void ").replace(_ANONYMOUS, "")


def name_of(symbol: str) -> str:
    """Return the name alone, `ns::add<float, 3>`.

    For a variable or function within a function it is its own name.
    """
    demangled = demangle(symbol)
    if demangled.startswith("_Z"):
        return demangled
    head, _ = split_parameters(demangled)
    if head != demangled:
        return head
    inner_name = demangled.rpartition(")::")[2]  # `add(float*)::buf`
    return inner_name or demangled


def parameters_of(symbol: str) -> tuple[str, ...] | None:
    """Return the types of a kernel's parameters as the compiler sees them, typedefs resolved.

    Return None for what is not mangled.
    """
    if not symbol.startswith("_Z") or (demangled := demangle(symbol)).startswith("_Z"):
        return None
    _, parameters_text = split_parameters(demangled)
    return tuple(split_list(parameters_text or ""))


def split_parameters(text: str) -> tuple[str, str | None]:
    """Split `scale(float*)` into `scale` and `float*`; None where there is no list of parameters at the end."""
    if not text.endswith(")"):
        return text, None
    depth = 0
    for position in range(len(text) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(text[position], 0)
        if not depth:
            return text[:position], text[position + 1 : -1]
    return text, None


def split_list(text: str) -> list[str]:
    """Split at commas, but not at those within brackets of any kind."""
    parts, depth = [""], 0
    for character in text:
        depth += {**dict.fromkeys("(<[{", 1), **dict.fromkeys(")>]}", -1)}.get(character, 0)
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [" ".join(part.split()) for part in parts] if text.strip() else []


def normalise(name: str) -> str:
    """Spell equal names alike: `add<float,3>` and `add< float, (int)3 >` are the same."""
    name = re.sub(r"\(\s*(?:unsigned |long |int|bool|char|short)+\s*\)(?=-?\d)", "", name)
    name = _SPACES.sub(r"\1", " ".join(name.split())).removeprefix("::")
    return re.sub(r"(?<=\d)[uUlL]+\b", "", name)


def demangle_message(text: str) -> str:
    """Replace every mangled symbol in a message by its name."""
    return _SYMBOL.sub(lambda match: name_of(match[1]) + (match[2] or ""), text) if "_Z" in text else text


def distinct_names(symbols: Sequence[str]) -> list[str]:
    """List names that tell symbols apart; overloads have their parameters."""
    names = [name_of(symbol) for symbol in symbols]
    return [demangle(s) if names.count(n) > 1 else n for s, n in zip(symbols, names, strict=True)]


def find_symbols(symbols: Sequence[str], name: str) -> list[str]:
    """Find the symbols of that name: with or without parameters, the arguments of a template, namespaces."""
    normalised_name = normalise(name)

    def forms(symbol: str) -> set[str]:
        short_name = normalise(name_of(symbol))
        return {normalise(demangle(symbol)), short_name, short_name.partition("<")[0]}

    return [symbol for symbol in symbols if any(is_end_of(form, normalised_name) for form in forms(symbol))]


def is_end_of(qualified: str, name: str) -> bool:
    """Return whether a name is a qualified one without some of its namespaces."""
    name = name.removeprefix("::")
    return qualified == name or qualified.endswith(f"::{name}")

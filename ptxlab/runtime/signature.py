"""Types of a kernel's parameters: from the signature of a `.cu`, or from declarations and accesses of a `.ptx`.

What a name cannot be seen to mean (a typedef, a macro, a template, a struct) is not compared: an array is refused only
where the kernel would read other numbers than it holds. An array of uint8 is bytes, which every pointer takes.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ptxlab.declarations import KernelDeclaration
from ptxlab.emulator import Entry, PointerAccess, Variable, accesses_of
from ptxlab.errors import ArgumentError
from ptxlab.mangled import is_end_of, name_of, parameters_of, split_list

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_QUALIFIER = re.compile(
    r"\[\[.*?\]\]|__(?:align|attribute)__\s*\(+[^)]*\)+|"
    r"\b(?:const|volatile|__restrict__|__restrict|__grid_constant__|register|struct|enum)\b|\b(?:std|cuda)\s*::"
)
_INTEGER_WORDS = {"char", "short", "int", "long", "signed", "unsigned"}
_KEYWORDS = {*_INTEGER_WORDS, "void", "float", "double", "bool"}
_VECTOR = re.compile(r"(?:u?(?:char|short|int|long|longlong)|float|double)[1-4]")
_LONG = np.dtype("long").itemsize


@dataclass(frozen=True)
class Number:
    """A number in memory: `kind` is `i` (integer), `f` (float), `bf` (bfloat16) or `raw`, bits of whatever meaning."""

    kind: str
    nbytes: int = 0
    signed: bool | None = None  # of an integer; None: either
    is_vector: bool = False  # of several, such as float4, by which kernels also move narrower numbers

    def takes(self, dtype: np.dtype[Any], name: str) -> bool:
        """Check whether elements of that dtype are such numbers.

        `name` is the dtype's in the library it comes from.
        """
        if self.kind == "raw" or (self.is_vector and dtype.itemsize < self.nbytes):
            return True
        if self.kind == "bf":
            return name == "bfloat16" or (dtype.kind in "iu" and dtype.itemsize == 2)
        if self.kind == "f":
            return name != "bfloat16" and (dtype.kind, dtype.itemsize) in (("f", self.nbytes), ("c", 2 * self.nbytes))
        return dtype.itemsize == self.nbytes and (dtype.kind in "iu" or self.nbytes == 1)

    def __str__(self) -> str:
        if self.kind == "f":
            return f"float{8 * self.nbytes}"
        return "bfloat16 or its bits, uint16" if self.kind == "bf" else f"{8 * self.nbytes}-bit integers"

    def of(self, label: str, type_name: str, python_number: int | float) -> np.generic:
        """Convert a Python number to a scalar of this type. Raises ArgumentError if the type cannot hold it."""
        if self.kind == "i" and isinstance(python_number, int):
            bits = 8 * self.nbytes
            low, high = (0 if self.signed is False else -(1 << bits - 1)), (1 << bits - (self.signed is True)) - 1
            if not low <= python_number <= high:
                raise ArgumentError(label, f"{type_name} lies in {low}..{high}", python_number)
            scalar: np.generic = np.dtype(f"{'i' if python_number < 0 else 'u'}{self.nbytes}").type(python_number)
            return scalar
        if self.kind == "f":
            dtype = np.dtype(f"f{self.nbytes}")
            with np.errstate(over="ignore"):
                try:
                    number: np.generic = dtype.type(python_number)
                except OverflowError:  # of an int beyond every float
                    number = dtype.type(np.inf)
            if np.isinf(number) and python_number not in (float("inf"), float("-inf")):
                raise ArgumentError(label, f"{type_name} has to be finite in {self}", python_number)
            return number
        raise ArgumentError(
            label, f"{type_name}, which a Python number is not; pass a NumPy scalar", repr(python_number)
        )


_RAW = Number("raw")
_FLOAT16, _FLOAT32, _FLOAT64, _BFLOAT16 = Number("f", 2), Number("f", 4), Number("f", 8), Number("bf", 2)
_BYTE, _ADDRESS = Number("i", 1), Number("i", 8)
_BITS_16 = Number("i", 2, False)  # what kernels without cuda_fp16.h take halves as
_NAMED = {
    "void": _RAW, "float": _FLOAT32, "double": _FLOAT64, "bool": _BYTE, "byte": _RAW,
    "half": _FLOAT16, "__half": _FLOAT16, "nv_half": _FLOAT16, "half2": _FLOAT16, "__half2": _FLOAT16,
    "nv_half2": _FLOAT16, "nv_bfloat16": _BFLOAT16, "__nv_bfloat16": _BFLOAT16, "nv_bfloat162": _BFLOAT16,
    "__nv_bfloat162": _BFLOAT16, "cuComplex": _FLOAT32, "cuFloatComplex": _FLOAT32, "cuDoubleComplex": _FLOAT64,
    "__nv_fp8_e4m3": _BYTE, "__nv_fp8_e5m2": _BYTE,
    "size_t": Number("i", 8, False), "ptrdiff_t": Number("i", 8, True),
    "intptr_t": Number("i", 8, True), "uintptr_t": Number("i", 8, False),
    "uint": Number("i", 4, False), "ushort": Number("i", 2, False),
    **{f"{'' if signed else 'u'}int{bits}_t": Number("i", bits // 8, signed)
       for bits in (8, 16, 32, 64) for signed in (True, False)},
}  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """A parameter: its type as messages quote it; the number that it is, or points to (None: not known).

    `is_pointer` is None where it may be either; `accesses` are those of a `.ptx` through it; `struct_bytes` is the size
    of a struct that is passed by value. `is_const`: a pointer to what the kernel does not write.
    """

    name: str
    type: str = ""
    number: Number | None = None
    is_pointer: bool | None = None
    accesses: frozenset[PointerAccess] = frozenset()
    struct_bytes: int = 0
    is_const: bool = False

    @property
    def is_bfloat16(self) -> bool:
        """Return whether the parameter is a bfloat16, or points to such."""
        return self.number == _BFLOAT16

    def accept(self, label: str, argument: Any, dtype: str) -> Any:
        """Return the argument as it is, or a Python number as a NumPy scalar of the parameter's type.

        `argument` is a NumPy or CuPy array, a scalar, or anything else, which is left to the launch; `dtype` is its
        dtype's name where it comes from. Raises ArgumentError for another type than the parameter's.
        """
        if self.struct_bytes:
            return self._struct(label, argument, dtype)
        if isinstance(argument, bool | int | float) and not isinstance(argument, np.generic):
            return self._number(label, argument)
        if isinstance(argument, np.generic):
            self._check_scalar(label, argument)
        elif hasattr(argument, "dtype") and hasattr(argument, "shape"):
            self._check_array(label, argument, dtype)
        return argument

    def null(self, label: str) -> np.generic:
        """Return a null pointer; ArgumentError for a parameter that is no pointer."""
        if self.is_pointer or (self.is_pointer is None and (self.number is None or self.number.nbytes == 8)):
            return np.uint64(0)
        raise ArgumentError(
            label, f"the bytes of {self.type}" if self.struct_bytes else f"a number for {self.type}", None
        )

    def scalar(self, stored: Any) -> Any:
        """Convert a NumPy scalar read from a file back to the Python number that was stored, where it was one.

        An int64 or float64 becomes a Python number again if its size differs from the parameter's.
        """
        was_python = stored.dtype in (np.int64, np.float64, np.bool_)
        needs_resizing = (
            self.number is not None and self.is_pointer is False and self.number.nbytes != stored.dtype.itemsize
        )
        return stored.item() if was_python and needs_resizing else stored

    def _struct(self, label: str, argument: Any, dtype: str) -> bytes:
        """Return the bytes of a struct passed by value, given as bytes, or as an array or scalar of as many bytes."""
        if isinstance(argument, bytes | bytearray):
            raw, bytes_text = bytes(argument), f"{len(argument)} bytes"
        elif isinstance(argument, np.ndarray | np.generic):
            raw, bytes_text = argument.tobytes(), f"{argument.nbytes} bytes of {dtype or argument.dtype}"
        else:
            raw, bytes_text = b"", repr(argument)
        if len(raw) != self.struct_bytes:
            c_type = self.type if self.type and not self.type.startswith(".") else "a struct"
            rule = f"{c_type} is passed by value, as its {self.struct_bytes} bytes (a 0-d structured array, or uint8)"
            raise ArgumentError(label, rule, bytes_text)
        return raw

    def _number(self, label: str, number: int | float) -> np.generic:
        if self.is_pointer:
            raise ArgumentError(
                label, f"an array for {self.type}, null (None in Python) or an address (np.uint64)", repr(number)
            )
        if self.number is None or self.number.kind in ("raw", "bf"):
            raise ArgumentError(label, "a NumPy scalar, whose dtype says how wide the parameter is", repr(number))
        if self.number.kind == "i" and not isinstance(number, int):
            raise ArgumentError(label, f"an integer for {self.type}", repr(number))
        return self.number.of(label, self.type, number)

    def _check_scalar(self, label: str, scalar: np.generic) -> None:
        number = _ADDRESS if self.is_pointer else self.number
        if number is None or number.kind == "raw":
            return
        if not number.takes(scalar.dtype, scalar.dtype.name):
            rule = f"an array for {self.type}" if self.is_pointer else f"{self.type} takes {number}"
            raise ArgumentError(label, rule, f"{scalar.dtype} {scalar}")

    def _check_array(self, label: str, array: Any, name: str) -> None:
        if self.is_pointer is False and self.number is not None:
            raise ArgumentError(label, f"a number for {self.type}", f"an array of {name}{list(array.shape)}")
        dtype = array.dtype
        if name in ("uint8", "void") or dtype.kind == "V":
            return
        if self.is_pointer and self.number is not None:
            is_packed_int8 = name == "int8" and self.number.kind == "i"  # bytes in words
            is_float16_bits = name == "float16" and self.number == _BITS_16
            if not is_packed_int8 and not is_float16_bits and not self.number.takes(dtype, name):
                rule = f"{self.type} takes an array of {self.number}, or bytes (.view(np.uint8))"
                raise ArgumentError(label, rule, name)
        if not self._fits_accesses(dtype):
            accesses_text = " and ".join(sorted(map(str, self.accesses)))
            raise ArgumentError(
                label, f"the kernel accesses it as {accesses_text}, or give bytes (.view(np.uint8))", name
            )

    def _fits_accesses(self, dtype: np.dtype[Any]) -> bool:
        """Check whether elements of that dtype fit every known access.

        Bits may be moved in any pieces.
        """
        if dtype.kind == "f" and all(access.is_float for access in self.accesses):
            return not self.accesses or dtype.itemsize in {access.nbytes for access in self.accesses}
        if dtype == np.int64 and self.accesses:  # what NumPy makes of Python integers; packed words are unsigned
            return any(access.is_vector or access.nbytes == 8 for access in self.accesses)
        return True


def ptx_parameters(entry: Entry) -> tuple[Parameter, ...]:
    """Return the parameters of a kernel of PTX; `_Z3addPf_param_0` of a C++ kernel is `param_0`."""
    accesses = accesses_of(entry)
    parameters = [_parameter_of_variable(variable, accesses.get(variable.name)) for variable in entry.params]
    prefix = f"{entry.name}_" if entry.name.startswith("_Z") else ""
    return tuple(replace(parameter, name=parameter.name.removeprefix(prefix)) for parameter in parameters)


def _parameter_of_variable(variable: Variable, accesses: frozenset[PointerAccess] | None) -> Parameter:
    kind, bits, label = variable.type[0], variable.type[1:], f".param .{variable.type}"
    if accesses is not None:
        return Parameter(variable.name, label, None, True, accesses)
    if variable.type == "b8" and variable.size != 1:  # a struct, or a tensor map
        return Parameter(variable.name, label, None, False, struct_bytes=variable.size)
    if not bits.isdigit() or variable.size != int(bits) // 8:  # bf16
        return Parameter(variable.name)
    if kind == "f":
        return Parameter(variable.name, label, Number("f", variable.size), False)
    if kind == "b":
        return Parameter(variable.name)
    number = Number("i", variable.size, kind == "s")
    return Parameter(variable.name, label, number, None if variable.size == 8 else False)


def origin_of(ptx: str) -> str:
    """Return the source whose lines a compiler's PTX names: its first `.file`.

    Return an empty string if there is no `.file`, or no `.loc` line.
    """
    match = re.search(r'^\s*\.file\s+1\s+"([^"]+)"', ptx, re.MULTILINE)
    return match[1] if match and re.search(r"^\s*\.loc\s+\d", ptx, re.MULTILINE) else ""


def cuda_parameters(text: str, entry: str, names: Collection[str], macros: Collection[str]) -> tuple[Parameter, ...]:
    """Return the parameters of an `extern "C"` kernel by its signature; `macros` are names that `-D` defines."""
    text = _COMMENT.sub(" ", text)
    parameter_lists = {tuple(split_list(list_)) for list_ in _parameter_lists(text, entry)}
    if len(parameter_lists) != 1 or len(*parameter_lists) != len(names):  # the preprocessor decides
        return tuple(map(Parameter, names))
    (declarations,) = parameter_lists
    return tuple(
        parse_declaration(text, name, declaration, macros)
        for name, declaration in zip(names, declarations, strict=True)
    )


def mangled_parameters(symbol: str, declared: Sequence[KernelDeclaration]) -> tuple[Parameter, ...]:
    """Return the parameters of a C++ kernel: types come from its symbol, names from the declarations `declared`."""
    types = parameters_of(symbol) or ()
    names = _parameter_names(symbol, types, declared)
    return tuple(parse_declaration("", name, type_, ()) for name, type_ in zip(names, types, strict=True))


def add_struct_sizes(parameters: Sequence[Parameter], entry: Entry) -> tuple[Parameter, ...]:
    """Return the parameters with the bytes of structs as PTX declares them."""
    if len(parameters) != len(entry.params):
        return tuple(parameters)
    return tuple(map(_as_struct, parameters, entry.params))


def _parameter_names(symbol: str, types: Sequence[str], declared: Sequence[KernelDeclaration]) -> tuple[str, ...]:
    """Return the names of a mangled kernel's parameters from its declaration.

    Of several overloads, the one whose types are most alike decides.
    """
    base = name_of(symbol).partition("<")[0]
    candidates = [kernel for kernel in declared if is_end_of(base, kernel.name) or is_end_of(kernel.name, base)]
    candidates = [kernel for kernel in candidates if len(kernel.parameters) == len(types)]
    if not candidates:
        return tuple(f"arg{position}" for position in range(len(types)))

    def count_equal_types(kernel: KernelDeclaration) -> int:
        return sum(_normalise_type(a) == _normalise_type(b) for a, b in zip(kernel.types, types, strict=True))

    return max(candidates, key=count_equal_types).parameter_names


def _normalise_type(type_: str) -> str:
    """Normalise a type: without qualifiers and namespaces, its words in order.

    `const float *` and `float const*` become one.
    """
    return "".join(sorted(re.findall(r"\w+|\*", re.sub(r"\w+\s*::", "", _QUALIFIER.sub(" ", type_)))))


def _as_struct(parameter: Parameter, variable: Variable) -> Parameter:
    """Return a parameter of unknown type as a struct of as many bytes as PTX declares, if it declares bytes."""
    if parameter.is_pointer is None and variable.type == "b8":
        return replace(parameter, is_pointer=False, struct_bytes=variable.size)
    return parameter


def _parameter_lists(text: str, entry: str) -> list[str]:
    """Return the text between the parentheses of every declaration of the kernel."""
    lists = []
    for match in re.finditer(rf"\b{entry}\s*\(", text):
        head = re.split(r"[;{}]", text[: match.start()])[-1]
        depth, end = 1, match.end()
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        if re.search(r"\b__global__\b", head):
            lists.append(text[match.end() : end - 1])
    return lists


def parse_declaration(text: str, name: str, declaration: str, macros: Collection[str]) -> Parameter:
    """Parse a declaration without its attributes, such as `const float* x`.

    `text` may give its words other meanings.
    """
    bare_declaration = _QUALIFIER.sub(" ", declaration.partition("=")[0]).strip()
    arrays = bare_declaration.count("[")
    bare_declaration = re.sub(r"\[[^\]]*\]", "", bare_declaration).strip()
    if not re.fullmatch(r"[\w\s:*]+", bare_declaration):  # a template, a reference, a pointer to a function
        return Parameter(name)
    stars = bare_declaration.count("*") + arrays
    is_const = bool(re.match(r"[^*]*\bconst\b", declaration)) and stars == 1
    words = re.findall(r"[\w:]+", bare_declaration)
    if len(words) > 1 and words[-1] == name:
        words.pop()
    type_ = " ".join(words)
    label = type_ + "*" * stars
    if any(_is_redefined(word, text) or word in macros for word in words):
        return Parameter(name, label, None, True if stars else None, is_const=is_const)
    if stars > 1:
        return Parameter(name, label, _ADDRESS, True)
    number = _number_of_type(words)
    if number is None or (not stars and (number.kind == "raw" or _is_vector(words[0]))):
        return Parameter(name, label, None, True if stars else None, is_const=is_const)
    return Parameter(name, label, number, bool(stars), is_const=is_const)


def _number_of_type(words: list[str]) -> Number | None:
    """Return the number type of that name; None for a name that is not known."""
    if words and set(words) <= _INTEGER_WORDS:
        nbytes = 1 if "char" in words else 2 if "short" in words else 4
        if "long" in words:
            nbytes = 8 if words.count("long") > 1 else _LONG
        any_sign = "char" in words and len(words) == 1
        return Number("i", nbytes, None if any_sign else "unsigned" not in words)
    if len(words) != 1:
        return None
    if _VECTOR.fullmatch(words[0]):  # of integers: 16 bytes of anything at a time
        element_bytes = {"f": 4, "d": 8}.get(words[0][0])
        return Number("f", element_bytes, is_vector=True) if element_bytes else _RAW
    return _NAMED.get(words[0])


def _is_vector(word: str) -> bool:
    """Check whether a known type name stands for several numbers."""
    return bool(_VECTOR.fullmatch(word) or re.search(r"half2|bfloat162|Complex", word))


def _is_redefined(word: str, text: str) -> bool:
    """Check whether the text may redefine that name; keywords can only be redefined by macros."""
    pattern = rf"#\s*define\s+{word}\b"
    if word not in _KEYWORDS:
        pattern += (
            rf"|\busing\s+(?:\w+\s*::\s*)*{word}\b|\b(?:struct|class|enum|union|typename)\b[^;{{}}<>,=]*\b{word}\b"
        )
        pattern += rf"|(?:\btypedef\b[^;]*|}}[^;{{}}()]*)\b{word}\s*[;,)\[]"
    return re.search(pattern, text) is not None

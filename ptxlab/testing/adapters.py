"""Adapters for kernels of other libraries: they run from the PTX or source that is available without a GPU.

| object | what runs |
| --- | --- |
| Triton `@triton.jit`, also with `autotune`, `heuristics` | the PTX of `triton.compile`, specialised to the arguments |
| Triton's CompiledKernel | its PTX |
| numba.cuda `@cuda.jit` | the PTX of `numba.cuda.compile` |
| CuPy `RawKernel`, `RawModule` | the source, by NVRTC (extra `asm`) |
| cuda.core `ObjectCode` of PTX | its PTX |

A library is imported only after one of its objects was passed.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab import runtime
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.hardware.floats import bfloat16_bits
from ptxlab.hardware.tensor_map import TensorMap
from ptxlab.sources import Source

_TRITON_ARCH = "sm_80"
_SCRATCH = 16  # bytes of each scratch buffer: Triton's kernels have the parameters, and do not use them


@dataclass(frozen=True)
class Target:
    """A kernel and how to call it.

    Attributes:
        kernel: as `ptxlab.load` makes it.
        names: the caller's names of the arguments, in order.
        places: index of each argument's parameter; if an array is several parameters, that of the pointer.
        expand: the caller's arguments -> the values of all parameters; by default one each.
        block, shared_bytes: fixed by the kernel's compiler; None: the caller chooses.
    """

    kernel: runtime.Kernel
    names: tuple[str, ...]
    places: tuple[int, ...]
    expand: Callable[[Sequence[Any]], list[Any]] = list
    block: int | None = None
    shared_bytes: int | None = None

    @classmethod
    def of(cls, kernel: runtime.Kernel) -> "Target":
        """Make the target of a kernel called by its own parameters."""
        return cls(kernel, kernel.parameters, tuple(range(len(kernel.parameters))))

    @property
    def label(self) -> str:
        """The name in messages: for a Python function its own, not the mangled symbol."""
        return self.kernel.source.name if self.kernel.origin else self.kernel.name

    def arguments(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """Return the values of all parameters.

        Raises ArgumentError for an argument that is missing, repeated or unknown.
        """
        return self.expand(bind_arguments(self.kernel.name, self.names, args, named))


def bind_arguments(entry: str, names: Sequence[str], args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """Return the argument of each name, given by position or by name."""
    if len(args) > len(names):
        raise ArgumentError(f"{entry}: args", f"at most {len(names)} ({', '.join(names)})", len(args))
    arguments = dict(zip(names, args, strict=False))
    for name in named:
        if name not in names or name in arguments:
            rule = f"each of {', '.join(names)} once" if names else "no arguments"
            raise ArgumentError(f"{entry}: arguments", rule, name)
    arguments.update(named)
    if missing_names := [name for name in names if name not in arguments]:
        raise ArgumentError(f"{entry}: {missing_names[0]}", "must be given", ", ".join(arguments) or "nothing")
    return [arguments[name] for name in names]


def target(
    kernel: Any, options: Mapping[str, Any], args: Sequence[Any], named: Mapping[str, Any], targets: dict[Any, Target]
) -> tuple[Target, list[Any]]:
    """Adapt a kernel of another library, compiled once per session.

    Return the target and the values of all its parameters.
    """
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(kernel).__mro__}
    for kind, adapt in ADAPTERS.items():
        if kind in kinds:
            _refuse_options(options, f"a kernel of {kind.partition('.')[0]}", "include", "std")
            target_and_arguments: tuple[Target, list[Any]] = adapt(kernel, options, args, named, targets)
            return target_and_arguments
    rule = "a .ptx or .cu file, text, or a kernel of Triton, CuPy, numba.cuda or cuda.core"
    raise ArgumentError("kernel", rule, f"{type(kernel).__module__}.{type(kernel).__name__}")


def _refuse_options(options: Mapping[str, Any], kernel: str, *names: str) -> None:
    """Raise ArgumentError for the first of the options `names` that is set (not empty): `kernel` does not take it."""
    for name in names:
        if options[name]:
            raise ArgumentError(name, f"not for {kernel}, which its own library compiles", options[name])


def _load_text(text: str, label: str, entry: str | None, **options: Any) -> runtime.Kernel:
    return runtime.load(Source.from_text(text, label), entry, **options)


# Sources


def _adapt_cupy(kernel: Any, options: Mapping[str, Any], args: Any, named: Any, targets: dict[Any, Target]) -> Any:
    """Adapt CuPy's RawKernel and RawModule by their code and `-D` options."""
    if not kernel.code or kernel.backend != "nvrtc":
        raise ArgumentError(
            "kernel", "CuPy's from source code for NVRTC", kernel.file_path or f"backend {kernel.backend}"
        )
    entry = options["entry"] or getattr(kernel, "name", None)
    defines: dict[str, int | str] = {}
    for option in kernel.options:
        definition = re.fullmatch(r"-D\s*(\w+)(?:=(.*))?", option)
        if definition:
            text = definition[2] or "1"
            is_number = re.fullmatch(r"-?(?:0x[\da-fA-F]+|\d+)", text)
            defines[definition[1]] = int(text, 0) if is_number else text
        elif not re.match(r"(?:-std=|--std=|-lineinfo|--generate-line-info|--use_fast_math|-default-device)", option):
            raise ArgumentError("kernel", "options -D alone", option)
    key = ("cupy", kernel.code, kernel.options, entry, *sorted(options["defines"].items()), options["arch"])
    if key not in targets:
        constants = {**defines, **options["defines"]}
        label = f"<{entry or 'RawModule'}>"
        targets[key] = Target.of(_load_text(kernel.code, label, entry, defines=constants, arch=options["arch"]))
    return targets[key], targets[key].arguments(args, named)


def _adapt_object_code(
    kernel: Any, options: Mapping[str, Any], args: Any, named: Any, targets: dict[Any, Target]
) -> Any:
    """Adapt cuda.core's ObjectCode."""
    _refuse_options(options, "an ObjectCode", "defines", "arch")
    if kernel.code_type != "ptx":
        rule = "an ObjectCode of PTX (ObjectCode.from_ptx, Program.compile('ptx')): the emulator runs no machine code"
        raise ArgumentError("kernel", rule, kernel.code_type)
    code = kernel.code if isinstance(kernel.code, bytes) else str(kernel.code).encode()
    key = ("cuda.core", code, options["entry"])
    if key not in targets:
        text = code.decode(errors="replace").rstrip("\0")
        targets[key] = Target.of(_load_text(text, kernel.name or "<ObjectCode>", options["entry"]))
    return targets[key], targets[key].arguments(args, named)


def _adapt_program(kernel: Any, options: Mapping[str, Any], args: Any, named: Any, targets: dict[Any, Target]) -> Any:
    """Adapt cuda.core's Program, which compiles to PTX where there is a driver."""
    try:
        ptx_image = kernel.compile("ptx")
    except Exception as error:  # whatever that library raises
        reason = str(error).partition("\n")[0]
        raise UnavailableError(f"cuda.core's Program: {reason}; without a driver give its source text") from None
    return _adapt_object_code(ptx_image, options, args, named, targets)


# numba.cuda


def _adapt_numba(kernel: Any, options: Mapping[str, Any], args: Any, named: Any, targets: dict[Any, Target]) -> Any:
    """Adapt a numba.cuda dispatcher: an array is 5 parameters plus 2 per axis; the fifth is the pointer."""
    _refuse_options(options, "a kernel of numba.cuda", "defines", "entry")
    numba = sys.modules["numba"]
    function = kernel.py_func
    code = function.__code__
    arguments = bind_arguments(function.__name__, code.co_varnames[: code.co_argcount], args, named)
    try:
        types = tuple(map(numba.typeof, arguments))
    except ValueError as error:
        raise ArgumentError(
            f"{function.__name__}: args", "what numba has a type for", str(error).partition("\n")[0]
        ) from None
    architecture = re.fullmatch(r"sm_(\d+)(\d)a?", arch := options["arch"] or "sm_80")
    if not architecture:
        raise ArgumentError("arch", "sm_<number>, such as sm_80", arch)
    key = ("numba", function, types, arch)
    if key not in targets:
        cc = int(architecture[1]), int(architecture[2])
        try:
            text, _ = numba.cuda.compile(
                function, numba.types.void(*types), device=False, abi="numba", cc=cc, lineinfo=True, output="ptx"
            )
        except Exception as error:  # whatever that library raises
            raise ArgumentError(f"{function.__name__}: compile", "what numba.cuda compiles", error) from None
        if isinstance(text, bytes):
            text = text.decode()
        loaded = runtime.Kernel(
            Source(function.__name__, code.co_filename, "ptx", text), _only_entry(text), origin=code.co_filename
        )
        widths = [5 + 2 * type_.ndim if hasattr(type_, "ndim") else 1 for type_ in types]
        starts = [sum(widths[:i]) for i in range(len(widths))]
        places = tuple(start + 4 if width > 1 else start for start, width in zip(starts, widths, strict=True))
        names = tuple(code.co_varnames[: code.co_argcount])
        targets[key] = Target(loaded, names, places, lambda values: _flatten_arguments(values, types))
    return targets[key], targets[key].expand(arguments)


def _flatten_arguments(values: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    """Expand arguments to the parameters of a numba.cuda kernel.

    An array has (meminfo, parent, items, itemsize, pointer, shape, strides).
    """
    parameters: list[Any] = []
    for argument, kind in zip(values, types, strict=True):
        if not hasattr(kind, "ndim"):
            bits = getattr(kind, "bitwidth", 8)
            parameters.append(np.dtype(str(kind)).type(argument) if bits > 8 else np.dtype("u1").type(argument))
            continue
        counts = np.uint64(argument.size), np.uint64(argument.itemsize)
        null_pointer, sizes = np.uint64(0), (*argument.shape, *argument.strides)
        parameters += [null_pointer, null_pointer, *counts, argument, *map(np.uint64, sizes)]
    return parameters


def _only_entry(ptx: str) -> str:
    names = re.findall(r"\.entry\s+([\w$]+)", ptx)
    if len(names) != 1:
        raise ArgumentError("kernel", "one entry", ", ".join(names) or "none")
    name: str = names[0]
    return name


# Triton


def _adapt_compiled_triton(
    kernel: Any, options: Mapping[str, Any], args: Any, named: Any, targets: dict[Any, Target]
) -> Any:
    """Adapt a kernel that `triton.compile` returned."""
    _refuse_options(options, "a compiled kernel", "defines", "arch", "entry")
    constants = {path[0] for path in kernel.src.constants}
    names = [name for i, name in enumerate(kernel.src.fn.arg_names) if i not in constants]
    key = ("triton.compiled", kernel.hash)
    if key not in targets:
        targets[key] = _triton_target(kernel, names)
    return targets[key], targets[key].arguments(args, named)


def _adapt_triton(
    kernel: Any, options: Mapping[str, Any], args: Any, named_arguments: Any, targets: dict[Any, Target]
) -> Any:
    """Adapt a Triton function that is not compiled yet."""
    _refuse_options(options, "a Triton kernel", "defines", "entry")
    kernel, named_arguments = _unwrap_function(kernel, args, named_arguments)
    compiler, triton_target = _triton_compiler(options["arch"] or _TRITON_ARCH)
    names = tuple(kernel.arg_names)
    settings = {name: named_arguments.pop(name) for name in [*named_arguments] if name not in names}
    option_names = vars(compiler.make_backend(triton_target).parse_options({}))
    for name in settings:
        if name not in option_names:
            raise ArgumentError(f"{kernel.fn.__name__}: arguments", f"each of {', '.join(names)} once", name)
    defaults = {p.name: p.default for p in kernel.params if p.has_default and p.name not in named_arguments}
    defaults = {name: argument for name, argument in defaults.items() if name not in names[: len(args)]}
    arguments = bind_arguments(kernel.fn.__name__, names, args, {**defaults, **named_arguments})
    signature, constants, attributes = _specialise(kernel, arguments)
    parts = signature, constants, attributes, settings
    key = ("triton", kernel, options["arch"], *(tuple(map(repr, part.items())) for part in parts))
    if key not in targets:
        source = compiler.ASTSource(kernel, signature, constants, attributes)
        try:
            compiled_kernel = sys.modules["triton"].compile(source, target=triton_target, options=settings)
        except Exception as error:  # whatever that library raises
            problem = " ".join(str(error).split())
            raise ArgumentError(f"{kernel.fn.__name__}: triton.compile", "what Triton compiles", problem) from None
        targets[key] = _triton_target(compiled_kernel, [name for i, name in enumerate(names) if (i,) not in constants])
    runtime_arguments = [argument for i, argument in enumerate(arguments) if (i,) not in constants]
    return targets[key], targets[key].expand(
        [_triton_number(signature[n], v) for n, v in zip(targets[key].names, runtime_arguments, strict=True)]
    )


def _unwrap_function(
    kernel: Any, args: Sequence[Any], named_arguments: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Unwrap the function inside autotune and heuristics.

    Return it and the arguments by name, with the constants that the wrappers choose.
    """
    named_arguments = dict(named_arguments)
    while not hasattr(kernel, "params"):
        if configs := getattr(kernel, "configs", None):
            named_arguments = {**configs[0].all_kwargs(), **named_arguments}
        for name, heuristic in getattr(kernel, "values", {}).items():
            if name not in named_arguments:
                named_arguments[name] = heuristic(
                    {**dict(zip(kernel.arg_names, args, strict=False)), **named_arguments}
                )
        kernel = kernel.fn
    return kernel, named_arguments


def _specialise(
    kernel: Any, arguments: Sequence[Any]
) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any]]:
    """Return the arguments of Triton's compiler that specialise a function.

    They are types by name, and constants and attributes by position.
    """
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for i, (parameter, argument) in enumerate(zip(kernel.params, arguments, strict=True)):
        is_specialised = _is_int(argument) and not parameter.do_not_specialize
        if parameter.is_constexpr or argument is None or (is_specialised and argument == 1):
            signature[parameter.name], constants[(i,)] = "constexpr", argument
            continue
        label = f"{kernel.fn.__name__}: {parameter.name}"
        signature[parameter.name] = getattr(parameter, "annotation_type", "") or _triton_type(label, argument)
        if _is_array(argument) or (is_specialised and argument % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _triton_compiler(arch: str) -> tuple[Any, Any]:
    """Return Triton's compiler and its target for an architecture."""
    architecture = re.fullmatch(r"sm_(\d{2,3})a?", arch)
    if not architecture:
        raise ArgumentError("arch", "sm_<number>, such as sm_80 or sm_90", arch)
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    return compiler, GPUTarget("cuda", int(architecture[1]), 32)


def _triton_target(compiled: Any, names: Sequence[str]) -> Target:
    """Make the target of a compiled kernel: parameters of these names, then pointers to scratch memory."""
    facts, text = compiled.metadata, compiled.asm.get("ptx", "")
    if not text:
        raise ArgumentError("kernel", "compiled by Triton for NVIDIA", facts.target)
    refused_fields = {
        "global_scratch_size": "scratch memory is not emulated",
        "tmem_size": "the tensor memory of sm_100 (tcgen05) is not emulated",
    }
    for field, reason in refused_fields.items():
        if getattr(facts, field, 0):
            raise ArgumentError(f"{facts.name}: {field}", f"0: {reason}", getattr(facts, field))
    if getattr(facts, "num_ctas", 1) != 1:
        raise ArgumentError(f"{facts.name}: num_ctas", "1: clusters of Triton's are not launched here", facts.num_ctas)
    function = compiled.src.fn.fn
    file = function.__code__.co_filename
    # Triton's cache may hold it with the path of another copy of the file.
    text = re.sub(
        rf'(\.file\s+\d+ )"(?:[^"]*/)?{re.escape(Path(file).name)}"', lambda match: f'{match[1]}"{file}"', text
    )
    kernel = runtime.Kernel(Source(facts.name, file, "ptx", text), _only_entry(text), origin=file)
    entry = kernel.module.entries[kernel.entry]
    scratch = [np.zeros(_SCRATCH, np.uint8) for _ in range(len(entry.params) - len(names))]
    if len(scratch) not in (0, 1, 2):
        raise ArgumentError(f"{facts.name}: parameters", f"{len(names)} and two for scratch memory", len(entry.params))
    block = prod(entry.directives.get("reqntid") or (32 * facts.num_warps,))
    return Target(
        kernel,
        tuple(names),
        tuple(range(len(names))),
        lambda values: [*values, *scratch],
        block,
        facts.shared,
    )


_TRITON_TYPES = {
    **{f"{kind}int{bits}": f"{kind or 'i'}{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)},
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "bool": "i1",
    "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5",
}  # fmt: skip


def _is_int(argument: Any) -> bool:
    return isinstance(argument, int | np.integer) and not isinstance(argument, bool | np.bool_)


def _is_array(argument: Any) -> bool:
    return hasattr(argument, "dtype") and hasattr(argument, "shape") and not isinstance(argument, np.generic)


def _triton_type(label: str, argument: Any) -> str:
    """Return Triton's name for the type of an argument."""
    if isinstance(argument, TensorMap):
        raise ArgumentError(label, "an array or a number: Triton's host-side descriptors are not taken", "a tensor map")
    if hasattr(argument, "dtype"):
        name = str(argument.dtype).removeprefix("torch.")
        if name not in _TRITON_TYPES:
            raise ArgumentError(label, f"one of {', '.join(_TRITON_TYPES)}", name)
        return ("*" if _is_array(argument) else "") + _TRITON_TYPES[name]
    if isinstance(argument, bool):
        return "i1"
    if isinstance(argument, int):
        for kind, low, high in (("i32", -(2**31), 2**31), ("i64", -(2**63), 2**63), ("u64", 0, 2**64)):
            if low <= argument < high:
                return kind
        raise ArgumentError(label, "an integer of at most 64 bits", argument)
    if isinstance(argument, float):
        return "fp32"
    raise ArgumentError(label, "an array or a number", type(argument).__name__)


def _triton_number(kind: str, argument: Any) -> Any:
    """Convert a number to the width of its parameter; arrays stay as they are."""
    if _is_array(argument) or kind.startswith("*"):
        return argument
    if kind == "bf16":
        return bfloat16_bits(np.array([argument], np.float32))[0]
    numpy_types = {"i1": "u1", "u1": "u1", "fp16": "f2", "fp32": "f4", "fp64": "f8"}
    return np.dtype(numpy_types.get(kind) or f"{kind[0]}{int(kind[1:]) // 8}").type(argument)


Adapter = Callable[[Any, Mapping[str, Any], Sequence[Any], Mapping[str, Any], dict[Any, Target]], Any]
ADAPTERS: dict[str, Adapter] = {
    "triton.JITFunction": _adapt_triton,
    "triton.Autotuner": _adapt_triton,
    "triton.Heuristics": _adapt_triton,
    "triton.CompiledKernel": _adapt_compiled_triton,
    "cupy.RawKernel": _adapt_cupy,
    "cupy.RawModule": _adapt_cupy,
    "numba.CUDADispatcher": _adapt_numba,
    "cuda.ObjectCode": _adapt_object_code,
    "cuda.Program": _adapt_program,
}

"""A kernel's arguments: checks of arrays of any library before a launch, geometry, macros and sizes."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab import _moved, emulator, gpu
from ptxlab.errors import ArgumentError
from ptxlab.hardware.tensor_map import TensorMap
from ptxlab.runtime.signature import Parameter
from ptxlab.sources import Source
from ptxlab.spec import Arg, KernelSpec, Launch, Sizes
from ptxlab.spec.dtypes import ByVariant, dtype_in, name_of, storage
from ptxlab.validate import is_integer, is_one_of


def accept(spec: KernelSpec, arg: Arg, array: Any) -> Any:
    """Check dtype, contiguity and alignment; DLPack arrays become NumPy or CuPy arrays on the same memory.

    Where a constant of the variant decides the dtype, any of its dtypes will do; see `check_variant`.
    """
    array = gpu.as_array(f"{spec.name}: {arg.name}", array)
    dtypes = (arg.dtype,) if isinstance(arg.dtype, str) else arg.dtype.dtypes
    if array.dtype not in map(storage, dtypes):
        raise ArgumentError(f"{spec.name}: {arg.name}", f"dtype {' or '.join(dtypes)}", array.dtype)
    _check_contiguous(f"{spec.name}: {arg.name}", array)
    gpu.check_alignment(f"{spec.name}: {arg.name}", array)
    if arg.role in ("out", "inout", "scratch") and isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ArgumentError(f"{spec.name}: {arg.name}", "must be writeable", "a read-only array")
    return array


def variant_constants(
    spec: KernelSpec, sizes: Sizes, arrays: Mapping[str, Any], overrides: Mapping[str, int]
) -> dict[str, int]:
    """Return the constants of the variant to run.

    The spec chooses them by the sizes. Those of `overrides` replace them. Constants of dtypes and of arrays left
    out are as the arrays have them.
    """
    config = {**spec.config_for(sizes), **overrides}
    for arg in spec.args:
        if arg.absent:
            config[arg.absent] = int(arg.name not in arrays)
        if isinstance(arg.dtype, ByVariant) and not arg.dtype.by_sizes and arg.name in arrays:
            config[arg.dtype.constant] = [*map(storage, arg.dtype.dtypes)].index(arrays[arg.name].dtype)
    return config


def output_variant(spec: KernelSpec, out_dtype: Any) -> dict[str, int]:
    """Return the constants that give outputs the dtype `out_dtype`, where no input decides it.

    None means the first dtype there is: a GEMM's scaled numbers, and not the accumulators that it is verified by.
    """
    input_constants = {arg.dtype.constant for arg in spec.inputs if isinstance(arg.dtype, ByVariant)}
    free = [arg.dtype for arg in spec.outputs if isinstance(arg.dtype, ByVariant)]
    free = [dtype for dtype in free if dtype.constant not in input_constants and not dtype.by_sizes]
    if out_dtype is None:
        return {dtype.constant: 0 for dtype in free}
    name = name_of(out_dtype)
    if not free or name not in free[0].dtypes:
        rule = f"one of {', '.join(free[0].dtypes)}" if free else "must be left out: the outputs' dtype is settled"
        raise ArgumentError(f"{spec.name}: out_dtype", rule, name)
    return {dtype.constant: dtype.dtypes.index(name) for dtype in free}


def check_numbers(spec: KernelSpec, sizes: Sizes) -> None:
    """Raise ArgumentError for a size that is no whole number, unless the kernel takes a float of that name."""
    floats = {arg.name for arg in spec.args if not arg.shape and str(arg.dtype).startswith("float")}
    for name, size in sizes.items():
        if not is_integer(size) and (name not in floats or not isinstance(size, float | np.floating)):
            raise ArgumentError(f"{spec.name}: {name}", "a number" if name in floats else "an integer", repr(size))


def check_variant(spec: KernelSpec, config: Mapping[str, int], arrays: Mapping[str, Any]) -> None:
    """Raise `ArgumentError` for an array whose dtype is not the one that the variant takes."""
    for name, array in arrays.items():
        dtype = dtype_in(spec.arg(name).dtype, config)
        if array.dtype != storage(dtype):
            raise ArgumentError(f"{spec.name}: {name}", f"dtype {dtype}", array.dtype)


def require_on_host(name: str, array: Any, dtype: str, shape: tuple[int, ...], *, written: bool = False) -> Any:
    """Return the array as NumPy's, checked to be on the host, of that dtype and shape, and C-contiguous.

    bfloat16 may come as its bits, uint16. What is `written` has to be writeable. Raises ArgumentError otherwise.
    """
    if gpu.is_device_array(array):
        raise ArgumentError(name, "must be on the host, as the other arrays are", "an array on the GPU")
    array = gpu.as_array(name, array)
    if array.dtype != storage(dtype):
        raise ArgumentError(name, f"dtype {dtype}", array.dtype)
    if array.shape != shape:
        raise ArgumentError(name, f"shape {list(shape)}", list(array.shape))
    _check_contiguous(name, array)
    if written and not array.flags.writeable:
        raise ArgumentError(name, "must be writeable", "a read-only array")
    return array


def accept_for_parameter(name: str, parameter: Parameter, arg: Any) -> Any:
    """Convert an argument of a kernel without a spec to what its parameter takes.

    Arrays are converted as in `accept`, also in a tensor map; numbers become scalars.
    """
    if arg is None:
        return parameter.null(name)
    if isinstance(arg, TensorMap):
        return replace(arg, array=_shared(name, arg.array))
    is_array = hasattr(arg, "__dlpack__") or hasattr(arg, "__cuda_array_interface__")
    if not is_array and not isinstance(arg, np.generic | bool | int | float | bytes | bytearray):
        raise ArgumentError(name, "an array, a tensor map, a number or bytes", type(arg).__name__)
    if isinstance(arg, np.ndarray) and not arg.shape and not parameter.is_pointer and not parameter.struct_bytes:
        arg = parameter.scalar(arg[()])  # a number, as files hold them
        is_array = False
    if not is_array or isinstance(arg, np.generic):
        return parameter.accept(name, arg, "")
    array = _shared(name, arg)
    dtype = getattr(arg, "dtype", array.dtype)  # of bfloat16 the array has the bits
    return parameter.accept(name, array, str(dtype).removeprefix("torch."))


def _shared(name: str, array: Any) -> Any:
    array = gpu.as_array(name, array)
    _check_contiguous(name, array)
    if array.dtype.kind not in "biufcV" or array.dtype.hasobject or not array.dtype.isnative:
        raise ArgumentError(name, "numbers in native byte order", array.dtype)
    return array


def _check_contiguous(name: str, array: Any) -> None:
    if not array.flags.c_contiguous:
        raise ArgumentError(name, "C-contiguous", f"strides {array.strides}")


def order_arguments(name: str, signature: Sequence[Parameter], arrays: Mapping[str, Any]) -> list[Any]:
    """Return a file's arrays as the arguments of a kernel without a spec.

    They go by name, or `arr_0`, `arr_1` ... in order.
    """
    parameters = [parameter.name for parameter in signature]
    arrays = name_in_order(parameters, arrays)
    for parameter in parameters:
        if parameter not in arrays:
            raise ArgumentError(f"{name}: {parameter}", "must be given", ", ".join(arrays) or "no arguments")
    if extra_names := sorted(set(arrays) - set(parameters)):
        rule = f"each of {', '.join(parameters)}" if parameters else "none"
        raise ArgumentError(f"{name}: arguments", rule, extra_names[0])
    return [arrays[parameter] for parameter in parameters]


def name_in_order(parameters: Sequence[str], arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name a file's arrays by parameter.

    Arrays without a name, which `np.savez` calls `arr_0`, `arr_1` ..., take the parameters in order.
    """
    if set(arrays) & set(parameters) or not all(re.fullmatch(r"arr_\d+", key) for key in arrays):
        return arrays
    name_by_number = {f"arr_{i}": name for i, name in enumerate(parameters)}
    return {name_by_number.get(key, key): array for key, array in arrays.items()}


def source_of(source: str | Path | Source) -> Source:
    """Return a source as it is, or read it from a path, or make it of the text itself."""
    if isinstance(source, Source):
        return source
    if not isinstance(source, (str, Path)):
        raise ArgumentError("source", "a path, the text itself or a Source", repr(source))
    return Source.from_text(str(source)) if is_text(source) else Source.read(source)


def is_text(source: str | Path) -> bool:
    """Check whether `source` is the text of a kernel and not its path."""
    return isinstance(source, str) and ("\n" in source or "{" in source)


def check_defines(defines: Any, arch: Any) -> None:
    """Raise ArgumentError for `defines` or an architecture of a form that compilers do not take."""
    rule = "names of macros with integers or text, such as {'STAGES': 4}"
    if not isinstance(defines, Mapping):
        raise ArgumentError("defines", rule, repr(defines))
    for name, macro in defines.items():
        if not isinstance(name, str) or not name.isidentifier() or not isinstance(macro, int | np.integer | str):
            raise ArgumentError("defines", rule, {name: macro})
    if arch is not None and not isinstance(arch, str):
        raise ArgumentError("arch", "sm_<number>, such as sm_80 or sm_90a", repr(arch))


def positions(label: str, chosen: Collection[str], names: Sequence[str]) -> list[int]:
    """Return the positions of the chosen names among all `names`."""
    if isinstance(chosen, str | np.ndarray) or not isinstance(chosen, Collection):
        raise ArgumentError(label, f"some of {', '.join(names)}", repr(chosen))
    for name in chosen:
        if not is_one_of(name, names):
            raise ArgumentError(label, f"some of {', '.join(names)}", name)
    return [names.index(name) for name in chosen]


def check_flags(**flags: Any) -> None:
    """Raise ArgumentError for a keyword whose value is neither True nor False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ArgumentError(name, "must be True or False", repr(flag))


def geometry(grid: Any, block: Any, shared_bytes: Any = 0, cluster: Any = 1) -> Launch:
    """Build the geometry of a kernel without a spec. Raises ArgumentError for a size that is not valid."""
    if not is_integer(shared_bytes) or shared_bytes < 0:
        raise ArgumentError("shared_bytes", "an integer, 0 or more", repr(shared_bytes))
    grid, block = emulator.size_of("grid", grid), emulator.size_of("block", block)
    return Launch(grid, block, int(shared_bytes), emulator.size_of("cluster", cluster))


def is_on_device(arg: Any) -> bool:
    """Check whether an argument is an array in GPU memory, or a tensor map over one."""
    return gpu.is_device_array(arg.array if isinstance(arg, TensorMap) else arg)


def parse_integers(option: str, texts: Sequence[str]) -> dict[str, int]:
    """Parse `TILE=64` or `FIXED`, which counts as 1, as in a compiler's options."""
    values: dict[str, int] = {}
    for text in texts:
        name, equals_sign, digits = text.partition("=")
        if name in values:
            raise ArgumentError(option, "each name once", name)
        try:
            values[name] = int(digits if equals_sign else "1", 0)
        except ValueError:
            raise ArgumentError(option, "NAME=INTEGER", text) from None
        if not name.isidentifier():
            raise ArgumentError(option, "NAME=INTEGER", text or "nothing")
    return values


def parse_defines(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """Parse a compiler's macros: `TILE=64`, `FIXED`, which counts as 1, or `T=float`.

    Values are integers where the text is one.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, equals_sign, macro = text.partition("=")
        if name in values:
            raise ArgumentError(option, "each name once", name)
        if not name.isidentifier():
            raise ArgumentError(option, "NAME[=VALUE]", text or "nothing")
        try:
            values[name] = int(macro if equals_sign else "1", 0)
        except ValueError:
            values[name] = macro
    return values


def parse_sizes(option: str, text: str) -> dict[str, int]:
    """Parse `M=64,N=4096`; unlike a macro a size has to be given."""
    parts = text.split(",")
    if parts_without_value := [part for part in parts if "=" not in part]:
        raise ArgumentError(option, "NAME=INTEGER[,NAME=INTEGER..]", parts_without_value[0] or text or "nothing")
    return parse_integers(option, parts)


def merge_sizes(option: str, spec: KernelSpec, usual: Sizes, requested: Sizes) -> dict[str, Any]:
    """Return a kernel's usual sizes, overridden by the requested ones.

    Raises:
        ArgumentError: a size that the kernel does not have, or one below 1 that in none of its examples is.
    """
    if unknown_symbols := sorted(set(requested) - set(usual)):
        raise ArgumentError(option, f"{spec.name} takes {', '.join(usual)}", unknown_symbols[0])
    may_be_none = {name for sizes in spec.example_sizes for name, size in sizes.items() if size < 1}
    if too_small := [f"{name}={size}" for name, size in requested.items() if size < 1 and name not in may_be_none]:
        raise ArgumentError(option, "sizes of 1 or more", too_small[0])
    return {**usual, **requested}


def __getattr__(name: str) -> Any:
    """Look up a name that has moved."""
    return _moved.name_in(__name__, name)

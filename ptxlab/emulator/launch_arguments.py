"""What a launch is given: the kernel, sizes, checks and arguments, each refused by name where it cannot be."""

from collections.abc import Sequence

import numpy as np

from ptxlab.emulator.front.ir import Entry, Module
from ptxlab.emulator.front.types import Array
from ptxlab.errors import ArgumentError
from ptxlab.layout.tensor_map import TENSOR_MAP_BYTES, TensorMap
from ptxlab.spec import MOST_BLOCKS
from ptxlab.validate import is_integer, is_one_of

CHECKS = frozenset({"lanes", "race", "init", "async", "divergence"})
MODES = ("early", "late")
LARGEST_CLUSTER = 16
# Instructions that a wave of blocks dispatches, at some ten to a hundred microseconds each.
MAX_STEPS = 10_000_000

Argument = np.ndarray | np.generic | bytes | TensorMap
Dim3 = int | Sequence[int]
Extent = tuple[int, int, int]  # a Dim3 written out


def array_of(argument: Argument) -> Array | None:
    """The buffer that an argument points to: an array, or that of a tensor map."""
    if isinstance(argument, TensorMap):
        result: Array = argument.array
        return result
    return argument if isinstance(argument, np.ndarray) else None


def kernel_named(module: Module, name: str | None) -> Entry:
    """The module's kernel of that name; None stands for its only one."""
    if name is None and len(module.entries) == 1:
        return next(iter(module.entries.values()))
    if not module.entries:
        raise ArgumentError("entry", f"there is no kernel in {module.path} for {module.target or 'its target'}", name)
    if name not in module.entries:
        raise ArgumentError("entry", f"has to be one of {', '.join(module.entries)}", name)
    return module.entries[name]


def size_of(name: str, value: Dim3) -> Extent:
    """One to three positive integers as three."""
    sizes = tuple(value) if isinstance(value, tuple | list) else (value,)
    if not 1 <= len(sizes) <= 3 or any(not is_integer(size) or size < 1 for size in sizes):
        raise ArgumentError(name, "one to three positive integers", repr(value))
    x, y, z = (*map(int, sizes), 1, 1)[:3]
    return x, y, z


def steps_of(value: int) -> int:
    """A positive number of instructions."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ArgumentError("max_steps", "has to be a positive integer", value)
    return int(value)


def cluster_of(kernel: Entry, asked: Extent) -> Extent:
    """The cluster's size: what is asked for, or what the kernel was compiled for."""
    required = kernel.directives.get("reqnctapercluster")
    if not required:
        return asked
    x, y, z = (*required, 1, 1)[:3]
    if asked not in ((1, 1, 1), (x, y, z)):
        raise ArgumentError("cluster", f"has to be {(x, y, z)}, by .reqnctapercluster of {kernel.name}", asked)
    return x, y, z


def check_launch(
    kernel: Entry,
    grid: Extent,
    block: Extent,
    cluster: Extent,
    shared_bytes: int,
    checks: frozenset[str],
    mode: str,
    seed: int,
) -> None:
    """Refuse a launch that the kernel or any GPU would refuse."""
    if any(blocks > most for blocks, most in zip(grid, MOST_BLOCKS, strict=True)):
        raise ArgumentError("grid", f"has at most {MOST_BLOCKS} blocks", grid)
    threads = block[0] * block[1] * block[2]
    if threads > 1024 or block[2] > 64:
        raise ArgumentError("block", "has at most 1024 threads, and 64 in z", block)
    required = kernel.directives.get("reqntid")
    if required and (*required, 1, 1)[:3] != block:
        raise ArgumentError("block", f"has to be {required}, by .reqntid of {kernel.name}", block)
    if kernel.max_threads is not None and threads > kernel.max_threads:
        raise ArgumentError("block", f"has at most {kernel.max_threads} threads, by .maxntid of {kernel.name}", block)
    if cluster[0] * cluster[1] * cluster[2] > LARGEST_CLUSTER:
        raise ArgumentError("cluster", f"has at most {LARGEST_CLUSTER} blocks", cluster)
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise ArgumentError("cluster", f"has to divide the grid {grid}", cluster)
    if not is_integer(shared_bytes) or shared_bytes < 0 or kernel.dynamic_offset + shared_bytes > 227 * 1024:
        raise ArgumentError(
            "shared_bytes", "has to fit 227 KB with the kernel's static shared memory", repr(shared_bytes)
        )
    if checks - CHECKS:
        raise ArgumentError("checks", f"are {', '.join(sorted(CHECKS))}", ", ".join(sorted(checks - CHECKS)))
    if not is_one_of(mode, MODES):
        raise ArgumentError("mode", f"is one of {', '.join(MODES)}", mode)
    if not is_integer(seed) or seed < 0:
        raise ArgumentError("seed", "is an integer, 0 or more", repr(seed))


def check_arguments(kernel: Entry, args: Sequence[Argument]) -> None:
    """Refuse arguments that are not the parameters'."""
    if len(args) != len(kernel.params):
        raise ArgumentError("args", f"{kernel.name} takes {len(kernel.params)} arguments", len(args))
    for position, (value, param) in enumerate(zip(args, kernel.params, strict=True)):
        name, array = f"argument {position} ({param.name})", array_of(value)
        if array is not None:
            _check_array(name, array)
        if array is not None and isinstance(value, TensorMap) and param.size != TENSOR_MAP_BYTES:
            rule = f"is {param.size} bytes by value, not the {TENSOR_MAP_BYTES} of a tensor map"
            raise ArgumentError(name, rule, f"tensor map of {array.dtype}")
        if isinstance(value, np.ndarray) and param.size != 8:
            raise ArgumentError(name, f"is {param.size} bytes by value, not a buffer", f"array of {value.dtype}")
        if isinstance(value, np.generic | bytes):
            size = len(value) if isinstance(value, bytes) else value.dtype.itemsize
            if size != param.size:
                raise ArgumentError(name, f"has to have {param.size} bytes", f"{type(value).__name__} of {size}")
        elif array is None:
            rule = "has to be an array, a tensor map, a NumPy scalar or bytes"
            raise ArgumentError(name, rule, type(value).__name__)


def _check_array(name: str, array: Array) -> None:
    if not isinstance(array, np.ndarray):
        raise ArgumentError(name, "has to be a NumPy array", type(array).__name__)
    if not array.flags.c_contiguous:
        raise ArgumentError(name, "has to be C-contiguous", f"strides {array.strides}")
    if array.dtype.kind not in "biufcV" or array.dtype.hasobject or not array.dtype.isnative:
        raise ArgumentError(name, "has to hold numbers in native byte order", array.dtype.str)

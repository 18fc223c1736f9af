"""What a launch and a wave of its blocks consist of: lanes, registers, operands.

A lane is a thread of some block of the wave: lane = block * stride + thread, where stride is the block's size rounded
up to whole warps, so that `lane // 32` names a warp. Registers of one width form an array [register, lane].
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.emulator.core.findings import Findings, GlobalAccess, SharedAccess
from ptxlab.emulator.core.lanes import Lanes, Reader, Writer, count_of, indices_of
from ptxlab.emulator.core.memory import SHARED_START, Memory
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Entry, Instruction, Operand, Register
from ptxlab.emulator.front.opcode import UnknownOpcode
from ptxlab.emulator.front.types import DTYPES, FILES, Array, bits_of, is_float, is_signed
from ptxlab.emulator.options import EmulatorOptions
from ptxlab.hardware.tensor_map import TensorMap

MOST_PRINTED = 1 << 20  # characters of a launch, as CUDA's buffer has by default


@dataclass
class LaunchState:
    """State that all waves of a launch share."""

    entry: Entry
    memory: Memory
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int  # dynamic
    addresses: dict[int, int]  # id of a global, const or param variable -> its address
    args: Sequence[Any] = ()  # as they were passed, in launch order
    shared_windows: Array = field(init=False)  # arena offset of each block's, for as many blocks as a wave may have
    local_window: int = field(init=False)
    findings: Findings = field(default_factory=Findings)
    options: EmulatorOptions = field(default_factory=EmulatorOptions)
    unwritten: Array | None = None  # bool per byte of the arena: nobody has written it (check "init")
    after_wait: Sequence[int] = ()  # arena offsets of buffers that the kernel before makes (check "race")
    programmatic: bool = False  # whether it may begin while those before it in a chain still run (`chain`)
    at_wait: list[tuple[int, Array]] = field(default_factory=list)  # what these write, and where: there behind a wait
    has_waited: bool = False  # some thread has executed griddepcontrol.wait
    # of each byte that a launch of a chain has written without a proxy fence: by which of `writers`, from 1
    unfenced: Array | None = None
    writers: list[str] = field(default_factory=list)
    tracked: frozenset[int] = frozenset()  # loads, by index, whose values are tracked (`load_taint`)
    suspects: set[int] = field(default_factory=set)  # ordinary loads that have raced
    tensor_maps: dict[int, tuple[TensorMap, int]] = field(default_factory=dict)  # by arena offset; where its array is
    shared_accesses: dict[tuple[str, int, str], SharedAccess] = field(default_factory=dict)  # by path, line, text
    global_accesses: dict[tuple[str, int, str], GlobalAccess] = field(default_factory=dict)
    steps: int = 0
    lane_instructions: int = 0
    output: list[str] = field(default_factory=list)  # by printf
    printed: int = 0  # characters, those dropped too
    elapsed: int = 0  # on the step clock, by the waves before (`step_clock`)

    def print(self, text: str) -> None:
        """Add text that the kernel prints to the output, up to a length beyond which it is dropped, as on a GPU."""
        free_characters = MOST_PRINTED - self.printed
        self.printed += len(text)
        if free_characters > 0:
            self.output.append(text[:free_characters])

    def wait_for_predecessors(self) -> None:
        """Copy the earlier kernels' writes into memory, as griddepcontrol.wait makes them visible."""
        self.has_waited = True
        while self.at_wait:
            start, written_bytes = self.at_wait.pop()
            self.memory.arena[start : start + len(written_bytes)] = written_bytes

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return math.prod(self.block)

    @property
    def stride(self) -> int:
        """Lanes of a block: its threads, rounded up to whole warps."""
        return ceil_div(self.threads, 32) * 32

    @property
    def window_bytes(self) -> int:
        """Shared memory of a block, static and dynamic."""
        return self.entry.dynamic_offset + self.shared_bytes if self.shared_bytes else self.entry.shared_bytes

    @property
    def local_pitch(self) -> int:
        """Bytes from one lane's local window to the next: the window's size."""
        return ceil_div(self.entry.local_bytes, 16) * 16

    def is_shared(self, offsets: Array) -> Array:
        """Tell which arena offsets lie in a shared window."""
        if not len(self.shared_windows):
            return np.zeros(len(offsets), bool)
        last_window_end = self.shared_windows[-1] + self.window_bytes  # nothing else lies between the windows
        is_inside: Array = (offsets >= self.shared_windows[0]) & (offsets < last_window_end)
        return is_inside


class Wave:
    """The blocks with the given indices (ctaid), shape [blocks, 3]; their lanes and registers."""

    def __init__(self, launch: LaunchState, blocks: Array) -> None:
        self.launch, self.blocks = launch, blocks
        self.memory, self.code = launch.memory, launch.entry.instructions
        self.index = {id(instruction): i for i, instruction in enumerate(self.code)}
        self.stride = launch.stride
        self.lanes = len(blocks) * self.stride
        self.files = {
            bits: np.zeros((rows + (bits == 1), self.lanes), FILES[bits])
            for bits, rows in launch.entry.registers.items()
        }
        self.views: dict[tuple[str, str, bool], Array] = {}  # of the files, see `row`
        self.carry: Array = self.files[1][-1]  # the flag of every lane: one more predicate
        self.thread = np.arange(self.lanes) % self.stride
        self.alive = self.thread < launch.threads
        self.living = int(np.count_nonzero(self.alive))
        self.clock: Array | None = None  # of each warp; None: the instructions dispatched so far
        self.shared_base = np.repeat(launch.shared_windows[: len(blocks)] - SHARED_START, self.stride)
        self.local_base = launch.local_window + np.arange(self.lanes, dtype=np.int64) * launch.local_pitch

    def row(self, register: Register, type_name: str, relaxed: bool = False) -> Array:
        """View the register's row as the type; `relaxed`: the low part of a register that may be wider."""
        kind = register.type, type_name, relaxed
        if kind not in self.views:
            width, bits = bits_of(register.type), bits_of(type_name)
            if (width == 1) != (bits == 1):
                raise ValueError(f"{register.name} is {'' if width == 1 else 'not '}a predicate")
            if bits > width or (bits < width and not relaxed):
                raise ValueError(f"{register.name} has {width} bits, the instruction takes {bits}")
            self.views[kind] = self.files[width].view(DTYPES[type_name])[:, :: width // bits]
        row: Array = self.views[kind][register.index]
        return row

    def reader(self, operand: Operand, type_name: str, relaxed: bool = False) -> Reader:
        """Build a function lanes -> values of a source operand; constants have shape [1].

        `relaxed`: a wider register too.
        """
        if isinstance(operand, Register):
            row = self.row(operand, type_name, relaxed)
            if operand.negated:
                return lambda lanes: ~row[lanes]
            return row.__getitem__
        if isinstance(operand, ir.Special):
            return self.special(operand.name, type_name)
        constant = self.constant(operand, type_name)
        return lambda lanes: constant

    def constant(self, operand: Operand, type_name: str) -> Array:
        """Return an immediate, or a variable's address, as an array of shape [1]."""
        if type_name == "pred" and isinstance(operand, ir.Immediate):
            return np.array([operand.bits != 0])
        if isinstance(operand, ir.Symbol):
            return literal(self.address_of(operand), 0, type_name)
        if isinstance(operand, ir.Immediate):
            return literal(operand.bits, operand.float_bits, type_name)
        raise ValueError(f"{type(operand).__name__.lower()} where a value is expected")

    def address_of(self, symbol: ir.Symbol) -> int:
        """Return the address of a variable within its state space."""
        variable = symbol.variable
        if variable.space == "shared":
            return SHARED_START + variable.offset + symbol.offset
        if variable.space == "local":
            return variable.offset + symbol.offset
        return self.launch.addresses[id(variable)] + symbol.offset

    def writer(self, operand: Operand, type_name: str, relaxed: bool = False) -> Writer:
        """Build a function (lanes, values) that stores into a destination.

        `relaxed`: a wider register too, which the type's sign extends to.
        """
        if isinstance(operand, ir.Sink):
            return lambda lanes, values: None
        if not isinstance(operand, Register):
            raise ValueError("the destination is not a register")
        width, bits = bits_of(operand.type), bits_of(type_name)
        if bits == width or 1 in (bits, width):
            return self.row(operand, type_name).__setitem__
        if bits > width or not relaxed:
            raise ValueError(f"{operand.name} has {width} bits, the instruction writes {bits}")
        row = self.row(operand, f"{'s' if is_signed(type_name) else 'u'}{width}")
        if is_float(type_name):
            return lambda lanes, values: row.__setitem__(lanes, values.view(f"u{bits // 8}"))
        return row.__setitem__

    def special(self, name: str, type_name: str) -> Reader:
        """Build a function lanes -> values of a special register."""
        launch, (base, _, axis) = self.launch, name[1:].partition(".")
        dtype = DTYPES[type_name]
        if base in ("clock", "clock64", "clock_hi", "globaltimer", "globaltimer_lo", "globaltimer_hi"):
            shift = 32 if base.endswith("_hi") else 0
            if (clock := self.clock) is not None:
                return lambda lanes: (clock[indices_of(lanes) // 32] >> shift).astype(dtype)
            return lambda lanes: np.array([launch.steps >> shift], np.uint64).astype(dtype)
        x, y, _ = launch.block
        cluster = launch.cluster
        index = "xyz".find(axis) if axis else 0
        thread, lane = self.thread, self.thread % 32

        def block() -> Array:
            return np.arange(self.lanes) // self.stride

        def block_index() -> Array:
            indices: Array = self.blocks[block(), index]
            return indices

        def below() -> Array:
            return (np.uint64(1) << lane.astype(np.uint64)) - np.uint64(1)

        one, full = np.uint64(1), np.uint64(0xFFFFFFFF)
        values: dict[str, Callable[[], Any]] = {  # only the one that is asked for is made
            "tid": lambda: (thread % x, thread // x % y, thread // (x * y))[index],
            "ntid": lambda: launch.block[index],
            "ctaid": block_index,
            "nctaid": lambda: launch.grid[index],
            "cluster_ctaid": lambda: block_index() % cluster[index],
            "cluster_nctaid": lambda: cluster[index],
            "clusterid": lambda: block_index() // cluster[index],
            "nclusterid": lambda: launch.grid[index] // cluster[index],
            "cluster_ctarank": lambda: block() % math.prod(cluster),  # blocks of a cluster lie side by side in a wave
            "cluster_nctarank": lambda: math.prod(cluster),
            "is_explicit_cluster": lambda: math.prod(cluster) > 1,
            "laneid": lambda: lane,
            "warpid": lambda: thread // 32,
            "nwarpid": lambda: 64,
            "smid": lambda: block() % 132,
            "nsmid": lambda: 132,
            "gridid": lambda: 1,
            "dynamic_smem_size": lambda: launch.shared_bytes,
            "total_smem_size": lambda: launch.window_bytes,
            "lanemask_lt": below,
            "lanemask_le": lambda: below() << one | one,
            "lanemask_eq": lambda: below() + one,
            "lanemask_gt": lambda: full ^ (below() << one | one),
            "lanemask_ge": lambda: full ^ below(),
        }
        if base not in values:
            raise UnknownOpcode(name)
        row = np.broadcast_to(np.asarray(values[base]()), (self.lanes,)).astype(dtype)
        return row.__getitem__

    # Places

    def place_of(self, lane: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Return (block index, thread index) of a lane."""
        x, y, _ = self.launch.block
        block, thread = divmod(int(lane), self.stride)
        bx, by, bz = (int(i) for i in self.blocks[block])
        return (bx, by, bz), (thread % x, thread // x % y, thread // (x * y))

    def place(self, instruction: Instruction, lanes: Lanes) -> str:
        """Name lanes at an instruction: `path:line: `text`: block (0,0,0) thread (3,0,0) and 31 more`."""
        first, count = int(indices_of(lanes)[0]), count_of(lanes)
        return self.fault_place(instruction, first) + (f" and {count - 1} more" if count > 1 else "")

    def first_fault(self, instruction: Instruction, lanes: Lanes, wrong: Array) -> tuple[int, str]:
        """Return the position of the first lane that is `wrong`, and its `fault_place`."""
        first = int(np.argmax(wrong))
        return first, self.fault_place(instruction, int(indices_of(lanes)[first]))

    def fault_place(self, instruction: Instruction, lane: int) -> str:
        """Name a lane at an instruction: `path:line: `text`: block (0,0,0) thread (3,0,0)`."""
        block, thread = ("({},{},{})".format(*index) for index in self.place_of(lane))
        return f"{instruction.where}: block {block} thread {thread}"


@lru_cache(maxsize=1 << 16)
def literal(number: int, float_bits: int, type_name: str) -> Array:
    """Return a constant as an array of shape [1], which is shared: every launch binds the same ones."""
    dtype, bits = DTYPES[type_name], bits_of(type_name)
    if float_bits and dtype.kind == "f":
        constant = np.array([number], f"u{float_bits // 8}").view(f"f{float_bits // 8}").astype(dtype)
    elif float_bits not in (0, bits):
        raise ValueError(f"a {float_bits}-bit floating-point literal where the type is {type_name}")
    else:
        constant = np.array([number & (1 << bits) - 1], f"u{bits // 8}").view(dtype)
    constant.flags.writeable = False
    return constant

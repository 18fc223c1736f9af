"""One wave of blocks: their registers, and the scheduler that runs their lanes.

A lane is a thread of some block of the wave: lane = block * stride + thread, where stride is the block's size rounded
up to whole warps, so that `lane // 32` names a warp. Registers of one width form an array [register, lane]. Each
instruction is bound once to a *step*, a function of the lanes that run it, with its operands resolved to rows. A step
returns None when all its lanes go on to the next instruction, else a list of (instruction index, lanes) to go on
with; lanes that it leaves out have ended or are parked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from ptxlab.emulator import ir
from ptxlab.emulator.alu import UnknownOpcode, form
from ptxlab.emulator.check import Findings
from ptxlab.emulator.ir import Entry, Instruction, Operand, Register
from ptxlab.emulator.memory import BASE, Memory
from ptxlab.emulator.types import (
    DTYPES,
    FILES,
    Array,
    Lanes,
    bits_of,
    count_of,
    indices_of,
    is_float,
    is_signed,
    merge,
    split,
)
from ptxlab.errors import Deadlock, EmulationError, SourceError, UnknownInstruction

Outcome = list[tuple[int, Lanes]] | None
Step = Callable[[Lanes], Outcome]
Reader = Callable[[Lanes], Array]
Writer = Callable[[Lanes, Array], Any]

SHARED_START = 1024  # address of the first byte of a shared window, as on sm_90: null is out of bounds
# So many instructions are dispatched lowest-pc-first, which reconverges lanes; then as many in turn, so that lanes
# spinning on a flag cannot starve the one that will set it.
TURN = 2000

BINDERS: dict[str, Callable[[Machine, Instruction, int], Step]] = {}


def binder(*names: str):
    """Enter a function (machine, instruction, its index) -> step for opcodes that begin with these names."""

    def enter(function):
        BINDERS.update(dict.fromkeys(names, function))
        return function

    return enter


@dataclass
class Launch:
    """What all waves of a launch share."""

    entry: Entry
    memory: Memory
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int  # dynamic
    addresses: dict[int, int]  # id of a global, const or param variable -> its address
    shared_windows: Array  # arena offset of each block's shared window, for as many blocks as a wave may have
    local_window: int
    findings: Findings
    checks: frozenset[str]
    max_steps: int | None
    defined: Array | None = None  # bool per byte of the arena: written since it came into being (check "init")
    steps: int = 0
    lane_instructions: int = 0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def stride(self) -> int:
        """Lanes of a block: its threads, rounded up to whole warps."""
        return -(-self.threads // 32) * 32

    @property
    def window_bytes(self) -> int:
        """Shared memory of a block, static and dynamic."""
        return self.entry.dynamic_offset + self.shared_bytes if self.shared_bytes else self.entry.shared_bytes


@dataclass
class Parked:
    """Lanes that wait at an instruction; `why` says for what."""

    pc: int
    lanes: Lanes
    why: str


@dataclass(eq=False)
class Machine:
    """A wave: the blocks with the given indices (ctaid), shape [blocks, 3]."""

    launch: Launch
    blocks: Array
    ready: dict[int, Lanes] = field(default_factory=dict)
    watchers: tuple = ()

    def __post_init__(self) -> None:
        launch = self.launch
        self.memory, self.code = launch.memory, launch.entry.instructions
        self.stride = launch.stride
        self.lanes = len(self.blocks) * self.stride
        # one more predicate: the carry flag
        self.files = {
            bits: np.zeros((rows + (bits == 1), self.lanes), FILES[bits])
            for bits, rows in launch.entry.registers.items()
        }
        self.thread = np.arange(self.lanes) % self.stride
        self.alive = self.thread < launch.threads
        self.living = int(np.count_nonzero(self.alive))
        self.shared_base = np.repeat(launch.shared_windows[: len(self.blocks)] - SHARED_START, self.stride)
        self.local_base = launch.local_window + np.arange(self.lanes, dtype=np.int64) * self.local_pitch
        # who waits for the rest of its warp: place -> (instruction index, lanes, masks of those they wait for)
        self.meetings: dict[Any, list[tuple[int, Lanes, Array]]] = {}
        self.barriers: dict[tuple[int, int], Any] = {}  # (block, number) -> sync.Barrier with somebody at it
        self.put(0, split(slice(0, self.lanes), self.alive)[0])  # type: ignore[arg-type]
        self.steps: list[Step] = []

    @property
    def local_pitch(self) -> int:
        """Bytes of a lane's local window, and its distance to the next lane's."""
        return -(-self.launch.entry.local_bytes // 16) * 16

    # Operands

    def row(self, register: Register, type_name: str) -> Array:
        """The register's row, as the type sees it: the low part of a wider register, if need be."""
        width, bits = bits_of(register.type), bits_of(type_name)
        row = self.files[width][register.index]
        if bits > width:
            raise ValueError(f"{register.name} has {width} bits, the instruction takes {bits}")
        if width == 1:
            return row
        dtype = DTYPES[type_name]
        return row.view(dtype) if bits == width else row.view(dtype)[:: width // bits]

    def reader(self, operand: Operand, type_name: str) -> Reader:
        """Function lanes -> values of a source operand; constants have shape [1]."""
        if isinstance(operand, Register):
            row = self.row(operand, type_name)
            if operand.negated:
                return lambda lanes: ~row[lanes]
            return row.__getitem__
        if isinstance(operand, ir.Special):
            return self.special(operand.name, type_name)
        constant = self.constant(operand, type_name)
        return lambda lanes: constant

    def constant(self, operand: Operand, type_name: str) -> Array:
        """An immediate, or a variable's address, as an array of shape [1]."""
        if type_name == "pred" and isinstance(operand, ir.Immediate):
            return np.array([operand.bits != 0])
        if isinstance(operand, ir.Symbol):
            value, float_bits = self.address_of(operand), 0
        elif isinstance(operand, ir.Immediate):
            value, float_bits = operand.bits, operand.float_bits
        else:
            raise ValueError(f"{type(operand).__name__.lower()} where a value is expected")
        dtype, bits = DTYPES[type_name], bits_of(type_name)
        if float_bits and dtype.kind == "f":
            literal = np.array([value], f"u{float_bits // 8}").view(f"f{float_bits // 8}")
            return literal.astype(dtype)
        if float_bits > bits:
            raise ValueError(f"a {float_bits}-bit floating-point literal where the type is {type_name}")
        return np.array([value & (1 << bits) - 1], f"u{bits // 8}").view(dtype)

    def address_of(self, symbol: ir.Symbol) -> int:
        """Address of a variable within its state space."""
        variable = symbol.variable
        if variable.space == "shared":
            return SHARED_START + variable.offset + symbol.offset
        if variable.space == "local":
            return variable.offset + symbol.offset
        return self.launch.addresses[id(variable)] + symbol.offset

    def writer(self, operand: Operand, type_name: str) -> Writer:
        """Function (lanes, values) that stores into a destination, extended to its width by the type's sign."""
        if isinstance(operand, ir.Sink):
            return lambda lanes, values: None
        if not isinstance(operand, Register):
            raise ValueError("the destination is not a register")
        width, bits = bits_of(operand.type), bits_of(type_name)
        if bits == width or width == 1:
            return self.row(operand, type_name).__setitem__
        if bits > width:
            raise ValueError(f"{operand.name} has {width} bits, the instruction writes {bits}")
        row = self.row(operand, f"{'s' if is_signed(type_name) else 'u'}{width}")
        if is_float(type_name):
            return lambda lanes, values: row.__setitem__(lanes, values.view(f"u{bits // 8}"))
        return row.__setitem__

    @property
    def carry(self) -> Array:
        """The carry flag of every lane."""
        return self.files[1][-1]

    def special(self, name: str, type_name: str) -> Reader:
        """A special register."""
        launch, (base, _, axis) = self.launch, name[1:].partition(".")
        dtype = DTYPES[type_name]
        if base in ("clock", "clock64", "clock_hi", "globaltimer", "globaltimer_lo", "globaltimer_hi"):
            shift = 32 if base.endswith("_hi") else 0  # the time is the number of instructions dispatched
            return lambda lanes: np.array([launch.steps >> shift], np.uint64).astype(dtype)
        x, y, _ = launch.block
        index = "xyz".find(axis) if axis else 0
        block = np.arange(self.lanes) // self.stride
        lane = self.thread % 32
        one, full = np.uint64(1), np.uint64(0xFFFFFFFF)
        below = (one << lane.astype(np.uint64)) - one
        through = below | below + one
        masks = {"lt": below, "le": through, "eq": below + one, "gt": full ^ through, "ge": full ^ below}
        values: dict[str, Any] = {
            "tid": (self.thread % x, self.thread // x % y, self.thread // (x * y))[index],
            "ntid": launch.block[index],
            "ctaid": self.blocks[block, index],
            "nctaid": launch.grid[index],
            "laneid": lane,
            "warpid": self.thread // 32,
            "nwarpid": 64,
            "smid": block % 132,
            "nsmid": 132,
            "gridid": 1,
            "dynamic_smem_size": launch.shared_bytes,
            "total_smem_size": launch.window_bytes,
            **{f"lanemask_{kind}": mask for kind, mask in masks.items()},
        }
        if base not in values:
            raise UnknownOpcode(name)
        row = np.broadcast_to(np.asarray(values[base]), (self.lanes,)).astype(dtype)
        return row.__getitem__

    # Binding

    def bind(self) -> None:
        """Resolve every instruction to its step, and the checks that were asked for around it."""
        self.steps = [self.bound(instruction, pc) for pc, instruction in enumerate(self.code)]

    def bound(self, instruction: Instruction, pc: int) -> Step:
        """The step of one instruction, behind its guard."""
        head = instruction.opcode.split(".")[0]
        try:
            step = (BINDERS.get(head) or bind_operation)(self, instruction, pc)
            for watcher in self.watchers:
                step = watcher.around(instruction, step)
            if instruction.guard is not None:
                step = self.guarded(step, self.reader(instruction.guard, "pred"), pc)
                for watcher in self.watchers:
                    step = watcher.around_guard(instruction, step)
        except UnknownOpcode:
            raise UnknownInstruction(f"{instruction.where}: the emulator does not know this instruction") from None
        except ValueError as error:
            raise SourceError(instruction.path, instruction.line, str(error), instruction.text) from None
        return step

    def guarded(self, step: Step, predicate: Reader, pc: int) -> Step:
        """The step for those lanes whose predicate holds; the others go on."""

        def run(lanes: Lanes) -> Outcome:
            chosen, others = split(lanes, predicate(lanes))
            if chosen is None:
                return None
            outcome = step(chosen)
            return outcome if outcome is None or others is None else [*outcome, (pc + 1, others)]

        return run

    # Scheduling

    def put(self, pc: int, lanes: Lanes) -> None:
        """Let lanes go on at an instruction, together with those that are there already."""
        known = self.ready.get(pc)
        self.ready[pc] = lanes if known is None else merge(known, lanes)

    def end(self, lanes: Lanes) -> None:
        """Lanes that leave the kernel; who waits for them looks again."""
        self.alive[lanes] = False
        self.living -= count_of(lanes)
        parked, self.meetings = self.meetings, {}
        for waiting in parked.values():
            for pc, those, _ in waiting:
                self.put(pc, those)
        for barrier in list(self.barriers.values()):
            barrier.look_again(self)

    def run(self) -> None:
        """Run all lanes to their end; raises what they run into."""
        launch, steps, ready = self.launch, self.steps, self.ready
        end = len(steps)
        last = -1
        while ready:
            in_turn = launch.steps // TURN & 1
            pc = min((p for p in ready if p > last), default=min(ready)) if in_turn else min(ready)
            lanes = ready.pop(pc)
            last, start, outcome = pc, pc, None
            while outcome is None:
                if pc == end:
                    self.end(lanes)
                    break
                outcome = steps[pc](lanes)
                pc += 1
                if outcome is None and pc in ready:
                    outcome = [(pc, lanes)]
            launch.steps += pc - start
            launch.lane_instructions += (pc - start) * count_of(lanes)
            for target, those in outcome or ():
                self.put(target, those)
            if launch.max_steps is not None and launch.steps > launch.max_steps:
                self.exhausted(ready or {last: lanes})
        if self.living:
            self.deadlock()

    def exhausted(self, ready: dict[int, Lanes]) -> NoReturn:
        """Raise: the kernel has taken too many steps."""
        where = "; ".join(
            self.place(self.code[min(pc, len(self.code) - 1)], lanes) for pc, lanes in sorted(ready.items())
        )
        raise EmulationError(f"still running after {self.launch.max_steps} steps: {where}")

    def deadlock(self) -> NoReturn:
        """Raise: everybody waits; with every waiter's line."""
        waiting = [Parked(pc, lanes, "the rest of its warp") for m in self.meetings.values() for pc, lanes, _ in m]
        waiting += [parked for barrier in self.barriers.values() for parked in barrier.waiting]
        lines = [f"{self.place(self.code[p.pc], p.lanes)} waits for {p.why}" for p in waiting]
        raise Deadlock("deadlock: no thread can run\n  " + "\n  ".join(lines))

    # Places

    def place_of(self, lane: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """(block index, thread index) of a lane."""
        x, y, _ = self.launch.block
        block, thread = divmod(int(lane), self.stride)
        bx, by, bz = (int(i) for i in self.blocks[block])
        return (bx, by, bz), (thread % x, thread // x % y, thread // (x * y))

    def place(self, instruction: Instruction, lanes: Lanes) -> str:
        """`path:line: `text`: block (0,0,0) thread (3,0,0) and 31 more`."""
        more = count_of(lanes) - 1
        return f"{self.fault_place(instruction, int(indices_of(lanes)[0]))}" + (f" and {more} more" if more else "")

    def fault_place(self, instruction: Instruction, lane: int) -> str:
        """`path:line: `text`: block (0,0,0) thread (3,0,0)`."""
        block, thread = ("({},{},{})".format(*index) for index in self.place_of(lane))
        return f"{instruction.where}: block {block} thread {thread}"


def bind_operation(machine: Machine, instruction: Instruction, pc: int) -> Step:
    """Step of a register-to-register operation of the `alu` table."""
    selectors = tuple(getattr(operand, "selector", "") for operand in instruction.operands)
    known = form(instruction.opcode, selectors if any(selectors) else ())
    operands = list(instruction.operands)
    explicit = [t for t in known.out if t != "cc"]
    if operands and isinstance(operands[0], ir.Vector) and operands[0].pair:
        operands[:1] = operands[0].items
    elif explicit[1:] == ["pred"]:
        operands.insert(1, ir.Sink())
    sources = [t for t in known.sources if t != "cc"]
    given = len(operands) - len(explicit)
    if not len(sources) - known.optional <= given <= len(sources):
        raise ValueError(f"{instruction.opcode} takes {len(explicit) + len(sources)} operands, not {len(operands)}")
    writers = [machine.writer(o, t) for o, t in zip(operands, explicit, strict=False)]
    readers = [machine.reader(o, t) for o, t in zip(operands[len(explicit) :], sources, strict=False)]
    if "cc" in known.sources:
        readers.append(machine.carry.__getitem__)
    if "cc" in known.out:
        writers.append(machine.carry.__setitem__)
    compute = known.compute
    if len(writers) == 1:
        write = writers[0]
        if len(readers) == 1:
            (read,) = readers
            return lambda lanes: write(lanes, compute(read(lanes)))
        if len(readers) == 2:
            first, second = readers
            return lambda lanes: write(lanes, compute(first(lanes), second(lanes)))
        return lambda lanes: write(lanes, compute(*[read(lanes) for read in readers]))

    def several(lanes: Lanes) -> None:
        for write, values in zip(writers, compute(*[read(lanes) for read in readers]), strict=True):
            write(lanes, values)

    return several


@binder("mov")
def _move(machine: Machine, instruction: Instruction, pc: int) -> Step:
    parts = instruction.opcode.split(".")
    t = parts[-1]
    if len(parts) != 2 or (t not in DTYPES):
        raise UnknownOpcode(instruction.opcode)
    target, source = instruction.operands
    t = t if t == "pred" or is_float(t) else f"u{bits_of(t)}"
    if isinstance(source, ir.Vector):
        return _pack(machine, target, source.items, bits_of(t))
    if isinstance(target, ir.Vector):
        return _unpack(machine, target.items, source, bits_of(t))
    write, read = machine.writer(target, t), machine.reader(source, t)
    return lambda lanes: write(lanes, read(lanes))


def _pack(machine: Machine, target: Operand, items: tuple, bits: int) -> Step:
    part = bits // len(items)
    write = machine.writer(target, f"u{bits}")
    readers = [machine.reader(item, f"u{part}") for item in items]

    def pack(lanes: Lanes) -> None:
        columns = np.broadcast_arrays(*[read(lanes) for read in readers])
        write(lanes, np.stack(columns, axis=1).view(f"u{bits // 8}")[:, 0])

    return pack


def _unpack(machine: Machine, items: tuple, source: Operand, bits: int) -> Step:
    part = bits // len(items)
    read = machine.reader(source, f"u{bits}")
    writers = [machine.writer(item, f"u{part}") for item in items]

    def unpack(lanes: Lanes) -> None:
        columns = np.ascontiguousarray(read(lanes)).view(f"u{part // 8}").reshape(-1, len(writers)).copy()
        for i, write in enumerate(writers):
            write(lanes, columns[:, i])

    return unpack


@binder("bra")
def _branch(machine: Machine, instruction: Instruction, pc: int) -> Step:
    (target,) = instruction.operands
    if not isinstance(target, ir.Label):
        raise ValueError("bra takes a label")
    return lambda lanes: [(target.index, lanes)]


@binder("ret", "exit")
def _return(machine: Machine, instruction: Instruction, pc: int) -> Step:
    def end(lanes: Lanes) -> Outcome:
        machine.end(lanes)
        return []

    return end


@binder("trap", "brkpt")
def _trap(machine: Machine, instruction: Instruction, pc: int) -> Step:
    def trap(lanes: Lanes) -> NoReturn:
        raise EmulationError(f"{machine.place(instruction, lanes)}: the kernel trapped")

    return trap


@binder("cvta")
def _convert_address(machine: Machine, instruction: Instruction, pc: int) -> Step:
    parts = instruction.opcode.split(".")
    t, to, space = f"u{parts[-1][1:]}", "to" in parts, parts[-2]
    target, source = instruction.operands
    write, read = machine.writer(target, t), machine.reader(source, t)
    if space in ("shared", "shared::cta", "local"):
        base = (machine.local_base if space == "local" else machine.shared_base) + BASE
        sign = -1 if to else 1
        row = (sign * base).astype(DTYPES[t])
        return lambda lanes: write(lanes, read(lanes) + row[lanes])
    if space in ("global", "const", "param"):
        return lambda lanes: write(lanes, read(lanes))
    raise UnknownOpcode(instruction.opcode)


@binder("isspacep")
def _is_space(machine: Machine, instruction: Instruction, pc: int) -> Step:
    space = instruction.opcode.split(".")[1]
    write, read = machine.writer(instruction.operands[0], "pred"), machine.reader(instruction.operands[1], "u64")

    def is_space(lanes: Lanes) -> None:
        offsets = read(lanes).view(np.int64) - BASE
        shared = offsets - machine.shared_base[lanes] - SHARED_START
        in_shared = (shared >= 0) & (shared < machine.launch.window_bytes)
        local = offsets - machine.launch.local_window
        in_local = (local >= 0) & (local < machine.local_pitch * machine.lanes)
        spaces = {"shared": in_shared, "shared::cta": in_shared, "local": in_local, "global": ~in_shared & ~in_local}
        write(lanes, spaces.get(space, np.zeros_like(in_shared)))

    return is_space


@binder("nanosleep", "prefetch", "prefetchu", "discard", "applypriority", "griddepcontrol", "setmaxnreg")
def _nothing(machine: Machine, instruction: Instruction, pc: int) -> Step:
    return lambda lanes: None

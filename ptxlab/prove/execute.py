"""Symbolic execution of PTX: the stores of some threads of a launch, as bitvectors over their loads.

Threads go in lockstep, the lowest instruction first, each under a guard: the condition on which it gets there. A branch
on an input splits the guard, and where the ways meet again registers hold either value by condition. So there is one
run, whatever the inputs are. Addresses must come out as numbers, or as a few numbers by condition.

A `lane` is the index of one of the threads that are followed. Only `@lanes` means the packed fields of a register.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from time import process_time
from typing import Any, NoReturn

import z3

from ptxlab.emulator.core.access import decode
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Entry, Instruction, Register
from ptxlab.emulator.front.opcode import UnknownOpcode
from ptxlab.emulator.front.types import DTYPES, bits_of, is_float, is_signed
from ptxlab.emulator.ops.alu import selectors_of, typed_operands
from ptxlab.errors import PtxlabError
from ptxlab.prove.bitvectors import Bits, concatenate_fields, constant, extend, split_fields
from ptxlab.prove.semantics import computation
from ptxlab.prove.solve import check, symbols_of

MAX_STEPS = 20_000
MAX_ADDRESSES = 64  # that one access may have, by condition
MAX_ITERATIONS = 64  # of a loop whose length an input decides and no assumption bounds: one for each bit of a u64
SECONDS = 5.0  # of CPU time: for all iterations of such a loop, and for the addresses of one access
_MAX_ADVISED = 3  # inputs that an error proposes to assume; more of them are no advice
_SUGGESTED_NUMBER = 4  # that an error advises to assume for an input, if the input may have it
_WINDOW_BITS = 40  # bits of an address within its buffer
_BUFFER_START = 0x5A3C7E4B00  # where in its window a buffer begins: no claim holds because an address is a round number
_HARMLESS = ("membar", "fence", "nanosleep", "prefetch", "prefetchu", "discard", "applypriority", "griddepcontrol")
TRUE, FALSE = z3.BoolVal(True), z3.BoolVal(False)
Index = tuple[int, int, int]


class NotModelled(PtxlabError):  # noqa: N818  (like UnknownInstruction)
    """The prover does not know this instruction, or cannot follow this address."""


@dataclass(eq=False)
class Buffer:
    """Bytes that a pointer leads to: each a fresh symbol at its first read, and the stored term after a store.

    `size` None: of any size. `written` has for each byte the condition on which it has been stored to.
    """

    name: str
    size: int | None = None
    content: dict[int, Bits] = field(default_factory=dict)
    written: dict[int, Any] = field(default_factory=dict)
    initial: Callable[[int], Bits] | None = None  # what a byte holds at first; by default a symbol by name and offset
    types: set[str] = field(default_factory=set)  # of the elements that instructions access

    def initial_byte(self, offset: int) -> Bits:
        """Return the byte that lay at an offset before the launch."""
        return self.initial(offset) if self.initial else z3.BitVec(f"{self.name} byte {offset}", 8)

    def read(self, offset: int) -> Bits:
        """Return the byte at an offset."""
        if offset not in self.content:
            self.content[offset] = self.initial_byte(offset)
        return self.content[offset]

    def write(self, offset: int, byte: Bits, guard: Any) -> None:
        """Store a byte where the guard holds."""
        self.content[offset] = byte if z3.is_true(guard) else z3.If(guard, byte, self.read(offset))
        self.written[offset] = z3.Or(guard, self.written.get(offset, FALSE))


@dataclass
class LoopIterations:
    """Counters of a loop whose length an input decides: iterations, solver seconds, what each lane's last guard was.

    Attributes:
        guards: by lane, the guard and whether it can hold.
    """

    count: int = 0
    seconds: float = 0.0
    guards: dict[int, tuple[Any, bool]] = field(default_factory=dict)


@dataclass(frozen=True)
class LaneStep:
    """An executed instruction with `@lanes`: its packed fields are to be proved free of overflow."""

    instruction: Instruction
    guard: Any
    sources: dict[str, Bits]
    output: Bits


@dataclass(frozen=True)
class SymbolicRun:
    """Steps and faults of a symbolic run: annotated steps, and on which conditions something went wrong, and why.

    `missed` are annotated instructions that no thread came to.
    """

    steps: list[LaneStep]
    missed: list[Instruction]
    faults: list[tuple[Any, str]]


def execute(
    entry: Entry,
    arguments: Sequence[Bits | Buffer],
    *,
    grid: Index,
    block: Index,
    threads: Sequence[tuple[Index, Index]],
    assume: Sequence[Any] = (),
    advance: Callable[[str], object] = lambda _: None,
) -> SymbolicRun:
    """Run threads (block index, thread index) of a launch on arguments in launch order, bitvectors or buffers.

    Buffers are written in place; `advance` is told the line of each instruction. NotModelled names the line of what
    cannot be followed, and the input that it depends on.
    """
    return SymbolicExecution(entry, arguments, grid, block, threads, assume).run(advance)


class SymbolicExecution:
    """Symbolic run of some threads of a launch; `execute` explains the arguments."""

    def __init__(
        self,
        entry: Entry,
        arguments: Sequence[Bits | Buffer],
        grid: Index,
        block: Index,
        threads: Sequence[tuple[Index, Index]],
        assume: Sequence[Any],
    ) -> None:
        self.entry, self.code, self.grid, self.block = entry, entry.instructions, grid, block
        self.threads, self.assume = threads, assume
        self.opcodes = {instruction.opcode for instruction in self.code}
        self.buffers: list[Buffer] = []
        self.input_numbers = _input_numbers(assume)
        self.params = {
            id(p): constant(self.allocate(a), 64) if isinstance(a, Buffer) else self.fold_inputs(a)
            for p, a in zip(entry.params, arguments, strict=True)
        }
        blocks = dict.fromkeys(block for block, _ in threads)
        self.shared = {
            b: self.allocate(Buffer(f"shared of block {b}", entry.shared_bytes, initial=_unwritten_byte))
            for b in blocks
        }
        self.local = [
            self.allocate(Buffer(f"local of thread {t}", entry.local_bytes, initial=_unwritten_byte)) for t in threads
        ]
        self.variables: dict[int, int] = {}
        self.registers: list[dict[tuple[int, int], Bits]] = [{} for _ in threads]
        self.defined: list[dict[tuple[int, int], Any]] = [{} for _ in threads]  # on which condition they hold that
        # Last written, under which guard.
        self.recent: list[dict[tuple[int, int], tuple[Any, Bits]]] = [{} for _ in threads]
        self.guards: dict[int, Any] = {}  # of the lanes that execute now
        self.carry: list[Bits] = [z3.FreshConst(z3.BoolSort(), "undefined carry") for _ in threads]
        self.steps: list[LaneStep] = []
        self.faults: list[tuple[Any, str]] = []
        self.iterations: dict[int, LoopIterations] = defaultdict(LoopIterations)  # by the instruction that goes back

    def run(self, advance: Callable[[str], object] = lambda _: None) -> SymbolicRun:
        """Execute all threads to their end and return what they store."""
        guards_by_pc: dict[int, dict[int, Any]] = {0: dict.fromkeys(range(len(self.threads)), TRUE)}
        step_count = 0
        while guards_by_pc:
            pc = min(guards_by_pc)
            if pc == len(self.code):
                break
            step_count += 1
            if step_count > MAX_STEPS:
                self.refuse(
                    self.code[pc], f"a launch of more than {MAX_STEPS:,} instructions, the most that are followed"
                )
            advance(self.code[pc].where.partition(": ")[0])
            for target, guards in self.step(pc, guards_by_pc.pop(pc)):
                for lane, guard in guards.items():
                    if target <= pc and not self.can_go_back(pc, lane, guard):
                        continue
                    target_guards = guards_by_pc.setdefault(target, {})
                    target_guards[lane] = (
                        z3.simplify(z3.Or(target_guards[lane], guard)) if lane in target_guards else guard
                    )
        executed_ids = {id(step.instruction) for step in self.steps}
        missed_barriers = [
            instruction
            for instruction in self.code
            if instruction.lanes is not None and id(instruction) not in executed_ids
        ]
        return SymbolicRun(self.steps, missed_barriers, self.faults)

    def refuse(self, instruction: Instruction, reason: str) -> NoReturn:
        """Raise NotModelled with the place and the reason."""
        raise NotModelled(f"{instruction.where}: not modelled: {reason}")

    def fold_inputs(self, term: Any) -> Any:
        """Substitute the numbers that assumptions fix inputs to, so that branches on these inputs are decided."""
        return z3.simplify(z3.substitute(term, *self.input_numbers)) if self.input_numbers else term

    def can_hold(self, *conditions: Any) -> bool:
        """Return whether conditions can hold at all; true where the solver cannot tell."""
        if all(z3.is_true(condition) for condition in conditions) or any(
            z3.is_false(condition) for condition in conditions
        ):
            return not any(z3.is_false(condition) for condition in conditions)
        return bool(check(z3.Solver(), *self.assume, *conditions, seconds=SECONDS) != z3.unsat)

    def can_go_back(self, pc: int, lane: int, guard: Any) -> bool:
        """Return whether a lane can take a loop's backward branch under this guard.

        NotModelled: the guard changes turn by turn, so an input decides how many there are, and nothing bounds it.
        """
        iterations = self.iterations[pc]
        previous_guard, is_possible = iterations.guards.get(lane, (None, False))
        if previous_guard is not None and previous_guard.eq(guard):
            return is_possible
        # All lanes go round together, so the lowest one counts for all.
        iterations.count += previous_guard is not None and lane == min(iterations.guards)
        start_seconds = process_time()
        is_possible = self.can_hold(guard)
        iterations.seconds += process_time() - start_seconds
        iterations.guards[lane] = guard, is_possible
        if (
            is_possible
            and (iterations.count > MAX_ITERATIONS or iterations.seconds > SECONDS)
            and self.has_huge_input(guard)
        ):
            self.refuse(self.code[pc], f"how often this loop goes round depends on {self.advice(guard)}")
        return is_possible

    def has_huge_input(self, guard: Any) -> bool:
        """Return whether an input of a condition may be too large for a loop over it to be unrolled."""
        # A symbol of 8 bits is a byte of memory, which may be part of a wide number.
        words = [x for x in symbols_of([guard]).values() if z3.is_bv(x)]
        return any(x.size() < 16 or self.can_hold(guard, z3.UGT(x, MAX_STEPS)) for x in words) or not words

    def advice(self, term: Any) -> str:
        """Return a hint that names the inputs of a term and the assumptions that would make it a number.

        Both are written as on a command line.
        """
        inputs = dict[str, Bits]()
        for name, symbol in sorted(symbols_of([term]).items(), key=lambda pair: (len(pair[0]), pair[0])):
            buffer_name, _, offset = name.partition(" byte ")
            buffer = next((b for b in self.buffers if b.name == buffer_name), None) if offset.isdigit() else None
            if buffer is not None:
                size = max((bits_of(t) // 8 for t in buffer.types), default=1)
                start = int(offset) // size * size
                word = concatenate_fields([buffer.initial_byte(start + i) for i in range(size)])
                inputs[f"{buffer.name}.u{8 * size}[{start // size}]"] = word
            elif any(symbol.eq(parameter) for parameter in self.params.values() if z3.is_expr(parameter)):
                inputs[name] = symbol
            elif "[" in name:  # an element of a spec's logical input: only the spec's rules bound it, no --assume
                inputs.setdefault(name, None)
        if not inputs:
            return "what nothing has written"
        input_names = ", ".join([*inputs][:_MAX_ADVISED])
        if len(inputs) > _MAX_ADVISED:
            input_names += f" and {len(inputs) - _MAX_ADVISED} more"
        if None in inputs.values() or len(inputs) > _MAX_ADVISED:
            return input_names
        solver = z3.Solver()
        solver.add(*self.assume)
        assumptions = []
        for name, bits in inputs.items():
            if check(solver, bits == _SUGGESTED_NUMBER, seconds=1) == z3.sat:
                number = _SUGGESTED_NUMBER
            elif check(solver, seconds=1) == z3.sat:
                number = solver.model().eval(bits, model_completion=True).as_signed_long()
            else:
                return input_names
            solver.add(bits == number)
            assumptions.append(f"--assume '{name} == {number}'")
        return f"{input_names}: add {' '.join(assumptions)}, or another value"

    # Addresses

    def allocate(self, buffer: Buffer) -> int:
        """Give a buffer an address."""
        self.buffers.append(buffer)
        return (len(self.buffers) << _WINDOW_BITS) + _BUFFER_START

    def symbol_address(self, symbol: ir.Symbol) -> int:
        """Return the address of a variable, in its space where that is shared or local."""
        variable = symbol.variable
        if variable.space in ("shared", "local"):
            return variable.offset + symbol.offset
        if id(variable) not in self.variables:
            initial_bytes = dict(enumerate(constant(b, 8) for b in variable.initial or b""))
            self.variables[id(variable)] = self.allocate(
                Buffer(variable.name, variable.size, initial_bytes, initial=_unwritten_byte)
            )
        return self.variables[id(variable)] + symbol.offset

    # Registers

    def read(self, lane: int, operand: ir.Operand, type_name: str) -> Bits:
        """Read a source operand as bits of the type's width, or a Bool."""
        bits = bits_of(type_name)
        if isinstance(operand, Register):
            width = bits_of(operand.type)
            if (width == 1) != (bits == 1):
                raise ValueError(f"{operand.name} is {'' if width == 1 else 'not '}a predicate")
            register_bits = self.register(lane, operand, width)
            if bits > width:
                raise ValueError(f"{operand.name} has {width} bits, the instruction takes {bits}")
            if bits == 1:
                return z3.simplify(z3.Not(register_bits)) if operand.negated else register_bits
            return extend(register_bits, bits, False)
        if isinstance(operand, ir.Immediate):
            if operand.float_bits not in (0, bits):
                raise ValueError("a floating-point constant of another width")
            return z3.BoolVal(operand.bits != 0) if bits == 1 else constant(operand.bits, bits)
        if isinstance(operand, ir.Special):
            return constant(self.special_register(operand.name, lane), bits)
        if isinstance(operand, ir.Symbol):
            return constant(self.symbol_address(operand), bits)
        raise ValueError(f"{type(operand).__name__.lower()} where a value is expected")

    def register(self, lane: int, register: Register, width: int) -> Bits:
        """Read a register; where nothing has written it, its bits are unknown."""
        key = width, register.index
        current_value, is_defined = self.registers[lane].get(key), self.defined[lane].get(key, FALSE)
        guard = self.guards.get(lane, TRUE)
        written_under, recent_bits = self.recent[lane].get(key, (FALSE, None))
        if recent_bits is not None and _implies_condition(guard, written_under):
            return recent_bits  # shorter than `current_value`, which grows by one z3.If with each iteration of a loop
        if current_value is not None and (
            _implies_condition(guard, is_defined) or not self.can_hold(guard, z3.Not(is_defined))
        ):
            return current_value
        unknown_value = z3.FreshConst(
            z3.BoolSort() if width == 1 else z3.BitVecSort(width), f"undefined {register.name}"
        )
        return unknown_value if current_value is None else z3.If(is_defined, current_value, unknown_value)

    def write(self, lane: int, guard: Any, operand: ir.Operand, word: Bits, signed: bool = False) -> None:
        """Store into a destination where the guard holds; a wider register is filled by the sign."""
        if isinstance(operand, ir.Sink):
            return
        if not isinstance(operand, Register):
            raise ValueError("the destination is not a register")
        width = bits_of(operand.type)
        if width > 1:
            word = extend(word, width, signed)
        key = width, operand.index
        self.recent[lane][key] = guard, z3.simplify(word)
        if key in self.registers[lane] and not z3.is_true(guard):
            word = z3.If(guard, word, self.registers[lane][key])
            guard = z3.simplify(z3.Or(guard, self.defined[lane][key]))
        self.registers[lane][key], self.defined[lane][key] = z3.simplify(word), guard

    def special_register(self, name: str, lane: int) -> int:
        """Return the value of a special register such as `%tid.x` for one lane."""
        base, _, axis = name[1:].partition(".")
        block, thread = self.threads[lane]
        thread_index = self.thread_index(lane)
        dim = "xyz".find(axis) if axis else 0
        lanes_below = (1 << thread_index % 32) - 1
        values: dict[str, int] = {
            "tid": thread[dim], "ntid": self.block[dim], "ctaid": block[dim], "nctaid": self.grid[dim],
            "laneid": thread_index % 32, "warpid": thread_index // 32, "lanemask_lt": lanes_below,
            "lanemask_le": 2 * lanes_below + 1, "lanemask_eq": lanes_below + 1,
            "lanemask_gt": 0xFFFFFFFF ^ (2 * lanes_below + 1), "lanemask_ge": 0xFFFFFFFF ^ lanes_below,
        }  # fmt: skip
        if base not in values:
            raise ValueError(f"{name} is not modelled")
        return values[base]

    def thread_index(self, lane: int) -> int:
        """Return the thread's number in its block."""
        x, y, z = self.threads[lane][1]
        return x + self.block[0] * (y + self.block[1] * z)

    # Instructions

    def step(self, pc: int, guards: dict[int, Any]) -> Iterator[tuple[int, dict[int, Any]]]:
        """Execute an instruction for lanes under their guards; yield where they go on, each under its guard."""
        instruction, self.guards = self.code[pc], guards
        active_guards, skipped_guards = guards, dict[int, Any]()
        try:
            if instruction.guard is not None:
                predicates = {lane: self.read(lane, instruction.guard, "pred") for lane in guards}
                active_guards = _restrict_guards(guards, predicates)
                skipped_guards = _restrict_guards(
                    guards, {lane: z3.Not(predicate) for lane, predicate in predicates.items()}
                )
            if skipped_guards:
                yield pc + 1, skipped_guards
            if not active_guards:
                return
            head = instruction.head
            if head == "bra":
                yield instruction.operands[0].index, active_guards
            elif head in ("ret", "exit"):
                return
            elif head in ("trap", "brkpt"):
                self.faults += [(guard, f"{instruction.where}: the kernel traps") for guard in active_guards.values()]
            else:
                self.guards = active_guards
                self.perform(instruction, active_guards)
                yield pc + 1, active_guards
        except (ValueError, UnknownOpcode) as error:
            reason = "no such instruction" if isinstance(error, UnknownOpcode) else str(error)
            self.refuse(instruction, reason)

    def perform(self, instruction: Instruction, guards: dict[int, Any]) -> None:
        """Execute one instruction for every lane, under its guard."""
        head = instruction.head
        operation_by_head: dict[str, Callable[[Instruction, int, Any], None]] = {
            "ld": self.load, "ldu": self.load, "st": self.store, "mov": self.move, "cvta": self.convert_address,
        }  # fmt: skip
        if head in _HARMLESS:
            return
        if head in ("bar", "barrier"):
            self.check_barrier(instruction, guards)
        elif head == "shfl":
            self.shuffle(instruction, guards)
        else:
            for lane, guard in guards.items():
                operation_by_head.get(head, self.compute)(instruction, lane, guard)

    def check_barrier(self, instruction: Instruction, guards: dict[int, Any]) -> None:
        """Raise ValueError unless a barrier's threads reach it at once, under one guard, so that it holds none back."""
        words = instruction.opcode.split(".")
        if {"red", "arrive", "cluster"} & {*words}:
            raise ValueError("no such barrier")
        is_warp_barrier, thread_count = "warp" in words, prod(self.block)
        arrivals: dict[Any, list[Any]] = defaultdict(list)  # block, warp, threads that are waited for -> who is here
        for lane, guard in guards.items():
            block, warp = self.threads[lane][0], self.thread_index(lane) // 32 if is_warp_barrier else 0
            numbers = [
                _require_number(self.read(lane, operand, "u32"), "a barrier") for operand in instruction.operands
            ]
            if is_warp_barrier:
                expected_count = (numbers[0] & (1 << min(32, thread_count - 32 * warp)) - 1).bit_count()
            else:
                expected_count = numbers[1] if numbers[1:] else thread_count
            arrivals[block, warp, expected_count].append(guard)
        for (*_, expected_count), arrived_guards in arrivals.items():
            if len(arrived_guards) != expected_count or not all(
                guard.eq(arrived_guards[0]) for guard in arrived_guards
            ):
                raise ValueError(
                    f"of the {expected_count} threads of a barrier, {len(arrived_guards)} come to it, on some condition"
                )

    def compute(self, instruction: Instruction, lane: int, guard: Any) -> None:
        """Execute a register-to-register operation of the emulator's table for one lane."""
        operation, targets, typed_sources = typed_operands(instruction)
        self.check_contraction(instruction)
        sources = [self.read(lane, operand, t) for operand, t in typed_sources]
        if "cc" in operation.sources:
            sources.append(self.carry[lane])
        function = computation(instruction.opcode, selectors_of(instruction))
        outputs = function(*sources)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if instruction.lanes is not None:
            letters = [letter for letter in "abc" if letter in instruction.lanes]
            lane_sources = {letter: sources["abc".index(letter)] for letter in letters}
            self.steps.append(LaneStep(instruction, guard, lane_sources, outputs[0]))
        if "cc" in operation.out:
            flag = outputs[-1]
            self.carry[lane] = flag if z3.is_true(guard) else z3.If(guard, flag, self.carry[lane])
        for (operand, t), output in zip(targets, outputs, strict=False):
            self.write(lane, guard, operand, output, is_signed(t))

    def check_contraction(self, instruction: Instruction) -> None:
        """Check that ptxas cannot fuse a float `mul` with this `add` or `sub`.

        Without a rounding modifier it may fuse them, and they then round once. Raises ValueError if it may.
        """
        head, *words = instruction.opcode.split(".")
        if head in ("add", "sub") and len(words) == 1 and is_float(words[0]) and f"mul.{words[0]}" in self.opcodes:
            raise ValueError(f"ptxas may fuse it with a mul.{words[0]}: write {head}.rn.{words[0]}")

    def move(self, instruction: Instruction, lane: int, guard: Any) -> None:
        """Execute `mov` for one lane."""
        t = instruction.opcode.split(".")[-1]
        if instruction.opcode.count(".") != 1 or t not in DTYPES:
            raise UnknownOpcode(instruction.opcode)
        target, source = instruction.operands
        bits = bits_of(t)
        if isinstance(source, ir.Vector):
            part = f"u{bits // len(source.elements)}"
            word = concatenate_fields([self.read(lane, element, part) for element in source.elements])
        else:
            word = self.read(lane, source, t)
        if isinstance(target, ir.Vector):
            for element, piece in zip(target.elements, split_fields(word, bits // len(target.elements)), strict=True):
                self.write(lane, guard, element, piece)
        else:
            self.write(lane, guard, target, word)

    def convert_address(self, instruction: Instruction, lane: int, guard: Any) -> None:
        """Execute `cvta` for one lane: between a generic address and one within a space."""
        parts = instruction.opcode.split(".")
        target, source = instruction.operands
        address = self.read(lane, source, f"u{parts[-1][1:]}")
        space = parts[-2].split("::")[0]
        if space in ("shared", "local"):
            base = self.shared[self.threads[lane][0]] if space == "shared" else self.local[lane]
            address = address + constant(-base if "to" in parts else base, address.size())
        elif space not in ("global", "const", "param"):
            raise UnknownOpcode(instruction.opcode)
        self.write(lane, guard, target, address)

    def shuffle(self, instruction: Instruction, guards: dict[int, Any]) -> None:
        """Execute shfl[.sync].mode.b32 d[|p], a, b, c[, mask]; lanes, b and c have to be numbers."""
        words = instruction.opcode.split(".")[1:]
        if words[:1] == ["sync"]:
            words = words[1:]
        if len(words) != 2 or words[0] not in ("up", "down", "bfly", "idx") or words[1] != "b32":
            raise UnknownOpcode(instruction.opcode)
        target, source, *control_operands = instruction.operands
        destination, predicate = target.elements if isinstance(target, ir.Vector) else (target, ir.Sink())
        values = {lane: self.read(lane, source, "u32") for lane in range(len(self.threads))}
        source_by_lane = {}  # lane -> the lane it reads from, and whether its partner was in range
        for lane in guards:
            b, c, *mask = (_require_number(self.read(lane, operand, "u32"), "its lane") for operand in control_operands)
            number = self.thread_index(lane) % 32
            segment, clamp, b = c >> 8 & 31, c & 31, b & 31
            last = (number & segment) | (clamp & ~segment)
            partner = {"up": number - b, "down": number + b, "bfly": number ^ b,
                     "idx": (number & segment) | (b & ~segment)}[words[0]]  # fmt: skip
            is_in_range = partner >= last if words[0] == "up" else partner <= last
            partner = partner if is_in_range else number
            if mask and not mask[0] >> number & mask[0] >> partner & 1:
                raise ValueError(f"lanes {number} and {partner} exchange, and the mask is {mask[0]:#x}")
            source_by_lane[lane] = self.neighbour(lane, partner, guards), is_in_range
        for lane, (source_lane, is_in_range) in source_by_lane.items():
            self.write(lane, guards[lane], destination, values[source_lane])
            self.write(lane, guards[lane], predicate, z3.BoolVal(is_in_range))

    def neighbour(self, lane: int, number: int, guards: dict[int, Any]) -> int:
        """Return the lane with that number in the warp, which must be active whenever this one is."""
        block, warp = self.threads[lane][0], self.thread_index(lane) // 32
        for candidate, guard in guards.items():
            is_active = z3.is_true(guard) or guard.eq(guards[lane])
            if is_active and (self.threads[candidate][0], self.thread_index(candidate)) == (block, 32 * warp + number):
                return candidate
        raise ValueError(f"lane {number} of the warp is not followed here")

    # Memory

    def find_places(self, instruction: Instruction, lane: int, guard: Any, kind: str) -> tuple[Any, list[Any]]:
        """Decode an access; return it with the (guard, buffer, offset) of each place that it may touch.

        A place outside every buffer is a fault.
        """
        access = decode(instruction, kind)
        operand = instruction.operands[0 if kind == "store" else 1]
        if not isinstance(operand, ir.Address) or operand.coordinates:
            raise ValueError("the operand is not an address")
        base, space = operand.base, access.space.split("::")[0]
        if isinstance(base, ir.Symbol) and base.variable.space in ("shared", "local"):
            space = base.variable.space
        is_wide = not (isinstance(base, Register) and bits_of(base.type) == 32)
        address = self.read(lane, base, "u64" if is_wide else "u32")
        address = z3.simplify(extend(address, 64, False) + constant(operand.offset, 64))
        places = []
        for condition, number in self.possible_addresses(instruction, address, guard):
            window = {"shared": self.shared[self.threads[lane][0]], "local": self.local[lane]}.get(space, 0)
            buffer_number, offset = divmod(number + window, 1 << _WINDOW_BITS)
            buffer, offset = (
                self.buffers[buffer_number - 1] if 0 < buffer_number <= len(self.buffers) else None,
                offset - _BUFFER_START,
            )
            access_guard = z3.simplify(z3.And(guard, condition))
            size = (buffer and buffer.size) or 1 << _WINDOW_BITS - 1
            is_fault = buffer is None or offset % access.size or not 0 <= offset <= size - access.size
            if buffer is None or is_fault:
                location = f"byte {offset} of {buffer.name}" if buffer else f"address {number:#x}"
                self.faults.append((access_guard, f"{instruction.where}: {access.size} bytes at {location}"))
            else:
                places.append((access_guard, buffer, offset))
                buffer.types.add(access.type)
        return access, places

    def possible_addresses(self, instruction: Instruction, address: Bits, guard: Any) -> Iterator[tuple[Any, int]]:
        """Yield each value that an address may have, with the condition under which it has it."""
        if z3.is_bv_value(address):
            yield TRUE, address.as_long()
            return
        solver = z3.Solver()
        solver.add(*self.assume, guard)
        start_seconds = process_time()
        for _ in range(MAX_ADDRESSES + 1):  # once more than that, to learn that there is no other
            remaining_seconds = SECONDS - (process_time() - start_seconds)
            verdict = check(solver, seconds=remaining_seconds) if remaining_seconds > 0 else z3.unknown
            if verdict == z3.unsat:
                return
            if verdict != z3.sat:
                break
            number = solver.model().eval(address, model_completion=True).as_long()
            yield address == number, number
            solver.add(address != number)
        raise ValueError(f"its address has more than {MAX_ADDRESSES} values, and depends on {self.advice(address)}")

    def load(self, instruction: Instruction, lane: int, guard: Any) -> None:
        """Execute a load for one lane."""
        target = instruction.operands[0]
        registers = target.elements if isinstance(target, ir.Vector) else (target,)
        t = instruction.opcode.split(".")[-1]
        if ".param" in instruction.opcode and (parameter_bits := self.parameter(instruction)) is not None:
            words = split_fields(parameter_bits, bits_of(t))
        else:
            access, places = self.find_places(instruction, lane, guard, "load")
            bits = z3.FreshConst(z3.BitVecSort(8 * access.size), "nothing")  # what a faulting load gets
            for condition, buffer, offset in places:
                loaded_bits = self.fold_inputs(
                    concatenate_fields([buffer.read(offset + i) for i in range(access.size)])
                )
                bits = loaded_bits if len(places) == 1 else z3.If(condition, loaded_bits, bits)
            words = split_fields(bits, bits_of(t))
        for register, word in zip(registers, words, strict=True):
            self.write(lane, guard, register, word, is_signed(t))

    def parameter(self, instruction: Instruction) -> Bits | None:
        """Read a kernel's parameter; return None for a parameter of a call, which lies in local memory."""
        address = instruction.operands[1]
        base = address.base if isinstance(address, ir.Address) else None
        if not isinstance(base, ir.Symbol) or id(base.variable) not in self.params:
            return None
        access = decode(instruction, "load")
        bits, first_bit = self.params[id(base.variable)], 8 * address.offset
        return z3.Extract(first_bit + 8 * access.size - 1, first_bit, bits)

    def store(self, instruction: Instruction, lane: int, guard: Any) -> None:
        """Execute a store for one lane."""
        access, places = self.find_places(instruction, lane, guard, "store")
        source = instruction.operands[1]
        operands = source.elements if isinstance(source, ir.Vector) else (source,)
        stored_bits = concatenate_fields([self.read(lane, operand, f"u{bits_of(access.type)}") for operand in operands])
        for condition, buffer, offset in places:
            for i, byte in enumerate(split_fields(stored_bits, 8)):
                buffer.write(offset + i, byte, condition)


def _restrict_guards(guards: dict[int, Any], conditions: dict[int, Any]) -> dict[int, Any]:
    """Return the lanes whose condition may hold, each with its guard and the condition combined."""
    restricted_guards = {lane: z3.simplify(z3.And(guard, conditions[lane])) for lane, guard in guards.items()}
    return {lane: guard for lane, guard in restricted_guards.items() if not z3.is_false(guard)}


def _implies_condition(guard: Any, condition: Any) -> bool:
    """Return whether the two terms as written show that the condition holds wherever the guard does."""
    if z3.is_true(condition) or condition.eq(guard):
        return True
    guard_ids = {part.get_id() for part in _operands_or_term(guard, z3.is_and)}
    return any(
        {part.get_id() for part in _operands_or_term(alternative, z3.is_and)} <= guard_ids
        for alternative in _operands_or_term(condition, z3.is_or)
    )


def _input_numbers(assume: Sequence[Any]) -> list[tuple[Bits, Bits]]:
    """Return the inputs that assumptions set equal to a number, each with that number."""
    parts = [part for assumption in assume for part in _operands_or_term(z3.simplify(assumption), z3.is_and)]
    sides = [part.children() for part in parts if z3.is_eq(part)]
    return [(x, n) for x, n in sides if z3.is_const(x) and not z3.is_bv_value(x) and z3.is_bv_value(n)]


def _operands_or_term(term: Any, joins: Callable[[Any], bool]) -> list[Any]:
    return list(term.children()) if joins(term) else [term]


def _require_number(bits: Bits, subject: str) -> int:
    bits = z3.simplify(bits)
    if not z3.is_bv_value(bits):
        raise ValueError(f"{subject} depends on an input")
    return int(bits.as_long())


def _unwritten_byte(offset: int) -> Bits:
    """Return an unknown byte, for memory that nothing has written."""
    return z3.FreshConst(z3.BitVecSort(8), "unwritten")

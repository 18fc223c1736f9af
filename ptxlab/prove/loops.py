"""One loop step, executed from unknown registers and memory, and the formulas of a `LoopClaim` about it.

The body is executed once, for one thread that stands for all. Registers, special registers and whatever is loaded are
anything, and so is what an instruction gives that is not modelled. An integer matrix instruction or a dp4a adds an
unknown number to each of its sums, as large as its operands' elements allow.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import z3

from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Entry, Instruction, Register
from ptxlab.emulator.front.opcode import UnknownOpcode
from ptxlab.emulator.front.types import bits_of, is_signed
from ptxlab.errors import ArgumentError
from ptxlab.prove.bitvectors import Bits, constant, extend, split_fields
from ptxlab.prove.execute import FALSE, TRUE, LaneStep, NotModelled, SymbolicExecution
from ptxlab.prove.loop_claim import LoopClaim
from ptxlab.prove.solve import Query, symbols_of

Bounds = dict[str, list[Any]]  # by the name of an unknown
_MATRIX = re.compile(
    r"(?:mma\.sync\.aligned|wgmma\.mma_async\.sync\.aligned)\.m\d+n\d+k(\d+)(?:\.row\.col)?"
    r"(?:\.s32)\.([su][48])\.([su][48])(?:\.s32)?"
)
_DOT = re.compile(r"dp4a\.([su])32\.([su])32")
EXACT_IN_F32 = 2**24
SHIFT = 0x4B400000  # 1.5 * 2^23 as FP32
TOP_BITS = 0x80808080


@dataclass(frozen=True)
class Product:
    """A symbol for the sum that a step's integer matrix instructions or dp4as have so far added to one accumulator.

    Attributes:
        symbol: it.
        channels: over how many products it goes.
        operands: A and B of the last of them: the type of their elements, and the registers that they lie in, if any.
        added_to: what the sum was before.
        guard: on what condition.
    """

    symbol: Bits
    channels: int
    operands: tuple[tuple[str, tuple[Bits, ...]], tuple[str, tuple[Bits, ...]]]
    added_to: Bits
    guard: Any


@dataclass(frozen=True)
class Body:
    """Effects of one step of a loop.

    Attributes:
        ends: for each way back to the loop's head the condition, and registers (width, index) -> bits.
        initial: what registers held at the head, by the same keys.
        products: in order.
        channels: over how many products each unknown that was added goes, by name.
        merged: names of those that a later one of the same sum includes.
        to_float: INT32 numbers that were converted to FP32.
        steps: instructions with an @lanes annotation, of so many that are `annotated`.
    """

    ends: list[tuple[Any, dict[tuple[int, int], Bits]]]
    initial: Mapping[tuple[int, int], Bits]
    products: list[Product]
    channels: Mapping[str, int]
    merged: set[str]
    to_float: list[tuple[Any, Bits]]
    steps: list[LaneStep]
    annotated: int

    @cached_property
    def sums(self) -> dict[str, Bits]:
        """Values of registers before the step to which products are added, by name."""
        initial_names = {symbol.decl().name() for symbol in self.initial.values()}
        summands = {name: x for p in self.products for name, x in _summands(p.added_to).items()}
        return {name: x for name, x in summands.items() if name in initial_names}


def loops_of(entry: Entry) -> list[range]:
    """Find the innermost loops that multiply integers, each as instructions from its head to its last branch back."""
    back_branches = [(i.operands[0].index, pc) for pc, i in enumerate(entry.instructions) if i.head == "bra"]
    last_by_head = {
        head: max(last for first, last in back_branches if first == head) for head, pc in back_branches if head <= pc
    }
    multiplications = [
        pc for pc, i in enumerate(entry.instructions) if _MATRIX.fullmatch(i.opcode) or _DOT.match(i.opcode)
    ]
    loops = [range(a, b + 1) for a, b in sorted(last_by_head.items()) if any(a <= pc <= b for pc in multiplications)]
    return [
        loop
        for loop in loops
        if not any(inner_loop != loop and inner_loop[0] in loop and inner_loop[-1] in loop for inner_loop in loops)
    ]


def steps_of(entry: Entry) -> list[Body]:
    """Execute a step of each innermost loop of a kernel that multiplies integers.

    Raises ArgumentError if there is none.
    """
    bodies = [execute_body(entry, loop) for loop in loops_of(entry)]
    if not bodies:
        raise ArgumentError(entry.name, "a loop that multiplies integers", "none")
    return bodies


def execute_body(entry: Entry, loop: range) -> Body:
    """Execute the body of a loop once, from unknown registers and memory."""
    return LoopStepExecution(entry, loop).body()


class LoopStepExecution(SymbolicExecution):
    """Symbolic run of some instructions, once and in order, from unknown registers and memory."""

    def __init__(self, entry: Entry, loop: range) -> None:
        arguments = [z3.FreshConst(z3.BitVecSort(8 * p.size), p.name) for p in entry.params]
        origin = (0, 0, 0)
        super().__init__(entry, arguments, grid=(1, 1, 1), block=(1, 1, 1), threads=[(origin, origin)], assume=())
        self.loop = loop
        self.initial: dict[tuple[int, int], Bits] = {}
        self.products: list[Product] = []
        self.channels: dict[str, int] = {}  # of each product, by name
        self.merged: set[str] = set()
        self.to_float: list[tuple[Any, Bits]] = []
        self.latest: dict[tuple[int, int], tuple[Any, Bits]] = {}  # what was written last, on which condition
        self.named: dict[Any, Bits] = {}

    def body(self) -> Body:
        """Execute the instructions; return the state at each end, and the products in between."""
        head, last = self.loop[0], self.loop[-1]
        inner_loops = {i.operands[0].index: pc for pc in self.loop
                 if (i := self.code[pc]).head == "bra" and head < i.operands[0].index <= pc}  # fmt: skip
        guard_by_pc: dict[int, Any] = {head: TRUE}
        end_guards = []
        while guard_by_pc:
            pc = min(guard_by_pc)
            guard = guard_by_pc.pop(pc)
            if not guard_by_pc:  # whatever goes on with the step comes through here
                guard = TRUE
            if pc in inner_loops:  # whatever its steps have done, registers that it writes hold something
                for instruction in self.code[pc : inner_loops[pc] + 1]:
                    self.set_unknown(instruction, TRUE)
                self.carry = [z3.FreshConst(z3.BoolSort(), "carry")]
            for target, guards in self.step(pc, {0: guard}):
                if target == head:
                    end_guards.append((guards[0], dict(self.registers[0])))
                elif pc < target <= last:
                    guard_by_pc[target] = z3.simplify(z3.Or(guard_by_pc.get(target, FALSE), guards[0]))
        annotated_count = sum(self.code[pc].lanes is not None for pc in self.loop)
        parts = self.initial, self.products, self.channels, self.merged, self.to_float, self.steps
        return Body(end_guards, *parts, annotated_count)

    def register(self, lane: int, register: Register, width: int) -> Bits:
        key = width, register.index
        if key not in self.registers[0]:
            sort = z3.BoolSort() if width == 1 else z3.BitVecSort(width)
            self.registers[0][key] = self.initial[key] = z3.FreshConst(sort, f"{register.name} before")
            self.defined[0][key] = TRUE
        guard, latest_bits = self.latest.get(key, (FALSE, None))
        return latest_bits if guard.eq(self.guards.get(0, TRUE)) else self.registers[0][key]

    def write(self, lane: int, guard: Any, operand: ir.Operand, word: Bits, signed: bool = False) -> None:
        if isinstance(operand, Register):
            width = bits_of(operand.type)
            self.register(lane, operand, width)
            self.latest[width, operand.index] = guard, word if width == 1 else extend(word, width, signed)
        super().write(lane, guard, operand, word, signed)

    def read(self, lane: int, operand: ir.Operand, type_name: str) -> Bits:
        if isinstance(operand, ir.Special | ir.Symbol):
            key = operand.name if isinstance(operand, ir.Special) else (operand.variable.name, operand.offset)
            symbol = self.named.setdefault(key, z3.FreshConst(z3.BitVecSort(64), str(key)))
            return extend(symbol, bits_of(type_name), False)
        return super().read(lane, operand, type_name)

    def set_unknown(self, instruction: Instruction, guard: Any) -> None:
        """Set an instruction's destinations to unknown values."""
        for target in instruction.destinations:
            width = bits_of(target.type)
            sort = z3.BoolSort() if width == 1 else z3.BitVecSort(width)
            self.write(0, guard, target, z3.FreshConst(sort, target.name))

    # Instructions

    def perform(self, instruction: Instruction, guards: dict[int, Any]) -> None:
        guard = guards[0]
        matrix, dot = _MATRIX.fullmatch(instruction.opcode), _DOT.fullmatch(instruction.opcode)
        if instruction.head == "call":
            raise ValueError("a call in a loop's body")
        if matrix:
            self.multiply(instruction, guard, int(matrix[1]), (matrix[2], matrix[3]))
        elif dot:
            self.multiply(instruction, guard, 4, (f"{dot[1]}8", f"{dot[2]}8"))
        elif instruction.head in ("ld", "ldu"):
            self.load_unknown(instruction, guard)
        elif instruction.head in ("st", "bar", "barrier", "shfl"):
            self.set_unknown(instruction, guard)
        else:
            if instruction.head in ("mma", "wgmma", "dp2a") and {"s32", "u32"} & {*instruction.opcode.split(".")}:
                raise ValueError("integer products of another form")
            if instruction.opcode == "cvt.rn.f32.s32":
                self.to_float.append((guard, self.read(0, instruction.operands[1], "s32")))
            try:
                super().perform(instruction, guards)
            except (ValueError, UnknownOpcode, NotModelled):
                self.set_unknown(instruction, guard)

    def load_unknown(self, instruction: Instruction, guard: Any) -> None:
        """Set a load's destinations to unknown values."""
        target, t = instruction.operands[0], instruction.opcode.split(".")[-1]
        for register in target.elements if isinstance(target, ir.Vector) else (target,):
            self.write(0, guard, register, z3.FreshConst(z3.BitVecSort(bits_of(t)), "loaded"), is_signed(t))

    def multiply(self, instruction: Instruction, guard: Any, channels: int, types: tuple[str, str]) -> None:
        """Execute a matrix instruction or dp4a.

        d = a*b + c of mma and dp4a. wgmma has no c: d += a*b, or d = a*b where its scale is 0.
        """
        d, a, b, *more_operands = instruction.operands
        targets = d.elements if isinstance(d, ir.Vector) else (d,)
        keeps_sum = TRUE
        if instruction.head == "wgmma":
            c, scale = d, more_operands[0]
            keeps_sum = self.read(0, scale, "pred") if isinstance(scale, Register) else z3.BoolVal(scale.bits != 0)
        else:
            c = more_operands[0]
        accumulators = [self.read(0, operand, "u32") for operand in (c.elements if isinstance(c, ir.Vector) else (c,))]
        operands = tuple((t, self.operand_words(o)) for t, o in zip(types, (a, b), strict=True))
        for target, c_before in zip(targets, accumulators, strict=True):
            initial_sum, earlier_channels = self.split_sum(z3.simplify(z3.If(keeps_sum, c_before, constant(0, 32))))
            products_sum = z3.FreshConst(z3.BitVecSort(32), "products")
            self.channels[products_sum.decl().name()] = earlier_channels + channels
            self.products.append(Product(products_sum, earlier_channels + channels, operands, initial_sum, guard))  # type: ignore[arg-type]
            self.write(0, guard, target, initial_sum + products_sum)

    def split_sum(self, accumulated: Bits) -> tuple[Bits, int]:
        """Separate an accumulator from the products that this step has added to it.

        Return the sum without them, and the number of channels that they cover.
        """
        terms = accumulated.children() if z3.is_app_of(accumulated, z3.Z3_OP_BADD) else [accumulated]
        for index, term in enumerate(terms):
            name = term.decl().name()
            if name in self.channels:
                self.merged.add(name)
                return sum(terms[:index] + terms[index + 1 :], constant(0, 32)), self.channels[name]
        return accumulated, 0

    def operand_words(self, operand: ir.Operand) -> tuple[Bits, ...]:
        """Read an operand's words; return none for a descriptor."""
        words = operand.elements if isinstance(operand, ir.Vector) else (operand,)
        are_words = all(not isinstance(i, Register) or bits_of(i.type) == 32 for i in words)
        return tuple(self.read(0, word, "u32") for word in words) if are_words else ()


# Formulas


def sums_fit(bodies: Iterable[Body], loop: LoopClaim, max_products: int) -> list[Query]:
    """Build the formulas that no step overflows an INT32 sum of up to `max_products` products."""
    low, high = loop.product
    queries = []
    for body in bodies:
        sums = _sums_after(body)
        step_channels = max((_max_channels(bits, body.channels) for _, bits in sums), default=0)
        width = max(33, (max(-low, high) * max_products).bit_length() + 2)
        # low*k and high*k before the step, for any k that is left
        lowest, highest = z3.BitVecs("lowest highest", width)
        bounds = _product_bounds(body, loop) | {"lowest": [low * (max_products - step_channels) <= lowest, lowest <= 0]}
        bounds |= {"highest": [highest >= 0, highest <= high * (max_products - step_channels)]}
        bounds |= {name: _range_conditions(initial_sum, lowest, highest) for name, initial_sum in body.sums.items()}
        for guard, bits in sums:
            condition = z3.And(_range_conditions(bits, lowest + low * step_channels, highest + high * step_channels))
            queries.append(_query_within(z3.Implies(guard, condition), bounds))
        queries += _operands_fit(body, loop, 0)
    # Within limits that s32 holds nothing has wrapped; beyond them a number that has is among them.
    return [*queries, Query(z3.BoolVal(low * max_products >= -(2**31) and high * max_products < 2**31))]


def sums_are_exact(bodies: Iterable[Body], loop: LoopClaim) -> list[Query]:
    """Build the formulas that sums are zero after each step, and that FP32 represents each converted sum.

    It converts by an instruction; or by beginning at the bits of 1.5 * 2^23, to which a sum within 2^22 is added as to
    a float.
    """
    queries = []
    for body in bodies:
        products = _product_bounds(body, loop)
        bounds = products | {name: [initial_sum == 0] for name, initial_sum in body.sums.items()}
        queries += [
            _query_within(z3.Implies(guard, bits == 0), bounds) for guard, bits in _sums_after(body, include_new=False)
        ]
        converted_names = set[str]()
        for guard, number in body.to_float:
            is_exact = z3.And(_range_conditions(number, -EXACT_IN_F32, EXACT_IN_F32))
            if products.keys() & _summands(number).keys():
                queries.append(_query_within(z3.Implies(guard, is_exact), bounds))
                converted_names |= _summands(number).keys()
        for product in body.products:
            if product.symbol.decl().name() not in converted_names | body.merged:
                shifted_sum = product.added_to + product.symbol - SHIFT
                fits_mantissa = z3.And(_range_conditions(shifted_sum, 1 - 2**22, 2**22 - 1))
                queries.append(_query_within(fits_mantissa, bounds))
        queries += _operands_fit(body, loop, SHIFT)
    return queries


def dequantises(bodies: Iterable[Body], loop: LoopClaim) -> list[Query]:
    """Build the formulas that each packed mad or mul has operands in range, and exact lanes for admitted groups."""
    queries = []
    for body in bodies:
        steps = [s for s in body.steps if s.instruction.head in ("mad", "mul")]
        for step in steps:
            nibbles = split_fields(step.sources["a"], 8)
            scale = step.sources["b"]
            stored_bytes = split_fields(step.output, 8)
            offsets = split_fields(step.sources["c"], 8) if "c" in step.sources else [constant(0, 8)] * 4
            operands_fit = z3.And(
                z3.ULE(scale, 255), *(z3.ULE(q, 15) for q in nibbles), *(o == offsets[0] for o in offsets)
            )
            exact_bytes = [z3.ZeroExt(8, q) * z3.Extract(15, 0, scale) + z3.ZeroExt(8, o)
                     for q, o in zip(nibbles, offsets, strict=True)]  # fmt: skip
            assumptions = (
                [z3.ULE(x, 255) for x in exact_bytes] if loop.packed == "scaled_offset" else [z3.ULE(scale, 17)]
            )
            is_exact = z3.And([z3.ZeroExt(8, r) == x for r, x in zip(stored_bytes, exact_bytes, strict=True)])
            queries += [
                Query(z3.Implies(step.guard, operands_fit)),
                Query(z3.Implies(step.guard, is_exact), assumptions),
            ]
        queries.append(Query(z3.BoolVal(bool(steps) and len(body.steps) == body.annotated)))
        if loop.packed == "scaled_offset":
            dequantised = [z3.simplify(s.output ^ TOP_BITS) for s in steps]
            words = [z3.simplify(word) for p in body.products for word in p.operands[0][1]]
            queries += [Query(z3.BoolVal(bool(words) and all(any(w.eq(k) for k in dequantised) for w in words)))]
    return queries


def converts(bodies: Iterable[Body], loop: LoopClaim) -> list[Query]:
    """Build the formulas that bytes of operand A, as s8, are 16 times the signed nibbles of a loaded word.

    Or they are the word itself (INT8 blocks), but only on a condition, one for all words of an operand.
    """
    queries, nibbles = [], 0
    for product in (p for body in bodies for p in body.products if p.operands[0][0] == "s8"):
        conditions = dict[str, None]()
        for word in map(z3.simplify, product.operands[0][1]):
            condition, *alternatives = word.children() if z3.is_app_of(word, z3.Z3_OP_ITE) else (product.guard, word)
            conditions[condition.sexpr()] = None
            for alternative in alternatives:
                loaded_words = [x for x in symbols_of([alternative]).values() if z3.is_bv(x) and x.size() == 32]
                if len(loaded_words) != 1:
                    queries.append(Query(z3.BoolVal(False)))
                elif condition.eq(TRUE) or not alternative.eq(loaded_words[0]):
                    nibbles += 1
                    queries.append(
                        Query(
                            z3.Or(
                                _sixteen_times(alternative, loaded_words[0], 4),
                                _sixteen_times(alternative, loaded_words[0], 0),
                            )
                        )
                    )
        queries.append(Query(z3.BoolVal(len(conditions) <= 1)))
    return [*queries, Query(z3.BoolVal(nibbles > 0))]


def _sixteen_times(word: Bits, packed: Bits, first: int) -> Any:
    """Build the formula that the s8 bytes of `word` are 16 times the high (`first` 4) or low s4 nibbles of `packed`."""
    fours = [z3.Extract(first + 3, first, octet) for octet in split_fields(packed, 8)]
    return z3.And(
        [z3.SignExt(24, x) == 16 * z3.SignExt(28, q) for x, q in zip(split_fields(word, 8), fours, strict=True)]
    )


def _range_conditions(x: Bits, low: Any, high: Any) -> list[Any]:
    """Build the conditions that a sum lies within limits.

    The limits are numbers, or formulas of enough bits that they do not wrap.
    """
    width = low.size() if z3.is_bv(low) else 33
    wide_bits = z3.SignExt(width - x.size(), x)
    return [low <= wide_bits, wide_bits <= high]


def _sums_after(body: Body, include_new: bool = True) -> list[tuple[Any, Bits]]:
    """Return the sums after the step, each with its condition.

    With `include_new`, sums that the step has begun are included, where it left them.
    """
    keys = {key for key, initial_bits in body.initial.items() if initial_bits.decl().name() in body.sums}
    summand_names = {*body.sums, *(p.symbol.decl().name() for p in body.products)} if include_new else set()
    return [
        (guard, bits)
        for guard, registers in body.ends
        for key, bits in registers.items()
        if key[0] == 32 and (key in keys or set() < _summands(bits).keys() <= summand_names)
    ]


def _summands(bits: Bits) -> dict[str, Bits]:
    """Return the summands of a sum, in all branches: unknowns by name, other terms by their text."""
    summands, pending_terms = dict[str, Bits](), [bits]
    while pending_terms:
        term = pending_terms.pop()
        if z3.is_app_of(term, z3.Z3_OP_ITE):
            pending_terms += term.children()[1:]
        elif z3.is_app_of(term, z3.Z3_OP_BADD):
            pending_terms += term.children()
        elif z3.is_app_of(term, z3.Z3_OP_UNINTERPRETED):
            summands[term.decl().name()] = term
        elif not z3.is_bv_value(term) or term.as_long():
            summands[term.sexpr()] = term
    return summands


def _max_channels(bits: Bits, channels: Mapping[str, int]) -> int:
    """Return the largest number of products that a sum receives in any branch."""
    if z3.is_app_of(bits, z3.Z3_OP_ITE):
        condition, *branches = bits.children()
        simplified_branches = (
            z3.substitute(branch, (condition, truth)) for branch, truth in zip(branches, (TRUE, FALSE), strict=True)
        )
        return max(_max_channels(z3.simplify(branch), channels) for branch in simplified_branches)
    if z3.is_app_of(bits, z3.Z3_OP_BADD):
        return sum(_max_channels(term, channels) for term in bits.children())
    return channels.get(bits.decl().name(), 0) if z3.is_const(bits) else 0


def _product_bounds(body: Body, loop: LoopClaim) -> Bounds:
    """Return for each product the formulas that bound the amount it adds."""
    low, high = loop.product
    return {
        p.symbol.decl().name(): _range_conditions(p.symbol, low * p.channels, high * p.channels) for p in body.products
    }


def _operands_fit(body: Body, loop: LoopClaim, start: int) -> Iterator[Query]:
    """Yield the formulas that products are added only to sums, 0 or `start`, and that elements lie within the claim.

    Elements lie there by their type, or by what the loop's code left in registers.
    """
    allowed_summands = {constant(start, 32).sexpr(), *body.sums, *(p.symbol.decl().name() for p in body.products)}
    for product in body.products:
        yield Query(z3.BoolVal(_summands(product.added_to).keys() <= allowed_summands))
        for (kind, words), (low, high) in zip(product.operands, (loop.a, loop.b), strict=True):
            bits, signed = int(kind[1:]), kind[0] == "s"
            type_low, type_high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
            if type_low < low or high < type_high:
                elements = [extend(x, 32, signed) for word in words for x in split_fields(word, bits)]
                yield Query(z3.And([z3.And(low <= x, x <= high) for x in elements] or [z3.BoolVal(False)]))


def _query_within(holds: Any, bounds: Bounds) -> Query:
    """Build the query of a formula, assuming the bounds of the unknowns in it."""
    symbols = symbols_of([holds])
    return Query(holds, [bound for name in symbols for bound in bounds.get(name, ())], symbols)

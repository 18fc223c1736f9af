"""One thread of a kernel that reorders and quantises a row, from its PTX: what it sends, reads back and writes.

These kernels have no loop. One thread, whose number is unknown, is executed once, at the sizes of an example. What it
reads from memory is anything: what lies in shared memory has been sent by any thread, and what lanes tell each other is
any word, no smaller than their own where it is a maximum. Products, fused multiply-adds and approximate reciprocals are
uninterpreted: what is proved holds whatever they give, and that a `Divider`'s chain of them is the IEEE quotient is a
matter of its own (`tests/lowbit/kernels/quantize`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import z3

from ptxlab.arithmetic import ceil_div
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Entry, Instruction
from ptxlab.emulator.front.types import bits_of, is_signed
from ptxlab.prove.bitvectors import (
    SORTS,
    Bits,
    as_float,
    concatenate_fields,
    constant,
    extend,
    float_bits,
    split_fields,
)
from ptxlab.prove.execute import FALSE, TRUE
from ptxlab.prove.loops import LoopStepExecution
from ptxlab.prove.semantics import computation
from ptxlab.prove.solve import Query, contradict, symbols_of
from ptxlab.spec import Arg, KernelSpec

WORD = z3.BitVecSort(32)
PRODUCT = z3.Function("product", WORD, WORD, WORD)
FUSED = z3.Function("fused multiply-add", WORD, WORD, WORD, WORD)
RECIPROCAL = z3.Function("reciprocal, nearly", WORD, WORD)
_UNINTERPRETED = {
    "mul.f32": PRODUCT, "mul.rn.f32": PRODUCT, "fma.rn.f32": FUSED, "rcp.approx.ftz.f32": RECIPROCAL,
}  # fmt: skip


@dataclass(frozen=True)
class Access:
    """Load or store of a thread: its guard, memory space, address and bits."""

    guard: Any
    space: str
    at: Bits
    bits: Bits


class Thread(LoopStepExecution):
    """Symbolic run of one thread, of unknown number, from the kernel's first instruction to its last.

    `loads` and `stores` are in order. `maxima` is all that is known of what `redux.max` and `max.NaN` gave.
    """

    def __init__(self, entry: Entry, arguments: list[Bits]) -> None:
        super().__init__(entry, range(len(entry.instructions)))
        self.params = {id(p): x for p, x in zip(entry.params, arguments, strict=True)}
        self.loads: list[Access] = []
        self.stores: list[Access] = []
        self.maxima: list[Any] = []
        self.mapped: dict[str, tuple[Bits, Bits]] = {}  # an address in the cluster, by name: in the block, which block
        self.body()

    def perform(self, instruction: Instruction, guards: dict[int, Any]) -> None:
        guard, operands = guards[0], instruction.operands
        if (function := _UNINTERPRETED.get(instruction.opcode)) is not None:
            self.write(0, guard, operands[0], function(*(self.read(0, o, "f32") for o in operands[1:])))
        elif instruction.head == "st":
            registers = operands[1].elements if isinstance(operands[1], ir.Vector) else operands[1:]
            word = f"u{bits_of(instruction.opcode.split('.')[-1])}"
            self.stores.append(
                self.access(
                    instruction, guard, concatenate_fields([self.read(0, register, word) for register in registers])
                )
            )
        elif instruction.opcode in ("redux.sync.max.u32", "max.NaN.f32"):
            maximum, is_warp_reduction = z3.FreshConst(WORD, "maximum"), instruction.head == "redux"
            first_operand, *operands_left = (
                self.read(0, o, "u32") for o in operands[1 : 2 if is_warp_reduction else 3]
            )
            self.maxima.append(
                z3.UGE(maximum, first_operand)
                if is_warp_reduction
                else _is_magnitude(maximum, first_operand, *operands_left)
            )
            self.write(0, guard, operands[0], maximum)
        elif instruction.head == "mapa":
            cluster_address = z3.FreshConst(WORD, "in the cluster")
            self.mapped[cluster_address.decl().name()] = (
                self.read(0, operands[1], "u32"),
                self.read(0, operands[2], "u32"),
            )
            self.write(0, guard, operands[0], cluster_address)
        else:
            super().perform(instruction, guards)

    def load_unknown(self, instruction: Instruction, guard: Any) -> None:
        target, t = instruction.operands[0], instruction.opcode.split(".")[-1]
        registers = target.elements if isinstance(target, ir.Vector) else (target,)
        loaded_bits = self.parameter(instruction) if ".param" in instruction.opcode else None
        if loaded_bits is None:
            loaded_bits = z3.FreshConst(z3.BitVecSort(bits_of(t) * len(registers)), "loaded")
            self.loads.append(self.access(instruction, guard, loaded_bits))
        for register, piece in zip(registers, split_fields(loaded_bits, bits_of(t)), strict=True):
            self.write(0, guard, register, piece, is_signed(t))

    def access(self, instruction: Instruction, guard: Any, bits: Bits) -> Access:
        """Return the access that a load or store makes: its guard, space, address and bits."""
        address = instruction.operands[1 if instruction.head == "ld" else 0]
        space = instruction.opcode.split(".")[1].split("::")[0]
        base = self.read(0, address.base, "u32" if space == "shared" else "u64")
        return Access(guard, space, z3.simplify(base + constant(address.offset, base.size())), bits)


def _is_magnitude(maximum: Bits, a: Bits, b: Bits) -> Any:
    """State that `maximum` is a magnitude, and no less than the magnitudes a and b, as words."""
    return z3.Implies(z3.And(a >= 0, b >= 0), z3.And(maximum >= 0, maximum >= a, maximum >= b))


@dataclass(frozen=True)
class TokenRow:
    """A kernel's thread at some sizes: K INT4 channels in groups of `g`, then outliers; `pairs`, `code` as in the spec.

    Channels are numbered in Atom's order. A row has `blocks` blocks of `width` threads.
    """

    thread: Thread
    K: int
    outliers: int
    g: int
    pairs: int
    code: int
    width: int
    blocks: int
    plain: bool  # x itself is sent
    normed: bool  # what is read back is scaled by one factor

    @property
    def channels(self) -> int:
        """Number of all channels, outliers included."""
        return self.K + self.outliers

    @property
    def columns(self) -> int:
        """Columns of a row of scales."""
        return ceil_div(self.groups + (self.code < 2), 8) * 8

    @property
    def groups(self) -> int:
        """Number of groups with a scale of their own: all blocks of COMET, only the INT4 groups of Atom."""
        return (self.K + (self.outliers if self.code == 2 else 0)) // self.g

    def special(self, name: str) -> Bits:
        """Return the value of a special register, u32."""
        return extend(self.thread.named[name], 32, False)

    @property
    def m(self) -> Bits:
        """The token, u64."""
        return z3.ZeroExt(32, z3.LShR(self.special("%ctaid.x"), self.blocks.bit_length() - 1))

    @property
    def rank(self) -> Bits:
        """The block's number in its row, u32."""
        return self.special("%ctaid.x") & self.blocks - 1

    @property
    def chunk(self) -> Bits:
        """The number of the thread in its row, u32: which 16 channels it sends."""
        return self.rank * self.width + self.special("%tid.x")

    @property
    def limits(self) -> list[Any]:
        """Conditions on thread and block numbers that hold in the launch."""
        return [z3.ULT(self.special("%tid.x"), self.width), z3.ULT(self.special("%ctaid.x"), self.blocks << 28)]

    def place_of(self, channel: Bits) -> tuple[Bits, Bits]:
        """Return the byte address in shared memory of a channel u32, and the block of the row that holds it."""
        gap_channels = 0 if self.g == 128 else -self.K % 128
        index = z3.If(z3.ULT(channel, self.K), channel, channel + gap_channels)
        index_in_block = z3.URem(index, 16 * self.width)
        return self.shared + 4 * (index_in_block + z3.LShR(index_in_block, 5)), z3.UDiv(
            index, constant(16 * self.width, 32)
        )

    @property
    def shared(self) -> Bits:
        """The address of the row in shared memory, u32."""
        (base_address,) = (x for name, x in self.thread.named.items() if isinstance(name, tuple))
        return extend(base_address, 32, False)

    def sent_to(self, one: Access) -> tuple[Bits, Bits]:
        """Return the target of a store into shared memory: the address in a block, and which block of the row."""
        return self.thread.mapped.get(one.at.decl().name(), (one.at, constant(0, 32)))

    def stores_to(self, *names: str) -> Iterator[tuple[str, Access, Bits]]:
        """Yield the stores to the named arguments: the argument, the store, its offset in bytes."""
        for access in self.thread.stores:
            for name in names:
                if access.space == "global" and name in symbols_of([access.at]):
                    yield name, access, z3.simplify(access.at - z3.BitVec(name, 64))

    @cached_property
    def writes(self) -> list["Written"]:
        """Stores of integers, once as INT4 and once as INT8, as far as the store can be either."""
        writes = []
        for name, access, offset in self.stores_to("x_q", "x8"):
            joined_bytes = self.K // 2 + (self.outliers if self.pairs == 2 else 0)
            per_row = self.outliers if name == "x8" else joined_bytes if self.pairs else self.channels
            first_channel, bits = offset - self.m * per_row, 4 if access.bits.size() == 16 else 8
            if self.pairs:
                first_channel = (
                    2 * first_channel if bits == 4 else first_channel + (self.K if name == "x8" else self.K // 2)
                )
            for four_bits in (True, False):
                conditions = [*self.limits, access.guard, (first_channel < self.K) == z3.BoolVal(four_bits)]
                if not contradict(conditions):
                    writes.append(Written(self, access, first_channel, four_bits, bits, conditions))
        return writes


def row_of(entry: Entry, spec: KernelSpec, parameters: Mapping[str, Any]) -> TokenRow:
    """Run a kernel's thread at known sizes and constants; every other argument may have any value."""

    def argument(arg: Arg) -> Bits:
        if arg.name in ("K", "outliers"):
            return constant(int(parameters[arg.name]), 32)
        return z3.BitVec(arg.name, 64 if arg.shape else 32)

    sizes = {name: int(parameters[name]) for name in ("K", "outliers", "g", "pairs", "code")}
    return TokenRow(
        thread=Thread(entry, [argument(arg) for arg in spec.args]),
        **sizes,
        width=parameters["THREADS"],
        blocks=parameters["CLUSTER"],
        plain=spec.name == "reorder_quantize",
        normed="gamma" in {arg.name for arg in spec.args},
    )


@dataclass(frozen=True)
class Written:
    """Store of four integers to channels `first`.. (u64), each of `bits` bits, under the `conditions`."""

    row: TokenRow
    access: Access
    first: Bits
    four_bits: bool
    bits: int
    conditions: list[Any]

    @cached_property
    def simplify(self) -> "Simplifier":
        """Simplifier under this store's `conditions`; see `Simplifier`."""
        return Simplifier(self.conditions)

    @cached_property
    def elements(self) -> list[Bits]:
        """The four integers."""
        return [z3.simplify(x) for x in split_fields(self.simplify(self.access.bits), self.bits)]

    @cached_property
    def quotients(self) -> list[Bits]:
        """Quotient that each integer was rounded from; an integer that depends on several terms has none."""
        divisions = [results_in(element) for element in self.elements]
        return [terms[0] for terms in divisions if len(terms) == 1]

    @property
    def steps(self) -> float:
        """Number of steps by which the largest magnitude is divided."""
        return (7.0 if self.four_bits else 127.0) + (0 if self.row.code else 0.5)

    def of_largest(self, access: Access) -> dict[str, Bits] | None:
        """Find the terms of a stored scale: the quotient (`whole`), its divisor `steps`, its dividend `largest`."""
        for stored_word in results_in(self.simplify(access.bits)):
            for terms in matches(OF_LARGEST, stored_word, {"whole": stored_word}):
                if is_result(terms["largest"]):
                    return terms
        return None

    def largest(self, access: Access) -> Bits | None:
        """Return the largest magnitude of a stored scale, before it is clipped."""
        parts = self.of_largest(access)
        clip_factor = z3.BitVec("clip", 32) if self.four_bits else float_word(1)
        magnitudes = [x for x in parts["largest"].children() if not x.eq(clip_factor)] if parts else []
        return magnitudes[0] if len(magnitudes) == 1 else None

    def parts(self, i: int) -> dict[str, Bits] | None:
        """Find the terms of quotient i: `value`, `factor`, `scale` and, by the code's rules, `largest`."""
        pattern = BY_RECIPROCAL if self.row.code == 1 else BY_SCALE
        loaded_terms = {str(load.bits) for load in self.row.thread.loads}
        return next((x for x in matches(pattern, self.quotients[i], {}) if str(x["value"]) in loaded_terms), None)


class Simplifier:
    """Simplifier of terms: removes conditions on the thread's number that the given conditions decide."""

    def __init__(self, conditions: list[Any]) -> None:
        self.solver = z3.Solver()
        self.solver.add(*conditions)
        self.decided = dict[int, tuple[Any, Any]]()  # by the id of a condition, which lives as long as it is here
        self.of_thread = dict[int, tuple[Any, bool]]()  # of a term: whether nothing but the thread's number is in it

    def __call__(self, term: Any) -> Any:
        """Simplify a term, with every condition in it that is decided replaced by its value."""
        substitutions = [
            (condition, truth) for condition in conditions_in(term) if (truth := self.of(condition)) is not None
        ]
        simplified_term = z3.simplify(z3.substitute(term, *substitutions))
        constant = [
            x for x in parts_of(simplified_term) if x.decl().eq(PRODUCT) and all(map(z3.is_bv_value, x.children()))
        ]
        multiply = computation("mul.rn.f32")
        return z3.simplify(
            z3.substitute(simplified_term, *((x, z3.simplify(multiply(*x.children()))) for x in constant))
        )

    def of(self, condition: Any) -> Any:
        """Return the condition's value, or None if it is undecided; each condition is decided once."""
        if condition.get_id() not in self.decided:
            self.decided[condition.get_id()] = condition, self.decide(condition)
        return self.decided[condition.get_id()][1]

    def decide(self, condition: Any) -> Any:
        """Ask the solver for the condition's value: true, false, or None if it depends on more."""
        if not self.is_of_thread(condition):
            return None
        if self.solver.check(z3.Not(condition)) == z3.unsat:
            return TRUE
        return FALSE if self.solver.check(condition) == z3.unsat else None

    def is_of_thread(self, term: Any) -> bool:
        """Tell if a term depends on the thread's and the block's number alone."""
        key = term.get_id()
        if key not in self.of_thread:
            is_symbol = z3.is_const(term) and term.decl().kind() == z3.Z3_OP_UNINTERPRETED
            is_named = not is_symbol or str(term).startswith(("%tid.x!", "%ctaid.x!"))
            self.of_thread[key] = term, is_named and all(map(self.is_of_thread, term.children()))
        return self.of_thread[key][1]


def conditions_in(term: Any) -> list[Any]:
    """List the conditions of a term's if-then-else choices."""
    return [part.arg(0) for part in parts_of(term) if z3.is_app_of(part, z3.Z3_OP_ITE)]


def results_in(term: Any) -> list[Bits]:
    """List the outermost results of uninterpreted functions in a term."""
    return [part for part in parts_of(term, within=False) if is_result(part)]


def is_result(term: Any) -> bool:
    """Tell if a term is the result of an uninterpreted function."""
    return any(term.decl().eq(function) for function in (PRODUCT, FUSED, RECIPROCAL))


def parts_of(term: Any, within: bool = True) -> list[Any]:
    """List a term and its parts, each once; leave out parts of results unless `within`."""
    parts_by_id, pending_terms = dict[int, Any](), [term]
    while pending_terms:
        part = pending_terms.pop()
        if part.get_id() not in parts_by_id:
            parts_by_id[part.get_id()] = part
            pending_terms += part.children() if within or not is_result(part) else []
    return list(parts_by_id.values())


# Patterns


def quotient(x: Bits, negated: Bits, reciprocal: Bits) -> Bits:
    """Build the term that `Divider` computes for x / s, given -s and 1 / s."""
    near_quotient = PRODUCT(x, reciprocal)
    nearer = FUSED(FUSED(negated, near_quotient, x), reciprocal, near_quotient)
    return FUSED(FUSED(negated, nearer, x), reciprocal, nearer)


def inverse(divisor: Bits, negated: Bits) -> Bits:
    """Build the term that `reciprocal` computes for 1 / s."""
    near_inverse = RECIPROCAL(divisor)
    return FUSED(FUSED(negated, near_inverse, float_word(1)), near_inverse, near_inverse)


def float_word(number: float) -> Bits:
    """Return an FP32 constant as a word."""
    return constant(int(np.float32(number).view(np.uint32)), 32)


def matches(pattern: Any, term: Any, bindings: dict[str, Bits]) -> Iterator[dict[str, Bits]]:
    """Yield the ways to match a pattern with a term: unknown -> part of the term; factors in either order."""
    if z3.is_const(pattern) and pattern.decl().kind() == z3.Z3_OP_UNINTERPRETED:
        if bindings.get(str(pattern), term).eq(term):
            yield {**bindings, str(pattern): term}
    elif pattern.decl().eq(term.decl()):
        parts, children = pattern.children(), term.children()
        yield from _all_match(parts, children, bindings)
        if len(parts) > 1 and is_result(term):
            yield from _all_match(parts, [children[1], children[0], *children[2:]], bindings)


def _all_match(patterns: list[Any], terms: list[Any], bindings: dict[str, Bits]) -> Iterator[dict[str, Bits]]:
    if not patterns:
        yield bindings
        return
    for partial_bindings in matches(patterns[0], terms[0], bindings):
        yield from _all_match(patterns[1:], terms[1:], partial_bindings)


_VALUE, _FACTOR, _SCALE, _NEGATED, _STEPS, _LARGEST = z3.BitVecs("value factor scale negated steps largest", 32)
BY_SCALE = quotient(PRODUCT(_VALUE, _FACTOR), _NEGATED, inverse(_SCALE, _NEGATED))
BY_RECIPROCAL = PRODUCT(PRODUCT(_VALUE, _FACTOR), quotient(_STEPS, _NEGATED, inverse(_SCALE, _NEGATED)))
OF_LARGEST = quotient(_LARGEST, _NEGATED, z3.BitVec("reciprocal", 32))
LEAST, ONE = 1, 0x3C00  # FP16: 2^-24, and 1


# Formulas


def rounds(rows: Iterable[TokenRow]) -> Iterator[Query]:
    """Yield the queries that each integer is its quotient, rounded and clipped.

    The paper's rules round half to even, the code's half away from zero.
    """
    for written in (one for row in rows for one in row.writes):
        low, high = (-8, 7) if written.four_bits else (-128, 127)
        yield Query(z3.BoolVal([len(one) for one in map(results_in, written.elements)] == [1] * 4))
        for element, quotient_term in zip(written.elements, written.quotients, strict=False):
            t = z3.BitVec("quotient", 32)
            x = as_float(t, "f32")
            nearest_integer = z3.fpRoundToIntegral(z3.RNA() if written.row.code == 1 else z3.RNE(), x)
            clipped_value = z3.If(z3.fpGEQ(nearest_integer, _float(high)), _float(high), nearest_integer)
            clipped_value = z3.If(z3.fpLEQ(nearest_integer, _float(low)), _float(low), clipped_value)
            expected_integer = z3.fpToSBV(z3.RTZ(), z3.If(z3.fpIsNaN(x), _float(low), clipped_value), WORD)
            stored_integer = z3.simplify(z3.substitute(element, (quotient_term, t)))
            yield Query(extend(stored_integer, 32, True) == expected_integer, [], {"quotient": t})


def divides(rows: Iterable[TokenRow]) -> Iterator[Query]:
    """Yield the queries that each stored integer's quotient divides the right channel by the right scale.

    The channel is the one that the integer is stored for, read from where it was sent. The scale is the one stored for
    its group. For each channel there is a thread that stores it.
    """
    for row in rows:
        yield _complete(row)
        factors = dict[int, Bits]()
        for written in row.writes:
            first_channel, last_channel = written.first, row.K if written.four_bits else row.channels
            begins_in_part = first_channel >= (0 if written.four_bits else row.K)
            yield _where(
                written.conditions, begins_in_part, first_channel + 4 <= last_channel, z3.URem(first_channel, 4) == 0
            )
            for i, parts in enumerate(map(written.parts, range(4))):
                load = next((x for x in row.thread.loads if parts and x.bits.eq(parts["value"])), None)
                if parts is None or load is None:
                    yield Query(z3.BoolVal(False))
                    continue
                place, rank = row.place_of(z3.Extract(31, 0, first_channel) + i)
                yield _where(written.conditions, written.simplify(load.guard), load.at == place, rank == row.rank)
                yield Query(parts["negated"] == parts["scale"] ^ 0x80000000)
                yield Query(z3.Or(z3.BoolVal(row.normed), parts["factor"] == float_word(1)))
                factors.setdefault(parts["factor"].get_id(), parts["factor"])
        yield Query(z3.BoolVal(len(factors) == 1))


def _complete(row: TokenRow) -> Query:
    """Build the query that some thread of the row stores the four channels from `first` on, for any `first`."""
    first, m, warps = z3.BitVec("first", 16), z3.BitVec("m", 28), row.width // 32
    int4 = z3.ULT(first, row.K)
    outlier_index = first - row.K
    block = z3.If(int4, z3.LShR(first, 7), constant(ceil_div(row.K, 128), 16) + z3.LShR(outlier_index, 7))
    lane = z3.LShR(z3.If(int4, first, outlier_index) & 127, 2)
    rank = z3.UDiv(block, constant(4 * warps, 16))
    token = z3.Concat(m, z3.Extract(row.blocks.bit_length() - 2, 0, rank)) if row.blocks > 1 else m
    terms_by_name = {"%tid.x": z3.URem(block, warps) * 32 + lane, "%ctaid.x": token}
    terms = [(row.thread.named[name], extend(x, 64, False)) for name, x in terms_by_name.items()]
    stores = [z3.And(written.access.guard, written.first == extend(first, 64, False)) for written in row.writes]
    there_is = z3.simplify(z3.substitute(z3.And(*row.limits, z3.Or(stores)), *terms))
    return _where([z3.ULT(first, row.channels), first & 3 == 0], there_is)


def scales(rows: Iterable[TokenRow]) -> Iterator[Query]:
    """Yield the queries on stored scales.

    The scale stored for a group is the FP16 quotient of its largest magnitude, clipped. It is the scale that divides
    the group. The largest magnitude is at least that of each of the thread's own channels.
    """
    a, b = z3.BitVecs("a b", 32)
    yield Query(_is_magnitude(computation("max.NaN.f32")(a, b), a, b))
    for row in rows:
        scale_stores = list(row.stores_to("x_scale"))
        for written in row.writes:
            store_index = row.thread.stores.index(written.access)  # the next scale that is stored is its group's
            _, access, offset = next(one for one in scale_stores if row.thread.stores.index(one[1]) > store_index)
            yield from _scale(written, access, offset)
        for _, access, offset in scale_stores:
            if z3.is_bv_value(access.bits):  # ones up to a whole number of eights
                column = z3.ZeroExt(32, row.special("%tid.x")) + row.groups + (row.code < 2 and row.outliers > 0)
                stores_padding = z3.And(row.rank == 0, z3.ULT(column, row.columns))
                yield _where(row.limits, access.guard == stores_padding)
                is_at_column = offset == 2 * (row.m * row.columns + column)
                yield _where([*row.limits, access.guard], is_at_column, access.bits == ONE)


def _scale(written: "Written", access: Access, offset: Bits) -> Iterator[Query]:
    row, simplify, int4 = written.row, written.simplify, written.four_bits
    column, begins_group = written.first / row.g, z3.URem(written.first, row.g) == 0
    if not int4 and row.code < 2:
        column, begins_group = constant(row.groups, 64), written.first == row.K
    yield _where(written.conditions, simplify(access.guard) == begins_group)
    yield _where([*written.conditions, access.guard], offset == 2 * (row.m * row.columns + column))
    parts, largest = written.of_largest(access), written.largest(access)
    if parts is None or largest is None:
        yield Query(z3.BoolVal(False))
        return
    steps = written.steps
    t, u = z3.BitVecs("quotient largest", 32)
    yield Query(z3.And(parts["negated"] == float_word(-steps), parts["reciprocal"] == float_word(1 / steps)))
    half = float_bits(z3.fpFPToFP(z3.RNE(), as_float(t, "f32"), z3.FPSort(*SORTS["f16"])), "f16")
    below_least = z3.fpLT(as_float(half, "f16"), as_float(constant(LEAST, 16), "f16"))
    expected_scale = z3.If(
        z3.fpIsZero(as_float(u, "f32")), constant(ONE, 16), z3.If(below_least, constant(LEAST, 16), half)
    )
    abstract = [(parts["whole"], t), (parts["largest"], u)]
    bits = z3.substitute(simplify(access.bits), *abstract)
    yield Query(bits == expected_scale)
    divisor = (
        computation("max.f32")(u, float_word(steps * 2.0**-24)) if row.code == 1 else computation("cvt.f32.f16")(bits)
    )
    for quotient_parts in map(written.parts, range(4)):
        yield Query(z3.BoolVal(quotient_parts is not None))
        if quotient_parts is not None:
            yield Query(z3.substitute(quotient_parts["scale"], *abstract) == divisor)
            yield Query(quotient_parts.get("steps", float_word(steps)) == float_word(steps))
    products = [PRODUCT(x["value"], x["factor"]) for x in map(written.parts, range(4)) if x]
    channels = [(x, z3.BitVec(f"channel {i}", 32)) for i, x in enumerate(products)]
    maximum = z3.substitute(largest, *channels)
    bounds = _bounds_of(maximum, [z3.substitute(simplify(bound), *channels) for bound in row.thread.maxima])
    yield _where(bounds, *(z3.UGE(maximum, x & 0x7FFFFFFF) for _, x in channels))


def _bounds_of(maximum: Bits, bounds: list[Any]) -> list[Any]:
    """Select the bounds on a magnitude and on the magnitudes that it was made of."""
    names, selected_bounds = {*symbols_of([maximum])}, list[Any]()
    for bound in reversed(bounds):
        if names & symbols_of([bound]).keys():
            selected_bounds, names = [*selected_bounds, bound], names | {*symbols_of([bound])}
    return selected_bounds


def sends(rows: Iterable[TokenRow]) -> Iterator[Query]:
    """Yield the queries that each of a thread's 16 channels goes to its place in the block that reads it.

    The place is the one that `place` names. `reorder_quantize` sends x itself.
    """
    for row in rows:
        places, values = ([x for x in row.thread.loads if name in symbols_of([x.at])] for name in ("place", "x"))
        sent_stores = [x for x in row.thread.stores if x.space == "shared" and _depends(row, x, places)]
        yield Query(z3.BoolVal(len(sent_stores) == 16 and len(places) == 2))
        chunk = z3.ZeroExt(32, row.chunk)
        for e, (store, load) in enumerate(zip(sent_stores, [places[0]] * 8 + [places[1]] * 8, strict=False)):
            conditions = [*row.limits, store.guard]
            place = z3.ZeroExt(16, split_fields(load.bits, 16)[e % 8])
            address, rank = row.sent_to(store)
            expected_address, target_block = row.place_of(place)
            is_read = z3.And(load.guard, load.at == z3.BitVec("place", 64) + 32 * chunk + 16 * (e // 8))
            yield _where(conditions, is_read, address == expected_address, rank == target_block)
            is_inside = z3.And(z3.ULT(row.chunk, row.channels // 16), z3.ULT(place, row.channels))
            yield _where(row.limits, store.guard == is_inside)
            if row.plain:
                source = values[e // 8]
                channel_address = z3.BitVec("x", 64) + 2 * (row.m * row.channels + 16 * chunk) + 16 * (e // 8)
                yield _where(conditions, source.guard, source.at == channel_address)
                sent_as = computation("cvt.f32.f16")(split_fields(source.bits, 16)[e % 8])
                yield Query(z3.BoolVal(Simplifier(conditions)(store.bits).eq(z3.simplify(sent_as))))


def _depends(row: TokenRow, one: Access, loads: list[Access]) -> bool:
    """Tell if a store's address depends on one of the given loads."""
    return bool(symbols_of([row.sent_to(one)[0]]).keys() & {str(load.bits) for load in loads})


def _where(conditions: list[Any], *holds: Any) -> Query:
    """Build the query that all of `holds` is true under `conditions`, which other threads do not share."""
    return Query(z3.Implies(z3.And(conditions), z3.And(holds)))


def _float(number: float) -> Any:
    return z3.FPVal(number, z3.Float32())

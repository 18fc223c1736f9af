"""A program under construction: units of PTX lines, inputs, and a slot for every result.

Thread t of all reads the values of its own from rows of one array, `inputs` [rows, threads], and stores each result
into a row of another, `slots` [rows, threads], 64 bits each. So every result of every instruction is compared, and one
that differs is told from what follows of it.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from tests.fuzz import entries
from tests.fuzz.domains import DOMAINS, Values, literal
from tests.fuzz.forms import OPERAND, WRITTEN, choose

VERSION, TARGET = "8.7", "sm_90a"
_LETTERS = {1: "%p", 16: "%h", 32: "%r", 64: "%x"}
_RECENT = 16  # registers that are read again
_SET = re.compile(r"\bset\.\S*\.[su]32\.\w(32|64)")  # what makes an integer of a comparison
_HIGH_PRODUCT = re.compile(r"(?:@\S+ )?m(?:ul|ad)c?\.hi\b\S*\.[su]32 %\w+, ([^,]+), ([^,;]+)")
Option = TypeVar("Option")
Extent = tuple[int, int, int]


@dataclass(frozen=True)
class Source:
    """An operand that is read: its register or constant, and where that comes from: an input, a slot, or neither."""

    text: str
    domain: str
    input: int = -1
    slot: int = -1


@dataclass(frozen=True)
class Tolerance:
    """Limits of an approximate result's error."""

    relative: float
    absolute: float = 0.0


@dataclass(frozen=True)
class Slot:
    """A result: `form` is the instruction's opcode, `expected` a model of it in place of the emulator's."""

    domain: str
    form: str
    sources: tuple[Source, ...] = ()
    crosses: bool = False  # it depends on other threads' operands
    tolerance: Tolerance | None = None
    expected: Values | None = None


@dataclass
class Unit:
    """Lines that a reduction keeps or takes out together.

    Attributes:
        makes: registers of their results, and slots; -1 for inputs.
        is_pure: whether they only compute these: loads of the results can stand in their place.
        stores: slots that they store.
        kernel: the one of the module that they belong to.
    """

    lines: list[str]
    makes: list[tuple[str, int]] = field(default_factory=list)
    is_pure: bool = False
    stores: tuple[int, ...] = ()
    kernel: int = 0


@dataclass(frozen=True)
class How:
    """Properties of a table of forms.

    Attributes:
        crosses: results depend on other threads.
        rule: a rule of `entries` that the table's operands follow.
        fresh: a rule by which operands come from memory, not from another instruction.
        last: a rule by which results are no operands of others.
        tolerance: of approximate results.
        guarded: whether a guard may stand before it.
        constants: whether an operand may be a constant.
    """

    crosses: bool = False
    rule: str = ""
    fresh: str = ""
    last: str = ""
    tolerance: Tolerance | None = None
    guarded: bool = True
    constants: bool = True


PLAIN = How()


class Program:
    """Grows by `form` and `sequence`; `render` gives its PTX."""

    def __init__(
        self, rng: np.random.Generator, category: str, threads: int, blocks: int = 1, cluster: int = 1
    ) -> None:
        self.rng, self.category = rng, category
        self.threads, self.blocks, self.cluster = threads, blocks, cluster
        self.units: list[Unit] = []
        self.inputs: list[Values] = []
        self.slots: list[Slot] = []
        self.declarations: list[str] = []  # before the kernel
        self.shared: list[str] = []  # variables within it
        # Arguments behind inputs and slots: their parameters, and how they are made of copies of some arrays
        self.parameters: list[str] = []
        self.arrays: list[Any] = []
        self.make_arguments: Callable[[list[Any]], list[Any]] = lambda arrays: arrays
        self.kernels = 1
        self.avoided: Counter[str] = Counter()  # forms and rules of `entries`
        self.is_asynchronous = False  # whether its results could depend on when copies and products are done
        self._counts: Counter[int] = Counter()  # registers by width
        self._recent: dict[int, list[tuple[str, Source]]] = {bits: [] for bits in _LETTERS}  # kind, register
        self._factors: set[frozenset[str]] = set()  # of products whose high half is taken

    # Draws

    def pick(self, *options: Option) -> Option:
        """Draw one of the options."""
        return options[int(self.rng.integers(len(options)))]

    def below(self, limit: int) -> int:
        """Draw a number from 0 to most - 1."""
        return int(self.rng.integers(limit))

    def chance(self, probability: float) -> bool:
        """Draw whether something happens."""
        return bool(self.rng.random() < probability)

    def avoid(self, rule: str) -> None:
        """Count that a rule of `entries` kept something out of the program."""
        entries.require_rule(rule)
        self.avoided[rule] += 1

    # Registers and operands

    def register(self, bits: int) -> str:
        """Declare a register."""
        self._counts[bits] += 1
        return f"{_LETTERS[bits]}{self._counts[bits]}"

    def next_kernel(self) -> None:
        """Go on in another kernel, which is launched behind those before it and may begin before they end."""
        self.kernels += 1
        self._recent = {bits: [] for bits in _LETTERS}

    def add(self, lines: list[str], makes: Sequence[tuple[str, int]] = (), **fields: Any) -> None:
        """Add a unit to the kernel at hand."""
        self.units.append(Unit(lines, list(makes), kernel=self.kernels - 1, **fields))

    def labels(self, count: int) -> list[str]:
        """Name places in the code."""
        return [f"L{len(self.units)}_{i}" for i in range(count)]

    def input(self, name: str, values: Values | None = None) -> Source:
        """Load values of a domain, a thread its own, into a register."""
        domain, row = DOMAINS[name], len(self.inputs)
        drawn = domain.draw(self.rng, self.total) if values is None else np.asarray(values).astype(np.uint64)
        self.inputs.append(drawn)
        register = self.register(domain.bits)
        source = Source(register, name, input=row)
        lines = load(register, domain.bits, f"%in+{8 * self.total * row}")
        self.add(lines, [(register, -1)], is_pure=True)
        return source

    def source(self, name: str, *, constant: bool = False, rule: str = "") -> Source:
        """Draw an operand of a domain: a register that was written before, a constant if that may be, or an input.

        With a `rule` of `entries` it is no register that another instruction has made.
        """
        domain = DOMAINS[name]
        recent = self._recent[domain.bits]
        if recent and not domain.fresh and self.chance(0.5 if domain.kind == "pred" else 0.35):
            kind, source = recent[-1 - self.below(min(len(recent), _RECENT))]
            if rule or kind != domain.kind:
                self.avoid(rule or "kinds")
            else:
                return replace(source, domain=name)
        if constant and domain.literal and self.chance(0.08):
            return Source(literal(name, int(domain.draw(self.rng, 1)[0])), name)
        return self.input(name)

    # Instructions

    def form(self, table: Sequence[str], how: How = PLAIN) -> None:
        """Add one of a table's forms; nothing if an entry keeps it out."""
        template = choose(table, self.rng)
        sources: dict[str, Source] = {}
        written: dict[str, tuple[str, str]] = {}  # name -> register, domain
        for name, domain in OPERAND.findall(template):
            if name in WRITTEN:
                written[name] = self.register(DOMAINS[domain].bits), domain
            elif name not in sources:
                may_be_constant = how.constants and bool(sources) and all(s.text[0] == "%" for s in sources.values())
                if may_be_constant and template.startswith("set") and any(map(self._is_of_set, sources.values())):
                    self.avoid("constants beside results of set")
                    may_be_constant = False
                sources[name] = self.source(domain, constant=may_be_constant, rule=how.fresh)
        text = OPERAND.sub(lambda m: written[m[1]][0] if m[1] in written else sources[m[1]].text, template)
        lines = [text]
        if how.rule:
            self.avoid(how.rule)
        if how.guarded and self.chance(0.06):
            guard = self.source("pred")
            sources["guard"] = guard
            clearing = [f"setp.eq.u32 {r}, %t, 3;" if d == "pred" else f"mov.b{DOMAINS[d].bits} {r}, 77;"
                      for r, d in written.values()]  # fmt: skip
            lines = [*clearing, f"@{self.pick('', '!')}{guard.text} {text}"]
        if entry := entries.find_entry(lines[-1]):
            self.avoided[entry] += 1
            return
        if not self.note_factors(text):
            return
        opcode = ("guarded " if len(lines) > 1 else "") + template.split()[0]
        self.sequence(lines, opcode, list(written.values()), tuple(sources.values()), how, is_pure=not how.crosses)

    def note_factors(self, line: str) -> bool:
        """Note the factors of a product whose high half a line takes; return False if an earlier line took it."""
        if not (product := _HIGH_PRODUCT.match(line)):
            return True
        if (factors := frozenset(product.groups())) in self._factors:
            self.avoid("operands of mad.hi")
            return False
        self._factors.add(factors)
        return True

    def _is_of_set(self, source: Source) -> bool:
        return source.slot >= 0 and bool(_SET.search(self.slots[source.slot].form))

    def sequence(
        self,
        lines: list[str],
        form: str,
        stored: Sequence[tuple[str, str]],
        sources: tuple[Source, ...] = (),
        how: How = PLAIN,
        *,
        is_pure: bool = False,
        expected: Sequence[Values] = (),
    ) -> None:
        """Add lines and store their results, pairs of a register and its domain."""
        self.add(lines, is_pure=is_pure)
        unit = self.units[-1]
        for i, (register, name) in enumerate(stored):
            slot, domain = len(self.slots), DOMAINS[name]
            model = expected[i] if expected else None
            self.slots.append(Slot(name, form, sources, how.crosses, how.tolerance, model))
            unit.makes.append((register, slot))
            self.add(store(register, domain.bits, f"%out+{8 * self.total * slot}"), stores=(slot,))
            if how.last:
                self.avoid(how.last)
            else:
                self._recent[domain.bits].append((domain.kind, Source(register, name, slot=slot)))

    def lines(self, *lines: str) -> None:
        """Add lines without results."""
        self.add(list(lines))

    # The whole

    @property
    def names(self) -> list[str]:
        """The kernels, in the order of their launches."""
        return ["k" if i == 0 else f"k{i}" for i in range(self.kernels)]

    def extras(self) -> list[Any]:
        """Make the arguments behind inputs and slots, of copies of the arrays."""
        return self.make_arguments([array.copy() for array in self.arrays])

    @property
    def total(self) -> int:
        """Threads of all blocks."""
        return self.threads * self.blocks

    @property
    def arguments(self) -> tuple[Values, Values]:
        """Inputs, and what the slots hold before: a pattern, so that a store of the wrong width is seen."""
        rows = np.concatenate(self.inputs) if self.inputs else np.zeros(self.total, np.uint64)
        return rows, np.full(max(1, len(self.slots)) * self.total, 0xA5A5A5A5A5A5A5A5, np.uint64)

    def render(self, units: Sequence[Unit] | None = None) -> str:
        """PTX of all units, or of some in their places."""
        chosen = self.units if units is None else units
        head = [f".version {VERSION}", f".target {TARGET}", ".address_size 64", *self.declarations]
        kernels = [self._kernel(name, [u for u in chosen if u.kernel == i]) for i, name in enumerate(self.names)]
        return "\n".join([*head, *(line for lines in kernels for line in lines)]) + "\n"

    def _kernel(self, name: str, units: Sequence[Unit]) -> list[str]:
        declared = [f".reg .b{bits} {_LETTERS[bits]}<{self._counts[bits] + 1}>;" for bits in (16, 32, 64)]
        parameters = [".param .u64 inputs", ".param .u64 outputs", *self.parameters]
        return [
            f".visible .entry {name}({', '.join(parameters)})", "{", *declared,
            f".reg .pred %p<{self._counts[1] + 1}>;",
            ".reg .b32 %t, %lane, %warp, %block, %scratch; .reg .b64 %in, %out, %offset; .reg .pred %is;", *self.shared,
            "mov.u32 %t, %tid.x;", "mov.u32 %block, %ctaid.x;", "and.b32 %lane, %t, 31;", "shr.u32 %warp, %t, 5;",
            "ld.param.u64 %in, [inputs];", "ld.param.u64 %out, [outputs];", "cvta.to.global.u64 %in, %in;",
            "cvta.to.global.u64 %out, %out;", f"mad.lo.u32 %scratch, %block, {self.threads}, %t;",
            "mul.wide.u32 %offset, %scratch, 8;", "add.s64 %in, %in, %offset;", "add.s64 %out, %out, %offset;",
            *(line for unit in units for line in unit.lines), "ret;", "}",
        ]  # fmt: skip


def load(register: str, bits: int, address: str) -> list[str]:
    """Load a register from memory."""
    if bits == 1:
        return [f"ld.global.b32 %scratch, [{address}];", f"setp.ne.u32 {register}, %scratch, 0;"]
    return [f"ld.global.b{bits} {register}, [{address}];"]


def store(register: str, bits: int, address: str) -> list[str]:
    """Store a register to memory."""
    if bits == 1:
        return [f"selp.u32 %scratch, 1, 0, {register};", f"st.global.b32 [{address}], %scratch;"]
    return [f"st.global.b{bits} [{address}], {register};"]


Generate = Callable[[Program], None]


def stored_bits(domain: str) -> int:
    """Count the bits of a slot that a result takes."""
    bits = DOMAINS[domain].bits
    return 32 if bits == 1 else bits

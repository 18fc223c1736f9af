"""Operands: registers, constants, addresses, vectors, and names that may be labels further down."""

import re
from dataclasses import dataclass, replace

from ptxlab.emulator.front import ir
from ptxlab.emulator.front.declare import Declarations
from ptxlab.emulator.front.ir import Operand, Register
from ptxlab.emulator.front.tokens import OPERATORS, SUM

_SPECIAL = re.compile(
    r"%(?:(?:n?tid|n?ctaid|cluster_n?ctaid|n?clusterid)\.[xyz]|cluster_n?ctarank|is_explicit_cluster|n?warpid|laneid|n?smid|gridid"
    r"|lanemask_(?:eq|lt|le|gt|ge)|clock(?:_hi|64)?|globaltimer(?:_lo|_hi)?"
    r"|(?:dynamic|total|aggr)_smem_size|reserved_smem_offset_begin)"
)


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A name that may be a label further down."""

    name: str


class Operands(Declarations):
    """Reads operands."""

    def operand(self) -> Operand:
        """One operand of any kind."""
        if self.accept("["):
            return self.address()
        if self.accept("{"):
            return ir.Vector(tuple(self.comma_separated(self.operand, "}")))
        if self.accept("("):
            items = self.comma_separated(self.operand, ")")
            first = items[0] if len(items) == 1 else None
            if isinstance(first, ir.Immediate) and self.token in OPERATORS:  # (1 + 2) * 3, and no argument of a call
                return self.constant(left=first.bits)
            return ir.Vector(tuple(items))
        if self.accept("!"):
            register = self.operand()
            if not isinstance(register, Register):
                self.fail("! takes a predicate register")
            return replace(register, negated=not register.negated)
        if self.kinds[self.at] == "number" or self.token in ("-", "~", "WARP_SZ"):
            return self.constant()
        first = self.named(self.word("an operand"))
        if self.accept("|"):
            return ir.Vector((first, self.operand()), pair=True)
        if isinstance(first, ir.Symbol) and self.token in ("+", "-"):
            return replace(first, offset=self.offset())
        return first

    def offset(self) -> int:
        """`+4-8`, perhaps nothing."""
        return self.constant(SUM, left=0).bits if self.token in ("+", "-") else 0

    def address(self) -> ir.Address:
        """`[` has been read: `%rd+4]`, `variable+4]`, `%rd, {%x, %y}]`."""
        base = self.operand() if self.kinds[self.at] == "word" else ir.Immediate(self.integer())
        if isinstance(base, ir.Symbol):
            base, offset = replace(base, offset=0), base.offset
        elif isinstance(base, Register | ir.Special | ir.Immediate):
            offset = self.offset()
        elif isinstance(base, Unresolved):
            self.fail(f"{base.name} is not declared")
        else:
            self.fail("an address is [register+offset], [variable+offset] or [constant]")
        coordinates = ()
        if self.accept(","):
            vector = self.operand()
            coordinates = vector.items if isinstance(vector, ir.Vector) else (vector,)
        self.expect("]")
        return ir.Address(base, offset, coordinates)

    def named(self, name: str) -> Operand:
        """What a name stands for; one that is not known yet may be a label."""
        if name == "_":
            return ir.Sink()
        known = self.known(name)
        if known is None and "." in name:  # `%r1.b3210`
            base, _, selector = name.rpartition(".")
            known = self.known(base)
            if isinstance(known, Register):
                return replace(known, selector=selector)
        if known is not None:
            return known if isinstance(known, Register) else ir.Symbol(known)
        if _SPECIAL.fullmatch(name):
            return ir.Special(name)
        return Unresolved(name)  # type: ignore[return-value]

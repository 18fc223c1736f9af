"""What a kernel does for all inputs: expressions over its logical inputs and outputs, for a solver to decide."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class KernelClaim:
    """A claim on every source of a kernel, in the language of `ptxlab.prove.expressions`.

    Attributes:
        name: short, unique within the kernel.
        holds: a condition on every element `i` of the first output: `out[i] == q4[i]*scale[i//g]`.
        assume: conditions on the inputs that belong to element `i`.
        unknowns: integers that exist beside the inputs, with their limits: `q8[i]`, the weight that q4[i] came from.
        expect: `refuted` where the claim shows that the precondition cannot be wider.
        equals: another kernel, run on the same inputs, whose outputs are `other.out` in `holds`.
        alone: on the first thread only, where it takes long: another claim covers what differs in others, addresses.
    """

    name: str
    holds: str
    assume: tuple[str, ...] = ()
    unknowns: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    expect: Literal["proved", "refuted"] = "proved"
    equals: str = ""
    alone: bool = False

    @property
    def text(self) -> str:
        """The claim in one line."""
        limits = [f"{low} <= {name} <= {high}" for name, (low, high) in self.unknowns.items()]
        conditions = [*limits, *self.assume]
        return f"{', '.join(conditions)} => {self.holds}" if conditions else self.holds

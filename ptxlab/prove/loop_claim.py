"""`LoopClaim`: the claim on a kernel's main loop: operand ranges, and what it does with them."""

from dataclasses import dataclass
from typing import Literal

Range = tuple[int, int]


@dataclass(frozen=True)
class LoopClaim:
    """The claim on a kernel's main loop.

    Attributes:
        a, b: limits of the operands' elements. Where the operand's type is wider, the loop's own code keeps them.
        sums: `grow` over all of K, or are `converted` to FP32 in every step.
        packed: the dequantisation in the loop, four lanes at once: `scaled_offset` q*scale + offset, `scaled` q*scale,
            `s4` INT4 as the upper half of s8 (W4A4 and COMET's W4A8 on INT8 tensor cores), or none.
    """

    a: Range = (-128, 127)
    b: Range = (-128, 127)
    sums: Literal["grow", "converted"] = "grow"
    packed: Literal["", "scaled_offset", "scaled", "s4"] = ""

    @property
    def product(self) -> Range:
        """Limits of a product."""
        products = [x * y for x in self.a for y in self.b]
        return min(products), max(products)

    @property
    def max_products(self) -> int:
        """Number of products that an INT32 sum has room for."""
        low, high = self.product
        return min((2**31 - 1) // high, 2**31 // -low)

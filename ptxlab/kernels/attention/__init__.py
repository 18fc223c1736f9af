"""Family `attention`: decode attention over a paged cache of 4 or 8 bits, the teaching steps first (QServe §5.3)."""

from ptxlab.kernels.attention import ladder, sm80

SPECS = (*ladder.SPECS, *sm80.SPECS)

__all__ = ["SPECS"]

"""attention_kv4_sm90 in its own order of operations, on arrays: the same bits, in the emulator and on an H200.

It is the kernel's numerics, written down: what is an integer, what is rounded when, what is added up in which order.
`shares` are the tiles of each block, `queries` and `tokens` what an MMA takes, `tiles` what a warp makes of them one
after the other, `parts` how the sums of warps and then of blocks are put together. Every operation on float32 is
rounded once, as IEEE 754 wants it; the others are in `arithmetic`. NumPy or CuPy. A column is one query of a unit: no
two of them ever meet. `prefill` is the same for the prefill kernels, on rows of tiles.
"""

from ptxlab.lowbit.kernels.attention.exact.arithmetic import EMULATED, TRUNCATING, Arithmetic, hopper
from ptxlab.lowbit.kernels.attention.exact.parts import attention
from ptxlab.lowbit.kernels.attention.exact.prefill import prefill

__all__ = ["EMULATED", "TRUNCATING", "Arithmetic", "attention", "hopper", "prefill"]

"""Family `gemm`: W4A8, Y = X Wᵀ with integer accumulators. A ladder of main loops, one file per step."""

from ptxlab.kernels.gemm import sm80, sm90

SPECS = (*sm80.SPECS, *sm90.SPECS)

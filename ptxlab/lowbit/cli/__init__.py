"""Commands of `ptxlab` on the low-bit kernels."""

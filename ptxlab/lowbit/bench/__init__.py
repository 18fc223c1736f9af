"""Suites of `ptxlab bench` on the low-bit kernels: each beside its floor, and beside the peers it is given."""

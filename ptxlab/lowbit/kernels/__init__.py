"""The families of low-bit kernels: specs, and the public calls of each; `ptxlab.registry` finds them by name."""

"""Claims about the low-bit formats and kernels beyond what the specs claim; `ptxlab prove --all` decides them."""

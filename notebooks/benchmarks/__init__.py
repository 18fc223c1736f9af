"""Suites that time other projects beside the kernels: whole models, layers, PyTorch, and GEMMs and attention with peers."""

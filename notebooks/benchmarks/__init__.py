"""Suites that time other projects beside the kernels: whole models, layers, PyTorch, GEMMs and attention."""

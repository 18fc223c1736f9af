"""Checkpoints: what quantising would do to them (`audit`), and packed ones made of them (`convert`, `quantize`).

`imports` takes those that others have quantised.
"""

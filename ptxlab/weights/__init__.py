"""Checkpoints: what quantising would do (`audit`), packing one (`convert`), a whole model by a recipe (`quantize`).

`imports` takes those that others have quantised.
"""

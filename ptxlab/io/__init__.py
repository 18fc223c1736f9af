"""File formats: arrays and text, checkpoints, GGUF, tokenizers, wiki dumps; downloads of trained weights and text.

Other libraries' arrays come in by DLPack.
"""

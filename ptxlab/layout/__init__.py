"""Where each element lives: packings, each with its exact inverse."""

from ptxlab.layout.words import pack_comet, pack_u4, unpack_comet, unpack_u4

__all__ = ["pack_comet", "pack_u4", "unpack_comet", "unpack_u4"]

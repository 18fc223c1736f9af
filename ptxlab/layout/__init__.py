"""Where each element lives: fragments, packings with their exact inverses, swizzles, and the banks that they meet."""

from ptxlab.layout.packed_weight import LAYOUTS, SCHEMES, PackedWeight, buffer_shapes, pack, unpack
from ptxlab.layout.storage import load, packed_names, save
from ptxlab.layout.words import pack_comet, pack_u4, unpack_comet, unpack_u4

__all__ = [
    "LAYOUTS",
    "SCHEMES",
    "PackedWeight",
    "buffer_shapes",
    "load",
    "pack",
    "pack_comet",
    "pack_u4",
    "packed_names",
    "save",
    "unpack",
    "unpack_comet",
    "unpack_u4",
]

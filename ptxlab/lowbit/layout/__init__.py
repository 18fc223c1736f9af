"""Where each element lives: fragments, packings with their exact inverses, swizzles, and the banks that they meet."""

from ptxlab.hardware.tensor_map import TensorMap
from ptxlab.lowbit.layout.activations import (
    from_fragment_order,
    from_swizzled_tiles,
    to_fragment_order,
    to_swizzled_tiles,
)
from ptxlab.lowbit.layout.atom import pack_atom_strips, pack_pairs, unpack_atom_strips, unpack_pairs
from ptxlab.lowbit.layout.atom_operands import (
    ATOM_LAYOUTS,
    ATOM_ORDERS,
    AtomActivations,
    AtomWeight,
    pack_atom,
    pack_atom_activations,
    unpack_atom,
    unpack_atom_activations,
)
from ptxlab.lowbit.layout.comet_operands import (
    BLOCK_ORDERS,
    BlockActivations,
    BlockWeight,
    pack_block_activations,
    pack_block_weight,
    unpack_block_activations,
    unpack_block_weight,
)
from ptxlab.lowbit.layout.expert_weights import ExpertWeights, stack_experts
from ptxlab.lowbit.layout.kv_cache import HEAD_DIMS, KVCache, gather, scatter, write_slots
from ptxlab.lowbit.layout.nibbles import pack_comet, pack_s4, pack_u4, unpack_comet, unpack_s4, unpack_u4
from ptxlab.lowbit.layout.packed_activations import PackedActivations, pack_activations, unpack_activations
from ptxlab.lowbit.layout.packed_weight import LAYOUTS, SCHEMES, PackedWeight, buffer_shapes, pack, unpack
from ptxlab.lowbit.layout.pages import PAGE_SIZES, pack_pages, page_bytes, unpack_pages
from ptxlab.lowbit.layout.reordered import ReorderedWeight, pack_reordered
from ptxlab.lowbit.layout.storage import METADATA_KEY, load, load_atom, load_blocks, load_reordered, packed_names, save

__all__ = [
    "ATOM_LAYOUTS",
    "ATOM_ORDERS",
    "BLOCK_ORDERS",
    "HEAD_DIMS",
    "LAYOUTS",
    "METADATA_KEY",
    "PAGE_SIZES",
    "SCHEMES",
    "AtomActivations",
    "AtomWeight",
    "BlockActivations",
    "BlockWeight",
    "ExpertWeights",
    "KVCache",
    "PackedActivations",
    "PackedWeight",
    "ReorderedWeight",
    "TensorMap",
    "buffer_shapes",
    "from_fragment_order",
    "from_swizzled_tiles",
    "gather",
    "load",
    "load_atom",
    "load_blocks",
    "load_reordered",
    "pack",
    "pack_activations",
    "pack_atom",
    "pack_atom_activations",
    "pack_atom_strips",
    "pack_block_activations",
    "pack_block_weight",
    "pack_comet",
    "pack_pages",
    "pack_pairs",
    "pack_reordered",
    "pack_s4",
    "pack_u4",
    "packed_names",
    "page_bytes",
    "save",
    "scatter",
    "stack_experts",
    "to_fragment_order",
    "to_swizzled_tiles",
    "unpack",
    "unpack_activations",
    "unpack_atom",
    "unpack_atom_activations",
    "unpack_atom_strips",
    "unpack_block_activations",
    "unpack_block_weight",
    "unpack_comet",
    "unpack_pages",
    "unpack_pairs",
    "unpack_s4",
    "unpack_u4",
    "write_slots",
]

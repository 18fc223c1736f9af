"""The public names, which `import ptxlab` offers."""

from ptxlab.emulator import EmulatorOptions
from ptxlab.errors import PtxlabError
from ptxlab.hardware.tensor_map import TensorMap
from ptxlab.lowbit.kernels.attention import (
    AttentionWorkspace,
    append_kv4,
    attention_kv4,
    attention_workspace,
    rope_append_kv4,
)
from ptxlab.lowbit.kernels.gemm import Workspace, gemm_w4a4, gemm_w4a8, gemm_w4a8_grouped, gemm_w4ax, gemm_workspace
from ptxlab.lowbit.kernels.moe import RoutedTokens, combine_experts, route_tokens
from ptxlab.lowbit.kernels.operation import release_memory
from ptxlab.lowbit.kernels.quantize import (
    quantize_activations,
    reorder_quantize,
    rmsnorm_quantize,
    rmsnorm_reorder_quantize,
    silu_mul_quantize,
    silu_mul_reorder_quantize,
)
from ptxlab.lowbit.kernels.transfer import to_device
from ptxlab.lowbit.layout import (
    AtomActivations,
    AtomWeight,
    BlockActivations,
    BlockWeight,
    ExpertWeights,
    KVCache,
    PackedActivations,
    PackedWeight,
    pack,
    pack_atom,
    pack_block_weight,
    stack_experts,
)
from ptxlab.lowbit.quant import calibrate_kv, quantize_kv, smooth_attention
from ptxlab.registry import find, specs
from ptxlab.runtime import Kernel, Outcome, load, run_spec
from ptxlab.runtime.by_name import run
from ptxlab.sources import Source
from ptxlab.spec import Arg, KernelSpec, Launch, WrongByDesign
from ptxlab.spec.dtypes import ByVariant

__all__ = [
    "Arg",
    "AtomActivations",
    "AtomWeight",
    "AttentionWorkspace",
    "BlockActivations",
    "BlockWeight",
    "ByVariant",
    "EmulatorOptions",
    "ExpertWeights",
    "KVCache",
    "Kernel",
    "KernelSpec",
    "Launch",
    "Outcome",
    "PackedActivations",
    "PackedWeight",
    "PtxlabError",
    "RoutedTokens",
    "Source",
    "TensorMap",
    "Workspace",
    "WrongByDesign",
    "append_kv4",
    "attention_kv4",
    "attention_workspace",
    "calibrate_kv",
    "combine_experts",
    "find",
    "gemm_w4a4",
    "gemm_w4a8",
    "gemm_w4a8_grouped",
    "gemm_w4ax",
    "gemm_workspace",
    "load",
    "pack",
    "pack_atom",
    "pack_block_weight",
    "quantize_activations",
    "quantize_kv",
    "release_memory",
    "reorder_quantize",
    "rmsnorm_quantize",
    "rmsnorm_reorder_quantize",
    "rope_append_kv4",
    "route_tokens",
    "run",
    "run_spec",
    "silu_mul_quantize",
    "silu_mul_reorder_quantize",
    "smooth_attention",
    "specs",
    "stack_experts",
    "to_device",
]

"""ptxlab: a workbench for low-bit LLM kernels.

`gemm_w4a8`, `attention_kv4`, `append_kv4`, `quantize_activations`, `rmsnorm_quantize`, `silu_mul_quantize`,
`route_tokens` and `combine_experts` call the kernels. `load` and `run` launch any kernel on a GPU or in the PTX
emulator, with checks. `pack`, `KVCache` and `to_device` prepare weights and caches.

The folders; imports go one way, from a later line of this list to an earlier one:

- Foundations: `io` (files, checkpoints, downloaded weights), `toolchain` (NVRTC, ptxas, nvdisasm), `cost` (data
  sheets of GPUs and the cost model, by which kernels choose tiles).
- Formats: `reference` (NumPy references), `quant` (floats to integers), `layout` (where each element lives), `spec`
  (the contract of a kernel).
- Backends: `emulator` (PTX on the CPU, with checks), `gpu` (CuPy), `runtime` (one call for both).
- Kernels: `kernels` has the specs and the public calls; the sources are in `ptx/` and `cuda_src/`. `model` puts the
  calls together to a decoder layer.
- Tools: `sass`, `nsight`, `bench`, `profile`, `timeline`, `weights` (audit and convert checkpoints), `demo`.
- Ways in: `jupyter`, `cli`, and `testing` for the project's own tests.
"""

from typing import Any

from ptxlab.errors import PtxlabError
from ptxlab.kernels import find, run, specs
from ptxlab.kernels.attention import (
    AttentionWorkspace,
    append_kv4,
    attention_kv4,
    attention_workspace,
    rope_append_kv4,
)
from ptxlab.kernels.gemm import Workspace, gemm_w4a8, gemm_w4a8_grouped, gemm_workspace
from ptxlab.kernels.moe import RoutedTokens, combine_experts, route_tokens
from ptxlab.kernels.operation import release_memory
from ptxlab.kernels.quantize import quantize_activations, rmsnorm_quantize, silu_mul_quantize
from ptxlab.kernels.transfer import to_device
from ptxlab.layout import ExpertWeights, KVCache, PackedActivations, PackedWeight, pack, stack_experts
from ptxlab.layout.tensor_map import TensorMap
from ptxlab.quant import calibrate_kv, quantize_kv, smooth_attention
from ptxlab.runtime import Kernel, Outcome, load, run_spec
from ptxlab.sources import Source
from ptxlab.spec import Arg, KernelSpec, Launch, WrongByDesign
from ptxlab.spec.dtypes import ByVariant

__version__ = "0.2.0"

__all__ = [
    "Arg",
    "AttentionWorkspace",
    "ByVariant",
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
    "__version__",
    "append_kv4",
    "attention_kv4",
    "attention_workspace",
    "calibrate_kv",
    "combine_experts",
    "find",
    "gemm_w4a8",
    "gemm_w4a8_grouped",
    "gemm_workspace",
    "load",
    "pack",
    "quantize_activations",
    "quantize_kv",
    "release_memory",
    "rmsnorm_quantize",
    "rope_append_kv4",
    "route_tokens",
    "run",
    "run_spec",
    "silu_mul_quantize",
    "smooth_attention",
    "specs",
    "stack_experts",
    "to_device",
]


def load_ipython_extension(shell: Any) -> None:
    """Register the magics `%%ptx` and `%%cuda` and the displays; `%load_ext ptxlab` calls this."""
    from ptxlab import jupyter

    jupyter.register(shell)

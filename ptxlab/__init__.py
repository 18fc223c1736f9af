"""ptxlab: a workbench for low-bit LLM kernels."""

from ptxlab.kernels import find, run, specs
from ptxlab.kernels.gemm import Workspace, gemm_w4a8, gemm_workspace
from ptxlab.kernels.packed import to_device
from ptxlab.kernels.quantize import quantize_activations
from ptxlab.layout import PackedActivations, PackedWeight, pack
from ptxlab.runtime import Kernel, Outcome, load

__version__ = "0.1.0"

__all__ = [
    "Kernel",
    "Outcome",
    "PackedActivations",
    "PackedWeight",
    "Workspace",
    "__version__",
    "find",
    "gemm_w4a8",
    "gemm_workspace",
    "load",
    "pack",
    "quantize_activations",
    "run",
    "specs",
    "to_device",
]

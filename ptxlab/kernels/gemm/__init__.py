"""Family `gemm`: W4A8, Y = X Wᵀ with integer accumulators. A ladder of main loops, one file per step."""

from ptxlab.kernels.gemm import sm80, sm90, tile
from ptxlab.kernels.gemm.device import Workspace, gemm_workspace
from ptxlab.kernels.gemm.face import gemm_w4a8

LADDER = (*sm80.SPECS, *sm90.SPECS)  # whole GEMMs, step by step
SPECS = (*tile.SPECS, *LADDER)

__all__ = ["LADDER", "SPECS", "Workspace", "gemm_w4a8", "gemm_workspace"]

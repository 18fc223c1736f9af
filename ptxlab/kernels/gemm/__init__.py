"""Family `gemm`: W4A8, Y = X Wᵀ with integer accumulators. A ladder of main loops, one file per step."""

from ptxlab.kernels.gemm import grouped, sm80, sm90, tile, w8a8
from ptxlab.kernels.gemm.device import Workspace, gemm_workspace
from ptxlab.kernels.gemm.face import gemm_w4a8
from ptxlab.kernels.gemm.groupedface import gemm_w4a8_grouped
from ptxlab.kernels.gemm.ladder import LADDER

SPECS = (*tile.SPECS, *sm80.SPECS, *sm90.SPECS, *w8a8.SPECS, *grouped.SPECS)

STEPS = tuple(step.spec for step in LADDER if step.order == "row_major")  # the ladder, one spec per kernel

__all__ = ["SPECS", "STEPS", "Workspace", "gemm_w4a8", "gemm_w4a8_grouped", "gemm_workspace"]

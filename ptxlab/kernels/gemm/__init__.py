"""Family `gemm`: W4A8, Y = X Wᵀ with integer accumulators. A ladder of main loops, one file per step."""

from ptxlab.kernels.gemm import epilogues, grouped, sm80, sm90, strips, tile, w8a8
from ptxlab.kernels.gemm.api import Workspace, gemm_w4a8, gemm_workspace
from ptxlab.kernels.gemm.grouped_api import gemm_w4a8_grouped
from ptxlab.kernels.gemm.ladder import LADDER

SPECS = (*tile.SPECS, *sm80.SPECS, *sm90.SPECS, *strips.SPECS, *w8a8.SPECS, *grouped.SPECS)

# Of kernels in SPECS the form for weights per channel, `NAME:channel`, and those with another epilogue.
FORMS = (strips.SMALL_CHANNEL, strips.LARGE_CHANNEL, grouped.GROUPED_CHANNEL, *epilogues.FORMS)

# The ladder, one spec per kernel; weights in strips have kernels beyond it.
STEPS = tuple(step.spec for step in LADDER if step.order == "row_major" and step.packing != "strips")

__all__ = ["SPECS", "STEPS", "Workspace", "gemm_w4a8", "gemm_w4a8_grouped", "gemm_workspace"]

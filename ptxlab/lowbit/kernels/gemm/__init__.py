"""Family `gemm`: W4A8, W4A4 and W4Ax, Y = X Wᵀ with integer accumulators. Ladders of main loops, one file per step."""

from ptxlab.lowbit.kernels.gemm import epilogues, f16, grouped, sm80, sm90, strips, tile, w4a4, w4ax, w8a8
from ptxlab.lowbit.kernels.gemm.api import Workspace, gemm_w4a8, gemm_workspace
from ptxlab.lowbit.kernels.gemm.f16 import gemm_f16
from ptxlab.lowbit.kernels.gemm.grouped_api import gemm_w4a8_grouped
from ptxlab.lowbit.kernels.gemm.ladder import LADDER, layout_here
from ptxlab.lowbit.kernels.gemm.w4a4_api import gemm_w4a4, gemm_w4ax
from ptxlab.lowbit.kernels.gemm.w8a8_api import gemm_w8a8

SPECS = (
    *tile.SPECS,
    *sm80.SPECS,
    *sm90.SPECS,
    *strips.SPECS,
    *w8a8.SPECS,
    *w4a4.SPECS,
    *w4ax.SPECS,
    *grouped.SPECS,
    *f16.SPECS,
)

# Of kernels in SPECS other forms, `NAME:FORM`: for weights per channel, of another end, rounding as Atom's code does.
FORMS = (strips.SMALL_CHANNEL, strips.LARGE_CHANNEL, grouped.GROUPED_CHANNEL, w4a4.ATOM_HALVES, *epilogues.FORMS)

# The ladder, one spec per kernel; weights in strips have kernels beyond it.
STEPS = tuple(step.spec for step in LADDER if step.order == "row_major" and step.packing != "strips")

__all__ = [
    "SPECS",
    "STEPS",
    "Workspace",
    "gemm_f16",
    "gemm_w4a4",
    "gemm_w4a8",
    "gemm_w4a8_grouped",
    "gemm_w4ax",
    "gemm_w8a8",
    "gemm_workspace",
    "layout_here",
]

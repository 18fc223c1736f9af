"""The steps of the ladder for Hopper: wgmma with the weights from registers (LiquidGEMM §5)."""

from ptxlab.spec import KernelSpec

SPECS: tuple[KernelSpec, ...] = ()

"""The steps of the ladder for Hopper: wgmma with the weights from registers (LiquidGEMM §5)."""

from ptxlab.kernels.gemm.common import Step

STEPS: tuple[Step, ...] = ()
SPECS = tuple(step.spec for step in STEPS)

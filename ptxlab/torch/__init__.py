"""PyTorch: the kernels as operators (`torch.ops.ptxlab`), quantised modules, models of `transformers`.

The only room besides the peers of benches that imports PyTorch; nothing else imports this one.
"""

from ptxlab.torch import operators  # noqa: F401  (defines torch.ops.ptxlab)
from ptxlab.torch.linear import W4A8Linear
from ptxlab.torch.operators import attention_workspace

__all__ = ["W4A8Linear", "attention_workspace"]

"""PyTorch: the kernels as operators (`torch.ops.ptxlab`), quantised modules, models of `transformers`.

The only room besides the peers of benches that imports PyTorch; nothing else imports this one.
"""

from typing import Any

from ptxlab.torch.linear import W4A8Linear
from ptxlab.torch.operators import attention_workspace

__all__ = ["KV4Cache", "W4A8Linear", "attention_workspace", "quantize_model"]


def __getattr__(name: str) -> Any:
    """What needs `transformers`, imported when first asked for."""
    if name == "KV4Cache":
        from ptxlab.torch.cache import KV4Cache

        return KV4Cache
    if name == "quantize_model":
        from ptxlab.torch.models import quantize_model

        return quantize_model
    raise AttributeError(f"module 'ptxlab.torch' has no attribute {name!r}")

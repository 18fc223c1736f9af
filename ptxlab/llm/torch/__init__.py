"""PyTorch: the kernels as operators (`torch.ops.ptxlab`), quantised modules, models of `transformers`.

The only folder of the package that imports PyTorch; nothing else imports this one.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ptxlab.errors import UnavailableError

_INSTALL = "python -m pip install 'ptxlab[torch]'"
try:
    from ptxlab.llm.torch import operators_experts as _operators_experts  # noqa: F401  (defines them)
    from ptxlab.llm.torch import operators_w4a4 as _operators_w4a4  # noqa: F401
    from ptxlab.llm.torch.linear import W4A8Linear
    from ptxlab.llm.torch.operators import attention_workspace
except ModuleNotFoundError as error:
    raise UnavailableError(f"{error.name}: not installed; {_INSTALL}") from None

if TYPE_CHECKING:
    from ptxlab.llm.torch.cache import KV4Cache
    from ptxlab.llm.torch.models import quantize_model

__all__ = ["KV4Cache", "W4A8Linear", "attention_workspace", "quantize_model"]


def __getattr__(name: str) -> Any:
    """Import a name that needs `transformers` when it is first used."""
    module = {"KV4Cache": "cache", "quantize_model": "models", "bench": "bench"}.get(name)
    if module is None:
        raise AttributeError(f"module 'ptxlab.llm.torch' has no attribute {name!r}")
    try:
        submodule = import_module(f"ptxlab.llm.torch.{module}")
    except ModuleNotFoundError as error:
        raise UnavailableError(f"{error.name}: not installed; {_INSTALL}") from None
    return submodule if name == module else getattr(submodule, name)

"""ptxlab: a workbench for low-bit LLM kernels.

`gemm_w4a8`, `gemm_w4a4`, `gemm_w4ax`, `attention_kv4`, `append_kv4`, `quantize_activations`, `rmsnorm_quantize`,
`silu_mul_quantize`, `reorder_quantize`, `route_tokens` and `combine_experts` call the kernels. `load` and `run` launch
any kernel on a GPU or in the PTX emulator, with checks. `pack`, `KVCache` and `to_device` prepare weights and caches.

Rooms; each imports only those before it:

- The workbench, everything at this level: it runs, checks, debugs, proves, times and shows any kernel, and knows no
  quantisation scheme. `registry` finds what other rooms and packages bring.
- `lowbit`: references, quantisers, layouts, kernels and their public calls, claims, the cost model, suites of `bench`.
- `llm`: whole models: checkpoints, recipes, runners, a server, PyTorch.

`public` has the names that are offered here.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ptxlab import _moved

if TYPE_CHECKING:
    from ptxlab.public import *  # noqa: F403

__version__ = "0.2.0"

_moved.install()


def __getattr__(name: str) -> Any:
    """Import folders and public names when they are first used.

    Pytest loads the plugin of this package at every start.
    """
    if name == "__all__":
        return ["__version__", *import_module("ptxlab.public").__all__]
    if name.startswith("_"):
        raise AttributeError(f"module 'ptxlab' has no attribute {name!r}")
    if find_spec(f"ptxlab.{name}"):
        return import_module(f"ptxlab.{name}")
    public = import_module("ptxlab.public")
    if name not in public.__all__:
        raise AttributeError(f"module 'ptxlab' has no attribute {name!r}")
    globals()[name] = getattr(public, name)
    return globals()[name]


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]


def load_ipython_extension(shell: Any) -> None:
    """Register the magics `%%ptx` and `%%cuda` and the displays; `%load_ext ptxlab` calls this."""
    from ptxlab import jupyter

    jupyter.register(shell)

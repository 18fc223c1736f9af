"""ptxlab: a workbench for low-bit LLM kernels.

`gemm_w4a8`, `gemm_w4a4`, `gemm_w4ax`, `attention_kv4`, `append_kv4`, `quantize_activations`, `rmsnorm_quantize`,
`silu_mul_quantize`, `reorder_quantize`, `route_tokens` and `combine_experts` call the kernels. `load` and `run` launch
any kernel on a GPU or in the PTX emulator, with checks. `pack`, `KVCache` and `to_device` prepare weights and caches.

The folders; imports go one way, from a later line of this list to an earlier one:

- Foundations: `io` (files, checkpoints, downloaded weights), `toolchain` (NVRTC, ptxas, nvdisasm), `cost` (data
  sheets of GPUs and the cost model, by which kernels choose tiles).
- Formats: `reference` (NumPy references), `quant` (floats to integers), `layout` (where each element lives), `spec`
  (the contract of a kernel).
- Backends: `emulator` (PTX on the CPU, with checks), `gpu` (CuPy), `runtime` (one call for both).
- Kernels: `kernels` has the specs and the public calls; the sources are in `ptx/` and `cuda_src/`. `model` puts the
  calls together to a decoder layer.
- Tools: `verify`, `prove`, `sass`, `nsight`, `bench`, `profile`, `timeline`, `weights` (audit and convert
  checkpoints), `demo`.
- Ways in: `jupyter`, `cli`, `doctor`, `testing` (the pytest plugin), `torch` (operators and modules of PyTorch).
  `public` has the names that are offered here.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptxlab.public import *  # noqa: F403

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Folders and public names, imported when first asked for: pytest loads the plugin herein at every start."""
    if name == "__all__":
        return ["__version__", *import_module("ptxlab.public").__all__]
    if name.startswith("_"):
        raise AttributeError(f"module 'ptxlab' has no attribute {name!r}")
    if find_spec(f"ptxlab.{name}"):
        return import_module(f"ptxlab.{name}")
    found = globals()[name] = getattr(import_module("ptxlab.public"), name)
    return found


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]


def load_ipython_extension(shell: Any) -> None:
    """Register the magics `%%ptx` and `%%cuda` and the displays; `%load_ext ptxlab` calls this."""
    from ptxlab import jupyter

    jupyter.register(shell)

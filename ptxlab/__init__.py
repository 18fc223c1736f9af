"""ptxlab: a workbench for low-bit LLM kernels."""

from ptxlab.kernels import find, run, specs
from ptxlab.runtime import Kernel, Outcome, load

__version__ = "0.1.0"

__all__ = ["Kernel", "Outcome", "__version__", "find", "load", "run", "specs"]

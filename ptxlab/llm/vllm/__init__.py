"""`vllm serve MODEL --quantization ptxlab`: the kernels as an out-of-tree plugin of vLLM.

vLLM finds `register` by the entry point group `vllm.general_plugins` and calls it in each of its processes. Nothing of
vLLM is patched; what is registered follows vLLM 0.26.0. Importing this module imports neither PyTorch nor vLLM.
"""

from importlib import metadata
from logging import getLogger

NAME = "ptxlab"  # of the quantisation method, and of its options in `--additional-config`
VLLM = "0.26.0"
log = getLogger("vllm.ptxlab")  # below vLLM's own, which has the handler


def register() -> None:
    """Register the quantisation method `ptxlab` and the attention backend CUSTOM with vLLM 0.26.0.

    With another version nothing is registered and a warning says so: vLLM then refuses `--quantization ptxlab` as
    unknown. What else goes wrong is raised, and vLLM does not start: it would serve something else.
    """
    installed = metadata.version("vllm").partition("+")[0]
    if installed != VLLM:
        log.warning("ptxlab: made for vLLM %s, this is %s: --quantization ptxlab is not available", VLLM, installed)
        return
    from ptxlab.llm.vllm.serving import register_with_vllm

    register_with_vllm()

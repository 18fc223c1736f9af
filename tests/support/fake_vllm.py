"""vLLM's Python without its compiled operators: stand-ins for these, and a platform that says compute capability 9.0.

Its sources have to be importable (`tests/llm/vllm` is skipped where they are not); nothing of it is changed.
"""

import sys
import types
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

COMPILED = ("_C", "_moe_C", "_vllm_fa3_C", "_C_cache_ops", "_C_custom_ar", "_flashmla_C")
EXTENSIONS = (
    "vllm.vllm_flash_attn._vllm_fa3_C", "vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm._flashmla_C",
    "vllm.cumem_allocator", "vllm.spinloop", "vllm.fs_io_C",
)  # fmt: skip


class _Operators(types.ModuleType):
    """A namespace of `torch.ops` in which every name is a stand-in."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        operator = MagicMock(name=name)
        setattr(self, name, operator)
        return operator


def install() -> None:
    """Put the stand-ins in place, and an H200 as vLLM's platform."""
    import torch

    for name in COMPILED:
        torch.ops.__dict__[name] = _Operators(name)
    for name in EXTENSIONS:
        sys.modules.setdefault(name, types.ModuleType(name))
    register_fake = torch.library.register_fake

    def register_known(op: Any, *args: Any, **how: Any) -> Any:
        """Leave out the fakes of operators that are stand-ins."""
        if isinstance(op, str) and op.partition("::")[0] in COMPILED:
            keep: Callable[[Any], Any] = lambda function: function  # noqa: E731
            return keep
        return register_fake(op, *args, **how)

    torch.library.register_fake = register_known
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class FakeH200(NonNvmlCudaPlatform):
        """A platform of compute capability 9.0 whose tensors are the CPU's."""

        capability = DeviceCapability(9, 0)
        device_type, dispatch_key = "cpu", "CPU"

        @classmethod
        def opaque_attention_op(cls) -> bool:
            return False

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return cls.capability

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H200"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 141 << 30

        @classmethod
        def device_count(cls) -> int:
            return 1

    vllm.platforms._current_platform = FakeH200()
    torch.accelerator.max_memory_allocated = lambda *device: 0
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # which would have no stand-ins, and takes a minute

"""The GPU side, through CuPy: the device, loading and launching kernels, arrays, graphs.

The only folder that imports CuPy, and only inside functions: `import ptxlab.gpu` works without it. Every launch goes
through `launch`, on the caller's stream.
"""

from ptxlab.gpu.arrays import as_array, caller_stream, check_alignment, empty, is_device_array, like
from ptxlab.gpu.device import DeviceInfo, available, device_info, remedy, unused_gpu, why_not
from ptxlab.gpu.graph import Graph, Timing, capture
from ptxlab.gpu.launch import launch, prepare
from ptxlab.gpu.module import GpuKernel, load

__all__ = [
    "DeviceInfo",
    "GpuKernel",
    "Graph",
    "Timing",
    "as_array",
    "available",
    "caller_stream",
    "capture",
    "check_alignment",
    "device_info",
    "empty",
    "is_device_array",
    "launch",
    "like",
    "load",
    "prepare",
    "remedy",
    "unused_gpu",
    "why_not",
]

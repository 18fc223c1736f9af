"""The GPU side, through CuPy: the device, loading and launching kernels, arrays, graphs.

The only folder that imports CuPy, and only inside functions: `import ptxlab.gpu` works without it. Every launch goes
through `launch`, on the caller's stream.
"""

from ptxlab.gpu.architecture import compiling_for, target, why_not_compiled
from ptxlab.gpu.arrays import (
    ALIGNMENT,
    allocating_elsewhere,
    as_array,
    caller_stream,
    check_alignment,
    copy_bytes,
    empty,
    fetch,
    fill_bytes,
    free_pool,
    gumbel,
    is_device_array,
    like,
    synchronize,
    to_device,
    to_host,
    without_pool,
    zeros,
)
from ptxlab.gpu.device import DeviceInfo, available, card_id, device_info, install_hint, unused_gpu_hint, why_not
from ptxlab.gpu.floats import float_instruction
from ptxlab.gpu.graph import Graph, Timing, call_times, capture, time_calls, wrap_graph
from ptxlab.gpu.launch import bind, launch, prepare
from ptxlab.gpu.marks import NamedRange, profiling
from ptxlab.gpu.module import GpuKernel, image_kind, load, load_image
from ptxlab.gpu.tensor_map import encode
from ptxlab.gpu.view import View, current_device, flat_rows, hand_to_caller, is_capturing, new, stream_handle, view

__all__ = [
    "ALIGNMENT",
    "DeviceInfo",
    "GpuKernel",
    "Graph",
    "NamedRange",
    "Timing",
    "View",
    "allocating_elsewhere",
    "as_array",
    "available",
    "bind",
    "call_times",
    "caller_stream",
    "capture",
    "card_id",
    "check_alignment",
    "compiling_for",
    "copy_bytes",
    "current_device",
    "device_info",
    "empty",
    "encode",
    "fetch",
    "fill_bytes",
    "flat_rows",
    "float_instruction",
    "free_pool",
    "gumbel",
    "hand_to_caller",
    "image_kind",
    "install_hint",
    "is_capturing",
    "is_device_array",
    "launch",
    "like",
    "load",
    "load_image",
    "new",
    "prepare",
    "profiling",
    "stream_handle",
    "synchronize",
    "target",
    "time_calls",
    "to_device",
    "to_host",
    "unused_gpu_hint",
    "view",
    "why_not",
    "why_not_compiled",
    "without_pool",
    "wrap_graph",
    "zeros",
]

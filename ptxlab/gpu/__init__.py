"""The GPU side, through CuPy: the device, loading and launching kernels, arrays, graphs.

The only folder that imports CuPy, and only inside functions: `import ptxlab.gpu` works without it. Every launch goes
through `launch`, on the caller's stream.
"""

from ptxlab.gpu.architecture import compiling_for, target, why_not_compiled
from ptxlab.gpu.arrays import (
    ALIGNMENT,
    as_array,
    caller_stream,
    check_alignment,
    copy_bytes,
    elsewhere,
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
from ptxlab.gpu.device import DeviceInfo, available, card_id, device_info, remedy, unused_gpu, why_not
from ptxlab.gpu.floats import float_instruction
from ptxlab.gpu.graph import Graph, Timing, adopt, call_times, capture, time_calls
from ptxlab.gpu.launch import bind, launch, prepare
from ptxlab.gpu.marks import Marked, profiled
from ptxlab.gpu.module import GpuKernel, image_kind, load, load_image
from ptxlab.gpu.tensor_map import encode
from ptxlab.gpu.view import View, current_device, flat_rows, handed, is_capturing, new, stream_handle, view

__all__ = [
    "ALIGNMENT",
    "DeviceInfo",
    "GpuKernel",
    "Graph",
    "Marked",
    "Timing",
    "View",
    "adopt",
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
    "elsewhere",
    "empty",
    "encode",
    "fetch",
    "fill_bytes",
    "flat_rows",
    "float_instruction",
    "free_pool",
    "gumbel",
    "handed",
    "image_kind",
    "is_capturing",
    "is_device_array",
    "launch",
    "like",
    "load",
    "load_image",
    "new",
    "prepare",
    "profiled",
    "remedy",
    "stream_handle",
    "synchronize",
    "target",
    "time_calls",
    "to_device",
    "to_host",
    "unused_gpu",
    "view",
    "why_not",
    "why_not_compiled",
    "without_pool",
    "zeros",
]

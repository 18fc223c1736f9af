"""The GPU of this machine: whether it can be used, why not, and what it is."""

import ctypes
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import UUID

from ptxlab.errors import UnavailableError
from ptxlab.gpu.architecture import capability, needs, target, why_not_compiled

_BROKEN_CUPY = "14.1.0"
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class DeviceInfo:
    """CuPy's current device.

    Attributes:
        name: `NVIDIA H200`.
        compute_capability: `(9, 0)`.
        sms: streaming multiprocessors.
        l2_bytes: size of the L2 cache.
        memory_bytes: size of the device memory.
        shared_bytes: most shared memory that one block can ask for.
        shared_bytes_per_sm: shared memory of an SM, of which every block takes some (1 KB) for itself.
        driver: version of the driver, `580.95.05`; where it cannot be read, the CUDA version it supports.
        cupy: version of CuPy.
    """

    name: str
    compute_capability: tuple[int, int]
    sms: int
    l2_bytes: int
    memory_bytes: int
    shared_bytes: int
    shared_bytes_per_sm: int
    driver: str
    cupy: str

    @property
    def arch(self) -> str:
        """The architecture to compile for: with the features of this very GPU from Hopper on, `sm_90a`."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")

    @property
    def slug(self) -> str:
        """The name for folders and tables, `h200`."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower().removeprefix("nvidia ")).strip("-")

    def __str__(self) -> str:
        capability = ".".join(map(str, self.compute_capability))
        memory = self.memory_bytes / 2**30
        return f"{self.name}, compute capability {capability}, {self.sms} SMs, {memory:.0f} GiB, driver {self.driver}"


def available() -> bool:
    """Check whether kernels can run on a GPU here; `why_not` says why not."""
    return why_not(None) is None


def why_not(arch: str | None, *, exact: bool = False) -> str | None:
    """Return the reason why a kernel cannot run on the GPU here; None if it can.

    Args:
        arch: lowest architecture that the kernel needs, `sm_80`; None asks for any GPU.
        exact: the kernel is for that architecture only (`sm_90a`).

    Inside `compiling_for` the architecture of that takes the GPU's place.
    """
    reason = _why_no_gpu()
    if reason is not None or arch is None:
        return reason
    needed_capability, device_capability = capability(arch), device_info().compute_capability
    if (target_arch := target()) is not None:
        is_too_old = capability(target_arch) > device_capability
        return (
            f"this is below {target_arch}, {_label(device_info())}"
            if is_too_old
            else why_not_compiled(arch, exact=exact)
        )
    if device_capability == needed_capability or (device_capability > needed_capability and not exact):
        return None
    return f"{needs(arch, exact)}, and this is {_label(device_info())}"


def _label(device: DeviceInfo) -> str:
    return f"{device.name}, sm_{''.join(map(str, device.compute_capability))}"


def device_info() -> DeviceInfo:
    """Describe the current device. Raises `UnavailableError`, which says why there is none."""
    reason = _why_no_gpu()
    if reason is not None:
        raise UnavailableError(f"no GPU backend here: {reason}" + (f"; {install_hint()}" if install_hint() else ""))
    import cupy

    return _info(cupy.cuda.Device().id)


def card_id() -> str:
    """Identify the current device among cards of one kind: its UUID as nvidia-smi has it, `GPU-...`."""
    import cupy
    from cuda.bindings import driver

    error, uuid = driver.cuDeviceGetUuid(cupy.cuda.Device().id)
    return f"GPU-{UUID(bytes=uuid.bytes)}" if error == driver.CUresult.CUDA_SUCCESS else ""


def install_hint() -> str:
    """Return the command that would bring the GPU backend to this machine.

    It is empty where the backend works, or where nothing would bring it.
    """
    cuda = _driver_cuda_version()
    if cuda is None or cuda < 12000 or _why_no_gpu() is None:
        return ""
    return f"python -m pip install 'ptxlab[cu{13 if cuda >= 13000 else 12}]'"


def unused_gpu_hint() -> str | None:
    """Return a hint for people who have a GPU that ptxlab cannot use yet; None if there is nothing to say."""
    return f"There is a GPU here, but {_why_no_gpu()}: {install_hint()}" if install_hint() else None


@cache
def _info(device: int) -> DeviceInfo:
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(device)
    return DeviceInfo(
        name=properties["name"].decode(),
        compute_capability=(properties["major"], properties["minor"]),
        sms=properties["multiProcessorCount"],
        l2_bytes=properties["l2CacheSize"],
        memory_bytes=properties["totalGlobalMem"],
        shared_bytes=properties["sharedMemPerBlockOptin"],
        shared_bytes_per_sm=properties["sharedMemPerMultiprocessor"],
        driver=_read_driver_version(),
        cupy=cupy.__version__,
    )


@cache
def _why_no_gpu() -> str | None:
    """Return why no GPU can be used: the driver, a package or a device is missing or unfit; None if one can."""
    cuda = _driver_cuda_version()
    if cuda is None:
        return "no NVIDIA driver found"
    if cuda < 12000:
        return f"the driver supports CUDA {_format_cuda_version(cuda)}, and 12.0 is needed"
    packages = [p for p in ("cupy-cuda12x", "cupy-cuda13x", "cupy") if _version(p)]
    if len(packages) > 1:
        return (
            f"{' and '.join(packages)} are both installed, and only one may be: python -m pip uninstall {packages[0]}"
        )
    for module in ("cupy", "cuda.bindings.driver"):
        try:
            __import__(module)
        except ImportError as error:
            package = "CuPy" if module == "cupy" else "cuda-bindings"
            return (
                f"{package} is not installed"
                if error.name in ("cupy", "cuda", "cuda.bindings")
                else f"{package}: {error}"
            )
    import cupy

    if cupy.__version__ == _BROKEN_CUPY:
        return f"CuPy {_BROKEN_CUPY} is broken"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy {cupy.__version__} finds no device: {error}"
    return None if count else "no CUDA device is visible (CUDA_VISIBLE_DEVICES?)"


@cache
def _driver_cuda_version() -> int | None:
    """Return the CUDA version that the driver supports (13000 for 13.0); None without a driver and a device."""
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        cuda: Any = ctypes.CDLL(library)
    except OSError:
        return None
    count, version = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    return None if cuda.cuDriverGetVersion(ctypes.byref(version)) else version.value


def _read_driver_version() -> str:
    try:
        match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", _DRIVER_FILE.read_text(encoding="utf-8"))
    except OSError:
        match = None
    return match[1] if match else f"CUDA {_format_cuda_version(_driver_cuda_version() or 0)}"


def _format_cuda_version(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

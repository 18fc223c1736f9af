"""The GPU side where there is no GPU or no CuPy: it imports, and says what is missing and what to install."""

import subprocess
import sys

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.gpu import device
from ptxlab.gpu.launch import spread_bytes
from ptxlab.spec import Launch

EXAMINE = device._why_no_gpu.__wrapped__  # uncached


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Pretend a driver (the CUDA version it supports, or None), installed CuPy packages, and importable modules."""

    def pretend(driver: int | None, packages: tuple[str, ...] = (), **modules: object) -> None:
        monkeypatch.setattr(device, "_why_no_gpu", EXAMINE)
        monkeypatch.setattr(device, "_driver_cuda_version", lambda: driver)
        monkeypatch.setattr(device, "_version", lambda package: "14.2.0" if package in packages else None)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    return pretend


class FakeCupy:
    """Stand-in with the parts of CuPy that `device` uses before anything runs."""

    class cuda:  # noqa: N801
        class runtime:  # noqa: N801
            CUDARuntimeError = RuntimeError
            devices = 0

            @classmethod
            def getDeviceCount(cls) -> int:  # noqa: N802
                if cls.devices < 0:
                    raise RuntimeError("cudaErrorInsufficientDriver")
                return cls.devices

    def __init__(self, version: str, devices: int) -> None:
        self.__version__ = version
        self.cuda.runtime.devices = devices


REFUSE_IMPORTS = """
import sys
class Refuse:
    def find_spec(self, name, *_):
        if name.partition('.')[0] in ('cupy', 'torch', 'cuda'): raise ImportError(name)
sys.meta_path.insert(0, Refuse())
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "program",
    [
        "import ptxlab.gpu; assert not ptxlab.gpu.available(); print(ptxlab.gpu.why_not('sm_80'))",
        "import runpy\n"
        "sys.argv = ['ptxlab', 'verify', 'dequant_lqq.ptx', '--backend', 'emulator']\n"
        "runpy.run_module('ptxlab', run_name='__main__')",
    ],
    ids=["gpu", "emulator"],
)
def test_works_without_packages_of_the_gpu(program: str) -> None:
    """The base install has no CuPy, PyTorch or `cuda` package."""
    done = subprocess.run([sys.executable, "-c", REFUSE_IMPORTS + program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_no_driver(machine) -> None:
    machine(None)
    assert gpu.why_not("sm_80") == "no NVIDIA driver found" and not gpu.available()
    assert gpu.install_hint() == "" and gpu.unused_gpu_hint() is None
    with pytest.raises(UnavailableError, match=r"^no GPU backend here: no NVIDIA driver found$"):
        gpu.device_info()


@pytest.mark.parametrize(("driver", "extra"), [(13000, "cu13"), (13010, "cu13"), (12080, "cu12")])
def test_gpu_without_cupy(machine, driver: int, extra: str) -> None:
    machine(driver, cupy=None)  # None in sys.modules: importing it fails as if it were not installed
    assert gpu.why_not(None) is not None and "CuPy" in gpu.why_not(None)
    assert gpu.install_hint() == f"python -m pip install 'ptxlab[{extra}]'"
    assert gpu.unused_gpu_hint() is not None and gpu.install_hint() in gpu.unused_gpu_hint()
    with pytest.raises(UnavailableError, match=rf"CuPy.*ptxlab\[{extra}\]"):
        gpu.device_info()


def test_old_driver(machine) -> None:
    machine(11080)
    assert gpu.why_not(None) == "the driver supports CUDA 11.8, and 12.0 is needed"
    assert gpu.install_hint() == ""


def test_both_cupys(machine) -> None:
    machine(13000, ("cupy-cuda12x", "cupy-cuda13x"))
    assert "both installed" in gpu.why_not(None) and "pip uninstall cupy-cuda12x" in gpu.why_not(None)


def test_broken_and_blind_cupy(machine) -> None:
    machine(13000, cupy=FakeCupy("14.1.0", 1))
    assert gpu.why_not(None) == "CuPy 14.1.0 is broken"
    machine(13000, cupy=FakeCupy("14.2.0", -1))
    assert gpu.why_not(None) == "CuPy 14.2.0 finds no device: cudaErrorInsufficientDriver"
    machine(13000, cupy=FakeCupy("14.2.0", 0))
    assert "CUDA_VISIBLE_DEVICES" in gpu.why_not(None)


@pytest.mark.parametrize(
    ("capability", "arch", "exact", "runs"),
    [
        ((9, 0), "sm_80", False, True),
        ((9, 0), "sm_90", False, True),
        ((9, 0), "sm_90a", True, True),
        ((8, 0), "sm_90a", True, False),
        ((12, 0), "sm_90a", True, False),
        ((12, 0), "sm_90", False, True),
        ((7, 5), "sm_80", False, False),
    ],
)
def test_architectures(machine, monkeypatch, capability, arch, exact, runs) -> None:
    machine(13000, cupy=FakeCupy("14.2.0", 1))
    device_info = gpu.DeviceInfo("NVIDIA Test 1", capability, 1, 1, 1, 1, 1, "1", "14.2.0")
    monkeypatch.setattr(device, "device_info", lambda: device_info)
    reason = gpu.why_not(arch, exact=exact)
    assert (reason is None) == runs
    if not runs:
        assert arch in reason and "NVIDIA Test 1, sm_" in reason


_H200 = gpu.DeviceInfo("NVIDIA H200", (9, 0), 132, 60 << 20, 141 << 30, 232448, 233472, "580.1", "14.2.0")


@pytest.mark.parametrize(("blocks", "share"), [(1, 1), (132, 1), (133, 2), (384, 3), (1056, 8)])
@pytest.mark.parametrize("static", [0, 96, 4096])
def test_an_sm_holds_its_share_of_a_spread_grid_and_no_more(blocks: int, share: int, static: int) -> None:
    block_bytes = spread_bytes(Launch((blocks, 1, 1), (256, 1, 1)), static, _H200) + static
    assert (
        share * (block_bytes + 1024) <= _H200.shared_bytes_per_sm < (share + 1) * (block_bytes + 1024)
        and block_bytes <= _H200.shared_bytes
    )


def test_large_grids_are_not_spread_and_clusters_get_some_room() -> None:
    assert spread_bytes(Launch((1057, 1, 1), (256, 1, 1)), 0, _H200) == 0
    alone, clustered = Launch((132, 1, 1), (256, 1, 1)), Launch((132, 1, 1), (256, 1, 1), cluster=(4, 1, 1))
    assert spread_bytes(clustered, 0, _H200) < spread_bytes(alone, 0, _H200) / 2


def test_names_derived_from_the_device() -> None:
    h200 = _H200
    assert (h200.arch, h200.slug) == ("sm_90a", "h200")
    a100 = gpu.DeviceInfo("NVIDIA A100-SXM4-80GB", (8, 0), 108, 40 << 20, 80 << 30, 166912, 167936, "580.1", "14.2.0")
    assert (a100.arch, a100.slug) == ("sm_80", "a100-sxm4-80gb")
    assert str(h200) == "NVIDIA H200, compute capability 9.0, 132 SMs, 141 GiB, driver 580.1"


def test_host_arrays() -> None:
    array = np.arange(8, dtype=np.uint8)
    assert gpu.as_array("x", array) is array and not gpu.is_device_array(array)
    assert gpu.like(array, array) is array

    class Shares:
        def __dlpack__(self, **options: object) -> object:
            return array.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return array.__dlpack_device__()

    device_array = gpu.as_array("x", Shares())
    assert isinstance(device_array, np.ndarray) and np.shares_memory(device_array, array)
    with pytest.raises(ArgumentError, match=r"^x: an array: NumPy, CuPy, DLPack .*\(got list\)$"):
        gpu.as_array("x", [1, 2])


def test_alignment_of_host_arrays() -> None:
    gpu.check_alignment("x", np.zeros(4, np.float32))
    with pytest.raises(ArgumentError, match=r"^x: aligned to its 4-byte elements \(got address 0x"):
        gpu.check_alignment("x", np.zeros(17, np.uint8)[1:].view(np.float32))

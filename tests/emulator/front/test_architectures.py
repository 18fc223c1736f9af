"""Instructions that ptxas takes for some targets alone; the table was held against ptxas 13.2."""

import numpy as np
import pytest

import ptxlab
from ptxlab import Launch, emulator
from ptxlab.errors import SourceError
from tests.support.small_kernels import kernel_text

WGMMA, SETMAXNREG = "wgmma.fence.sync.aligned;", "setmaxnreg.inc.sync.aligned.u32 128;"
ONE_WARP_GROUP = Launch((1, 1, 1), (128, 1, 1))


def module(line: str, target: str) -> str:
    return kernel_text(f"{line}\nret;", directives=".maxntid 128").replace("sm_90", target)


@pytest.mark.parametrize(
    ("line", "takes", "refuses"),
    [
        (WGMMA, ("sm_90a",), ("sm_90", "sm_80", "sm_100", "sm_100a", "sm_100f", "sm_120a")),
        (SETMAXNREG, ("sm_90a", "sm_100a", "sm_100f", "sm_103a", "sm_121a"), ("sm_90", "sm_100", "sm_80")),
    ],
)
def test_targets(line: str, takes: tuple[str, ...], refuses: tuple[str, ...]) -> None:
    for target in takes:
        emulator.require_target(emulator.parse(module(line, target)))
    for target in refuses:
        with pytest.raises(SourceError, match=rf"k.ptx:\d+: {target} has no {line.split('.')[0]}: it takes sm_90a"):
            emulator.require_target(emulator.parse(module(line, target), "k.ptx"))


@pytest.mark.parametrize(("arch", "refused"), [("sm_90", True), ("sm_100a", True), ("sm_90a", False), (None, False)])
def test_an_architecture_that_is_stated(arch: str | None, refused: bool) -> None:
    """Without one, CUDA C++ is compiled for the lowest that has what it uses."""
    source = 'extern "C" __global__ void k(int* y) {\n    asm volatile("wgmma.fence.sync.aligned;");\n}'
    loaded_kernel = ptxlab.load(source, arch=arch)
    if refused:
        with pytest.raises(SourceError, match=f":2: {arch} has no wgmma"):
            loaded_kernel.launch([np.zeros(1, np.int32)], ONE_WARP_GROUP, backend="emulator")
    else:
        loaded_kernel.launch([np.zeros(1, np.int32)], ONE_WARP_GROUP, backend="emulator")


def test_a_ptx_file_states_its_target() -> None:
    with pytest.raises(SourceError, match="sm_90 has no wgmma"):
        ptxlab.load(module(WGMMA, "sm_90")).launch([np.zeros(1, np.int32)], ONE_WARP_GROUP, backend="emulator")

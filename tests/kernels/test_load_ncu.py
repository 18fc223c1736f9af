"""The bank model against the hardware's counters, kernel by kernel. Needs a GPU, and ncu with permission to count."""

import pytest

from ptxlab import kernels
from ptxlab.bench import loads
from ptxlab.errors import UnavailableError

pytestmark = [pytest.mark.gpu, pytest.mark.timing]  # counters of the device, which count others' launches too

TILES = [name for name, spec in kernels.specs().items() if spec.family == "load" and "T" in spec.example_sizes[0]]


@pytest.mark.parametrize("name", TILES)
def test_wavefronts_and_conflicts_are_those_that_ncu_counts(name: str) -> None:
    spec, (source, *_) = kernels.find(name)
    modelled = loads.modelled_banks(spec, source)
    try:
        counted = loads.counted_banks(spec)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    assert modelled == counted
    conflicts_per_warp = 8 if name == "load_lds32_u4" else 0
    assert modelled["conflicts"] == conflicts_per_warp * 4 * loads.BANK_TILES

from ptxlab import kernels
from ptxlab.bench import emulation


def test_the_emulator_is_as_fast_as_the_tests_need() -> None:
    """20 million lane-instructions a second at 4,096 lanes; it reaches a multiple, so load does not matter."""
    row = emulation.measure(kernels.specs()["dequant_lqq"], 4096, ())
    assert row.sizes["lanes"] == 4096
    assert row.rate == row.fraction * emulation.WANTED / 1e6
    assert max(row.rate, row.rate * row.time_us / row.fastest_us) > 20

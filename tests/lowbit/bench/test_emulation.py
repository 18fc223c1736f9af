import pytest

from ptxlab import registry
from ptxlab.lowbit.bench import emulation


def test_the_emulator_is_as_fast_as_the_tests_need() -> None:
    """20 million lane-instructions a second at 4,096 lanes; it reaches three times that on an idle core.

    The fastest of its runs counts, and a second and third try, because other tests run beside this one.
    """
    for _ in range(3):
        row = emulation.measure(registry.specs()["dequant_lqq"], 4096, ())
        assert row.sizes["lanes"] == 4096
        assert row.rate == pytest.approx(row.fraction * emulation.WANTED / 1e6)
        if row.rate * row.time_us / row.fastest_us > 20:
            return
    pytest.fail(f"{row.rate:.1f} million a second")

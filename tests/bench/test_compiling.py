"""What `test_on_gpu` times is compiled early, while other tests have the device: that file has it to itself."""

import pytest

from tests.support.timed_variants import compile_timed_variants


@pytest.mark.gpu
@pytest.mark.long(60)
def test_every_timed_variant_compiles() -> None:
    compile_timed_variants()

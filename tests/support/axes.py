"""What many tests are parametrised by: the backend, and when asynchronous operations take effect in the emulator."""

import pytest

from ptxlab import emulator

on_every_backend = pytest.mark.parametrize("backend", ["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
both_modes = pytest.mark.parametrize("mode", emulator.MODES)

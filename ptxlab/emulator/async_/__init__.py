"""Asynchronous instructions: cp.async, bulk and tensor copies, st.async, wgmma."""

# Each module enters its instructions into the table of binders when it is imported.
from ptxlab.emulator.async_ import cp_async, st_async, wgmma  # noqa: F401

"""Instructions that are done when they have been executed: ALU, loads and stores, warp collectives, matrices."""

# Each module enters its instructions into the table of binders when it is imported.
from ptxlab.emulator.ops import (  # noqa: F401
    atomic,
    bits,
    calls,
    collective,
    control,
    convert,
    floating,
    integer,
    ldmatrix,
    load_store,
    mma,
    setmaxnreg,
    video,
    wmma,
)

"""Instructions that wait for other threads: barriers of blocks and clusters, fences, mbarriers."""

# Each module enters its instructions into the table of binders when it is imported.
from ptxlab.emulator.sync import barrier, cluster, mbarrier  # noqa: F401

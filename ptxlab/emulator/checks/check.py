"""The base of all checks: a watcher of one machine, which can report findings."""

import numpy as np

from ptxlab.emulator.core.lanes import Lanes, indices_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.core.watcher import Watcher
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.types import Array


class Check(Watcher):
    """Base of the checks: watches a machine and adds findings."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def report(self, instruction: Instruction, kind: str, lanes: Lanes, wrong: Array, message: str) -> None:
        """Add a finding for the lanes (of the set) where `wrong`."""
        first = int(indices_of(lanes)[int(np.argmax(wrong))])
        place = self.machine.place_of(first)
        self.machine.launch.findings.add(instruction, kind, place, message, int(np.count_nonzero(wrong)))

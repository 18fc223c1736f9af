"""Instructions of some architectures alone: PTX for another target is refused, as ptxas refuses it."""

import re

from ptxlab.emulator.front.ir import Module
from ptxlab.errors import SourceError

# How an opcode begins -> the targets that have it, as a pattern, and in words. PTX ISA, target notes of each.
_ONLY = {
    "wgmma.": (r"sm_90a", "sm_90a"),
    "setmaxnreg.": (r"sm_(90a|1\d\d[af])", "sm_90a, and sm_100a and newer with a or f"),
}


def require_target(module: Module) -> None:
    """Raise SourceError at the first instruction that the module's `.target` has not."""
    for entry in module.entries.values():
        for opcode_prefix, (targets, words) in _ONLY.items():
            if not entry.uses(opcode_prefix) or re.fullmatch(targets, module.target):
                continue
            instruction = next(i for i in entry.instructions if i.opcode.startswith(opcode_prefix))
            problem = f"{module.target} has no {instruction.opcode.split('.')[0]}: it takes {words}"
            raise SourceError(instruction.path, instruction.line, problem, instruction.text)

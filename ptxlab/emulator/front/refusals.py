"""What PTX has and the emulator has not, and why, as messages say. The guide's page `emulator` has examples."""

import re

INSTRUCTIONS = {  # how an instruction begins, as a pattern -> why there is none like it here
    r"tcgen05": "the tensor memory of sm_100 is not emulated",
    r"clusterlaunchcontrol": "cluster launch control of sm_100 is not emulated",
    r"mma\S*\.kind::": "the block-scaled and mixed mma of sm_100 and sm_120 are not emulated",
    r"cp\.\S*\.tile::(gather4|scatter4)": "gathers and scatters of sm_100 are not emulated",
    r"(add|sub|fma)\S*\.f32\.b?f16$": "sums of f32 and halves, new in sm_100, are not emulated",
    r"cvt\.rs\.": "stochastic rounding of sm_100 is not emulated",
    r"(ldmatrix|stmatrix)\S*\.(m16n16|m8n16|m16n8)\.": "byte matrices of ldmatrix, new in sm_100, are not emulated",
    r"st\.bulk": "bulk stores of sm_100 are not emulated",
    r"cp\.\S*\.im2col": "im2col copies are not emulated",
    r"(wgmma\.mma_async|mma)\.sp": "sparse operands are not emulated",
    r"(tex|tld4|txq|suld|sust|sured|suq|istypep)\.": "textures and surfaces are not emulated",
    r"multimem": "multicast memory is not emulated",
    r"tensormap\.": "tensor maps that the device makes are not emulated",
    r"(alloca|stacksave|stackrestore)\.": "stack memory of a size known at run time is not emulated",
    r"call(\.uni)? (malloc|free)$": "malloc on the device is not emulated",
    r"call(\.uni)? of an address": "calls through function pointers are not emulated",
}
SPECIALS = {  # special registers, as a pattern -> why they have no value here
    r"%envreg\d+": "cooperative launches are not emulated",
    r"%pm\d(_64)?": "performance monitors are not emulated",
    r"%current_graph_exec": "graphs that the device launches are not emulated",
    r"%(aggr_smem_size|reserved_smem_offset_(begin|end|cap|[01]))": "reserved shared memory is not emulated",
}
FUNCTION_POINTERS = INSTRUCTIONS[r"call(\.uni)? of an address"]
RECURSION = "recursion is not emulated"
WIDE_REGISTERS = "registers of 128 bits are not emulated"
FLOAT_CONSTANTS = "arithmetic on floating-point constants is not emulated"


def reason_for(called: str) -> str | None:
    """Return why the emulator refuses an instruction, given its opcode or the text of a call."""
    return next((reason for pattern, reason in INSTRUCTIONS.items() if re.match(pattern, called)), None)


def reason_for_special(name: str) -> str | None:
    """Say why a special register has no value."""
    return next((reason for pattern, reason in SPECIALS.items() if re.fullmatch(pattern, name)), None)

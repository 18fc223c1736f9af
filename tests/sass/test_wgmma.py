"""Operands of a wgmma that change while it reads them are found in machine code, and only these."""

import pytest

from ptxlab import sass
from ptxlab.sass.wgmma import describe_overwritten_operands, overwritten_operands

# Two groups a round, of which each wait lets one run on.
LOOP = """
//--------------------- .text.k --------------------------
.text.k:
.L_round:
        /*0000*/                   LDS.128 R4, [R3] ;
        /*0010*/                   {early} ;
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x{pending} ;
        /*0030*/                   LOP3.LUT R8, R4, 0xf0f0f0f, RZ, 0xc0, !PT ;
        /*0040*/                   WARPGROUP.ARRIVE ;
        /*0050*/                   IGMMA.64x128x32.U8.S8 R24, R8, gdesc[UR8], R24, gsb0 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0070*/                   LOP3.LUT R12, R5, 0xf0f0f0f, RZ, 0xc0, !PT ;
        /*0080*/                   WARPGROUP.ARRIVE ;
        /*0090*/                   IGMMA.64x128x32.U8.S8 R24, R12, gdesc[UR8], R24, gsb0 ;
        /*00a0*/              @P0 BRA `(.L_round) ;
        /*00b0*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("early", "pending", "expected"),
    [
        ("NOP", 1, []),
        ("SHF.R.U32.HI R16, RZ, 0x4, R7", 1, []),  # another register
        ("STS.128 [R3], R12", 1, []),  # reads it
        ("SHF.R.U32.HI R13, RZ, 0x4, R7", 1, [0x10]),  # the group before reads R12..R15
        ("LDS.64 R10, [R3]", 1, [0x10]),  # the one before that R8..R11, until the wait
        ("NOP", 2, [0x30]),  # a wait that lets both run on
    ],
)
def test_what_writes_operands_too_early(early: str, pending: int, expected: list[int]) -> None:
    code = sass.parse(LOOP.format(early=early, pending=pending))["k"]
    assert [instruction.address for instruction in overwritten_operands(code)] == expected
    assert bool(list(describe_overwritten_operands(code))) == bool(expected)


def test_what_is_said_of_them() -> None:
    code = sass.parse(LOOP.format(early="MOV R12, R7", pending=1))["k"]
    (line,) = describe_overwritten_operands(code)
    assert line == "1 instructions write registers that a wgmma under way may still read, first MOV R12 at 0x10"

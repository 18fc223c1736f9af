"""Forms of known instructions that the emulator does not know."""

import numpy as np
import pytest

from ptxlab.errors import UnknownInstruction
from tests.support.small_kernels import kernel_text, run_text

FORMS = """
add.lo.u32 %r1, %r2, %r3
ld.global.fast.u32 %r1, [%x1]
mov.u32.x %r1, %r2
cvt.rq.u32.f32 %r1, %f1
fence.proxy.tensormap::generic.acq_rel.gpu
fence.acquired.gpu
cp.async.wait_group.read 0
cp.async.bulk.wait_all
cp.reduce.async.bulk.global.shared::cta.bulk_group.inc.s32 [%x1], [%r2], 16
cp.reduce.async.bulk.shared::cta.shared::cta.bulk_group.add.u32 [%x1], [%r2], 16
mbarrier.wait.shared.b64 [%r5], 1
wgmma.mma_async.sync.aligned.m64n40k32.s32.s8.s8
wgmma.mma_async.sync.aligned.m64n32k16.f16.bf16.bf16
wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.bf16
wgmma.mma_async.sync.aligned.m64n32k16.f32.tf32.tf32
wgmma.mma_async.sync.aligned.m64n32k8.f16.tf32.tf32
wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.s8
cvt.rn.e4m3x2.f32 %h0, %f1, %f2
cvt.rz.satfinite.e4m3x2.f32 %h0, %f1, %f2
cvt.rn.satfinite.f16x2.e4m3x2 %r1, %h0
cvt.rna.relu.tf32.f32 %r1, %f1
cvt.rn.satfinite.tf32.f32 %r1, %f1
wgmma.mma_async.sp.sync.aligned.m64n32k32.f32.f16.f16
wgmma.fence.sync
wgmma.depart.sync.aligned
movmatrix.sync.aligned.m8n8.b16 %s, %r2
ldmatrix.sync.aligned.m8n8.x3.shared.b16 {%s}, [%r2]
ldmatrix.sync.aligned.m8n8.x1.shared.b8 {%s}, [%r2]
griddepcontrol.signal
setmaxnreg.set.sync.aligned.u32 24
setmaxnreg.inc.u32 24
"""
MMA = """
m16n8k32.row.col.s32.s8.s4.s32     m16n8k64.row.col.s32.s8.s8.s32      m16n8k16.row.col.f32.f16.bf16.f32
m16n8k16.row.col.f16.bf16.bf16.f16 m16n8k16.row.col.f32.f16.f16.f16    m16n8k32.col.col.s32.s8.s8.s32
m16n8k16.row.col.f32.tf32.tf32.f32 m16n8k16.row.col.satfinite.f32.f16.f16.f32
m16n8k32.row.col.s32.s8.s8         m8n8k32.row.col.s32.s8.s8.s32       m16n8k8.row.col.s32.s8.s8.s32
m16n8k32.row.col.relu.s32.s8.s8.s32                                    m16n8k32.row.col.u32.u8.u8.u32
m8n8k16.row.col.f32.f16.f16.f32    m8n8k4.row.col.f16.f16.f16.f32      m8n8k4.row.col.f32.bf16.bf16.f32
"""
OPERANDS = "{%r1, %r2, %r3, %r4}, {%r5, %r6, %r7, %r8}, {%r9, %r10}, {%r1, %r2, %r3, %r4}"


@pytest.mark.parametrize(
    "form", [*FORMS.strip().splitlines(), *(f"mma.sync.aligned.{form} {OPERANDS}" for form in MMA.split())]
)
def test_other_forms_are_unknown(form: str) -> None:
    with pytest.raises(UnknownInstruction):
        run_text(kernel_text(f"{form};"), np.zeros(1))

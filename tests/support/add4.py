"""A small kernel with packed lanes: sums of bytes, four to a word, one word a thread."""

PTX_ADD4 = """
.version 6.5
.target sm_75
.address_size 64
.visible .entry add4(.param .u64 a, .param .u64 b, .param .u64 sum) {
    .reg .u64 %p<3>; .reg .u32 %x<2>, %i; .reg .u64 %o;
    ld.param.u64 %p0, [a]; ld.param.u64 %p1, [b]; ld.param.u64 %p2, [sum];
    mov.u32 %i, %tid.x; mul.wide.u32 %o, %i, 4;
    add.u64 %p0, %p0, %o; add.u64 %p1, %p1, %o; add.u64 %p2, %p2, %o;
    ld.global.u32 %x0, [%p0]; ld.global.u32 %x1, [%p1];
    add.u32 %x0, %x0, %x1;                     // @lanes d:u8x4 a:u8x4 b:u8x4
    st.global.u32 [%p2], %x0; ret;
}
"""

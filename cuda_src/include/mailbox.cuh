// Floats that one block hands to another of the same grid, word by word: a word is there or not, all by itself, so that
// neither a fence nor a flag is waited for. Its bits are inverted, so that 0 says that nothing has come yet, and is
// what the reader leaves: that would be a NaN of all ones, and arithmetic has 0x7fffffff for any NaN. PTX ISA 8.7
// (relaxed operations of one scope are no race), 9.7.9.8 ld.relaxed, 9.7.9.11 st.relaxed.
#pragma once

namespace ptxlab {

// Looks at words that do not come before their reader gives up, with a NaN: lengths that change under a launch, or two
// launches with one workspace, should not stop a GPU for ever. Every look is a way to the L2 and back, and counts for
// what is looked at together alone: a reader of many words that never come takes minutes.
#ifndef PATIENCE
#define PATIENCE (1 << 25)
#endif

__device__ __forceinline__ unsigned sealed(float x) { return ~__float_as_uint(x); }
__device__ __forceinline__ float opened(unsigned word) { return __uint_as_float(~word); }

__device__ __forceinline__ void post(unsigned* destination, float4 v) {
    asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "r"(sealed(v.x)),
                 "r"(sealed(v.y)), "r"(sealed(v.z)), "r"(sealed(v.w))
                 : "memory");
}
__device__ __forceinline__ void post(unsigned* destination, float2 v) {
    asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(destination), "r"(sealed(v.x)), "r"(sealed(v.y))
                 : "memory");
}

// True if all of it has been posted.
__device__ __forceinline__ bool fetch(float4& v, const unsigned* source) {
    unsigned x, y, z, w;
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                 : "l"(source)
                 : "memory");
    v = make_float4(opened(x), opened(y), opened(z), opened(w));
    return min(min(x, y), min(z, w)) != 0;
}
__device__ __forceinline__ bool fetch(float2& v, const unsigned* source) {
    unsigned x, y;
    asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "l"(source) : "memory");
    v = make_float2(opened(x), opened(y));
    return min(x, y) != 0;
}

template <int WORDS>
__device__ __forceinline__ void clear(unsigned* words) {
    if (WORDS == 4)
        asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %1, %1, %1};" ::"l"(words), "r"(0) : "memory");
    else asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %1};" ::"l"(words), "r"(0) : "memory");
}

}  // namespace ptxlab

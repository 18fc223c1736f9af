// Floats that one block posts and another block of the same grid fetches. Every word says by itself whether it has been
// posted, so that neither a fence nor a flag is waited for: its bits are inverted, 0 means that it has not been posted,
// and the reader sets it back to 0. Only a NaN of all ones would become 0, and arithmetic gives 0x7fffffff for any NaN.
// PTX ISA 8.7 (relaxed operations of one scope are no race), 9.7.9.8 ld.relaxed, 9.7.9.11 st.relaxed.
#pragma once

namespace ptxlab {

// Polls after which a reader gives up and goes on with NaN: lengths that change during a launch, or two launches with
// one workspace, should not hang a GPU. A poll is a round trip to the L2. Words that are polled together share a count,
// so a reader of many words that never come takes minutes.
#ifndef PATIENCE
#define PATIENCE (1 << 25)
#endif

// Encode a float as a posted word, and decode it: a word of 0 decodes as NaN.
__device__ __forceinline__ unsigned encode(float x) { return ~__float_as_uint(x); }
__device__ __forceinline__ float decode(unsigned word) { return __uint_as_float(~word); }

// Post four floats, or two, by one store.
__device__ __forceinline__ void post(unsigned* destination, float4 v) {
    asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "r"(encode(v.x)),
                 "r"(encode(v.y)), "r"(encode(v.z)), "r"(encode(v.w))
                 : "memory");
}
__device__ __forceinline__ void post(unsigned* destination, float2 v) {
    asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(destination), "r"(encode(v.x)), "r"(encode(v.y))
                 : "memory");
}

// Fetch four floats, or two; return true if all of them have been posted.
__device__ __forceinline__ bool fetch(float4& v, const unsigned* source) {
    unsigned x, y, z, w;
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                 : "l"(source)
                 : "memory");
    v = make_float4(decode(x), decode(y), decode(z), decode(w));
    return min(min(x, y), min(z, w)) != 0;
}
__device__ __forceinline__ bool fetch(float2& v, const unsigned* source) {
    unsigned x, y;
    asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "l"(source) : "memory");
    v = make_float2(decode(x), decode(y));
    return min(x, y) != 0;
}

// Set WORDS words back to 0: 4, or else 2.
template <int WORDS>
__device__ __forceinline__ void clear(unsigned* words) {
    if (WORDS == 4)
        asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %1, %1, %1};" ::"l"(words), "r"(0) : "memory");
    else asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %1};" ::"l"(words), "r"(0) : "memory");
}

}  // namespace ptxlab

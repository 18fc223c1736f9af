// Vector loads and stores of 2 words, or a multiple of 4 (loads also of 1), at an address that is a multiple of their
// bytes, 16 at most.
#pragma once
#include "mma.cuh"

namespace ptxlab {

template <int COUNT>
__device__ __forceinline__ void load_words(unsigned (&w)[COUNT], const void* source) {
    if constexpr (COUNT == 1) {
        w[0] = *static_cast<const unsigned*>(source);
    } else if constexpr (COUNT == 2) {
        const uint2 v = *static_cast<const uint2*>(source);
        w[0] = v.x, w[1] = v.y;
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            const uint4 v = static_cast<const uint4*>(source)[i / 4];
            w[i] = v.x, w[i + 1] = v.y, w[i + 2] = v.z, w[i + 3] = v.w;
        }
    }
}

// Store words to shared memory; in PTX, as nvcc makes single words of some vectors.
template <int COUNT>
__device__ __forceinline__ void store_words(void* destination, const unsigned (&w)[COUNT]) {
    static_assert(COUNT == 2 || COUNT % 4 == 0);
    const unsigned address = shared_address(destination);
    if constexpr (COUNT == 2)
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(w[0]), "r"(w[1]) : "memory");
    else
#pragma unroll
        for (int i = 0; i < COUNT; i += 4)
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address + i * 4), "r"(w[i]), "r"(w[i + 1]),
                         "r"(w[i + 2]), "r"(w[i + 3])
                         : "memory");
}

}  // namespace ptxlab

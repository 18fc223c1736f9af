// When a warp group does what: stamps of the SM's clock for `ptxlab profile --timeline`. Without TIMELINE nothing of it is compiled.
//
// A kernel names the threads that keep time, one per warp group or block, and says what follows:
//
//     TIMELINE_THREAD(threadIdx.x % 128 == 0);
//     PHASE(WAIT_COPY);
//     ...
//
// A phase lasts until the next one. wgmma goes on while its warp group does something else: PHASE(ISSUE) begins a group of wgmmas, and
// where PHASE(WAIT_MMA, n) ends all but the last n have ended. These lines stand alone, so that a test can take them out.
// PTX ISA    10.27, 10.30 %clock, %globaltimer; 10.15 %smid.
#pragma once
#ifndef TIMELINE
#define TIMELINE_THREAD(keeps_time)
#define PHASE(...)
#else

namespace ptxlab {

// Its names, in this order, are those of ptxlab/timeline.py.
enum class Phase : unsigned { END, SETUP, LOAD, WAIT_COPY, WAIT_GROUP, WAIT_MMA, DEQUANTISE, ISSUE, MULTIPLY, SCORES, SOFTMAX, VALUES, REDUCE, EPILOGUE };

constexpr unsigned TRACKS = 256, STAMPS = 4096, HEADER = 6;  // STAMPS: of a track, its header included

struct Timeline {
    unsigned long long tracks;                  // given out so far
    unsigned long long stamps[TRACKS * STAMPS]; // of a track: SM and warp; block; time in ns and clock at the beginning, and at the end;
};                                              // then clock (low half) and phase with its argument (high half)

}  // namespace ptxlab

extern "C" {
__device__ ptxlab::Timeline ptxlab_timeline;    // zeros, which the host restores before a launch, and reads after it
}

namespace ptxlab {

// The track of a thread, from here to where it leaves the kernel. TIMELINE: of so many SMs.
struct Recorder {
    unsigned at = ~0u;                          // the next stamp; where there is none, the last of a track

    __device__ __forceinline__ explicit Recorder(bool keeps_time) {
        unsigned sm;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
        if (!keeps_time || sm >= TIMELINE) return;
        const unsigned track = unsigned(atomicAdd(&ptxlab_timeline.tracks, 1ull));
        if (track >= TRACKS) return;
        at = track * STAMPS + HEADER;
        const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        const unsigned warp = (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) / 32;
        unsigned long long* header = ptxlab_timeline.stamps + track * STAMPS;
        header[0] = sm | static_cast<unsigned long long>(warp) << 32, header[1] = block;
        anchor(header + 2);
        stamp(Phase::SETUP);
    }
    __device__ __forceinline__ ~Recorder() {
        if (at == ~0u) return;
        stamp(Phase::END);
        anchor(ptxlab_timeline.stamps + at / STAMPS * STAMPS + 4);
    }

    // No branch: a warp whose lanes part between wgmmas has them one after the other (C7519).
    __device__ __forceinline__ void stamp(Phase phase, unsigned argument = 0) {
        const unsigned room = at % STAMPS != STAMPS - 1;
        asm volatile(
            "{\n"
            ".reg .pred room;\n"
            ".reg .u32 time;\n"
            "mov.u32 time, %%clock;\n"
            "setp.ne.u32 room, %2, 0;\n"
            "@room st.global.v2.u32 [%0], {time, %1};\n"
            "}" ::"l"(ptxlab_timeline.stamps + at), "r"(unsigned(phase) | argument << 8), "r"(room)
            : "memory");
        at += room;
    }

    static __device__ __forceinline__ void anchor(unsigned long long* to) {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(to[0])::"memory");
        asm volatile("mov.u64 %0, %%clock64;" : "=l"(to[1])::"memory");
    }
};

}  // namespace ptxlab

#define TIMELINE_THREAD(keeps_time) ptxlab::Recorder timeline(keeps_time)
#define PHASE(...) timeline.stamp(ptxlab::Phase::__VA_ARGS__)
#endif

// Timeline of warp groups: stamps of the SM's clock for `ptxlab timeline`. Without TIMELINE nothing of it is compiled.
//
// A kernel names the threads that keep time, one per warp group (or warp), and says what follows:
//
//     TIMELINE_THREAD(threadIdx.x % 128 == 0);
//     PHASE(WAIT_COPY);
//     ...
//
// A phase lasts until the next one. wgmma goes on while its warp group does something else: PHASE(ISSUE, n) begins a
// group of wgmmas that take the tensor cores n clocks at least, and where PHASE(WAIT_MMA, n) ends all but the last n
// groups have ended. These lines stand alone, so that a test can take them out. A function that has phases of its own
// takes `TIMELINE_PARAMETER` as its last parameter and is called with `TIMELINE_ARGUMENT`, both without a comma before.
// PTX ISA    10.27, 10.30 %clock, %globaltimer; 10.15 %smid.
#pragma once
#ifndef TIMELINE
#define TIMELINE_THREAD(keeps_time)
#define TIMELINE_PARAMETER
#define TIMELINE_ARGUMENT
#define PHASE(...)
#else

namespace ptxlab {

// Its names, in this order, are those of ptxlab/profile/timeline/__init__.py.
// clang-format off
enum class Phase : unsigned { END, SETUP, LOAD, WAIT_COPY, WAIT_GROUP, WAIT_MMA, DEQUANTISE, ISSUE, MULTIPLY,
                              SCORES, SOFTMAX, VALUES, REDUCE, EPILOGUE };
// clang-format on

constexpr unsigned TRACKS = 256, STAMPS = 4096, HEADER = 6;  // STAMPS: of a track, its header included
constexpr unsigned TRACK_BYTES = STAMPS * 8;

// The tracks of a launch: zeros at first. The host sets `tracks` back to zero before a launch, and reads all of it
// after.
struct Timeline {
    unsigned long long tracks;       // given out so far
    unsigned long long first_track;  // where the first one begins, in bytes: at a multiple of TRACK_BYTES in memory
    // Of a track: SM and warp; block; time in ns and clock at the beginning, and at the end; then clock (low half) and
    // phase with its argument (high half).
    unsigned long long stamps[(TRACKS + 1) * STAMPS];
};

}  // namespace ptxlab

extern "C" {
__device__ ptxlab::Timeline ptxlab_timeline;
}

namespace ptxlab {

// Records the track of a thread, from here to where it leaves the kernel, if it is on one of the first TIMELINE SMs.
struct Recorder {
    // Address of the next stamp. No stamp lies at a multiple of TRACK_BYTES, so such an address says that there is no
    // room, or no track.
    unsigned low = 0, high = 0;

    // Take a track and write its header, if the thread keeps time.
    __device__ __forceinline__ explicit Recorder(bool keeps_time) {
        unsigned sm;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
        if (!keeps_time || sm >= TIMELINE) return;
        const unsigned track = unsigned(atomicAdd(&ptxlab_timeline.tracks, 1ull));
        if (track >= TRACKS) return;
        const unsigned long long stamps = reinterpret_cast<unsigned long long>(ptxlab_timeline.stamps);
        const unsigned long long first_track = (stamps + TRACK_BYTES - 1) / TRACK_BYTES * TRACK_BYTES,
                                 begin = first_track + track * TRACK_BYTES;
        ptxlab_timeline.first_track = first_track - stamps;
        const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        const unsigned warp = (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) / 32;
        unsigned long long* header = reinterpret_cast<unsigned long long*>(begin);
        header[0] = sm | static_cast<unsigned long long>(warp) << 32, header[1] = block;
        anchor(header + 2);
        low = unsigned(begin) + HEADER * 8, high = unsigned(begin >> 32);
        stamp(Phase::SETUP);
    }
    __device__ __forceinline__ ~Recorder() {
        if (low == 0 && high == 0) return;
        stamp(Phase::END);
        const unsigned long long last = (static_cast<unsigned long long>(high) << 32 | low) - 1;
        anchor(reinterpret_cast<unsigned long long*>(last / TRACK_BYTES * TRACK_BYTES) + 4);
    }

    // Write a stamp: clock, phase, argument. As few instructions as can be, and no branch: a warp whose lanes diverge
    // between wgmmas has them one after the other (C7519).
    __device__ __forceinline__ void stamp(Phase phase, unsigned argument = 0) {
        asm volatile(
            "{\n"
            ".reg .pred room;\n"
            ".reg .u32 time, offset;\n"
            ".reg .u64 address;\n"
            "mov.u32 time, %%clock;\n"
            "and.b32 offset, %0, %3;\n"
            "setp.ne.u32 room, offset, 0;\n"
            "mov.b64 address, {%0, %1};\n"
            "@room st.global.v2.u32 [address], {time, %2};\n"
            "@room add.u32 %0, %0, 8;\n"
            "}"
            : "+r"(low)
            : "r"(high), "r"(unsigned(phase) | argument << 8), "n"(TRACK_BYTES - 1));
    }

    // Write the time in ns and the clock, by which stamps of different SMs are related.
    static __device__ __forceinline__ void anchor(unsigned long long* address) {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(address[0])::"memory");
        asm volatile("mov.u64 %0, %%clock64;" : "=l"(address[1])::"memory");
    }
};

}  // namespace ptxlab

#define TIMELINE_THREAD(keeps_time) ptxlab::Recorder timeline(keeps_time)
#define TIMELINE_PARAMETER , ptxlab::Recorder& timeline
#define TIMELINE_ARGUMENT , timeline
#define PHASE(...) timeline.stamp(ptxlab::Phase::__VA_ARGS__)
#endif

// The epilogue of epilogue_sm90.cuh, with a quarter of its traffic where the output has 16 bits and there are 32 tokens or more.
//
// Store    Rounded before they go through shared memory, 64 tokens at a time, [64][64] transposed by stmatrix; 16-byte columns
//          at their number xor the token's, so that neither side has bank conflicts. A thread has two rows of W and two tokens
//          of every eight, so that it reads few scales, and each once.
#pragma once
#include "epilogue_sm90.cuh"

namespace ptxlab {

template <int WARP_GROUPS, int TOKENS, int BLOCKS>
struct NarrowEpilogue : Epilogue<WARP_GROUPS, TOKENS, BLOCKS> {
    using Wide = Epilogue<WARP_GROUPS, TOKENS, BLOCKS>;
    static constexpr int TURN = TOKENS < 64 ? TOKENS : 64;  // tokens at a time
    static_assert(TURN * 128 <= Wide::CHUNK * Wide::PITCH * 4, "it takes no more shared memory");

    // Whether the sums of piece `j` of a warp group are in this block.
    __device__ __forceinline__ bool owns(int group, int j) const {
        return BLOCKS == 1 || (group * Wide::PER_GROUP + j) / Wide::OWNED == this->rank;
    }

    // By all threads of warp group `group`, whose 64 rows begin at n0: the owned pieces become outputs.
    template <int KIND>
    __device__ __forceinline__ void store(const int (&acc)[TOKENS / 2], int group, int thread, const Output& out, int token0, int n0) const {
        if constexpr (KIND < 2 && TOKENS >= 32) store_16<KIND>(acc, group, thread, out, token0, n0);
        else this->Wide::template store<KIND>(acc, group, thread, out, token0, n0);
    }

    template <int KIND>
    __device__ __forceinline__ void store_16(const int (&acc)[TOKENS / 2], int group, int thread, const Output& out, int token0,
                                             int n0) const {
        char* mine = reinterpret_cast<char*>(this->tile + group * Wide::CHUNK * Wide::PITCH);  // [TURN][8] columns of 16 bytes
        const auto column = [&](int token, int number) { return mine + token * 128 + (number ^ token % 8) * 16; };
        const int lane = thread % 32, row = n0 + thread / 32 * 16 + lane / 4;
        float w_scale[2] = {}, bias[2] = {-0.0f, -0.0f};                     // of rows r, r + 8; adding -0 changes nothing
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (row + 8 * i < out.N) w_scale[i] = out.w_scale[row + 8 * i];
            if (out.bias && row + 8 * i < out.N) bias[i] = out.bias[row + 8 * i];
        }
#pragma unroll
        for (int turn = 0; turn < TOKENS / TURN; ++turn) {
            float x_scale[TURN / 8][2];
#pragma unroll
            for (int i = 0; i < TURN / 4; ++i) {
                const int token = token0 + turn * TURN + i / 2 * 8 + lane % 4 * 2 + i % 2;
                x_scale[i / 2][i % 2] = token < out.M ? out.x_scale[token] : 0;
            }
            warp_group_sync(group);  // the turn before has been read
#pragma unroll
            for (int i = 0; i < TURN / 8; ++i) {
                const int j = turn * TURN / 8 + i;
                if (!owns(group, j)) continue;
                unsigned pair[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float v[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        v[e] = __fadd_rn(__fmul_rn(__fmul_rn(float(acc[4 * j + 2 * r + e]), x_scale[i][e]), w_scale[r]), bias[r]);
                    pair[r] = rounded_pair<KIND>(v[0], v[1]);
                }
                stmatrix_x2_trans(column(i * 8 + lane % 8, thread / 32 * 2 + lane / 8 % 2), pair[0], pair[1]);
            }
            warp_group_sync(group);
            uint4 eight[TURN / 16];
#pragma unroll
            for (int i = 0; i < TURN / 16; ++i)
                if (owns(group, turn * TURN / 8 + i * 2 + thread / 64))
                    eight[i] = *reinterpret_cast<const uint4*>(column(i * 16 + thread / 8, thread % 8));
#pragma unroll
            for (int i = 0; i < TURN / 16; ++i) {
                const int token = token0 + turn * TURN + i * 16 + thread / 8, n = n0 + thread % 8 * 8;
                if (owns(group, turn * TURN / 8 + i * 2 + thread / 64) && token < out.M && n < out.N)
                    *reinterpret_cast<uint4*>(static_cast<unsigned short*>(out.y) + size_t(token) * out.N + n) = eight[i];
            }
        }
    }
};

}  // namespace ptxlab

// Constants of the scores of attention, which are in base 2.
#pragma once

namespace ptxlab {

constexpr float kLowestScore = -1e30f;  // below any score, yet finite
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

}  // namespace ptxlab

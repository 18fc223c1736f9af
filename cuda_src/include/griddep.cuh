// One function per instruction: programmatic dependent launch (PTX ISA 9.7.13.17).
#pragma once

namespace ptxlab {

// The next kernel on the stream may begin once every block has said so, or ended.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Until the kernels before this one are done and what they wrote is visible.
__device__ __forceinline__ void wait_for_predecessors() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace ptxlab

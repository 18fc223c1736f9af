// One function per instruction: kernels that follow each other by programmatic dependent launch (PTX ISA 9.7.13.13).
// Before Hopper there is no such launch, and nothing to do.
#pragma once

namespace ptxlab {

// Let the next kernel on the stream begin, if it was launched programmatically, once every block has called this or
// ended. It sees what this kernel writes only after its own wait, so this may stand at the very beginning.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait until the previous kernel on the stream has ended and what it wrote is visible to this thread, and to those that
// synchronise with it. Before the wait, read nothing that it writes, and write nothing to global memory. Some thread of
// the grid has to wait even where there is nothing to do: the next kernel's wait is for this one alone, not for those
// before it.
__device__ __forceinline__ void wait_for_predecessors() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ptxlab

// The execution model of CUDA for a C++ compiler: one CTA at a time, its threads as fibers of one OS thread.
//
// A fiber runs until it meets a barrier or a warp operation, then the next lane of its warp does. A warp runs until none of its
// lanes can go on, then the next one does. Both go in ascending or descending order of their ids; so runs repeat exactly, and a
// result that differs between the two orders shows a missing barrier. Asynchronous copies happen as late as allowed in ascending
// order, when they are waited for, and at once in descending order. What a GPU leaves undefined stops the process with a message:
// a barrier that not all threads reach, warp operations that do not meet, misaligned copies, a thread that does not wait for the
// kernel before or touches what that one writes before it has. Shared memory begins as NaNs and ends at an unmapped page.
#pragma once
#include <stddef.h>
#include <stdint.h>

struct dim3 {
    unsigned x, y, z;
};

inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

// What a source file says of a kernel.
struct Kernel {
    const char* name;
    const char* args;
    size_t args_bytes;
    unsigned threads;
    unsigned shared_bytes;
    void (*thread)(const void* args);
    const Kernel* next;
};

// Adds a kernel to the list of all.
struct Registration {
    explicit Registration(Kernel& kernel);
};

// Dynamic shared memory of the running CTA.
extern thread_local unsigned char* shared_memory;

// What to do once every lane of a warp operation has come: `lanes[i]` is what lane i brought, null for those not in the mask.
using Together = void (*)(void* const* lanes);

// Waits for the lanes of `mask`, which all bring something and name the same operation.
void warp(unsigned mask, Together operation, void* mine);

// __syncthreads.
void barrier();

// The kernel before is done. Every thread of a kernel comes here. Lanes of a warp go on together; warps do not meet.
void wait_for_inputs();

void copy_async(void* shared, const void* global, unsigned bytes, unsigned source_bytes);
void commit_copies();
void wait_for_copies(unsigned groups_left);

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace emulation

// For the tests; each returns null, or 0, past the last kernel.
extern "C" {
const emulation::Kernel* emulation_kernels();
const emulation::Kernel* emulation_next(const emulation::Kernel* kernel);
// Runs every CTA of a grid, in order; `reverse` turns the order of threads and CTAs.
void emulation_launch(const emulation::Kernel* kernel, const unsigned* grid, const void* args, int reverse);
// Whole pages that the next kernel to be launched by this OS thread finds written by the one before it, which may not have ended.
void emulation_produced(void* at, size_t bytes, int is_writable);
}

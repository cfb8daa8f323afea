// What a test may do to the stand-in devices, beyond CUDA: C functions of the stand-in's
// libcuda.so.1, taken by dlsym or ctypes.
//
// The environment sets the same at start: FAKE_CUDA_DEVICES (1), FAKE_CUDA_MEMORY_MB (4096),
// FAKE_CUDA_COPY_MB_PER_SEC (0: as fast as memory), FAKE_CUDA_KERNEL_US (0), FAKE_CUDA_JITTER_US
// (0), FAKE_CUDA_SEED (1), FAKE_CUDA_FAIL
// ("function:after:code[:sticky]", see fake_cuda_fail), FAKE_CUDA_CONTENTION_PERCENT (0, see
// fake_cuda_set_contention).
//
// FAKE_CUDA_TRACE=FILE: each process writes, to FILE.PID, what its streams did and when: lines
// "device stream kind begin end bytes", times in nanoseconds of the monotonic clock, kind k
// (kernel), d (copy to the host), c (other copy), w (waiting for another stream), n (NCCL) or o.
//
// Threads: any.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Rate of copies, and time of a kernel: of work that is enqueued from now on.
void fake_cuda_set_copy_rate(uint64_t bytes_per_sec);
void fake_cuda_set_kernel_us(uint64_t us);
// Kernels run so much slower while something is copied from or to their device.
void fake_cuda_set_contention(unsigned percent);
// Before each piece of work a stream's worker sleeps up to so long, at random.
void fake_cuda_set_jitter(uint64_t max_us, uint64_t seed);
// 1: no stream begins another piece of work, as on a device that hangs; 0: they go on.
void fake_cuda_hold(int on);
// The `after`-th call from now of a function (1: the next) fails with `code` instead of doing
// anything. sticky: so does each later call of any function, as after an illegal access by a
// kernel.
void fake_cuda_fail(const char* function, uint64_t after, int code, int sticky);
// Forgets failures, those that stick too, and pinned memory, which a context that has failed does
// not give back.
void fake_cuda_heal(void);
// How often a function was called in this process.
uint64_t fake_cuda_calls(const char* function);
// Bit d: device d has a context.
uint64_t fake_cuda_contexts(void);
// Where the host can access device memory, once the device has done what was enqueued.
void* fake_cuda_shadow(const void* address);
// What is wrong with the PTX that the calling thread loaded last; empty: nothing. Until it loads
// again.
const char* fake_cuda_refusal(void);
// From now on, launches take `handle` as a kernel of this name, on each device. It does nothing but
// take time. If a launch has arguments, the first one is a Work (device.h), which is moved from.
void fake_cuda_add_kernel(const void* handle, const char* name);
// 1: cuGetProcAddress() gives functions at other addresses than those of the exported symbols.
void fake_cuda_set_thunks(int on);
// Enqueues `function(argument)` on a stream, as a kernel.
int fake_cuda_launch(void* stream, void (*function)(void*), void* argument);

#ifdef __cplusplus
}
#endif

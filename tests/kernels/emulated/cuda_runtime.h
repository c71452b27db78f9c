// Stands for CUDA's header where kernels/cuda.cu is compiled as C++ (tests/kernels/emulation.py): the words of the language,
// the intrinsics that the kernels use, and launches, which are queued and run later. emulator.cpp does the work.
#ifndef SPARE_EMULATED_CUDA_H
#define SPARE_EMULATED_CUDA_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(threads)

struct Dim {
  unsigned x;
};

typedef int cudaError_t;
typedef void* cudaStream_t;
enum { cudaDevAttrMultiProcessorCount = 16 };

namespace emulated {

enum Shuffle { kDown = 1 };
enum Atomic { kAdd64 = 1, kOr64, kMax32 };

// All of these are compiled without instrumentation, in emulator.cpp.
unsigned thread_index();
unsigned block_index();
unsigned grid_blocks();
int processors();
// Waits until all lanes of the warp have come to the same shuffle; the value of the lane `step` above this one.
uint64_t shuffle(Shuffle kind, unsigned mask, uint64_t value, int step);
uint64_t atomic(Atomic kind, void* address, uint64_t value);
void set_bytes(void* address, int value, size_t bytes);
int last_error();
// Which of the seeded faults is in force; 0 for none.
int mutant();
// Takes a copy of `size` bytes of arguments, and later calls run(copy) in each lane of each block.
void queue(unsigned blocks, unsigned threads, void (*run)(const void*), const void* arguments, size_t size);

template <class Call>
void run_call(const void* call) {
  (*static_cast<const Call*>(call))();
}

// What kernel<<<blocks, threads, 0, stream>>>(arguments) becomes: the call as an object that holds the arguments.
struct Launch {
  unsigned blocks, threads;
  template <class Call>
  void operator()(const Call& call) const {
    queue(blocks, threads, run_call<Call>, &call, sizeof call);
  }
};

}  // namespace emulated

#define threadIdx (Dim{emulated::thread_index()})
#define blockIdx (Dim{emulated::block_index()})
#define gridDim (Dim{emulated::grid_blocks()})

inline unsigned long long __shfl_down_sync(unsigned mask, unsigned long long value, int step) {
  return emulated::shuffle(emulated::kDown, mask, value, step);
}
inline int __shfl_down_sync(unsigned mask, int value, int step) {
  return int(emulated::shuffle(emulated::kDown, mask, uint64_t(unsigned(value)), step));
}
inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long value) {
  return emulated::atomic(emulated::kAdd64, to, value);
}
inline unsigned long long atomicOr(unsigned long long* to, unsigned long long value) {
  return emulated::atomic(emulated::kOr64, to, value);
}
inline int atomicMax(int* to, int value) { return int(emulated::atomic(emulated::kMax32, to, uint64_t(int64_t(value)))); }
inline float __fadd_rn(float one, float other) { return one + other; }
inline long long __double2ll_rn(double value) { return llrint(value); }
inline int max(int one, int other) { return one > other ? one : other; }

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
  *value = emulated::processors();
  return 0;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  emulated::set_bytes(to, value, bytes);
  return 0;
}
inline cudaError_t cudaGetLastError() { return emulated::last_error(); }
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }

#endif

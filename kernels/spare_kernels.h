// The C interface of the kernels, for the CPU and (with a stream) for CUDA. docs/exact_reduction.md has the formats.
//
// May assume: pointers are aligned to their elements, arguments are in the ranges that the Python package checks.
// Promises: results depend neither on the number of threads nor on the instruction set nor on the device, bit for bit;
// no call keeps a pointer after it returns (CUDA: after the work queued on the stream is done).
#ifndef SPARE_KERNELS_H
#define SPARE_KERNELS_H

#include <stdint.h>

// Grows when a signature or a format changes; the Python package refuses a library with another number.
#define SPARE_KERNELS_VERSION 10

#define SPARE_BLOCK 1024
#define SPARE_CHECKSUM_SEED 0x53504152ull
#define SPARE_DIGEST_SEED 0x44494745ull

enum SpareFloat { SPARE_FP32 = 0, SPARE_BF16 = 1, SPARE_FP16 = 2 };
enum SpareElement { SPARE_INT64 = 0, SPARE_INT32 = 1 };
enum SpareFlag { SPARE_OVERFLOW = 1, SPARE_NOT_FINITE = 2 };

// accumulator += rint(source * 2^exponent). With another gradient, `other`, it is rint((other + source) * 2^exponent), where
// the sum in brackets is rounded to fp32, or, where they are `apart`, rint(other * 2^exponent) + rint(source * 2^exponent).
// exponents: one for each block of the index space, or null for `exponent`.
struct SpareAccumulate {
  const void* source;
  const void* other;  // or null
  void* accumulator;
  const int16_t* exponents;
  int64_t* report;  // [0] += checksum, [1] |= flags
  int64_t count;
  int64_t first_index;
  int32_t source_type;       // SpareFloat
  int32_t other_type;        // SPARE_FP32 or source_type
  int32_t accumulator_type;  // SPARE_INT64 or SPARE_INT32
  int32_t exponent;
  int32_t bound_bits;
  int32_t apart;
  int32_t first;  // 1: the accumulator, which is not read, counts as 0
};

// destination = (sums + addend) / 2^exponent in fp32: the sum of integers wraps, is converted to double, scaled and rounded
// to fp32; what exceeds fp32 becomes infinite. A range of a tensor that holds several segments: sums, addend and
// destination point at its elements start..start + count, of which those in no segment become +0.
// segments: triples of start, stop (positions in the tensor) and the index of the first, sorted and apart; they may begin
// and end within a block, and a range may begin and end within a segment.
struct SpareConvert {
  const void* sums;
  const void* addend;  // or null
  float* destination;  // shares memory with neither
  const int16_t* exponents;  // of each block of the index space, from its first one on
  const int64_t* segments;
  int64_t* found;  // or null; [2 i] += checksum of the integers of segment i, [2 i + 1] += that of its result as int32
  int64_t num_segments;
  int64_t start;
  int64_t count;
  int32_t type;  // SPARE_INT64 or SPARE_INT32
};

// Of each segment: destination = total / divisor, as a quotient in double that is rounded once. Not for NaN.
// segments: quadruples of start and stop (positions in total), start in destination, and the index of the first. What lies
// in no segment is neither read nor written.
struct SpareFinalize {
  const float* total;
  void* destination;
  int32_t* peaks;  // of each block of the index space: = max(peaks, bits of the largest |total|), ordered as magnitudes are
  const int64_t* segments;
  int64_t num_segments;
  double divisor;            // 2^-100..2^100 in magnitude
  int32_t destination_type;  // SPARE_FP32 or SPARE_BF16
};

#ifdef __cplusplus
extern "C" {
#endif
#ifdef __GNUC__
#pragma GCC visibility push(default)
#endif

int spare_kernels_version(void);

// CPU. `threads` is the largest number of threads used. The level of instructions in use is 0 (plain), 1 (AVX2 and FMA) or
// 2 (AVX-512); spare_cpu_limit sets the highest level allowed and returns the one then in use (tests, benchmarks).
int spare_cpu_level(void);
int spare_cpu_limit(int level);
// Sets for how many bytes that a call reads and writes one thread is used; returns the old value (tests, benchmarks).
int64_t spare_cpu_bytes_per_thread(int64_t bytes);
void spare_cpu_accumulate(const struct SpareAccumulate* job, int threads);
// Segments: triples of start, stop (positions in values) and the index of the first; sums[i] += checksum of segment i.
void spare_cpu_checksums(const void* values, int type, const int64_t* segments, int64_t num_segments, int64_t* sums,
                         int threads);
// May be called from any thread. With one thread and `found` of its own it waits for nobody.
void spare_cpu_convert(const struct SpareConvert* job, int threads);
void spare_cpu_finalize(const struct SpareFinalize* job, int threads);
// sums[2 i] = nonlinear, sums[2 i + 1] = linear sum of part i.
void spare_cpu_digests(const void* const* parts, const int64_t* num_bytes, int64_t num_parts, int64_t* sums,
                       int threads);
// Of fp32 numbers: top = max(top, bits of the largest magnitude); those of NaN are larger than those of infinity.
void spare_cpu_largest(const void* const* parts, const int64_t* counts, int64_t num_parts, int32_t* top, int threads);
// Of finite fp32 numbers of magnitude up to 2^(26 - exponent): sums[0] + 2^32 sums[1] grows by the sum of
// rint((number * 2^exponent)^2). Each block of SPARE_BLOCK adds the lower and the upper half of its sum; 2^31 blocks have room.
void spare_cpu_squares(const void* const* parts, const int64_t* counts, int64_t num_parts, int exponent, int64_t* sums,
                       int threads);

// CUDA: pointers of the current device; those to parts, num_bytes, counts and segments are the host's, and are not used
// after the call. Each returns a cudaError_t (0: queued). What is a list, of segments or of parts, is one launch for each
// some 70 to 140 of them. digests adds to its sums.
int spare_cuda_accumulate(const struct SpareAccumulate* job, void* stream);
int spare_cuda_checksums(const void* values, int type, const int64_t* segments, int64_t num_segments, int64_t* sums,
                         void* stream);
int spare_cuda_convert(const struct SpareConvert* job, void* stream);
int spare_cuda_finalize(const struct SpareFinalize* job, void* stream);
int spare_cuda_digests(const void* const* parts, const int64_t* num_bytes, int64_t num_parts, int64_t* sums,
                       void* stream);
int spare_cuda_largest(const void* const* parts, const int64_t* counts, int64_t num_parts, int32_t* top, void* stream);
// Each thread adds the halves of its sum of four: 2^23 blocks have room.
int spare_cuda_squares(const void* const* parts, const int64_t* counts, int64_t num_parts, int exponent, int64_t* sums,
                       void* stream);
const char* spare_cuda_error(int error);

#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif

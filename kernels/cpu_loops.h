// What cpu_loops.inc gives for one instruction set. Ranges are positions and may begin and end anywhere, but no two of
// one segment to finalize share a block of the index space.
#ifndef SPARE_CPU_LOOPS_H
#define SPARE_CPU_LOOPS_H

#include "spare_kernels.h"

struct alignas(64) Tables {
  uint64_t checksum[SPARE_BLOCK];
  // checksum's; a vector may be loaded from each element
  uint32_t checksum32[SPARE_BLOCK + 16];
  // checksum's in both halves
  uint64_t checksum_twice[SPARE_BLOCK];
  // sums of checksum's before each element
  uint64_t checksum_below[SPARE_BLOCK + 1];
  uint64_t digest[SPARE_BLOCK];
};

struct Loops {
  // sums[0] += checksum, sums[1] |= flags
  void (*accumulate)(const SpareAccumulate& job, int64_t start, int64_t stop, const Tables& tables, uint64_t* sums);
  void (*checksum)(const void* values, int type, int64_t start, int64_t stop, int64_t first_index,
                   const Tables& tables, uint64_t* sums);
  // Elements start to stop of the range, which lie in one segment; the first has `index`. sums[0] += checksum of the
  // integers, sums[1] += that of the bits; stream: the destination is written past the cache.
  void (*convert)(const SpareConvert& job, int64_t start, int64_t stop, int64_t index, const Tables& tables,
                  uint64_t* sums, bool stream);
  // Elements start to stop of a segment.
  void (*finalize)(const SpareFinalize& job, const int64_t* segment, int64_t start, int64_t stop, bool stream);
  // whole words; sums[0] nonlinear, sums[1] linear
  void (*digest)(const uint8_t* data, int64_t start, int64_t stop, const Tables& tables, uint64_t* sums);
  int32_t (*largest)(const float* values, int64_t start, int64_t stop);
  // sums[0] += lower halves of the sums of blocks, sums[1] += upper halves
  void (*squares)(const float* values, int64_t start, int64_t stop, int exponent, uint64_t* sums);
};

extern const Loops spare_loops_plain;
extern const Loops spare_loops_avx2;
extern const Loops spare_loops_avx512;

#endif

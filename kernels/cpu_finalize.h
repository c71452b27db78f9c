// `finalize` of int64 sums in one pass over registers where AVX-512 has the instructions: conversion of 64-bit integers,
// rounding towards zero, eight lanes of the norm side by side. To the bit what the plain loops give.
#ifndef SPARE_CPU_FINALIZE_H
#define SPARE_CPU_FINALIZE_H

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define SPARE_FUSED_FINALIZE 1

#include <immintrin.h>
#include <stdint.h>

#include "arithmetic.h"

namespace {

// Store eight rounded quotients, and give them back as doubles. `normal`: none is denormal or infinite in fp32.
template <bool normal>
inline __m512d store_rounded(float* to, __m512d value) {
  const __m256 rounded = _mm512_cvtpd_ps(value);
  _mm256_storeu_ps(to, rounded);
  return _mm512_cvtps_pd(rounded);
}

template <bool normal>
inline __m512d store_rounded(uint16_t* to, __m512d value) {
  if (normal) {
    // bf16 has the upper 7 of double's 52 bits: what is beyond a half, or is a half after an odd number, carries.
    const __m512i bits = _mm512_castpd_si512(value), one = _mm512_set1_epi64(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi64(bits, 45), one);
    const __m512i carried = _mm512_add_epi64(_mm512_add_epi64(bits, _mm512_set1_epi64((1ll << 44) - 1)), odd);
    const __m512d rounded = _mm512_castsi512_pd(_mm512_and_si512(carried, _mm512_set1_epi64(-(1ll << 45))));
    const __m256i single = _mm256_castps_si256(_mm512_cvtpd_ps(rounded));
    _mm_storeu_si128((__m128i*)to, _mm256_cvtepi32_epi16(_mm256_srli_epi32(single, 16)));
    return rounded;
  }
  const __m256 towards_zero = _mm512_cvt_roundpd_ps(value, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  const __mmask8 inexact = _mm512_cmp_pd_mask(_mm512_cvtps_pd(towards_zero), value, _CMP_NEQ_UQ);
  const __m256i one = _mm256_set1_epi32(1), odd = _mm256_castps_si256(towards_zero);
  const __m256i bits = _mm256_mask_or_epi32(odd, inexact, odd, one);
  const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
  const __m256i nearest = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), even);
  const __m256i high = _mm256_srli_epi32(nearest, 16);
  _mm_storeu_si128((__m128i*)to, _mm256_cvtepi32_epi16(high));
  return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(high, 16)));
}

// Rows of SPARE_LANES elements: quotients out, squares added to `lanes` if `norm`, extremes to `top` and `bottom`.
template <class Destination, bool power_of_two, bool normal, bool norm>
inline void finalize_rows(const int64_t* total, Destination* out, int64_t count, double divisor, double* lanes,
                          int64_t* top, int64_t* bottom) {
  enum { kEach = 8, kRow = SPARE_LANES / kEach };
  const __m512d by = _mm512_set1_pd(power_of_two ? 1 / divisor : divisor);
  __m512i highest = _mm512_set1_epi64(*top), lowest = _mm512_set1_epi64(*bottom);
  __m512d sums[kRow];
  for (int j = 0; norm && j < kRow; ++j) sums[j] = _mm512_loadu_pd(lanes + kEach * j);
  for (int64_t row = 0; row < count; row += SPARE_LANES) {
#pragma GCC unroll 8
    for (int j = 0; j < kRow; ++j) {
      const __m512i sum = _mm512_loadu_si512(total + row + kEach * j);
      highest = _mm512_max_epi64(highest, sum);
      lowest = _mm512_min_epi64(lowest, sum);
      const __m512d x = _mm512_cvtepi64_pd(sum);
      const __m512d value = power_of_two ? _mm512_mul_pd(x, by) : _mm512_div_pd(x, by);
      const __m512d back = store_rounded<normal>(out + row + kEach * j, value);
      if (norm) sums[j] = _mm512_add_pd(sums[j], _mm512_mul_pd(back, back));
    }
  }
  for (int j = 0; norm && j < kRow; ++j) _mm512_storeu_pd(lanes + kEach * j, sums[j]);
  *top = _mm512_reduce_max_epi64(highest);
  *bottom = _mm512_reduce_min_epi64(lowest);
}

template <class Destination, bool power_of_two, bool normal>
inline void finalize_rows(const int64_t* total, Destination* out, int64_t count, double divisor, double* lanes,
                          int64_t* top, int64_t* bottom) {
  if (lanes)
    finalize_rows<Destination, power_of_two, normal, true>(total, out, count, divisor, lanes, top, bottom);
  else
    finalize_rows<Destination, power_of_two, normal, false>(total, out, count, divisor, lanes, top, bottom);
}

template <class Destination>
inline void finalize_rows(const int64_t* total, Destination* out, int64_t count, double divisor, double* lanes,
                          int64_t* top, int64_t* bottom) {
  const double size = divisor < 0 ? -divisor : divisor;
  const bool whole_power = (to_bits(divisor) & 0xfffffffffffffull) == 0;
  // Sums are 0 or within 1..2^63.
  const bool normal = power_of_two(-63) <= size && size <= power_of_two(126);
  if (whole_power && normal)
    finalize_rows<Destination, true, true>(total, out, count, divisor, lanes, top, bottom);
  else if (whole_power)
    finalize_rows<Destination, true, false>(total, out, count, divisor, lanes, top, bottom);
  else if (normal)
    finalize_rows<Destination, false, true>(total, out, count, divisor, lanes, top, bottom);
  else
    finalize_rows<Destination, false, false>(total, out, count, divisor, lanes, top, bottom);
}

}  // namespace

#endif
#endif

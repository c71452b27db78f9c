// `convert` in one pass over registers, for AVX2 and AVX-512: the sum of integers, its conversion, both checksums. To the
// bit what the plain loop gives.
#ifndef SPARE_CPU_CONVERT_H
#define SPARE_CPU_CONVERT_H

#if defined(__AVX2__)

#include "arithmetic.h"
#include "cpu_loops.h"
#include "cpu_words.h"

namespace {

#if defined(__AVX512F__)

inline __m256 scaled(Words value, double scale) {
  return _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_cvtepi64_pd(value), _mm512_set1_pd(scale)));
}
inline Singles joined(__m256 low, __m256 high) {
  return (Singles)_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}
inline Singles to_singles(Whole value) { return (Singles)_mm512_cvtepi32_ps((__m512i)value); }

#else

// The halves as bits of 2^52 + low and 2^84 + 2^63 + high * 2^32; what is too much is taken off exactly, so that the
// sum is rounded once.
inline __m128 scaled(Words value, double scale) {
  const __m256i low = _mm256_blend_epi32(value, _mm256_set1_epi64x(0x4330000000000000), 0xaa);
  const __m256i high = _mm256_xor_si256(upper(value), _mm256_set1_epi64x(0x4530000080000000));
  const __m256d above = _mm256_sub_pd(_mm256_castsi256_pd(high), _mm256_set1_pd(0x1p84 + 0x1p63 + 0x1p52));
  const __m256d whole = _mm256_add_pd(above, _mm256_castsi256_pd(low));
  return _mm256_cvtpd_ps(_mm256_mul_pd(whole, _mm256_set1_pd(scale)));
}
inline Singles joined(__m128 low, __m128 high) { return (Singles)_mm256_set_m128(high, low); }
inline Singles to_singles(Whole value) { return (Singles)_mm256_cvtepi32_ps((__m256i)value); }

#endif

// The checksum of int32 values: as each has 2^31 added, the products are unsigned, and 2^31 times the sum of the weights
// is too much in the end. The weights of odd elements are loaded from one element further on; so the table has one more.
struct Products {
  Words even = zero_words(), odd = zero_words();

  void add(Whole values, const uint32_t* weights) {
    const Words raised = (Words)(values ^ 0x80000000u);
    even = plus(even, lower_product(raised, load_words(weights)));
    odd = plus(odd, lower_product(upper(raised), load_words(weights + 1)));
  }
  uint64_t sum(uint64_t sum_of_weights) const { return total(plus(even, odd)) - (sum_of_weights << 31); }
};

inline uint64_t sum_of_weights(const Tables& tables, int64_t offset, int64_t count) {
  return tables.checksum_below[offset + count] - tables.checksum_below[offset];
}

// Whole vectors within one block of the index space; found[0] += checksum of the integers, found[1] += that of the bits,
// both without the block's factor.
template <bool two>
inline void convert_whole(const int64_t* sums, const int64_t* addend, float* destination, const Tables& tables,
                          int64_t offset, int64_t count, int exponent, uint64_t* found) {
  const double scale = power_of_two(-exponent);
  Words low[2] = {zero_words(), zero_words()}, high[2] = {zero_words(), zero_words()};
  Products bits;
  for (int64_t k = 0; k < count; k += kSingles) {
    fetch_ahead<kFarBytes, 2 * sizeof(Words)>(sums + k);
    if (two) fetch_ahead<kFarBytes, 2 * sizeof(Words)>(addend + k);
    Words values[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int64_t at = k + half * kWords;
      values[half] = load_words(sums + at);
      if (two) values[half] = plus(values[half], load_words(addend + at));
      const Words weight = load_words(tables.checksum_twice + offset + at);
      low[half] = plus(low[half], lower_product(values[half], weight));
      high[half] = plus(high[half], lower_product(upper(values[half]), weight));
    }
    const Singles result = joined(scaled(values[0], scale), scaled(values[1], scale));
    memcpy(destination + k, &result, sizeof result);
    bits.add((Whole)result, tables.checksum32 + offset + k);
  }
  found[0] += total(plus(low[0], low[1])) + (total(plus(high[0], high[1])) << 32);
  found[1] += bits.sum(sum_of_weights(tables, offset, count));
}

// Whether a number of int32 is rounded once when it is converted to fp32 and then scaled there: the scale is a normal
// number, and so is the product unless it is 0 or too large.
inline bool scales_singly(int exponent) { return -127 <= exponent && exponent <= 126; }

template <bool two>
inline void convert_whole(const int32_t* sums, const int32_t* addend, float* destination, const Tables& tables,
                          int64_t offset, int64_t count, int exponent, uint64_t* found) {
  const float scale = (float)power_of_two(-exponent);
  Products integers, bits;
  for (int64_t k = 0; k < count; k += kSingles) {
    fetch_ahead<kFarBytes, sizeof(Words)>(sums + k);
    if (two) fetch_ahead<kFarBytes, sizeof(Words)>(addend + k);
    Whole value = load_as<Whole>(sums + k);
    if (two) value += load_as<Whole>(addend + k);
    const Singles result = to_singles(value) * scale;
    memcpy(destination + k, &result, sizeof result);
    const uint32_t* weights = tables.checksum32 + offset + k;
    integers.add(value, weights);
    bits.add((Whole)result, weights);
  }
  const uint64_t weights = sum_of_weights(tables, offset, count);
  found[0] += integers.sum(weights);
  found[1] += bits.sum(weights);
}

}  // namespace

#endif
#endif

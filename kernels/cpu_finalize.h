// `finalize` in one pass over registers, for AVX2 and AVX-512: conversion to double, quotient, largest magnitude,
// rounding. To the bit what the plain loops give.
#ifndef SPARE_CPU_FINALIZE_H
#define SPARE_CPU_FINALIZE_H

#if defined(__AVX2__)
#define SPARE_FUSED_FINALIZE 1

#include "arithmetic.h"
#include "cpu_words.h"

namespace {

#if defined(__AVX512F__)

typedef __m512d Doubles;
inline Doubles all_doubles(double value) { return _mm512_set1_pd(value); }
inline Doubles to_doubles(const int64_t* from) { return _mm512_cvtepi64_pd(_mm512_loadu_si512(from)); }
inline Doubles to_doubles(const int32_t* from) { return _mm512_cvtepi32_pd(_mm256_loadu_si256((const __m256i*)from)); }
inline Doubles bits_of(Doubles value, Doubles mask) { return _mm512_and_pd(value, mask); }
inline Doubles larger(Doubles a, Doubles b) { return _mm512_max_pd(a, b); }
inline Doubles plus_product(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(b, c, a); }
inline Doubles less_product(Doubles a, Doubles b, Doubles c) { return _mm512_fnmadd_pd(b, c, a); }
inline __m512 singles(const Doubles* pair) {
  const __m256d low = _mm256_castps_pd(_mm512_cvtpd_ps(pair[0])), high = _mm256_castps_pd(_mm512_cvtpd_ps(pair[1]));
  return _mm512_castpd_ps(_mm512_insertf64x4(_mm512_castpd256_pd512(low), high, 1));
}
inline void store(float* to, const Doubles* four) {
  _mm512_storeu_ps(to, singles(four));
  _mm512_storeu_ps(to + 16, singles(four + 2));
}
// The upper halves: for numbers that bf16 has.
inline __m256i upper_halves(__m512 values) {
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(values), 16));
}
inline void store(uint16_t* to, const Doubles* four) {
  _mm256_storeu_si256((__m256i*)to, upper_halves(singles(four)));
  _mm256_storeu_si256((__m256i*)(to + 16), upper_halves(singles(four + 2)));
}

#else

typedef __m256d Doubles;
inline Doubles all_doubles(double value) { return _mm256_set1_pd(value); }
// The halves as bits of 2^52 + low and 2^84 + 2^63 + high * 2^32; what is too much is taken off exactly, so that the
// sum is rounded once.
inline Doubles to_doubles(const int64_t* from) {
  const __m256i value = _mm256_loadu_si256((const __m256i*)from);
  const __m256i low = _mm256_blend_epi32(value, _mm256_set1_epi64x(0x4330000000000000), 0xaa);
  const __m256i high = _mm256_xor_si256(_mm256_srli_epi64(value, 32), _mm256_set1_epi64x(0x4530000080000000));
  return _mm256_add_pd(_mm256_sub_pd(_mm256_castsi256_pd(high), _mm256_set1_pd(0x1p84 + 0x1p63 + 0x1p52)),
                       _mm256_castsi256_pd(low));
}
inline Doubles to_doubles(const int32_t* from) { return _mm256_cvtepi32_pd(_mm_loadu_si128((const __m128i*)from)); }
inline Doubles bits_of(Doubles value, Doubles mask) { return _mm256_and_pd(value, mask); }
inline Doubles larger(Doubles a, Doubles b) { return _mm256_max_pd(a, b); }
inline Doubles plus_product(Doubles a, Doubles b, Doubles c) { return _mm256_fmadd_pd(b, c, a); }
inline Doubles less_product(Doubles a, Doubles b, Doubles c) { return _mm256_fnmadd_pd(b, c, a); }
inline __m256 singles(const Doubles* pair) {
  return _mm256_set_m128(_mm256_cvtpd_ps(pair[1]), _mm256_cvtpd_ps(pair[0]));
}
inline void store(float* to, const Doubles* four) {
  _mm256_storeu_ps(to, singles(four));
  _mm256_storeu_ps(to + 8, singles(four + 2));
}
// The upper halves: for numbers that bf16 has.
inline void store(uint16_t* to, const Doubles* four) {
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(singles(four)), 16);
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(singles(four + 2)), 16);
  _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
}

#endif

enum { kGroup = 4 * kWords };

// Four vectors take each step side by side: in a row, each would wait for its own results.
#define SPARE_EACH _Pragma("GCC unroll 4") for (int j = 0; j < 4; ++j)

inline void round_to(const float*, Doubles*) {}

// To the nearest number of 8 significant bits, ties to even: m has x's sign and a last bit as large as the eighth of x.
// Subtracted in this order, a zero keeps its sign. For zeros and normal numbers of bf16.
inline void round_to(const uint16_t*, Doubles* values) {
  Doubles magnet[4];
  SPARE_EACH magnet[j] = bits_of(values[j], all_doubles(from_bits(0xfff0000000000000ull)));
  SPARE_EACH magnet[j] *= all_doubles(0x1.8p45);
  SPARE_EACH values[j] = magnet[j] - values[j];
  SPARE_EACH values[j] = magnet[j] - values[j];
}

// x / divisor to the bit, faster than the divider: by `inverse`, the double nearest to 1 / divisor. x * inverse is less
// than a unit of the last place off before it is rounded. So where the quotient is close to the middle of two doubles, it
// is one of these, and the correction errs by less than 2^-54 units; no quotient is that close to a middle, as the divisor
// has 53 bits.
inline void divide_four(const Doubles* x, Doubles* quotient, Doubles divisor, Doubles inverse) {
  Doubles rest[4];
  SPARE_EACH quotient[j] = x[j] * inverse;
  SPARE_EACH rest[j] = less_product(x[j], quotient[j], divisor);
  SPARE_EACH quotient[j] = plus_product(quotient[j], rest[j], inverse);
}

template <class Element, class Destination, bool power_of_two>
inline Doubles divide_groups(const Element* total, Destination* out, int64_t count, double divisor, Doubles largest) {
  const Doubles by = all_doubles(divisor), inverse = all_doubles(1 / divisor);
  const Doubles magnitude = all_doubles(from_bits(0x7fffffffffffffffull));
  for (int64_t k = 0; k < count; k += kGroup) {
    fetch_ahead<kFarBytes, kGroup * sizeof *total>(total + k);
    Doubles x[4], four[4];
    SPARE_EACH x[j] = to_doubles(total + k + j * kWords);
    SPARE_EACH largest = larger(largest, bits_of(x[j], magnitude));
    if (power_of_two)
      SPARE_EACH four[j] = x[j] * inverse;
    else
      divide_four(x, four, by, inverse);
    round_to(out, four);
    store(out + k, four);
  }
  return largest;
}

// Divides elements of one block; returns the largest magnitude as a double, which is exact below 2^53.
template <class Element, class Destination, bool power_of_two>
inline double divide_fused(const Element* total, Destination* out, int64_t count, double divisor) {
  const int64_t whole = count / kGroup * kGroup, rest = count - whole;
  Doubles largest = all_doubles(0);
  largest = divide_groups<Element, Destination, power_of_two>(total, out, whole, divisor, largest);
  if (rest) {
    Element last[kGroup] = {};
    Destination made[kGroup];
    memcpy(last, total + whole, rest * sizeof *last);
    largest = divide_groups<Element, Destination, power_of_two>(last, made, kGroup, divisor, largest);
    memcpy(out + whole, made, rest * sizeof *made);
  }
  double each[kWords], top = 0;
  memcpy(each, &largest, sizeof each);
  for (int k = 0; k < kWords; ++k) top = each[k] > top ? each[k] : top;
  return top;
}

}  // namespace

#endif
#endif

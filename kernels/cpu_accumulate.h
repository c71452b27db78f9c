// Rounding into sums for AVX2 and AVX-512: into int32 ones in single precision, half the lanes that double would need;
// into int64 ones, where compilers make products of 64 bits of the checksum's, and fetch nothing ahead.
#ifndef SPARE_CPU_ACCUMULATE_H
#define SPARE_CPU_ACCUMULATE_H

#if defined(__AVX2__)

#include "arithmetic.h"
#include "cpu_words.h"

namespace {

typedef uint16_t Halves __attribute__((vector_size(sizeof(Words) / 2)));

inline Singles load_singles(Fp32, const uint32_t* from) { return load_as<Singles>(from); }
inline Singles load_singles(Bf16, const uint16_t* from) {
  return (Singles)(__builtin_convertvector(load_as<Halves>(from), Whole) << 16);
}
inline Singles load_singles(Fp16, const uint16_t* from) {
  const Whole bits = __builtin_convertvector(load_as<Halves>(from), Whole);
  return (Singles)((bits & 0x7fff) << 13 | (bits & 0x8000) << 16) * 0x1p112f;
}

#if defined(__AVX512F__)
inline Whole nearest(Singles values) { return (Whole)_mm512_cvtps_epi32((__m512)values); }
inline Whole signs(Whole values) { return (Whole)_mm512_srai_epi32((__m512i)values, 31); }
#else
inline Whole nearest(Singles values) { return (Whole)_mm256_cvtps_epi32((__m256)values); }
inline Whole signs(Whole values) { return (Whole)_mm256_srai_epi32((__m256i)values, 31); }
#endif

// For exponents up to 127 and magnitudes up to 2^30. The product in fp32 is exact, or so small that it rounds to 0 anyhow
// (as it does where the scale itself is too small for fp32).
//
// Returns the checksum: products of the unsigned values, and for each negative one its weight less at 2^32. The weights
// of odd elements are loaded from one element further on; so the table has one more.
template <class Format>
inline uint64_t add_whole_singles(const typename Format::Bits* source, int32_t* accumulator, const uint32_t* weights,
                                  int64_t count, float scale) {
  Words even = zero_words(), odd = zero_words();
  Whole less = {};
  for (int64_t k = 0; k < count; k += kSingles) {
    const Whole value = nearest(load_singles(Format(), source + k) * scale);
    const Whole sum = load_as<Whole>(accumulator + k) + value;
    memcpy(accumulator + k, &sum, sizeof sum);
    even = plus(even, lower_product((Words)value, load_words(weights + k)));
    odd = plus(odd, lower_product(upper((Words)value), load_words(weights + k + 1)));
    less += signs(value) & load_as<Whole>(weights + k);
  }
  const Words lower_halves = lower_product((Words)less, all_words(1));
  return total(plus(even, odd)) - (total(plus(upper((Words)less), lower_halves)) << 32);
}

template <class Format>
inline uint64_t add_singles(const typename Format::Bits* source, int32_t* accumulator, const uint32_t* weights,
                            int64_t count, float scale) {
  const int64_t whole = count / kSingles * kSingles, rest = count - whole;
  uint64_t sum = add_whole_singles<Format>(source, accumulator, weights, whole, scale);
  if (rest) {
    typename Format::Bits last[kSingles] = {};
    int32_t sums[kSingles] = {};
    memcpy(last, source + whole, rest * sizeof *last);
    memcpy(sums, accumulator + whole, rest * sizeof *sums);
    sum += add_whole_singles<Format>(last, sums, weights + whole, kSingles, scale);
    memcpy(accumulator + whole, sums, rest * sizeof *sums);
  }
  return sum;
}

#if defined(__AVX512F__)
typedef __m256 HalfSingles;
inline HalfSingles half_of(Singles values, int half) {
  return half ? _mm512_extractf32x8_ps((__m512)values, 1) : _mm512_castps512_ps256((__m512)values);
}
// Integers that have SPARE_MAGIC_BITS too much. The product is exact, so that fusing it with the sum leaves one rounding.
inline Words round_magically(HalfSingles values, double scale) {
  const __m512d wide = _mm512_cvtps_pd(values);
  return (Words)_mm512_fmadd_pd(wide, _mm512_set1_pd(scale), _mm512_set1_pd(SPARE_MAGIC));
}
#else
typedef __m128 HalfSingles;
inline HalfSingles half_of(Singles values, int half) {
  return half ? _mm256_extractf128_ps((__m256)values, 1) : _mm256_castps256_ps128((__m256)values);
}
inline Words round_magically(HalfSingles values, double scale) {
  const __m256d wide = _mm256_cvtps_pd(values);
  return (Words)_mm256_fmadd_pd(wide, _mm256_set1_pd(scale), _mm256_set1_pd(SPARE_MAGIC));
}
#endif

// Rounds whole vectors of magnitudes up to 2^SPARE_NARROW_BITS; `two`: each of both gradients. `first`: the accumulator
// is not read. `weights` are in both halves of each word.
template <class Format, class Other, bool two, bool first>
inline uint64_t add_whole_words(const typename Format::Bits* source, const typename Other::Bits* other,
                                int64_t* accumulator, const uint64_t* weights, int64_t count, double scale) {
  const Words magic = all_words(two ? 2 * SPARE_MAGIC_BITS : SPARE_MAGIC_BITS);
  Words low[2] = {zero_words(), zero_words()}, high[2] = {zero_words(), zero_words()};
  for (int64_t k = 0; k < count; k += kSingles) {
    fetch_ahead<SPARE_BLOCK * sizeof *accumulator, 2 * sizeof(Words)>(accumulator + k);
    if (two) fetch_ahead<SPARE_BLOCK * sizeof *other, kSingles * sizeof *other>(other + k);
    const Singles values = load_singles(Format(), source + k);
    const Singles others = two ? load_singles(Other(), other + k) : values;
    for (int half = 0; half < 2; ++half) {
      int64_t* const sum = accumulator + k + half * kWords;
      Words value = round_magically(half_of(values, half), scale);
      if (two) value = plus(value, round_magically(half_of(others, half), scale));
      value = minus(value, magic);
      const Words weight = load_words(weights + k + half * kWords);
      const Words result = first ? value : plus(load_words(sum), value);
      memcpy(sum, &result, sizeof result);
      low[half] = plus(low[half], lower_product(value, weight));
      high[half] = plus_halves(high[half], upper_product(value, weight));
    }
  }
  return total_products(plus(low[0], low[1]), plus_halves(high[0], high[1]));
}

}  // namespace

#endif
#endif

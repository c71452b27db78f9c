// Packing of 64-bit integers in 6 or 4 bytes by shuffles, for AVX2 and AVX-512, four or eight at a time.
#ifndef SPARE_CPU_PACK_H
#define SPARE_CPU_PACK_H

#if defined(__AVX2__)

#include "cpu_words.h"

namespace {

inline __m256i load_four(const void* from) { return _mm256_loadu_si256((const __m256i*)from); }

// Eight values to 4 bytes each.
inline void pack_eight(const int64_t* values, uint8_t* out, __m256i* sums, __m256i half) {
  const __m256i a = load_four(values), b = load_four(values + 4);
  *sums = _mm256_or_si256(*sums, _mm256_or_si256(_mm256_add_epi64(a, half), _mm256_add_epi64(b, half)));
  const __m256 low = _mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), 0x88);
  _mm256_storeu_si256((__m256i*)out, _mm256_permute4x64_epi64(_mm256_castps_si256(low), 0xd8));
}

// Four values to 6 bytes each; 8 bytes more are written.
inline void pack_four(const int64_t* values, uint8_t* out, __m256i* sums, __m256i half) {
  const __m256i a = load_four(values);
  *sums = _mm256_or_si256(*sums, _mm256_add_epi64(a, half));
  const __m256i six = _mm256_setr_epi8(0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, -1, -1, -1, -1, 0, 1, 2, 3, 4, 5, 8, 9,
                                       10, 11, 12, 13, -1, -1, -1, -1);
  const __m256i close = _mm256_setr_epi32(0, 1, 2, 4, 5, 6, 7, 7);
  _mm256_storeu_si256((__m256i*)out, _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(a, six), close));
}

// A multiple of eight values; up to 8 bytes more are written. Returns the values + half, ORed.
inline uint64_t pack_eights(const int64_t* values, int bits, int64_t count, uint8_t* out) {
  const __m256i half = _mm256_set1_epi64x(1ll << (bits - 1));
  __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int64_t k = 0; k < count; k += 8) {
    fetch_ahead<kFarBytes, 64>(values + k);
    if (bits == 32) {
      pack_eight(values + k, out + 4 * k, sums, half);
    } else {
      pack_four(values + k, out + 6 * k, sums, half);
      pack_four(values + k + 4, out + 6 * k + 24, sums + 1, half);
    }
  }
  uint64_t each[4], found = 0;
  const __m256i both = _mm256_or_si256(sums[0], sums[1]);
  memcpy(each, &both, sizeof each);
  for (int k = 0; k < 4; ++k) found |= each[k];
  return found;
}

// Packs up to a block of values; 8 bytes more than those of eight values may be written. Returns whether all fit.
inline bool pack_block(const int64_t* values, int bits, int64_t count, uint8_t* out) {
  const int64_t whole = count / 8 * 8;
  uint64_t sums = pack_eights(values, bits, whole, out);
  if (whole < count) {
    int64_t last[8] = {};
    memcpy(last, values + whole, (count - whole) * sizeof *last);
    sums |= pack_eights(last, bits, 8, out + whole * bits / 8);
  }
  return sums >> bits == 0;
}

// A multiple of four values of 6 bytes; 8 bytes more are read.
inline void unpack_fours(const uint8_t* packed, int64_t count, int64_t* out) {
  const __m256i apart = _mm256_setr_epi32(0, 1, 2, 2, 3, 4, 5, 5);
  // The upper two bytes to the end of the word, and from there back with the sign.
  const __m256i six = _mm256_setr_epi8(0, 1, 2, 3, -1, -1, 4, 5, 6, 7, 8, 9, -1, -1, 10, 11, 0, 1, 2, 3, -1, -1, 4, 5,
                                       6, 7, 8, 9, -1, -1, 10, 11);
  for (int64_t k = 0; k < count; k += 4) {
    fetch_ahead<kFarBytes, 1>(packed + 6 * k);
    const __m256i words = _mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(load_four(packed + 6 * k), apart), six);
    const __m256i found = _mm256_blend_epi32(words, _mm256_srai_epi32(words, 16), 0xaa);
    _mm256_storeu_si256((__m256i*)(out + k), found);
  }
}

// Up to a block of values of 6 bytes.
inline void unpack48(const uint8_t* packed, int64_t count, int64_t* out) {
  const int64_t whole = count > 8 ? (count - 2) / 4 * 4 : 0;
  unpack_fours(packed, whole, out);
  uint8_t last[8 * 8] = {};
  int64_t values[8];
  memcpy(last, packed + 6 * whole, 6 * (count - whole));
  unpack_fours(last, 8, values);
  memcpy(out + whole, values, (count - whole) * sizeof *out);
}

}  // namespace

#endif
#endif

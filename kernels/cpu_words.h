// Vectors of 64-bit words, and of 32-bit ones, for the instruction set that the including file is compiled for, and
// streaming stores, which bypass the cache. Only for what compilers do not generate themselves: products of 32-bit halves, streaming stores.
#ifndef SPARE_CPU_WORDS_H
#define SPARE_CPU_WORDS_H

#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)

typedef __m512i Words;
inline Words zero_words() { return _mm512_setzero_si512(); }
inline Words all_words(uint64_t word) { return _mm512_set1_epi64((long long)word); }
inline Words load_words(const void* from) { return _mm512_loadu_si512(from); }
inline Words widen_words(const void* from) { return _mm512_cvtepi32_epi64(_mm256_loadu_si256((const __m256i*)from)); }
inline Words plus(Words a, Words b) { return _mm512_add_epi64(a, b); }
inline Words minus(Words a, Words b) { return _mm512_sub_epi64(a, b); }
inline Words upper(Words a) { return _mm512_srli_epi64(a, 32); }
inline Words lower_product(Words a, Words b) { return _mm512_mul_epu32(a, b); }
// The product of the upper halves mod 2^32 in the upper half; what is in the lower half does not count.
inline Words upper_product(Words a, Words b) { return _mm512_mullo_epi32(a, b); }
inline Words plus_halves(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline void stream_words(void* to, Words words) { _mm512_stream_si512((__m512i*)to, words); }

#elif defined(__AVX2__)

typedef __m256i Words;
inline Words zero_words() { return _mm256_setzero_si256(); }
inline Words all_words(uint64_t word) { return _mm256_set1_epi64x((long long)word); }
inline Words load_words(const void* from) { return _mm256_loadu_si256((const __m256i*)from); }
inline Words widen_words(const void* from) { return _mm256_cvtepi32_epi64(_mm_loadu_si128((const __m128i*)from)); }
inline Words plus(Words a, Words b) { return _mm256_add_epi64(a, b); }
inline Words minus(Words a, Words b) { return _mm256_sub_epi64(a, b); }
inline Words upper(Words a) { return _mm256_srli_epi64(a, 32); }
inline Words lower_product(Words a, Words b) { return _mm256_mul_epu32(a, b); }
inline Words upper_product(Words a, Words b) { return _mm256_mullo_epi32(a, b); }
inline Words plus_halves(Words a, Words b) { return _mm256_add_epi32(a, b); }
inline void stream_words(void* to, Words words) { _mm256_stream_si256((__m256i*)to, words); }

#else

typedef uint64_t Words;
inline Words zero_words() { return 0; }
inline Words all_words(uint64_t word) { return word; }
inline Words load_words(const void* from) {
  uint64_t word;
  memcpy(&word, from, sizeof word);
  return word;
}
inline Words widen_words(const void* from) {
  int32_t value;
  memcpy(&value, from, sizeof value);
  return (uint64_t)(int64_t)value;
}
inline Words plus(Words a, Words b) { return a + b; }
inline Words minus(Words a, Words b) { return a - b; }
inline Words upper(Words a) { return a >> 32; }
inline Words lower_product(Words a, Words b) { return (a & 0xffffffffull) * (b & 0xffffffffull); }
inline Words upper_product(Words a, Words b) { return upper(a) * upper(b) << 32; }
inline Words plus_halves(Words a, Words b) { return a + b; }
#ifdef __SSE2__
inline void stream_words(void* to, Words words) { _mm_stream_si64((long long*)to, (long long)words); }
#else
inline void stream_words(void* to, Words words) { memcpy(to, &words, sizeof words); }
#endif

#endif

enum { kWords = sizeof(Words) / 8 };

#if defined(__AVX2__)
enum { kSingles = 2 * kWords };
typedef float Singles __attribute__((vector_size(sizeof(Words))));
typedef uint32_t Whole __attribute__((vector_size(sizeof(Words))));

template <class Vector, class Element>
inline Vector load_as(const Element* from) {
  Vector found;
  memcpy(&found, from, sizeof found);
  return found;
}
#endif

inline uint64_t total(Words words) {
  uint64_t each[kWords], sum = 0;
  memcpy(each, &words, sizeof each);
  for (int k = 0; k < kWords; ++k) sum += each[k];
  return sum;
}

// The sum of products of words with weights of 32 bits mod 2^64, from the sums of their lower and upper products.
inline uint64_t total_products(Words lower_products, Words upper_products) {
  return total(lower_products) + (total(upper(upper_products)) << 32);
}

// The processor's own prefetching stops at the end of a page, so prefetch what comes next where that is measured to be
// faster; beyond the end of an array it is harmless. The distance is measured.
enum { kFarBytes = 2048 };

template <int ahead, int bytes>
inline void fetch_ahead(const void* from) {
#pragma GCC unroll 4
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch((const void*)((uintptr_t)from + ahead + line));
}

// Copies with streaming stores, so that cache lines that are only written are not read first.
inline void stream_out(void* destination, const void* source, int64_t bytes) {
  char* to = (char*)destination;
  const char* from = (const char*)source;
  int64_t done = (int64_t)(-(uintptr_t)to & (sizeof(Words) - 1));
  if (done > bytes) done = bytes;
  memcpy(to, from, done);
  for (; done + (int64_t)sizeof(Words) <= bytes; done += sizeof(Words)) stream_words(to + done, load_words(from + done));
  memcpy(to + done, from + done, bytes - done);
}

inline void stream_end() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace

#endif

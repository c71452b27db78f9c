// The arithmetic that CPU and GPU share: weights, powers of two, thresholds, rounding to fixed point.
//
// Everything is done in double, where a scaled fp32, bf16 or fp16 number is exact. Assumes round-to-nearest-even, no
// flushing of denormal numbers and no contraction of a product and a sum into one rounding.
#ifndef SPARE_ARITHMETIC_H
#define SPARE_ARITHMETIC_H

#include <stdint.h>
#include <string.h>

#include "spare_kernels.h"

#ifdef __CUDACC__
#define SPARE_INLINE static __host__ __device__ __forceinline__
#else
#define SPARE_INLINE static inline __attribute__((always_inline))
#endif

SPARE_INLINE uint64_t splitmix64(uint64_t value) {
  uint64_t z = value + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

SPARE_INLINE uint64_t checksum_factor(uint64_t block) { return splitmix64(block) | 1; }
SPARE_INLINE uint64_t digest_factor(uint64_t block) { return splitmix64(~block); }

SPARE_INLINE double from_bits(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

SPARE_INLINE uint64_t to_bits(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

SPARE_INLINE float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

SPARE_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

SPARE_INLINE double power_of_two(int exponent) { return from_bits((uint64_t)(exponent + 1023) << 52); }

// A source format: `max_finite` and thresholds are bit patterns without the sign, which order as the magnitudes do.
// `single` is the value of a finite number in fp32, `any` that of infinity and NaN as well.
struct Fp32 {
  typedef uint32_t Bits;
  enum { mantissa = 23, bias = 127, max_finite = 0x7f7fffff, magnitude = 0x7fffffff };
  SPARE_INLINE float single(uint32_t bits) { return float_from_bits(bits); }
  SPARE_INLINE float any(uint32_t bits) { return single(bits); }
};

struct Bf16 {
  typedef uint16_t Bits;
  enum { mantissa = 7, bias = 127, max_finite = 0x7f7f, magnitude = 0x7fff };
  SPARE_INLINE float single(uint32_t bits) { return float_from_bits(bits << 16); }
  SPARE_INLINE float any(uint32_t bits) { return single(bits); }
};

struct Fp16 {
  typedef uint16_t Bits;
  enum { mantissa = 10, bias = 15, max_finite = 0x7bff, magnitude = 0x7fff };
  // The bits read as fp32 are the value times 2^-112, denormal numbers included.
  SPARE_INLINE float single(uint32_t bits) {
    return float_from_bits((bits & 0x7fff) << 13 | (bits & 0x8000) << 16) * 0x1p112f;
  }
  SPARE_INLINE float any(uint32_t bits) {
    const uint32_t found = float_to_bits(single(bits));
    return float_from_bits((bits & magnitude) > max_finite ? found | 0x7f800000 : found);
  }
};

// Exact, as every finite number of the format is one of fp32.
template <class Format>
SPARE_INLINE double value_of(uint32_t bits) {
  return (double)Format::single(bits);
}

// The largest bit pattern whose finite magnitude is at most 2^power.
template <class Format>
SPARE_INLINE uint32_t threshold(int power) {
  if (power > Format::bias) return Format::max_finite;
  if (power < 1 - Format::bias - Format::mantissa) return 0;
  if (power >= 1 - Format::bias) return (uint32_t)(power + Format::bias) << Format::mantissa;
  return 1u << (power + Format::bias - 1 + Format::mantissa);
}

// Adding 1.5 * 2^52 puts the nearest integer into the low bits, for magnitudes up to 2^51.
#define SPARE_MAGIC 0x1.8p52
#define SPARE_MAGIC_BITS 0x4338000000000000ull
#define SPARE_NARROW_BITS 50

SPARE_INLINE uint64_t round_narrow(double value) { return to_bits(value + SPARE_MAGIC) - SPARE_MAGIC_BITS; }

// For magnitudes up to 2^62: the multiple of 2^32 nearest to value, exactly, and the rest. The first is even, so a tie
// goes to even as it does in one rounding.
SPARE_INLINE uint64_t round_wide(double value) {
  double shifted = value * 0x1p-32 + SPARE_MAGIC;
  double rest = value - (shifted - SPARE_MAGIC) * 0x1p32;
  return ((to_bits(shifted) - SPARE_MAGIC_BITS) << 32) + round_narrow(rest);
}

// rint of a square of up to 2^52, ties to even: 2^52 + square has it in its low bits.
#define SPARE_SQUARE_MAGIC 0x1p52
#define SPARE_SQUARE_BITS 0x4330000000000000ull

// Of a finite value of magnitude up to 2^26 / scale. The square is exact: a number of fp32 has 24 bits.
SPARE_INLINE uint64_t round_square(float value, double scale) {
  const double scaled = (double)value * scale;
  return to_bits(scaled * scaled + SPARE_SQUARE_MAGIC) - SPARE_SQUARE_BITS;
}

// One element with everything that can be wrong with it: the value that counts, and flags.
template <class Format>
SPARE_INLINE uint64_t round_checked(uint32_t bits, double scale, double bound, uint32_t* flags) {
  if ((bits & Format::magnitude) > Format::max_finite) {
    *flags |= SPARE_NOT_FINITE;
    return 0;
  }
  double value = value_of<Format>(bits) * scale;
  if (value > bound || value < -bound) {
    *flags |= SPARE_OVERFLOW;
    value = value > 0 ? bound : -bound;
  }
  return round_wide(value);
}

// int64 to double, rounded to nearest even, without an instruction for it.
SPARE_INLINE double to_double(int64_t value) {
  double low = from_bits(((uint64_t)value & 0xffffffffull) | 0x4330000000000000ull);
  double high = from_bits(((uint64_t)value >> 32) ^ 0x4530000080000000ull);
  return (high - from_bits(0x4530000080100000ull)) + low;
}

// fp32 as bits to the nearest bf16, ties to even. Not for NaN.
SPARE_INLINE uint16_t nearest_bf16(uint32_t bits) { return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16); }

// double to bf16, rounded once: towards zero to fp32 with the last bit set where inexact (round to odd), then to the
// nearest bf16. Not for NaN.
SPARE_INLINE uint16_t to_bf16(double value) {
  float single = (float)value;
  uint32_t bits = float_to_bits(single);
  double back = (double)single;
  double size = value < 0 ? -value : value, back_size = back < 0 ? -back : back;
  uint32_t larger = back_size > size ? 1 : 0, inexact = back_size != size ? 1 : 0;
  return nearest_bf16((bits - larger) | inexact);
}

#endif

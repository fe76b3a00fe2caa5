// 16-bit floats, widened exactly and narrowed with one rounding to the nearest, ties to even.
// It brings what the files of an instruction set need, for they include the rest within theirs.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>

namespace phasor {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

inline float from_bits(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(Bf16 x) { return from_bits(uint32_t{x.bits} << 16); }
inline float widen(F16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, rest = uint32_t(x.bits & 0x7fffu) << 13;
  if (rest >= 0x0f800000u) return from_bits(sign | 0x70000000u | rest); // infinity, NaN
  // the product adds to the exponent, and makes subnormal halves normal
  return from_bits(sign | to_bits(from_bits(rest) * 0x1p112f));
}

inline void narrow(float x, float *out) { *out = x; }
inline void narrow(double x, double *out) { *out = x; }
inline void narrow(float x, Bf16 *out) {
  const uint32_t u = to_bits(x);
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  out->bits = uint16_t(nan ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
inline void narrow(float x, F16 *out) {
  const uint32_t u = to_bits(x), sign = (u >> 16) & 0x8000u, size = u & 0x7fffffffu;
  uint32_t bits;
  if (size > 0x7f800000u) bits = 0x7e00u;
  else if (size >= 0x477ff000u) bits = 0x7c00u; // rounds to 2**16 or more
  else if (size < 0x38800000u) bits = to_bits(from_bits(size) + 0.5f) - 0x3f000000u; // subnormal
  else bits = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
  out->bits = uint16_t(sign | bits);
}

} // namespace phasor

// AVX2 with FMA and F16C: 8 pairs of floats at once, 4 of doubles.
#if defined(__x86_64__)
#include <immintrin.h>

#include "angles.h"
#include "numbers.h"
#include "rotate.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace phasor {
namespace {

constexpr int64_t kAligned = 32;
constexpr bool kFused = true;
inline void fence() { _mm_sfence(); }

inline __m256i load(const char *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
inline __m128i load_short(const char *p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
}
template <bool kStream> inline void store(char *p, __m256i v) {
  if constexpr (kStream) _mm256_stream_si256(reinterpret_cast<__m256i *>(p), v);
  else _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), v);
}
template <bool kStream> inline void store(char *p, __m128i v) {
  if constexpr (kStream) _mm_stream_si128(reinterpret_cast<__m128i *>(p), v);
  else _mm_storeu_si128(reinterpret_cast<__m128i *>(p), v);
}
// [8 lanes of 32 bits] -> their lower halves, side by side
inline __m128i lower_halves(__m256i v) {
  const __m256i clean = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(clean, clean), 0x08));
}

struct Register {
  static constexpr int width = 8;
  using F = __m256;
  using U [[gnu::vector_size(32)]] = uint32_t;
  using I [[gnu::vector_size(32)]] = int32_t;
  using W [[gnu::vector_size(32)]] = uint64_t;
  static F fuse(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static U upper_halves(U even, U odd) {
    return (U)_mm256_blend_epi32(_mm256_srli_epi64((__m256i)even, 32), (__m256i)odd, 0xaa);
  }
  static F choose(U quarter, F odd, F even) { return _mm256_blendv_ps(even, odd, (F)(quarter << 1)); }
};

struct Floats {
  using V = __m256;
  static constexpr int width = 8;
  static constexpr int cached_registers = 2;
  template <bool, bool> static constexpr bool has_rotate_whole = false;
  static V load_row(const float *p) { return _mm256_loadu_ps(p); }
  static void rotate(V x0, V x1, V c, V s, V &y0, V &y1) {
    y0 = _mm256_fmsub_ps(x0, c, _mm256_mul_ps(x1, s));
    y1 = _mm256_fmadd_ps(x1, c, _mm256_mul_ps(x0, s));
  }
};

template <class T> struct Lane;

template <> struct Lane<float> : Floats {
  static V load_half(const char *p) { return _mm256_castsi256_ps(load(p)); }
  static V order_lanes(__m256 v) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8));
  }
  static void deinterleave(V a, V b, V &even, V &odd) {
    even = order_lanes(_mm256_shuffle_ps(a, b, 0x88));
    odd = order_lanes(_mm256_shuffle_ps(a, b, 0xdd));
  }
  static void load_interleaved(const char *p, V &x0, V &x1) { deinterleave(load_half(p), load_half(p + 32), x0, x1); }
  template <bool kStream> static void store_half(char *p, char *q, V y0, V y1) {
    store<kStream>(p, _mm256_castps_si256(y0));
    store<kStream>(q, _mm256_castps_si256(y1));
  }
  template <bool kStream> static void store_interleaved(char *p, V y0, V y1) {
    const V low = _mm256_unpacklo_ps(y0, y1), high = _mm256_unpackhi_ps(y0, y1);
    store<kStream>(p, _mm256_castps_si256(_mm256_permute2f128_ps(low, high, 0x20)));
    store<kStream>(p + 32, _mm256_castps_si256(_mm256_permute2f128_ps(low, high, 0x31)));
  }
};

// Sixteen floats rounded to bfloat16 and interleaved, y0 first: to the nearest, ties to even. A NaN
// stays a NaN, because NaNs of bfloat16 numbers and of `Rows` have an empty lower half.
inline __m256i round_interleaved(__m256 y0, __m256 y1) {
  const __m256i u0 = _mm256_castps_si256(y0), u1 = _mm256_castps_si256(y1);
  const __m256i upper = _mm256_blend_epi16(_mm256_srli_epi32(u0, 16), u1, 0xaa);
  const __m256i lower = _mm256_blend_epi16(u0, _mm256_slli_epi32(u1, 16), 0xaa);
  const __m256i carried = _mm256_adds_epu16(lower, _mm256_and_si256(upper, _mm256_set1_epi16(1)));
  // more than 0x8000: there is no unsigned comparison, so the sign bit is flipped and compared with 0
  const __m256i flipped = _mm256_xor_si256(carried, _mm256_set1_epi16(int16_t(0x8000)));
  return _mm256_sub_epi16(upper, _mm256_cmpgt_epi16(flipped, _mm256_setzero_si256()));
}

template <> struct Lane<Bf16> : Floats {
  static constexpr int cached_registers = 8; // more than fit in registers, but arranged and in the nearest cache
  template <bool kHalfIn, bool kHalfOut> static constexpr bool has_rotate_whole = kHalfIn && kHalfOut;
  static V load_half(const char *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_short(p)), 16));
  }
  static void load_interleaved(const char *p, V &x0, V &x1) {
    const __m256i raw = load(p);
    x0 = _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16));
    x1 = _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(int(0xffff0000u))));
  }
  template <bool kStream> static void store_half(char *p, char *q, V y0, V y1) {
    const __m256i firsts_then_seconds =
        _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9, 12,
                         13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m256i in_lanes = _mm256_shuffle_epi8(round_interleaved(y0, y1), firsts_then_seconds);
    const __m256i apart = _mm256_permute4x64_epi64(in_lanes, 0xd8);
    store<kStream>(p, _mm256_castsi256_si128(apart));
    store<kStream>(q, _mm256_extracti128_si256(apart, 1));
  }
  template <bool kStream> static void store_interleaved(char *p, V y0, V y1) {
    store<kStream>(p, round_interleaved(y0, y1));
  }

  struct Constants {};

  // Rows as `rotate_whole` uses them. One shift and one mask unpack 16 numbers into the even and the
  // odd ones, which is faster than unpacking them in order; so where both pairings are halves, the
  // cosines of 16 neighbouring pairs are put into that order too.
  template <bool kHalfIn, bool kHalfOut, int kBlocks> static void arrange_rows(V *row) {
    for (int b = 0; b < kBlocks; b += 2)
      Lane<float>::deinterleave(row[b], row[b + 1], row[b], row[b + 1]);
  }
  template <bool kHalfIn, bool kHalfOut, bool kStream, int kBlocks>
  static void rotate_whole(const char *in, char *out, const V *c, const V *s, const float *,
                         const float *, const Constants &) {
    constexpr int64_t bytes = int64_t{kBlocks} * width * 2;
    for (int b = 0; b < kBlocks; b += 2) {
      const int64_t at = b * int64_t{width} * 2;
      V even0, odd0, even1, odd1, y0, y1, z0, z1;
      load_interleaved(in + at, even0, odd0);
      load_interleaved(in + bytes + at, even1, odd1);
      rotate(even0, even1, c[b], s[b], y0, y1);
      rotate(odd0, odd1, c[b + 1], s[b + 1], z0, z1);
      store<kStream>(out + at, round_interleaved(y0, z0));
      store<kStream>(out + bytes + at, round_interleaved(y1, z1));
    }
  }
};

template <> struct Lane<F16> : Floats {
  static V load_half(const char *p) { return _mm256_cvtph_ps(load_short(p)); }
  static void load_interleaved(const char *p, V &x0, V &x1) {
    const __m256i raw = load(p);
    x0 = _mm256_cvtph_ps(lower_halves(raw));
    x1 = _mm256_cvtph_ps(lower_halves(_mm256_srli_epi32(raw, 16)));
  }
  static __m128i narrow_f16(V y) {
    return _mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  template <bool kStream> static void store_half(char *p, char *q, V y0, V y1) {
    store<kStream>(p, narrow_f16(y0));
    store<kStream>(q, narrow_f16(y1));
  }
  template <bool kStream> static void store_interleaved(char *p, V y0, V y1) {
    const __m256i low = _mm256_cvtepu16_epi32(narrow_f16(y0));
    const __m256i high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow_f16(y1)), 16);
    store<kStream>(p, _mm256_or_si256(low, high));
  }
};

template <> struct Lane<double> {
  using V = __m256d;
  static constexpr int width = 4;
  static constexpr int cached_registers = 2;
  template <bool, bool> static constexpr bool has_rotate_whole = false;
  static V at(const char *p) { return _mm256_castsi256_pd(load(p)); }
  static V load_row(const double *p) { return _mm256_loadu_pd(p); }
  static V load_half(const char *p) { return at(p); }
  static void load_interleaved(const char *p, V &x0, V &x1) {
    const V a = at(p), b = at(p + 32);
    x0 = _mm256_permute4x64_pd(_mm256_unpacklo_pd(a, b), 0xd8);
    x1 = _mm256_permute4x64_pd(_mm256_unpackhi_pd(a, b), 0xd8);
  }
  static void rotate(V x0, V x1, V c, V s, V &y0, V &y1) {
    y0 = _mm256_fmsub_pd(x0, c, _mm256_mul_pd(x1, s));
    y1 = _mm256_fmadd_pd(x1, c, _mm256_mul_pd(x0, s));
  }
  template <bool kStream> static void store_half(char *p, char *q, V y0, V y1) {
    store<kStream>(p, _mm256_castpd_si256(y0));
    store<kStream>(q, _mm256_castpd_si256(y1));
  }
  template <bool kStream> static void store_interleaved(char *p, V y0, V y1) {
    const V low = _mm256_unpacklo_pd(y0, y1), high = _mm256_unpackhi_pd(y0, y1);
    store<kStream>(p, _mm256_castpd_si256(_mm256_permute2f128_pd(low, high, 0x20)));
    store<kStream>(p + 32, _mm256_castpd_si256(_mm256_permute2f128_pd(low, high, 0x31)));
  }
};

} // namespace
#include "sweep.inl"
void run_avx2(const Job &job, int64_t first, int64_t last) { run_here(job, first, last); }
} // namespace phasor
#pragma GCC pop_options
#endif

// AVX2 with FMA and F16C: 8 pairs of floats at once, 4 of doubles.
#if defined(__x86_64__)
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <immintrin.h>
#include <type_traits>

#include "numbers.h"
#include "rotate.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace phasor {
namespace {

constexpr int64_t kAligned = 32;
inline void fence() { _mm_sfence(); }

inline __m256i load(const char *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
inline __m128i load_short(const char *p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
}
template <bool kStream> inline void put(char *p, __m256i v) {
  if constexpr (kStream) _mm256_stream_si256(reinterpret_cast<__m256i *>(p), v);
  else _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), v);
}
template <bool kStream> inline void put(char *p, __m128i v) {
  if constexpr (kStream) _mm_stream_si128(reinterpret_cast<__m128i *>(p), v);
  else _mm_storeu_si128(reinterpret_cast<__m128i *>(p), v);
}
// the lower halves of eight 32-bit lanes, side by side
inline __m128i lower_halves(__m256i v) {
  const __m256i clean = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(clean, clean), 0x08));
}

struct Floats {
  using V = __m256;
  static constexpr int width = 8;
  static constexpr int held = 2;
  static constexpr bool whole = false;
  static V row(const float *p) { return _mm256_loadu_ps(p); }
  static void turn(V x0, V x1, V c, V s, V &y0, V &y1) {
    y0 = _mm256_fmsub_ps(x0, c, _mm256_mul_ps(x1, s));
    y1 = _mm256_fmadd_ps(x1, c, _mm256_mul_ps(x0, s));
  }
};

template <class T> struct Lane;

template <> struct Lane<float> : Floats {
  static V half(const char *p) { return _mm256_castsi256_ps(load(p)); }
  static V ordered(__m256 v) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8));
  }
  static void woven(const char *p, V &x0, V &x1) {
    const V a = half(p), b = half(p + 32);
    x0 = ordered(_mm256_shuffle_ps(a, b, 0x88));
    x1 = ordered(_mm256_shuffle_ps(a, b, 0xdd));
  }
  template <bool kStream> static void put_half(char *p, char *q, V y0, V y1) {
    put<kStream>(p, _mm256_castps_si256(y0));
    put<kStream>(q, _mm256_castps_si256(y1));
  }
  template <bool kStream> static void put_woven(char *p, V y0, V y1) {
    const V low = _mm256_unpacklo_ps(y0, y1), high = _mm256_unpackhi_ps(y0, y1);
    put<kStream>(p, _mm256_castps_si256(_mm256_permute2f128_ps(low, high, 0x20)));
    put<kStream>(p + 32, _mm256_castps_si256(_mm256_permute2f128_ps(low, high, 0x31)));
  }
};

// bfloat16 in the upper half of each 32-bit lane, rounded to nearest even; NaNs aside
inline __m256i rounded_up(__m256i u) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
}

// Both at once: one comparison sees a NaN in either, and hardly ever has to keep it one.
inline void round_both(__m256 y0, __m256 y1, __m256i &r0, __m256i &r1) {
  const __m256i u0 = _mm256_castps_si256(y0), u1 = _mm256_castps_si256(y1);
  r0 = rounded_up(u0);
  r1 = rounded_up(u1);
  if (__builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(y0, y1, _CMP_UNORD_Q)), 0)) {
    const __m256i quiet = _mm256_set1_epi32(0x400000);
    const __m256i nan0 = _mm256_castps_si256(_mm256_cmp_ps(y0, y0, _CMP_UNORD_Q));
    const __m256i nan1 = _mm256_castps_si256(_mm256_cmp_ps(y1, y1, _CMP_UNORD_Q));
    r0 = _mm256_blendv_epi8(r0, _mm256_or_si256(u0, quiet), nan0);
    r1 = _mm256_blendv_epi8(r1, _mm256_or_si256(u1, quiet), nan1);
  }
}

template <> struct Lane<Bf16> : Floats {
  static V half(const char *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_short(p)), 16));
  }
  static void woven(const char *p, V &x0, V &x1) {
    const __m256i raw = load(p);
    x0 = _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16));
    x1 = _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(int(0xffff0000u))));
  }
  template <bool kStream> static void put_half(char *p, char *q, V y0, V y1) {
    __m256i r0, r1;
    round_both(y0, y1, r0, r1);
    const __m256i both = _mm256_packus_epi32(_mm256_srli_epi32(r0, 16), _mm256_srli_epi32(r1, 16));
    const __m256i apart = _mm256_permute4x64_epi64(both, 0xd8);
    put<kStream>(p, _mm256_castsi256_si128(apart));
    put<kStream>(q, _mm256_extracti128_si256(apart, 1));
  }
  template <bool kStream> static void put_woven(char *p, V y0, V y1) {
    __m256i r0, r1;
    round_both(y0, y1, r0, r1);
    put<kStream>(p, _mm256_blend_epi16(_mm256_srli_epi32(r0, 16), r1, 0xaa));
  }
};

template <> struct Lane<F16> : Floats {
  static V half(const char *p) { return _mm256_cvtph_ps(load_short(p)); }
  static void woven(const char *p, V &x0, V &x1) {
    const __m256i raw = load(p);
    x0 = _mm256_cvtph_ps(lower_halves(raw));
    x1 = _mm256_cvtph_ps(lower_halves(_mm256_srli_epi32(raw, 16)));
  }
  static __m128i narrowed(V y) {
    return _mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  template <bool kStream> static void put_half(char *p, char *q, V y0, V y1) {
    put<kStream>(p, narrowed(y0));
    put<kStream>(q, narrowed(y1));
  }
  template <bool kStream> static void put_woven(char *p, V y0, V y1) {
    const __m256i low = _mm256_cvtepu16_epi32(narrowed(y0));
    const __m256i high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(narrowed(y1)), 16);
    put<kStream>(p, _mm256_or_si256(low, high));
  }
};

template <> struct Lane<double> {
  using V = __m256d;
  static constexpr int width = 4;
  static constexpr int held = 2;
  static constexpr bool whole = false;
  static V at(const char *p) { return _mm256_castsi256_pd(load(p)); }
  static V row(const double *p) { return _mm256_loadu_pd(p); }
  static V half(const char *p) { return at(p); }
  static void woven(const char *p, V &x0, V &x1) {
    const V a = at(p), b = at(p + 32);
    x0 = _mm256_permute4x64_pd(_mm256_unpacklo_pd(a, b), 0xd8);
    x1 = _mm256_permute4x64_pd(_mm256_unpackhi_pd(a, b), 0xd8);
  }
  static void turn(V x0, V x1, V c, V s, V &y0, V &y1) {
    y0 = _mm256_fmsub_pd(x0, c, _mm256_mul_pd(x1, s));
    y1 = _mm256_fmadd_pd(x1, c, _mm256_mul_pd(x0, s));
  }
  template <bool kStream> static void put_half(char *p, char *q, V y0, V y1) {
    put<kStream>(p, _mm256_castpd_si256(y0));
    put<kStream>(q, _mm256_castpd_si256(y1));
  }
  template <bool kStream> static void put_woven(char *p, V y0, V y1) {
    const V low = _mm256_unpacklo_pd(y0, y1), high = _mm256_unpackhi_pd(y0, y1);
    put<kStream>(p, _mm256_castpd_si256(_mm256_permute2f128_pd(low, high, 0x20)));
    put<kStream>(p + 32, _mm256_castpd_si256(_mm256_permute2f128_pd(low, high, 0x31)));
  }
};

// to the bit what Lane<T>::turn does
template <class C> inline void turn_pair(C x0, C x1, C c, C s, C &y0, C &y1) {
  y0 = std::fma(x0, c, -(x1 * s));
  y1 = std::fma(x1, c, x0 * s);
}

} // namespace
#include "sweep.inl"
void run_avx2(const Job &job, int64_t first, int64_t last) { run_here(job, first, last); }
} // namespace phasor
#pragma GCC pop_options
#endif

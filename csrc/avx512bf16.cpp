// AVX-512 of processors that round to bfloat16 in one instruction.
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
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c")
#include "avx512.inl"

namespace phasor {
namespace {

template <class T, bool kHalfIn, bool kHalfOut, bool kStream, class V>
void rotate_block(const char *in, char *out, int64_t bytes, int64_t at, V c, V s);

template <> struct Lane<Bf16> : Bf16Emulated {
  static constexpr bool has_rotate_whole = true;

  static __m512i interleave(__m512i v) {
    alignas(64) static constexpr int16_t kWeave[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,
                                                       21, 6, 22, 7, 23, 8,  24, 9,  25, 10, 26,
                                                       11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(kWeave), v);
  }

  // Rows as `rotate_whole` uses them. One shift and one mask unpack 32 numbers into the even and the
  // odd ones, which is faster than unpacking them in order; so where both pairings are halves, the
  // cosines of 32 neighbouring pairs are put into that order too.
  template <bool kHalfIn, bool kHalfOut, int kBlocks> static void arrange_rows(V *row) {
    if constexpr (kHalfIn && kHalfOut) {
      const __m512i even =
          _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
      const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
      for (int b = 0; b < kBlocks; b += 2) {
        const V low = row[b], high = row[b + 1];
        row[b] = _mm512_permutex2var_ps(low, even, high);
        row[b + 1] = _mm512_permutex2var_ps(low, odd, high);
      }
    }
  }

  // The instruction that rounds to bfloat16 takes subnormal numbers for zero. So a head is rotated in
  // registers, tested once for zeros among all results, and only if there is one computed again without
  // the instruction. Nothing is stored before.
  template <bool kHalfIn, bool kHalfOut, bool kStream, int kBlocks>
  static void rotate_whole(const char *in, char *out, const V *c, const V *s, const float *cos,
                         const float *sin) {
    constexpr int64_t bytes = int64_t{kBlocks} * width * 2;
    __m512i results[kBlocks];
    if constexpr (kHalfIn && kHalfOut) {
      for (int b = 0; b < kBlocks; b += 2) {
        const int64_t at = b * int64_t{width} * 2;
        V even0, odd0, even1, odd1, y0, y1, z0, z1;
        load_interleaved(in + at, even0, odd0);
        load_interleaved(in + bytes + at, even1, odd1);
        rotate(even0, even1, c[b], s[b], y0, y1);
        rotate(odd0, odd1, c[b + 1], s[b + 1], z0, z1);
        results[b] = (__m512i)_mm512_cvtne2ps_pbh(z0, y0);
        results[b + 1] = (__m512i)_mm512_cvtne2ps_pbh(z1, y1);
      }
    } else {
      for (int b = 0; b < kBlocks; ++b) {
        const int64_t at = b * int64_t{width} * 2;
        V x0, x1, y0, y1;
        if constexpr (kHalfIn) {
          x0 = load_half(in + at);
          x1 = load_half(in + bytes + at);
        } else {
          load_interleaved(in + 2 * at, x0, x1);
        }
        rotate(x0, x1, c[b], s[b], y0, y1);
        results[b] = (__m512i)_mm512_cvtne2ps_pbh(y1, y0);
      }
    }
    __mmask32 zeros = 0;
    for (int b = 0; b < kBlocks; ++b)
      zeros |= _mm512_testn_epi16_mask(results[b], _mm512_set1_epi16(0x7fff));
    if (__builtin_expect(zeros != 0, 0)) {
      rotate_emulated<kHalfIn, kHalfOut, kStream, kBlocks>(in, out, cos, sin);
      return;
    }
    for (int b = 0; b < kBlocks; ++b) {
      const int64_t at = b * int64_t{width} * 2;
      if constexpr (kHalfIn && kHalfOut) {
        store<kStream>(out + (b % 2 ? bytes + at - 32 : at), interleave(results[b]));
      } else if constexpr (kHalfOut) {
        store<kStream>(out + at, _mm512_castsi512_si256(results[b]));
        store<kStream>(out + bytes + at, _mm512_extracti64x4_epi64(results[b], 1));
      } else {
        store<kStream>(out + 2 * at, interleave(results[b]));
      }
    }
  }

  template <bool kHalfIn, bool kHalfOut, bool kStream, int kBlocks>
  __attribute__((noinline, cold)) static void rotate_emulated(const char *in, char *out,
                                                      const float *cos, const float *sin) {
    constexpr int64_t bytes = int64_t{kBlocks} * width * 2;
    for (int b = 0; b < kBlocks; ++b)
      rotate_block<Bf16, kHalfIn, kHalfOut, kStream>(in, out, bytes, b * int64_t{width} * 2,
                                                   load_row(cos + b * width), load_row(sin + b * width));
  }
};

} // namespace
#include "sweep.inl"
void run_avx512bf16(const Job &job, int64_t first, int64_t last) { run_here(job, first, last); }
} // namespace phasor
#pragma GCC pop_options
#endif

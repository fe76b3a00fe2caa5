// AVX-512 of processors that round to bfloat16 in one instruction.
#if defined(__x86_64__)
#include <immintrin.h>

#include "angles.h"
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
  static constexpr int cached_registers = 8; // more than fit in registers, but in the nearest cache
  template <bool, bool> static constexpr bool has_rotate_whole = true;

  // Constants for every head, in registers: the compiler would make some of them again for each head.
  struct Constants {
    __m512i low, high, weave, magnitude;
    Constants() {
      alignas(64) static constexpr int16_t kLow[32] = {0, 0, 0, 1, 0, 2,  0, 3,  0, 4,  0,
                                                       5, 0, 6, 0, 7, 0,  8, 0,  9, 0,  10,
                                                       0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
      alignas(64) static constexpr int16_t kWeave[32] = {
          0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
      low = in_register(_mm512_load_si512(kLow));
      high = in_register(_mm512_add_epi16(low, _mm512_set1_epi16(16)));
      weave = in_register(_mm512_load_si512(kWeave));
      magnitude = in_register(_mm512_set1_epi16(0x7fff));
    }
    static __m512i in_register(__m512i v) {
      asm("" : "+v"(v));
      return v;
    }
  };
  // Rows stay in order.
  template <bool, bool, int> static void arrange_rows(V *) {}

  // 32 numbers side by side, widened in order: each goes to the upper half of a lane, above zeros.
  static void load_32(const char *p, const Constants &k, V &first, V &second) {
    const __mmask32 upper = 0xaaaaaaaau;
    const __m512i raw = _mm512_loadu_si512(p);
    first = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(upper, k.low, raw));
    second = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(upper, k.high, raw));
  }

  // The instruction that rounds to bfloat16 turns subnormal numbers into zeros. So a head is rotated in
  // registers, its results are tested once for zeros, and only if there is a zero they are computed again
  // without the instruction. Nothing is stored before that.
  template <bool kHalfIn, bool kHalfOut, bool kStream, int kBlocks>
  __attribute__((always_inline)) static void rotate_whole(const char *in, char *out, const V *c,
                                                          const V *s, const float *cos,
                                                          const float *sin, const Constants &k) {
    constexpr int64_t bytes = int64_t{kBlocks} * width * 2;
    // for halves, the firsts and the seconds of 32 pairs; else 16 pairs each, firsts below seconds
    __m512i results[kBlocks];
    for (int b = 0; b < kBlocks; b += 2) {
      const int64_t at = b * int64_t{width} * 2;
      V x0[2], x1[2], y0[2], y1[2];
      if constexpr (kHalfIn) {
        load_32(in + at, k, x0[0], x0[1]);
        load_32(in + bytes + at, k, x1[0], x1[1]);
      } else {
        load_interleaved(in + 2 * at, x0[0], x1[0]);
        load_interleaved(in + 2 * at + 64, x0[1], x1[1]);
      }
      for (int i = 0; i < 2; ++i) rotate(x0[i], x1[i], c[b + i], s[b + i], y0[i], y1[i]);
      if constexpr (kHalfOut) {
        results[b] = (__m512i)_mm512_cvtne2ps_pbh(y0[1], y0[0]);
        results[b + 1] = (__m512i)_mm512_cvtne2ps_pbh(y1[1], y1[0]);
      } else {
        for (int i = 0; i < 2; ++i) results[b + i] = (__m512i)_mm512_cvtne2ps_pbh(y1[i], y0[i]);
      }
    }
    __mmask32 zeros = 0;
    for (int b = 0; b < kBlocks; ++b)
      zeros |= _mm512_testn_epi16_mask(results[b], k.magnitude);
    if (__builtin_expect(zeros != 0, 0)) {
      rotate_emulated<kHalfIn, kHalfOut, kStream, kBlocks>(in, out, cos, sin);
      return;
    }
    for (int b = 0; b < kBlocks; ++b) {
      const int64_t at = b * int64_t{width} * 2;
      if constexpr (kHalfOut) store<kStream>(out + (b % 2 ? bytes + at - 32 : at), results[b]);
      else store<kStream>(out + 2 * at, _mm512_permutexvar_epi16(k.weave, results[b]));
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

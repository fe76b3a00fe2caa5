// Lanes of AVX-512 (F, BW, DQ, VL): 16 pairs of floats at once, 8 of doubles.

namespace phasor {
namespace {

constexpr int64_t kAligned = 64;
constexpr bool kFused = true;
inline void fence() { _mm_sfence(); }

struct Register {
  static constexpr int width = 16;
  using F = __m512;
  using U [[gnu::vector_size(64)]] = uint32_t;
  using I [[gnu::vector_size(64)]] = int32_t;
  using W [[gnu::vector_size(64)]] = uint64_t;
  static F fuse(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static U upper_halves(U even, U odd) {
    return (U)_mm512_mask_shuffle_epi32((__m512i)odd, 0x5555, (__m512i)even, _MM_PERM_CDAB);
  }
  static F choose(U quarter, F odd, F even) {
    return _mm512_mask_blend_ps(_mm512_test_epi32_mask((__m512i)quarter, _mm512_set1_epi32(1 << 30)), even, odd);
  }
};

struct Floats {
  using V = __m512;
  static constexpr int width = 16;
  static constexpr int cached_registers = 4;
  template <bool, bool> static constexpr bool has_rotate_whole = false;
  static V load_row(const float *p) { return _mm512_loadu_ps(p); }
  static void rotate(V x0, V x1, V c, V s, V &y0, V &y1) {
    y0 = _mm512_fmsub_ps(x0, c, _mm512_mul_ps(x1, s));
    y1 = _mm512_fmadd_ps(x1, c, _mm512_mul_ps(x0, s));
  }
};

template <bool kStream> inline void store(char *p, __m512i v) {
  if constexpr (kStream) _mm512_stream_si512(reinterpret_cast<__m512i *>(p), v);
  else _mm512_storeu_si512(p, v);
}
template <bool kStream> inline void store(char *p, __m256i v) {
  if constexpr (kStream) _mm256_stream_si256(reinterpret_cast<__m256i *>(p), v);
  else _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), v);
}

template <class T> struct Lane;
template <> struct Lane<float> : Floats {
  template <bool kHalfIn, bool kHalfOut> static constexpr bool has_rotate_whole = !kHalfIn && !kHalfOut;
  struct Constants {};
  static V load_half(const char *p) { return _mm512_loadu_ps(p); }
  static void load_interleaved(const char *p, V &x0, V &x1) {
    const V a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + 64);
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    x0 = _mm512_permutex2var_ps(a, even, b);
    x1 = _mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
  }
  template <bool kStream> static void store_half(char *p, char *q, V y0, V y1) {
    store<kStream>(p, _mm512_castps_si512(y0));
    store<kStream>(q, _mm512_castps_si512(y1));
  }
  template <bool kStream> static void store_interleaved(char *p, V y0, V y1) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    store<kStream>(p, _mm512_castps_si512(_mm512_permutex2var_ps(y0, low, y1)));
    store<kStream>(p + 64, _mm512_castps_si512(_mm512_permutex2var_ps(y0, high, y1)));
  }
  // Interleaved numbers are rotated in their places, with copies whose members are exchanged, by
  // cosines and sines that are each repeated: one shuffle for each register, not two.
  template <bool kHalfIn, bool kHalfOut, int kBlocks> static void arrange_rows(V *row) {
    const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
#pragma GCC unroll 8
    for (int b = kBlocks - 1; b >= 0; --b) {
      row[2 * b + 1] = _mm512_permutexvar_ps(high, row[b]);
      row[2 * b] = _mm512_permutexvar_ps(low, row[b]);
    }
  }
  template <bool kHalfIn, bool kHalfOut, bool kStream, int kBlocks>
  __attribute__((always_inline)) static void rotate_whole(const char *in, char *out, const V *c, const V *s,
                                                          const float *, const float *, const Constants &) {
#pragma GCC unroll 8
    for (int b = 0; b < 2 * kBlocks; ++b) {
      const V x = _mm512_loadu_ps(in + b * 64), traded = _mm512_permute_ps(x, 0xb1);
      const V y = _mm512_fmaddsub_ps(x, c[b], _mm512_mul_ps(traded, s[b]));
      store<kStream>(out + b * 64, _mm512_castps_si512(y));
    }
  }
};

// 32 floats rounded to bfloat16, given the upper and the lower halves of their bits: to the nearest,
// ties to even. A NaN stays a NaN, because NaNs of bfloat16 numbers and of `Rows` have an empty
// lower half.
inline __m512i round_to_bf16(__m512i upper, __m512i lower) {
  const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi16(1));
  const __m512i carried = _mm512_adds_epu16(lower, odd);
  const __mmask32 up = _mm512_cmpgt_epu16_mask(carried, _mm512_set1_epi16(int16_t(0x8000)));
  return _mm512_mask_add_epi16(upper, up, upper, _mm512_set1_epi16(1));
}

// bfloat16 on processors that have no instruction to round to it.
struct Bf16Emulated : Floats {
  static V load_half(const char *p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
  }
  static void load_interleaved(const char *p, V &x0, V &x1) {
    const __m512i raw = _mm512_loadu_si512(p);
    x0 = _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16));
    x1 = _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(int(0xffff0000u))));
  }
  template <bool kStream> static void store_half(char *p, char *q, V y0, V y1) {
    // the upper halves of y0, then those of y1
    alignas(64) static constexpr int16_t kUpper[32] = {
        1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
        33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    const __m512i u0 = _mm512_castps_si512(y0), u1 = _mm512_castps_si512(y1);
    const __m512i at_upper = _mm512_load_si512(kUpper);
    const __m512i at_lower = _mm512_sub_epi16(at_upper, _mm512_set1_epi16(1));
    const __m512i both = round_to_bf16(_mm512_permutex2var_epi16(u0, at_upper, u1),
                                 _mm512_permutex2var_epi16(u0, at_lower, u1));
    store<kStream>(p, _mm512_castsi512_si256(both));
    store<kStream>(q, _mm512_extracti64x4_epi64(both, 1));
  }
  template <bool kStream> static void store_interleaved(char *p, V y0, V y1) {
    const __m512i u0 = _mm512_castps_si512(y0), u1 = _mm512_castps_si512(y1);
    const __mmask32 odd = 0xaaaaaaaau;
    store<kStream>(p, round_to_bf16(_mm512_mask_blend_epi16(odd, _mm512_srli_epi32(u0, 16), u1),
                            _mm512_mask_blend_epi16(odd, u0, _mm512_slli_epi32(u1, 16))));
  }
};

template <> struct Lane<F16> : Floats {
  static V load_half(const char *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
  }
  static void load_interleaved(const char *p, V &x0, V &x1) {
    const __m512i raw = _mm512_loadu_si512(p);
    x0 = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(raw));
    x1 = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(raw, 16)));
  }
  static __m256i narrow_f16(V y) {
    return _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  template <bool kStream> static void store_half(char *p, char *q, V y0, V y1) {
    store<kStream>(p, narrow_f16(y0));
    store<kStream>(q, narrow_f16(y1));
  }
  template <bool kStream> static void store_interleaved(char *p, V y0, V y1) {
    const __m512i low = _mm512_cvtepu16_epi32(narrow_f16(y0));
    const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow_f16(y1)), 16);
    store<kStream>(p, _mm512_or_si512(low, high));
  }
};

template <> struct Lane<double> {
  using V = __m512d;
  static constexpr int width = 8;
  static constexpr int cached_registers = 4;
  template <bool, bool> static constexpr bool has_rotate_whole = false;
  static V load_row(const double *p) { return _mm512_loadu_pd(p); }
  static V load_half(const char *p) { return _mm512_loadu_pd(p); }
  static void load_interleaved(const char *p, V &x0, V &x1) {
    const V a = _mm512_loadu_pd(p), b = _mm512_loadu_pd(p + 64);
    const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
    x0 = _mm512_permutex2var_pd(a, even, b);
    x1 = _mm512_permutex2var_pd(a, _mm512_add_epi64(even, _mm512_set1_epi64(1)), b);
  }
  static void rotate(V x0, V x1, V c, V s, V &y0, V &y1) {
    y0 = _mm512_fmsub_pd(x0, c, _mm512_mul_pd(x1, s));
    y1 = _mm512_fmadd_pd(x1, c, _mm512_mul_pd(x0, s));
  }
  template <bool kStream> static void store_half(char *p, char *q, V y0, V y1) {
    store<kStream>(p, _mm512_castpd_si512(y0));
    store<kStream>(q, _mm512_castpd_si512(y1));
  }
  template <bool kStream> static void store_interleaved(char *p, V y0, V y1) {
    const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    const __m512i high = _mm512_add_epi64(low, _mm512_set1_epi64(4));
    store<kStream>(p, _mm512_castpd_si512(_mm512_permutex2var_pd(y0, low, y1)));
    store<kStream>(p + 64, _mm512_castpd_si512(_mm512_permutex2var_pd(y0, high, y1)));
  }
};

} // namespace
} // namespace phasor

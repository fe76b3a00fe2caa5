// NEON on 64-bit Arm: 4 pairs of floats at once, 2 of doubles.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "angles.h"
#include "numbers.h"
#include "rotate.h"

namespace phasor {
namespace {

constexpr int64_t kAligned = 16;
constexpr bool kFused = true;
inline void fence() {}

inline const uint16_t *halves(const char *p) { return reinterpret_cast<const uint16_t *>(p); }
inline uint16_t *halves(char *p) { return reinterpret_cast<uint16_t *>(p); }
inline const float *floats(const char *p) { return reinterpret_cast<const float *>(p); }
inline float *floats(char *p) { return reinterpret_cast<float *>(p); }
inline const double *doubles(const char *p) { return reinterpret_cast<const double *>(p); }
inline double *doubles(char *p) { return reinterpret_cast<double *>(p); }

struct Register {
  static constexpr int width = 4;
  using F = float32x4_t;
  using U = uint32x4_t;
  using I = int32x4_t;
  using W = uint64x2_t;
  static F fuse(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static U upper_halves(U even, U odd) { return vtrn2q_u32(even, odd); }
  static F choose(U quarter, F odd, F even) { return vbslq_f32(vtstq_u32(quarter, vdupq_n_u32(1 << 30)), odd, even); }
};

struct Floats {
  using V = float32x4_t;
  static constexpr int width = 4;
  static constexpr int cached_registers = 0;
  template <bool, bool> static constexpr bool has_rotate_whole = false;
  static V load_row(const float *p) { return vld1q_f32(p); }
  static void rotate(V x0, V x1, V c, V s, V &y0, V &y1) {
    // vfmaq(a, b, c) is a + b c: the sign goes into the rounded product
    y0 = vfmaq_f32(vnegq_f32(vmulq_f32(x1, s)), x0, c);
    y1 = vfmaq_f32(vmulq_f32(x0, s), x1, c);
  }
};

template <class T> struct Lane;

template <> struct Lane<float> : Floats {
  static V load_half(const char *p) { return vld1q_f32(floats(p)); }
  static void load_interleaved(const char *p, V &x0, V &x1) {
    const float32x4x2_t both = vld2q_f32(floats(p));
    x0 = both.val[0];
    x1 = both.val[1];
  }
  template <bool> static void store_half(char *p, char *q, V y0, V y1) {
    vst1q_f32(floats(p), y0);
    vst1q_f32(floats(q), y1);
  }
  template <bool> static void store_interleaved(char *p, V y0, V y1) {
    vst2q_f32(floats(p), float32x4x2_t{{y0, y1}});
  }
};

// bfloat16, rounded to nearest even. A NaN stays a NaN, because NaNs of bfloat16 numbers and of
// `Rows` have an empty lower half, which cannot carry.
struct Bf16Numbers {
  static float32x4_t widen(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
  static uint16x4_t narrow(float32x4_t y) {
    const uint32x4_t u = vreinterpretq_u32_f32(y);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    return vshrn_n_u32(vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), odd), 16);
  }
};
struct F16Numbers {
  static float32x4_t widen(uint16x4_t x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
  static uint16x4_t narrow(float32x4_t y) { return vreinterpret_u16_f16(vcvt_f16_f32(y)); }
};

template <class Numbers> struct Halves : Floats {
  static V load_half(const char *p) { return Numbers::widen(vld1_u16(halves(p))); }
  static void load_interleaved(const char *p, V &x0, V &x1) {
    const uint16x4x2_t both = vld2_u16(halves(p));
    x0 = Numbers::widen(both.val[0]);
    x1 = Numbers::widen(both.val[1]);
  }
  template <bool> static void store_half(char *p, char *q, V y0, V y1) {
    vst1_u16(halves(p), Numbers::narrow(y0));
    vst1_u16(halves(q), Numbers::narrow(y1));
  }
  template <bool> static void store_interleaved(char *p, V y0, V y1) {
    vst2_u16(halves(p), uint16x4x2_t{{Numbers::narrow(y0), Numbers::narrow(y1)}});
  }
};
template <> struct Lane<Bf16> : Halves<Bf16Numbers> {};
template <> struct Lane<F16> : Halves<F16Numbers> {};

template <> struct Lane<double> {
  using V = float64x2_t;
  static constexpr int width = 2;
  static constexpr int cached_registers = 0;
  template <bool, bool> static constexpr bool has_rotate_whole = false;
  static V load_row(const double *p) { return vld1q_f64(p); }
  static V load_half(const char *p) { return vld1q_f64(doubles(p)); }
  static void load_interleaved(const char *p, V &x0, V &x1) {
    const float64x2x2_t both = vld2q_f64(doubles(p));
    x0 = both.val[0];
    x1 = both.val[1];
  }
  static void rotate(V x0, V x1, V c, V s, V &y0, V &y1) {
    y0 = vfmaq_f64(vnegq_f64(vmulq_f64(x1, s)), x0, c);
    y1 = vfmaq_f64(vmulq_f64(x0, s), x1, c);
  }
  template <bool> static void store_half(char *p, char *q, V y0, V y1) {
    vst1q_f64(doubles(p), y0);
    vst1q_f64(doubles(q), y1);
  }
  template <bool> static void store_interleaved(char *p, V y0, V y1) {
    vst2q_f64(doubles(p), float64x2x2_t{{y0, y1}});
  }
};

} // namespace
#include "sweep.inl"
void run_neon(const Job &job, int64_t first, int64_t last) { run_here(job, first, last); }
} // namespace phasor
#endif

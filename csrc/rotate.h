// What one call rotates. A job is checked and filled once, then the `run` of an instruction set rotates
// ranges of its tokens.
#pragma once
#include <cstdint>
#include <cstring>

namespace phasor {

constexpr int kMaxDims = 6;    // token dimensions, after `merge`
constexpr int kMaxPairs = 2048; // cosines and sines are on the stack of the thread that needs them
constexpr int64_t kMaxTile = 128; // tokens whose cosines and sines are made before heads are rotated
constexpr int kLimbs = 4; // of 32 bits, in a fraction of a turn

// The length of a row, or of one limb of all pairs, in whole registers of any instruction set.
inline int64_t padded(int64_t pairs) { return (pairs + 15) / 16 * 16; }

enum class Dtype { f32, f64, bf16, f16 };

// One tensor [tokens..., heads, head_dim]; strides in bytes.
struct Operand {
  const char *in;
  char *out;
  int64_t heads;
  int64_t head_in, head_out;
  int64_t item_in, item_out; // stride of the last dimension
  int64_t token_in[kMaxDims], token_out[kMaxDims];
};

struct Job {
  Dtype dtype;
  int operands;
  Operand x[2];
  int dims;
  int64_t shape[kMaxDims];
  int64_t tokens;
  int64_t head_dim, start, pairs;
  bool half_in, half_out;
  bool in_place; // only the rotated slice is written
  bool prefetch; // the tensors are larger than the caches near a core
  bool stream;   // new output larger than the last-level cache: do not read it in first
  bool inverse;
  double gain;
  // angles: either positions and the turns per position ...
  const char *positions;
  int position_bytes; // 4 or 8
  int64_t position_stride[kMaxDims];
  int axes;
  int64_t axis_stride;
  const int32_t *axis_of_pair;
  const uint32_t *turns; // [kLimbs][padded(pairs)], the most significant limb first
  // ... or cosines and sines
  const char *cos, *sin;
  int64_t cos_stride[kMaxDims], sin_stride[kMaxDims];
};

inline int64_t position_at(const char *p, int bytes) {
  if (bytes == 8) {
    int64_t v;
    std::memcpy(&v, p, 8);
    return v;
  }
  int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

using Run = void (*)(const Job &, int64_t first, int64_t last);

void run_portable(const Job &, int64_t, int64_t);
#if defined(__x86_64__)
void run_avx2(const Job &, int64_t, int64_t);
void run_avx512(const Job &, int64_t, int64_t);
void run_avx512bf16(const Job &, int64_t, int64_t);
#elif defined(__aarch64__)
void run_neon(const Job &, int64_t, int64_t);
#endif

} // namespace phasor

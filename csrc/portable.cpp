// Any processor: plain C++, one pair at a time where the compiler finds nothing better.

#include "angles.h"
#include "numbers.h"
#include "rotate.h"

namespace phasor {
namespace {

constexpr int64_t kAligned = 1;
constexpr bool kFused = false;
inline void fence() {}

struct Register {
  static constexpr int width = 4;
  using F [[gnu::vector_size(16)]] = float;
  using U [[gnu::vector_size(16)]] = uint32_t;
  using I [[gnu::vector_size(16)]] = int32_t;
  using W [[gnu::vector_size(16)]] = uint64_t;
  static F fuse(F a, F b, F c) { return a * b + c; }
  static U upper_halves(U even, U odd) { return (U)((W)even >> 32 | ((W)odd & ~uint64_t{0xffffffff})); }
  static F choose(U quarter, F odd, F even) { return (I)(quarter << 1) < 0 ? odd : even; }
};

template <class T> struct Lane {
  static constexpr int width = 1, cached_registers = 0;
  template <bool, bool> static constexpr bool has_rotate_whole = false;
};

} // namespace
#include "sweep.inl"
void run_portable(const Job &job, int64_t first, int64_t last) { run_here(job, first, last); }
} // namespace phasor

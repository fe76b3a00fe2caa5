// Any processor: plain C++, one pair at a time where the compiler finds nothing better.

#include "numbers.h"
#include "rotate.h"

namespace phasor {
namespace {

constexpr int64_t kAligned = 1;
constexpr bool kFused = false;
inline void fence() {}

template <class T> struct Lane {
  static constexpr int width = 1, cached_registers = 0;
  template <bool, bool> static constexpr bool has_rotate_whole = false;
};

} // namespace
#include "sweep.inl"
void run_portable(const Job &job, int64_t first, int64_t last) { run_here(job, first, last); }
} // namespace phasor

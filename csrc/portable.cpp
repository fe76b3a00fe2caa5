// Any processor: plain C++, one pair at a time where the compiler finds nothing better.

#include "numbers.h"
#include "rotate.h"

namespace phasor {
namespace {

constexpr int64_t kAligned = 1;
constexpr bool kFused = false;
inline void fence() {}

template <class T> struct Lane {
  using V = decltype(widen(T{}));
  static constexpr int width = 1;
  static constexpr int cached_registers = 0;
  template <bool, bool> static constexpr bool has_rotate_whole = false;
  static T read(const char *p) {
    T x;
    std::memcpy(&x, p, sizeof(T));
    return x;
  }
  static void write(char *p, V y) {
    T x;
    narrow(y, &x);
    std::memcpy(p, &x, sizeof(T));
  }
  static V load_half(const char *p) { return widen(read(p)); }
  static void load_interleaved(const char *p, V &x0, V &x1) {
    x0 = widen(read(p));
    x1 = widen(read(p + sizeof(T)));
  }
  template <bool> static void store_half(char *p, char *q, V y0, V y1) {
    write(p, y0);
    write(q, y1);
  }
  template <bool> static void store_interleaved(char *p, V y0, V y1) {
    write(p, y0);
    write(p + sizeof(T), y1);
  }
  static V load_row(const V *p) { return *p; }
  static void rotate(V x0, V x1, V c, V s, V &y0, V &y1) {
    y0 = x0 * c - x1 * s;
    y1 = x1 * c + x0 * s;
  }
};

} // namespace
#include "sweep.inl"
void run_portable(const Job &job, int64_t first, int64_t last) { run_here(job, first, last); }
} // namespace phasor

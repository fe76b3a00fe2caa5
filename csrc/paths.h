// Which instruction sets were built, and which of them this processor has.
#pragma once
#include "rotate.h"

namespace phasor {

struct Path {
  const char *name;
  Run run;
  bool here;
  int64_t fewest_pairs; // with fewer, the next fills its registers better, and rotates to the same bits
};

#if defined(__x86_64__)
inline bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
inline bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
inline bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

// Best first.
const Path kPaths[] = {
#if defined(__x86_64__)
    {"avx512bf16", run_avx512bf16, has_avx512bf16(), 16},
    {"avx512", run_avx512, has_avx512(), 16},
    {"avx2", run_avx2, has_avx2(), 0},
#elif defined(__aarch64__)
    {"neon", run_neon, true, 0},
#endif
    {"portable", run_portable, true, 0},
};

} // namespace phasor

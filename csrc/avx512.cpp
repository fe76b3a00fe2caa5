// AVX-512.
#if defined(__x86_64__)
#include <immintrin.h>

#include "angles.h"
#include "numbers.h"
#include "rotate.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#include "avx512.inl"

namespace phasor {
namespace {

template <> struct Lane<Bf16> : Bf16Emulated {};

} // namespace
#include "sweep.inl"
void run_avx512(const Job &job, int64_t first, int64_t last) { run_here(job, first, last); }
} // namespace phasor
#pragma GCC pop_options
#endif

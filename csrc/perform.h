// Running a checked job: caches, pages and threads of the machine.
#pragma once
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__unix__)
#include <sys/mman.h>
#include <unistd.h>
#endif
#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "rotate.h"
#include "tensors.h"

namespace phasor {

// A virtual machine may report the cache of the whole host, although its processors use a part of it.
inline int64_t last_level_cache() {
  int64_t size = int64_t{32} << 20;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long reported = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (reported > 0) size = std::min<int64_t>(size, reported);
#endif
  return size;
}

constexpr int64_t kNearCaches = int64_t{2} << 20; // bytes that the caches next to the cores hold

// A new tensor's memory is mapped page by page as it is written, which costs more than writing it.
inline void ask_for_huge_pages([[maybe_unused]] const DLTensor &t) {
#if defined(__linux__)
  constexpr int64_t kHuge = int64_t{2} << 20;
  const Span span = span_of(t);
  const int64_t low = (span.low + kHuge - 1) / kHuge * kHuge, high = span.high / kHuge * kHuge;
  if (high - low >= 2 * kHuge) madvise(reinterpret_cast<void *>(low), size_t(high - low), MADV_HUGEPAGE);
#endif
}

// How many parts to split the heads into before the tokens. In [batch, heads, seq, dim] memory a part of
// the heads is one piece, and this core's cache holds it: torch's operators, which wrote it, split memory
// evenly among threads.
inline int head_parts(const Job &job, int threads) {
  const int inner = job.dims - 1;
  const Operand &x = job.x[0];
  const bool heads_apart = std::abs(x.head_in) > std::abs(x.token_in[inner]);
  if (!heads_apart || job.tokens / job.shape[inner] >= threads) return 1;
  int64_t parts = threads;
  for (int i = 0; i < job.operands; ++i) parts = std::gcd(parts, job.x[i].heads);
  return int(parts);
}

// One of `parts` equal parts of the heads of a job.
inline Job heads_of(const Job &job, int64_t part, int64_t parts) {
  Job part_job = job;
  for (int i = 0; i < job.operands; ++i) {
    Operand &x = part_job.x[i];
    x.heads /= parts;
    x.in += part * x.heads * x.head_in;
    x.out += part * x.heads * x.head_out;
  }
  return part_job;
}

// Whether a job is long enough for several threads, and to release Python's lock for it.
inline bool is_long(const Job &job, int64_t elements) {
  return elements >= (job.dtype == Dtype::f32 || job.dtype == Dtype::f64 ? 40000 : 80000);
}

// Run a job on at most that many threads.
inline void perform(const Job &job, Run run, [[maybe_unused]] int most) {
#if defined(_OPENMP)
  if (most > 1 && job.tokens > 1 && !omp_in_parallel()) {
#pragma omp parallel num_threads(most)
    {
      const int threads = omp_get_num_threads(), thread = omp_get_thread_num();
      const int64_t parts = head_parts(job, threads);
      const int64_t each = threads / parts, t = thread % each;
      run(heads_of(job, thread / each, parts), job.tokens * t / each, job.tokens * (t + 1) / each);
    }
    return;
  }
#endif
  run(job, 0, job.tokens);
}

} // namespace phasor

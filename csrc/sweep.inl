// The sweep over tokens and heads for one instruction set. A file of such a set defines
// `template <class T> struct Lane` and includes this one inside a namespace of its own.
//
// Lane<T> handles `width` pairs at once in registers `V`; where that is one pair, it has no functions:
//   load_half(p)                   first or second coordinates, which lie side by side
//   load_interleaved(p, x0, x1)    both coordinates, from 2i and 2i + 1
//   store_half<kStream>(p, q, y0, y1), store_interleaved<kStream>(p, y0, y1)
//   load_row(p)                    cosines or sines
//   rotate(x0, x1, c, s, y0, y1)   the rotation
//   cached_registers               how many registers of cosines are worth keeping for all heads
//   has_rotate_whole<in, out>      whether it has `rotate_whole` for these pairings and heads of that many
//                                  registers, with `arrange_rows`, once for a token, and `Constants`
//
// `Register` makes the rows: see rows.inl. `kFused`: whether a product and a sum are fused, with one
// rounding. `kAligned`: the alignment that streaming stores need; `fence` ends them.

#include "rows.inl"

namespace {

// One pair, with the same bits as Lane<T>::rotate.
template <class C> inline void rotate_pair(C x0, C x1, C c, C s, C &y0, C &y1) {
  if constexpr (kFused) {
    y0 = std::fma(x0, c, -(x1 * s));
    y1 = std::fma(x1, c, x0 * s);
  } else {
    y0 = x0 * c - x1 * s;
    y1 = x1 * c + x0 * s;
  }
}

// The pairs of a head from `first` on, one at a time: pairs that do not fill a register, or all pairs
// if elements do not lie side by side.
template <class T, class C>
inline void rotate_scalar(const char *in, char *out, int64_t item_in, int64_t item_out,
                            bool half_in, bool half_out, const C *cos, const C *sin,
                            int64_t first, int64_t pairs) {
  for (int64_t k = first; k < pairs; ++k) {
    const int64_t a = half_in ? k : 2 * k, b = half_in ? pairs + k : 2 * k + 1;
    const int64_t c = half_out ? k : 2 * k, d = half_out ? pairs + k : 2 * k + 1;
    T r0, r1;
    std::memcpy(&r0, in + a * item_in, sizeof(T));
    std::memcpy(&r1, in + b * item_in, sizeof(T));
    const C x0 = widen(r0), x1 = widen(r1);
    C y0, y1;
    rotate_pair(x0, x1, cos[k], sin[k], y0, y1);
    narrow(y0, &r0);
    narrow(y1, &r1);
    std::memcpy(out + c * item_out, &r0, sizeof(T));
    std::memcpy(out + d * item_out, &r1, sizeof(T));
  }
}

// The pairs of one register, `at` bytes into the first half (twice that where they are interleaved).
template <class T, bool kHalfIn, class V>
inline void load_rotated(const char *in, int64_t bytes, int64_t at, V c, V s, V &y0, V &y1) {
  using L = Lane<T>;
  V x0, x1;
  if constexpr (kHalfIn) {
    x0 = L::load_half(in + at);
    x1 = L::load_half(in + bytes + at);
  } else {
    L::load_interleaved(in + 2 * at, x0, x1);
  }
  L::rotate(x0, x1, c, s, y0, y1);
}
template <class T, bool kHalfOut, bool kStream, class V>
inline void store_rotated(char *out, int64_t bytes, int64_t at, V y0, V y1) {
  if constexpr (kHalfOut) Lane<T>::template store_half<kStream>(out + at, out + bytes + at, y0, y1);
  else Lane<T>::template store_interleaved<kStream>(out + 2 * at, y0, y1);
}
template <class T, bool kHalfIn, bool kHalfOut, bool kStream, class V>
inline void rotate_block(const char *in, char *out, int64_t bytes, int64_t at, V c, V s) {
  V y0, y1;
  load_rotated<T, kHalfIn>(in, bytes, at, c, s, y0, y1);
  store_rotated<T, kHalfOut, kStream>(out, bytes, at, y0, y1);
}

// Some heads of some tokens. The heads of a token share its cosines and sines.
struct Vectors {
  const char *in;
  char *out;
  int64_t heads, head_in, head_out;
  int64_t tokens, token_in, token_out;
  int64_t ahead; // how many bytes beyond a head to prefetch; 0 for not at all
};

// The next `kHeads` heads of one token, which share every load of cosines and sines.
template <class T, class C, bool kHalfIn, bool kHalfOut, bool kStream, int kHeads>
__attribute__((always_inline)) inline void rotate_group(Vectors &w, const C *cos, const C *sin,
                                                        int64_t pairs) {
  using L = Lane<T>;
  const int64_t bytes = pairs * int64_t{sizeof(T)};
  for (; w.heads >= kHeads; w.heads -= kHeads) {
    for (int h = 0; h < kHeads && w.ahead; ++h)
      for (int64_t at = 0; at < 2 * bytes; at += 64)
        __builtin_prefetch(w.in + h * w.head_in + w.ahead + at);
    int64_t k = 0;
    if constexpr (L::width > 1) {
      // pairs that do not fill a register are rotated with the pairs before them, before these are written
      const int64_t last = pairs - L::width, last_bytes = last * int64_t{sizeof(T)};
      const bool overlaps = last > 0 && pairs % L::width != 0;
      typename L::V y0[kHeads], y1[kHeads];
#pragma GCC unroll 4
      for (int h = 0; h < kHeads && overlaps; ++h)
        load_rotated<T, kHalfIn>(w.in + h * w.head_in, bytes, last_bytes, L::load_row(cos + last),
                                 L::load_row(sin + last), y0[h], y1[h]);
      for (; k + L::width <= pairs; k += L::width) {
        const auto c = L::load_row(cos + k), s = L::load_row(sin + k);
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h)
          rotate_block<T, kHalfIn, kHalfOut, kStream>(w.in + h * w.head_in, w.out + h * w.head_out, bytes,
                                                      k * int64_t{sizeof(T)}, c, s);
      }
#pragma GCC unroll 4
      for (int h = 0; h < kHeads && overlaps; ++h)
        store_rotated<T, kHalfOut, false>(w.out + h * w.head_out, bytes, last_bytes, y0[h], y1[h]);
      if (overlaps) k = pairs;
    }
    for (int h = 0; h < kHeads && k < pairs; ++h)
      rotate_scalar<T, C>(w.in + h * w.head_in, w.out + h * w.head_out, sizeof(T), sizeof(T), kHalfIn,
                          kHalfOut, cos, sin, k, pairs);
    w.in += kHeads * w.head_in;
    w.out += kHeads * w.head_out;
  }
}

template <class T, class C, bool kHalfIn, bool kHalfOut, bool kStream>
inline void rotate_any_width(const Vectors &w, Rows<C> &rows, int64_t pairs) {
  for (int64_t t = 0; t < w.tokens; ++t) {
    rows.prefetch_next(t);
    Vectors heads = w;
    heads.in += t * w.token_in;
    heads.out += t * w.token_out;
    rotate_group<T, C, kHalfIn, kHalfOut, kStream, 4>(heads, rows.cos(t), rows.sin(t), pairs);
    rotate_group<T, C, kHalfIn, kHalfOut, kStream, 1>(heads, rows.cos(t), rows.sin(t), pairs);
  }
}

// The same for heads of `kBlocks` registers: the cosines and sines stay in registers for all heads of
// a token, so that each head costs only its own loads and stores. `kUnrolled` heads have instructions of
// their own: a processor foresees the next address of an instruction whose addresses are evenly apart.
template <class T, class C, bool kHalfIn, bool kHalfOut, bool kStream, int kUnrolled, int kBlocks>
__attribute__((always_inline)) inline void rotate_from_registers(const Vectors &w, Rows<C> &rows) {
  using L = Lane<T>;
  constexpr int64_t bytes = int64_t{kBlocks} * L::width * int64_t{sizeof(T)};
  const auto each_head = [&](auto arrange, auto rotate_head) __attribute__((always_inline)) {
    for (int64_t t = 0; t < w.tokens; ++t) {
      rows.prefetch_next(t);
      typename L::V c[2 * kBlocks], s[2 * kBlocks]; // `arrange_rows` may need twice as many
      for (int b = 0; b < kBlocks; ++b) {
        c[b] = L::load_row(rows.cos(t) + b * L::width);
        s[b] = L::load_row(rows.sin(t) + b * L::width);
      }
      arrange(c);
      arrange(s);
      const char *in = w.in + t * w.token_in;
      char *out = w.out + t * w.token_out;
      for (int64_t h = 0; h < w.heads; h += kUnrolled)
#pragma GCC unroll 4
        for (int i = 0; i < kUnrolled; ++i, in += w.head_in, out += w.head_out) {
          if (w.ahead)
            for (int64_t at = 0; at < 2 * bytes; at += 64) __builtin_prefetch(in + w.ahead + at);
          rotate_head(in, out, c, s, t);
        }
    }
  };
  if constexpr (L::template has_rotate_whole<kHalfIn, kHalfOut>) {
    const typename L::Constants constants;
    each_head([](auto *row) { L::template arrange_rows<kHalfIn, kHalfOut, kBlocks>(row); },
              [&](const char *in, char *out, const auto *c, const auto *s, int64_t t) {
                L::template rotate_whole<kHalfIn, kHalfOut, kStream, kBlocks>(in, out, c, s, rows.cos(t),
                                                                              rows.sin(t), constants);
              });
  } else {
    each_head([](auto *) {},
              [&](const char *in, char *out, const auto *c, const auto *s, int64_t) {
                for (int b = 0; b < kBlocks; ++b)
                  rotate_block<T, kHalfIn, kHalfOut, kStream>(
                      in, out, bytes, b * int64_t{L::width} * int64_t{sizeof(T)}, c[b], s[b]);
              });
  }
}

template <class T, class C, bool kHalfIn, bool kHalfOut, bool kStream, int kUnrolled>
inline void rotate_vectors(const Vectors &w, Rows<C> &rows, int64_t pairs) {
  using L = Lane<T>;
  [[maybe_unused]] const bool pays = w.heads > 1 || L::template has_rotate_whole<kHalfIn, kHalfOut>;
  if constexpr (L::cached_registers >= 8)
    if (pairs == 8 * L::width)
      return rotate_from_registers<T, C, kHalfIn, kHalfOut, kStream, kUnrolled, 8>(w, rows);
  if constexpr (L::cached_registers >= 4)
    if (pays && pairs == 4 * L::width)
      return rotate_from_registers<T, C, kHalfIn, kHalfOut, kStream, kUnrolled, 4>(w, rows);
  if constexpr (L::cached_registers >= 2)
    if (pays && pairs == 2 * L::width)
      return rotate_from_registers<T, C, kHalfIn, kHalfOut, kStream, kUnrolled, 2>(w, rows);
  rotate_any_width<T, C, kHalfIn, kHalfOut, kStream>(w, rows, pairs);
}

inline void copy_rest(const Job &job, const Operand &x, const char *in, char *out, size_t size) {
  auto copy = [&](int64_t first, int64_t last) {
    if (x.item_in == int64_t(size) && x.item_out == int64_t(size)) {
      std::memcpy(out + first * int64_t(size), in + first * int64_t(size),
                  size_t(last - first) * size);
      return;
    }
    for (int64_t i = first; i < last; ++i)
      std::memcpy(out + i * x.item_out, in + i * x.item_in, size);
  };
  copy(0, job.start);
  copy(job.start + 2 * job.pairs, job.head_dim);
}

// How many bytes ahead to prefetch: whole steps, about `bytes`. The hardware follows one stream of
// addresses well, but not the jumps from head to head.
inline int64_t ahead_of(const Job &job, int64_t step, int64_t bytes) {
  if (!job.prefetch) return 0;
  return step * std::max<int64_t>(1, bytes / std::max<int64_t>(1, std::abs(step)));
}

template <class T, class C, bool kHalfIn, bool kHalfOut, bool kStream>
inline void sweep_tile(const Job &job, const Operand &x, const char *in, char *out, int64_t tokens,
                       int64_t token_in, int64_t token_out, Rows<C> &rows) {
  const int64_t size = sizeof(T), first_in = job.start * x.item_in, first_out = job.start * x.item_out;
  const bool packed = x.item_in == size && x.item_out == size;
  // in place with another pairing of the result, a store would overwrite what is still to be read:
  // the head is copied to the stack first
  const bool staged = job.in_place && kHalfIn != kHalfOut;
  if (!job.in_place && 2 * job.pairs != job.head_dim)
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t h = 0; h < x.heads; ++h)
        copy_rest(job, x, in + t * token_in + h * x.head_in, out + t * token_out + h * x.head_out,
                  size_t(size));
  in += first_in;
  out += first_out;
  if (!packed || staged) {
    alignas(64) T stage[2 * kMaxPairs];
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t h = 0; h < x.heads; ++h) {
        const char *from = in + t * token_in + h * x.head_in;
        char *to = out + t * token_out + h * x.head_out;
        if (staged) {
          for (int64_t i = 0; i < 2 * job.pairs; ++i)
            std::memcpy(stage + i, from + i * x.item_in, size_t(size));
          from = reinterpret_cast<const char *>(stage);
        }
        Vectors head{from, to, 1, 0, 0, 1, 0, 0, 0};
        if (packed)
          rotate_group<T, C, kHalfIn, kHalfOut, false, 1>(head, rows.cos(t), rows.sin(t), job.pairs);
        else
          rotate_scalar<T, C>(from, to, staged ? size : x.item_in, x.item_out, kHalfIn, kHalfOut,
                              rows.cos(t), rows.sin(t), 0, job.pairs);
      }
    return;
  }
  Vectors w{in, out, x.heads, x.head_in, x.head_out, tokens, token_in, token_out, 0};
  if (tokens > 1 && x.heads > 1 && std::abs(x.head_in) > std::abs(token_in)) {
    // [heads, tokens] memory: go along the tokens, which lie side by side, with a few heads at a
    // time. That reads memory in order, and uses each row of cosines for all of them
    constexpr int kStreams = 4;
    w.ahead = ahead_of(job, token_in, 2048); // further would be beyond the tile
    w.heads = kStreams;
    for (int64_t h = x.heads / kStreams; h > 0; --h) {
      rotate_vectors<T, C, kHalfIn, kHalfOut, kStream, kStreams>(w, rows, job.pairs);
      w.in += kStreams * x.head_in;
      w.out += kStreams * x.head_out;
    }
    w.heads = x.heads % kStreams;
  } else {
    w.ahead = ahead_of(job, x.heads > 1 ? x.head_in : token_in, 8192);
  }
  if (w.heads > 0) rotate_vectors<T, C, kHalfIn, kHalfOut, kStream, 1>(w, rows, job.pairs);
}

// Calls `run` with a bool as a compile-time constant.
template <class Run> inline void with_constant(bool value, Run run) {
  value ? run(std::true_type{}) : run(std::false_type{});
}

template <class T, class C>
inline void dispatch_tile(const Job &job, const Operand &x, const char *in, char *out,
                          int64_t tokens, int64_t token_in, int64_t token_out,
                          Rows<C> &rows, bool stream) {
  with_constant(stream, [&](auto streaming) {
    with_constant(job.half_in, [&](auto half_in) {
      with_constant(job.half_out, [&](auto half_out) {
        sweep_tile<T, C, half_in.value, half_out.value, streaming.value>(job, x, in, out, tokens, token_in,
                                                                         token_out, rows);
      });
    });
  });
}

// Whether to write past the caches: a large new output is not read again soon, and an ordinary store
// would first read the memory that it overwrites. Streaming stores need every head aligned.
inline bool streams(const Job &job, const Operand &x, int64_t size) {
  if (!job.stream || x.item_out != size) return false;
  const int64_t unit = kAligned - 1;
  int64_t all = reinterpret_cast<int64_t>(x.out) | x.head_out | (job.start * size) |
                (job.pairs * size);
  for (int d = 0; d < job.dims; ++d) all |= x.token_out[d];
  return (all & unit) == 0;
}

template <class T, class C> void sweep(const Job &job, int64_t first, int64_t last) {
  Rows<C> rows;
  const int64_t fits = Rows<C>::kBytes / int64_t{sizeof(C)} / std::max<int64_t>(1, 2 * padded(job.pairs));
  const int64_t most = std::min(kMaxTile, fits);
  const int inner = job.dims - 1;
  bool stream[2] = {};
  for (int i = 0; i < job.operands; ++i) stream[i] = streams(job, job.x[i], sizeof(T));
  int64_t at[kMaxDims];
  int64_t left = first;
  for (int d = inner; d >= 0; --d) {
    at[d] = left % job.shape[d];
    left /= job.shape[d];
  }
  while (first < last) {
    const int64_t tokens = std::min({most, last - first, job.shape[inner] - at[inner]});
    // once for the heads of query and key
    fill_rows(job, at, tokens, rows);
    for (int i = 0; i < job.operands; ++i) {
      const Operand &x = job.x[i];
      if (x.heads == 0) continue; // it may have no memory
      const char *in = x.in;
      char *out = x.out;
      for (int d = 0; d < job.dims; ++d) {
        in += at[d] * x.token_in[d];
        out += at[d] * x.token_out[d];
      }
      dispatch_tile<T, C>(job, x, in, out, tokens, x.token_in[inner], x.token_out[inner], rows,
                          stream[i]);
    }
    first += tokens;
    at[inner] += tokens;
    for (int d = inner; d > 0 && at[d] == job.shape[d]; --d) {
      at[d] = 0;
      ++at[d - 1];
    }
  }
  fence();
}

void run_here(const Job &job, int64_t first, int64_t last) {
  switch (job.dtype) {
  case Dtype::f32: return sweep<float, float>(job, first, last);
  case Dtype::f64: return sweep<double, double>(job, first, last);
  case Dtype::bf16: return sweep<Bf16, float>(job, first, last);
  case Dtype::f16: return sweep<F16, float>(job, first, last);
  }
}

} // namespace

// The sweep over tokens and heads for one instruction set. A file of such a set defines
// `template <class T> struct Lane` and includes this one inside a namespace of its own.
//
// Lane<T> handles `width` pairs at once in registers `V`:
//   half(p), woven(p, x0, x1)               load firsts or seconds, or both from 2i and 2i + 1
//   put_half<kStream>(p, q, y0, y1), put_woven<kStream>(p, y0, y1)
//   row(p)                                   cosines or sines
//   turn(x0, x1, c, s, y0, y1)               the rotation
//   held                                     how many registers of a row of cosines are worth keeping
//   whole                                    whether it has `turn_whole`, for vectors it holds rows of
//
// `kFused` says whether `turn` rounds a product and a sum once. `kAligned` is the alignment that its
// streaming stores want, and `fence` ends them.

#include "rows.inl"

namespace {

// One pair, to the bit what Lane<T>::turn does.
template <class C> inline void turn_pair(C x0, C x1, C c, C s, C &y0, C &y1) {
  if constexpr (kFused) {
    y0 = std::fma(x0, c, -(x1 * s));
    y1 = std::fma(x1, c, x0 * s);
  } else {
    y0 = x0 * c - x1 * s;
    y1 = x1 * c + x0 * s;
  }
}

// A head of which not every pair fills a register, or whose items do not lie side by side.
template <class T, class C>
inline void turn_one_by_one(const char *in, char *out, int64_t item_in, int64_t item_out,
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
    turn_pair(x0, x1, cos[k], sin[k], y0, y1);
    narrow(y0, &r0);
    narrow(y1, &r1);
    std::memcpy(out + c * item_out, &r0, sizeof(T));
    std::memcpy(out + d * item_out, &r1, sizeof(T));
  }
}

// One register's worth of pairs, `at` bytes into the first half (or twice that into woven pairs).
template <class T, bool kHalfIn, bool kHalfOut, bool kStream, class V>
inline void turn_block(const char *in, char *out, int64_t bytes, int64_t at, V c, V s) {
  using L = Lane<T>;
  V x0, x1, y0, y1;
  if constexpr (kHalfIn) {
    x0 = L::half(in + at);
    x1 = L::half(in + bytes + at);
  } else {
    L::woven(in + 2 * at, x0, x1);
  }
  L::turn(x0, x1, c, s, y0, y1);
  if constexpr (kHalfOut) {
    L::template put_half<kStream>(out + at, out + bytes + at, y0, y1);
  } else {
    L::template put_woven<kStream>(out + 2 * at, y0, y1);
  }
}

// Vectors that share a row: the heads of a token, or one head of neighbouring tokens at one place.
struct Walk {
  const char *in;
  char *out;
  int64_t count, step_in, step_out;
  int64_t ahead; // how far beyond a vector to prefetch; 0 for not at all
};

template <class T, class C, bool kHalfIn, bool kHalfOut, bool kStream>
__attribute__((always_inline)) inline void turn_any(const Walk &w, const C *cos, const C *sin, int64_t pairs) {
  using L = Lane<T>;
  const int64_t bytes = pairs * int64_t{sizeof(T)};
  const char *in = w.in;
  char *out = w.out;
  for (int64_t i = 0; i < w.count; ++i, in += w.step_in, out += w.step_out) {
    if (w.ahead)
      for (int64_t at = 0; at < 2 * bytes; at += 64) __builtin_prefetch(in + w.ahead + at);
    int64_t k = 0;
    for (; k + L::width <= pairs; k += L::width)
      turn_block<T, kHalfIn, kHalfOut, kStream>(in, out, bytes, k * int64_t{sizeof(T)},
                                                L::row(cos + k), L::row(sin + k));
    if (k < pairs)
      turn_one_by_one<T, C>(in, out, sizeof(T), sizeof(T), kHalfIn, kHalfOut, cos, sin, k, pairs);
  }
}

// The same with the row kept in registers.
template <class T, class C, bool kHalfIn, bool kHalfOut, bool kStream, int kBlocks>
__attribute__((always_inline)) inline void turn_held(const Walk &w, const C *cos, const C *sin) {
  using L = Lane<T>;
  constexpr int64_t bytes = int64_t{kBlocks} * L::width * int64_t{sizeof(T)};
  typename L::V c[kBlocks], s[kBlocks];
  for (int b = 0; b < kBlocks; ++b) {
    c[b] = L::row(cos + b * L::width);
    s[b] = L::row(sin + b * L::width);
  }
  if constexpr (L::whole) {
    L::template arrange<kHalfIn, kHalfOut, kBlocks>(c);
    L::template arrange<kHalfIn, kHalfOut, kBlocks>(s);
  }
  const char *in = w.in;
  char *out = w.out;
  for (int64_t i = 0; i < w.count; ++i, in += w.step_in, out += w.step_out) {
    if (w.ahead)
      for (int64_t at = 0; at < 2 * bytes; at += 64) __builtin_prefetch(in + w.ahead + at);
    if constexpr (L::whole)
      L::template turn_whole<kHalfIn, kHalfOut, kStream, kBlocks>(in, out, c, s, cos, sin);
    else
      for (int b = 0; b < kBlocks; ++b)
        turn_block<T, kHalfIn, kHalfOut, kStream>(
            in, out, bytes, b * int64_t{L::width} * int64_t{sizeof(T)}, c[b], s[b]);
  }
}

template <class T, class C, bool kHalfIn, bool kHalfOut, bool kStream>
inline void turn_walk(const Walk &w, const C *cos, const C *sin, int64_t pairs) {
  using L = Lane<T>;
  if constexpr (L::held >= 8)
    if (pairs == 8 * L::width) return turn_held<T, C, kHalfIn, kHalfOut, kStream, 8>(w, cos, sin);
  if ((w.count > 1 || L::whole) && L::held >= 4 && pairs == 4 * L::width)
    return turn_held<T, C, kHalfIn, kHalfOut, kStream, 4>(w, cos, sin);
  if ((w.count > 1 || L::whole) && L::held >= 2 && pairs == 2 * L::width)
    return turn_held<T, C, kHalfIn, kHalfOut, kStream, 2>(w, cos, sin);
  turn_any<T, C, kHalfIn, kHalfOut, kStream>(w, cos, sin, pairs);
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

// How far ahead to prefetch along a walk: rows about 8 KiB on.
inline int64_t ahead_of(const Job &job, int64_t step) {
  if (!job.prefetch) return 0;
  const int64_t size = std::max<int64_t>(1, step < 0 ? -step : step);
  return step * std::max<int64_t>(1, 8192 / size);
}

template <class T, class C, bool kHalfIn, bool kHalfOut, bool kStream>
inline void sweep_tile(const Job &job, const Operand &x, const char *in, char *out, int64_t tokens,
                       int64_t token_in, int64_t token_out, const Rows<C> &rows) {
  const int64_t size = sizeof(T), first_in = job.start * x.item_in, first_out = job.start * x.item_out;
  const bool packed = x.item_in == size && x.item_out == size;
  // in place, and written in another order than read: nothing may be written before it is read
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
        const Walk one{from, to, 1, 0, 0, 0};
        if (packed)
          turn_any<T, C, kHalfIn, kHalfOut, false>(one, rows.cos[t], rows.sin[t], job.pairs);
        else
          turn_one_by_one<T, C>(from, to, staged ? size : x.item_in, x.item_out, kHalfIn, kHalfOut,
                                rows.cos[t], rows.sin[t], 0, job.pairs);
      }
    return;
  }
  auto magnitude = [](int64_t v) { return v < 0 ? -v : v; };
  if (tokens == 1 || x.heads == 1 || magnitude(x.head_in) <= magnitude(token_in)) {
    const int64_t ahead = ahead_of(job, x.heads > 1 ? x.head_in : token_in);
    for (int64_t t = 0; t < tokens; ++t) {
      const Walk heads{in + t * token_in, out + t * token_out, x.heads, x.head_in, x.head_out, ahead};
      turn_walk<T, C, kHalfIn, kHalfOut, kStream>(heads, rows.cos[t], rows.sin[t], job.pairs);
    }
    return;
  }
  // heads lie further apart than tokens: follow memory, a few heads at a time to share each row
  constexpr int64_t kStreams = 2;
  const int64_t ahead = ahead_of(job, token_in);
  auto follow = [&](auto blocks) {
    for (int64_t h = 0; h < x.heads; h += kStreams)
      for (int64_t t = 0; t < tokens; ++t) {
        const Walk few{in + t * token_in + h * x.head_in,
                       out + t * token_out + h * x.head_out,
                       std::min(kStreams, x.heads - h),
                       x.head_in,
                       x.head_out,
                       ahead};
        if constexpr (blocks.value == 0)
          turn_any<T, C, kHalfIn, kHalfOut, kStream>(few, rows.cos[t], rows.sin[t], job.pairs);
        else
          turn_held<T, C, kHalfIn, kHalfOut, kStream, blocks.value>(few, rows.cos[t], rows.sin[t]);
      }
  };
  using L = Lane<T>;
  if constexpr (L::held >= 8)
    if (job.pairs == 8 * L::width) return follow(std::integral_constant<int, 8>{});
  if (L::held >= 4 && job.pairs == 4 * L::width) follow(std::integral_constant<int, 4>{});
  else if (L::held >= 2 && job.pairs == 2 * L::width) follow(std::integral_constant<int, 2>{});
  else follow(std::integral_constant<int, 0>{});
}

template <class T, class C>
inline void dispatch_tile(const Job &job, const Operand &x, const char *in, char *out,
                          int64_t tokens, int64_t token_in, int64_t token_out,
                          const Rows<C> &rows, bool stream) {
  auto go = [&](auto half_in, auto half_out, auto streaming) {
    sweep_tile<T, C, half_in.value, half_out.value, streaming.value>(job, x, in, out, tokens,
                                                                     token_in, token_out, rows);
  };
  using Yes = std::true_type;
  using No = std::false_type;
  if (stream) {
    if (job.half_in) job.half_out ? go(Yes{}, Yes{}, Yes{}) : go(Yes{}, No{}, Yes{});
    else job.half_out ? go(No{}, Yes{}, Yes{}) : go(No{}, No{}, Yes{});
  } else {
    if (job.half_in) job.half_out ? go(Yes{}, Yes{}, No{}) : go(Yes{}, No{}, No{});
    else job.half_out ? go(No{}, Yes{}, No{}) : go(No{}, No{}, No{});
  }
}

// Streaming stores want every row of the output aligned.
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
  const int64_t row = 2 * job.pairs;
  const int64_t fits = Rows<C>::kBytes / int64_t{sizeof(C)} / std::max<int64_t>(1, row);
  const int64_t most = std::min<int64_t>(kMaxTile, std::max<int64_t>(1, fits));
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
    const bool still = job.positions != nullptr && job.position_stride[inner] == 0;
    int64_t place[kMaxDims];
    std::copy(at, at + job.dims, place);
    for (int64_t t = 0; t < tokens; ++t, ++place[inner]) {
      if (still && t > 0) {
        rows.cos[t] = rows.cos[0];
        rows.sin[t] = rows.sin[0];
      } else {
        fill_row<C>(job, place, rows, t, rows.room + t * row);
      }
    }
    for (int i = 0; i < job.operands; ++i) {
      const Operand &x = job.x[i];
      if (x.heads == 0) continue; // which may have no memory to point into
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

// Cosines and sines of a tile of tokens, from positions or as given. Included by sweep.inl, so that each
// instruction set compiles its own.
//
// A frequency is a fixed-point number of turns per position. Its product with a position, in integers
// that overflow at a whole turn, is the exact fraction of a turn. The nearest quarter is taken off; cosine
// and sine of the rest, at most an eighth, are polynomials, which the quarter exchanges and negates.
//
// `Register` is what an instruction set computes `width` float32 cosines with, in vectors of the compiler's:
//   F, U, I, W                  floats, unsigned and signed integers of 32 bits, unsigned ones of 64
//   fuse(a, b, c)               a * b + c, rounded once where `kFused`
//   upper_halves(even, odd)     of the integers of 64 bits, in turn
//   choose(quarter, odd, even)  `odd` where bit 30 is set

namespace {

// The rows of a tile of tokens, each padded to whole registers. They fit the nearest cache.
template <class C> struct Rows {
  static constexpr int64_t kBytes = 32 * 1024;
  alignas(64) C storage[kBytes / sizeof(C)];
  int64_t pairs, step; // from cosines to sines; from token to token, 0 where all have one position
  C *cos(int64_t t) { return storage + t * step; }
  C *sin(int64_t t) { return cos(t) + pairs; }
};

template <class V> inline V load_vector(const void *p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Register::F fuse(Register::F a, Register::F b, Register::F c) { return Register::fuse(a, b, c); }
inline double fuse(double a, double b, double c) {
  if constexpr (kFused) return std::fma(a, b, c);
  else return a * b + c;
}

// ((c[n] y + ...) y + c[1]) y + c[0]
template <class V, class C, size_t kCount> inline V polynomial(V y, const C (&c)[kCount]) {
  V sum = V{} + c[kCount - 1];
#pragma GCC unroll 16
  for (size_t i = kCount - 1; i > 0; --i) sum = fuse(sum, y, V{} + c[i - 1]);
  return sum;
}

// Cosine and sine of x eighths of a turn.
template <class C, class V> inline void cos_sin_of_rest(V x, V &cos, V &sin) {
  const V y = x * x;
  cos = fuse(polynomial(y, Polynomials<C>::cos), y, V{} + C(1));
  sin = polynomial(y, Polynomials<C>::sin) * x;
}

// Of an angle in whole units of 2**-32 turns, and of 2**-64. The nearest quarter turn is in the upper two
// bits of the angle plus `eighth`, which is half a turn more for the inverse.
inline void cos_sin(Register::U angle, uint32_t eighth, Register::F &cos, Register::F &sin) {
  using F = Register::F;
  using U = Register::U;
  // the upper two bits shifted out: what is left is the signed rest
  const F rest = __builtin_convertvector((Register::I)(angle << 2), F) * 0x1p-31f;
  F even, odd;
  cos_sin_of_rest<float>(rest, even, odd);
  const U quarter = angle + eighth, next = angle + 0x60000000u;
  cos = (F)((U)Register::choose(quarter, odd, even) ^ (next & 0x80000000u));
  sin = (F)((U)Register::choose(quarter, even, odd) ^ (quarter & 0x80000000u));
}
inline void cos_sin(uint64_t angle, uint64_t eighth, double &cos, double &sin) {
  // in two halves, because not every set converts 64 bits at once
  const uint64_t rest = angle << 2;
  const double upper = int32_t(rest >> 32), lower = int32_t(uint32_t(rest) >> 1);
  double even, odd;
  cos_sin_of_rest<double>(upper * 0x1p-31 + lower * 0x1p-62, even, odd);
  const uint64_t quarter = angle + eighth, next = angle + (uint64_t{3} << 61);
  const bool exchanged = quarter >> 62 & 1;
  cos = (exchanged ? odd : even) * (next >> 63 ? -1 : 1);
  sin = (exchanged ? even : odd) * (quarter >> 63 ? -1 : 1);
}

// Whether a position does without the third limb, which would add less than half a unit of 2**-32.
inline bool is_short(int64_t position) { return position == int32_t(position); }

// Equally distant positions, all short, or one position: `first`, `first + by`, ...
struct Run {
  int64_t first, by, count;
};

// The longest run from token `t` on.
template <class PositionOf> inline Run run_from(int64_t t, int64_t tokens, PositionOf position_of) {
  Run run{position_of(t), 0, 1};
  if (t + 1 == tokens || !is_short(run.first)) return run;
  int64_t last = run.first, next = position_of(t + 1);
  run.by = int64_t(uint64_t(next) - uint64_t(last));
  while (is_short(next) && next == last + run.by) {
    last = next;
    if (t + ++run.count == tokens) break;
    next = position_of(t + run.count);
  }
  return run;
}

// The rows of a run from token `t` on, of the pairs that follow that axis.
template <bool kPlain> // one axis, and gain 1
inline void fill_run(const Job &job, const Run &run, int axis, Rows<float> &rows, int64_t t) {
  using F = Register::F;
  using U = Register::U;
  using I = Register::I;
  using W = Register::W;
  constexpr uint64_t kLow = 0xffffffffu, kHalf = uint64_t{1} << 31;
  const float gain = float(job.gain);
  const uint32_t eighth = job.inverse ? 0xa0000000u : 0x20000000u;
  const uint64_t first = uint64_t(run.first), upper = uint64_t(run.first >> 32), lower = first & kLow;
  for (int64_t k = 0; k < job.pairs; k += Register::width) {
    // two pairs share 64 bits: of the even ones, and of the odd ones
    const uint32_t *limbs = job.turns + k;
    const W f1 = load_vector<W>(limbs), f2 = load_vector<W>(limbs + rows.pairs);
    const W even = f1 << 32 | (f2 & kLow), odd = (f1 & ~kLow) | f2 >> 32;
    W even_angle = even * first + kHalf, odd_angle = odd * first + kHalf;
    if (!is_short(run.first)) {
      const W f3 = load_vector<W>(limbs + 2 * rows.pairs);
      even_angle += (f3 & kLow) * upper + ((f3 & kLow) * lower >> 32);
      odd_angle += (f3 >> 32) * upper + ((f3 >> 32) * lower >> 32);
    }
    W even_by{}, odd_by{};
    if (run.count > 1) {
      even_by = even * uint64_t(run.by);
      odd_by = odd * uint64_t(run.by);
    }
    float *cos = rows.cos(t) + k, *sin = rows.sin(t) + k;
    for (int64_t left = run.count, step = rows.step; left > 0; --left, cos += step, sin += step) {
      F c, s;
      cos_sin(Register::upper_halves((U)even_angle, (U)odd_angle), eighth, c, s);
      if constexpr (!kPlain) {
        const I follows = load_vector<I>(job.axis_of_pair + k) == axis;
        c = follows ? c * gain : load_vector<F>(cos);
        s = follows ? s * gain : load_vector<F>(sin);
      }
      std::memcpy(cos, &c, sizeof c);
      std::memcpy(sin, &s, sizeof s);
      even_angle += even_by;
      odd_angle += odd_by;
    }
  }
}

// The rows of so many tokens, whose positions are `token_step` bytes apart.
inline void fill_rows_at(const Job &job, const char *p, int64_t token_step, int64_t tokens, Rows<float> &rows) {
  for (int axis = 0; axis < job.axes; ++axis, p += job.axis_stride) {
    const auto position_of = [&](int64_t t) { return position_at(p + t * token_step, job.position_bytes); };
    for (int64_t t = 0; t < tokens;) {
      const Run run = run_from(t, tokens, position_of);
      if (job.axes == 1 && job.gain == 1) fill_run<true>(job, run, axis, rows, t);
      else fill_run<false>(job, run, axis, rows, t);
      t += run.count;
    }
  }
}
inline void fill_rows_at(const Job &job, const char *p, int64_t token_step, int64_t tokens, Rows<double> &rows) {
  __extension__ using Wide = __int128;
  const uint64_t eighth = uint64_t{job.inverse ? 5u : 1u} << 61;
  for (int64_t t = 0; t < tokens; ++t, p += token_step) {
    double *cos = rows.cos(t), *sin = rows.sin(t);
    uint64_t angles[kMaxPairs];
    for (int64_t k = 0; k < job.pairs; ++k) {
      const int64_t position = position_at(p + job.axis_of_pair[k] * job.axis_stride, job.position_bytes);
      const uint32_t *limb = job.turns + k;
      const uint64_t upper = uint64_t{limb[0]} << 32 | limb[rows.pairs];
      const uint64_t lower = uint64_t{limb[2 * rows.pairs]} << 32 | limb[3 * rows.pairs];
      angles[k] = uint64_t(position) * upper + uint64_t(Wide{position} * Wide{lower} >> 64);
    }
    for (int64_t k = 0; k < job.pairs; ++k) {
      cos_sin(angles[k], eighth, cos[k], sin[k]);
      cos[k] *= job.gain;
      sin[k] *= job.gain;
    }
  }
}

// The row that is given, at any addresses.
template <class C>
inline void copy_row(const Job &job, const char *given_cos, const char *given_sin, C *cos, C *sin) {
  const C gain = C(job.gain), sin_gain = job.inverse ? -gain : gain;
  const C nan = std::numeric_limits<C>::quiet_NaN(); // with an empty lower half: `round_to_bf16`
  for (int64_t k = 0; k < job.pairs; ++k) {
    C c, s;
    std::memcpy(&c, given_cos + k * int64_t{sizeof(C)}, sizeof(C));
    std::memcpy(&s, given_sin + k * int64_t{sizeof(C)}, sizeof(C));
    cos[k] = c == c ? c * gain : nan;
    sin[k] = s == s ? s * sin_gain : nan;
  }
}

// The rows of so many tokens from `at` on, along the last dimension.
template <class C> inline void fill_rows(const Job &job, const int64_t *at, int64_t tokens, Rows<C> &rows) {
  const int inner = job.dims - 1;
  const bool given = job.positions == nullptr;
  const bool same = !given && job.position_stride[inner] == 0;
  const char *position = job.positions, *cos = job.cos, *sin = job.sin;
  for (int d = 0; d < job.dims; ++d) {
    position += at[d] * job.position_stride[d];
    cos += at[d] * job.cos_stride[d];
    sin += at[d] * job.sin_stride[d];
  }
  rows.pairs = padded(job.pairs);
  rows.step = same ? 0 : 2 * rows.pairs;
  if (!given) return fill_rows_at(job, position, job.position_stride[inner], same ? 1 : tokens, rows);
  for (int64_t t = 0; t < tokens; ++t)
    copy_row(job, cos + t * job.cos_stride[inner], sin + t * job.sin_stride[inner], rows.cos(t), rows.sin(t));
}

} // namespace

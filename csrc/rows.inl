// Cosines and sines of a tile of tokens, from positions or as given. Included by sweep.inl, so that each
// instruction set compiles its own.
//
// A frequency is a fixed-point number of turns per position. Its product with a position, in integers
// that overflow at a whole turn, is the exact fraction of a turn. The nearest quarter is taken off; cosine
// and sine of the rest, at most an eighth, are polynomials, which the quarter exchanges and negates.
//
// With `Register` an instruction set computes `width` float32 cosines, in the compiler's vectors:
//   F, U, I, W                  floats, unsigned and signed integers of 32 bits, unsigned ones of 64
//   fuse(a, b, c)               a * b + c, rounded once where `kFused`
//   upper_halves(even, odd)     of integers of 64 bits, in turn
//   choose(quarter, odd, even)  `odd` where bit 30 is set

namespace {

// The rows of a tile of tokens, each padded to whole registers. They fit the nearest cache.
template <class C> struct Rows {
  static constexpr int64_t kBytes = 32 * 1024;
  alignas(64) C storage[kBytes / sizeof(C)];
  int64_t pairs, step; // from cosines to sines; from token to token, 0 where all have one position
  // the given cosines and sines of the next tile; null if they need not be read ahead
  const char *next_cos = nullptr, *next_sin = nullptr;
  int64_t next_cos_step, next_sin_step;
  C *cos(int64_t t) { return storage + t * step; }
  C *sin(int64_t t) { return cos(t) + pairs; }
  // Read ahead while the heads of a token are rotated: the copy of a whole tile would wait for memory.
  void prefetch_next(int64_t t) const {
    if (next_cos == nullptr) return;
    for (int64_t at = 0; at < pairs * int64_t{sizeof(C)}; at += 64) {
      __builtin_prefetch(next_cos + t * next_cos_step + at, 0, 2);
      __builtin_prefetch(next_sin + t * next_sin_step + at, 0, 2);
    }
  }
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

// c[0] + c[1] y + ..., from the last on
template <class V, class C, size_t kCount> inline V polynomial(V y, const C (&c)[kCount]) {
  V sum = V{} + c[kCount - 1];
#pragma GCC unroll 16
  for (size_t i = kCount - 1; i > 0; --i) sum = fuse(sum, y, V{} + c[i - 1]);
  return sum;
}

// Cosine and sine of x eighths of a turn, from -1 to 1.
template <class C, class V> inline void cos_sin_of_rest(V x, V &cos, V &sin) {
  const V y = x * x;
  cos = fuse(polynomial(y, Polynomials<C>::cos), y, V{} + C(1));
  sin = polynomial(y, Polynomials<C>::sin) * x;
}

// For an angle in units of 2**-32 turns, or of 2**-64: the upper two bits of the angle plus `eighth` are its
// nearest quarter (`eighth` has half a turn more for the inverse); the bits below are the signed rest.
inline void cos_sin(Register::U angle, uint32_t eighth, Register::F &cos, Register::F &sin) {
  using F = Register::F;
  using U = Register::U;
  F c, s;
  cos_sin_of_rest<float>(__builtin_convertvector((Register::I)(angle << 2), F) * 0x1p-31f, c, s);
  const U quarter = angle + eighth, next = angle + 0x60000000u, sign = U{} + 0x80000000u;
  cos = (F)((U)Register::choose(quarter, s, c) ^ (next & sign));
  sin = (F)((U)Register::choose(quarter, c, s) ^ (quarter & sign));
}
inline void cos_sin(uint64_t angle, uint64_t eighth, double &cos, double &sin) {
  // in two halves, because not every set converts 64 bits at once
  const double upper = int32_t(angle << 2 >> 32), lower = int32_t(uint32_t(angle << 2) >> 1);
  double c, s;
  cos_sin_of_rest<double>(upper * 0x1p-31 + lower * 0x1p-62, c, s);
  const uint64_t quarter = angle + eighth, next = angle + (uint64_t{3} << 61);
  const bool odd = quarter >> 62 & 1;
  cos = (odd ? s : c) * (next >> 63 ? -1 : 1);
  sin = (odd ? c : s) * (quarter >> 63 ? -1 : 1);
}

// For a short position the third limb would add less than half a unit of 2**-32 turns.
inline bool is_short(int64_t position) { return position == int32_t(position); }

// Positions `first`, `first + by`, ..., all short; or one position.
struct Run {
  int64_t first, by, count;
};

template <class PositionOf> inline Run longest_run(int64_t t, int64_t tokens, PositionOf position_of) {
  Run run{position_of(t), 0, 1};
  for (int64_t last = run.first; is_short(last) && t + run.count < tokens; ++run.count) {
    const int64_t next = position_of(t + run.count);
    if (!is_short(next) || (run.count > 1 && next - last != run.by)) break;
    run.by = next - last;
    last = next;
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
  const uint64_t first = uint64_t(run.first), by = uint64_t(run.by), upper = uint64_t(run.first >> 32);
  const auto multiply = [&](W word, W third) { // with its lower half, the third limb adds less than a unit
    return word * first + kHalf + (is_short(run.first) ? W{} : third * upper);
  };
  for (int64_t k = 0; k < job.pairs; k += Register::width) {
    const uint32_t *limbs = job.turns + k;
    const W f1 = load_vector<W>(limbs), f2 = load_vector<W>(limbs + rows.pairs);
    const W f3 = load_vector<W>(limbs + 2 * rows.pairs);
    // two pairs share 64 bits: the even pairs, and the odd pairs
    const W even = f1 << 32 | (f2 & kLow), odd = (f1 & ~kLow) | f2 >> 32;
    W even_angle = multiply(even, f3 & kLow), odd_angle = multiply(odd, f3 >> 32);
    const W even_by = run.count > 1 ? even * by : even, odd_by = run.count > 1 ? odd * by : odd;
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

// The rows of so many tokens, whose positions are `step` bytes apart.
inline void fill_from_positions(const Job &job, const char *p, int64_t step, int64_t tokens, Rows<float> &rows) {
  for (int axis = 0; axis < job.axes; ++axis, p += job.axis_stride)
    for (int64_t t = 0; t < tokens;) {
      const Run run = longest_run(
          t, tokens, [&](int64_t i) { return position_at(p + i * step, job.position_bytes); });
      if (job.axes == 1 && job.gain == 1) fill_run<true>(job, run, axis, rows, t);
      else fill_run<false>(job, run, axis, rows, t);
      t += run.count;
    }
}
inline void fill_from_positions(const Job &job, const char *p, int64_t step, int64_t tokens, Rows<double> &rows) {
  __extension__ using Wide = __int128;
  const uint64_t eighth = uint64_t{job.inverse ? 5u : 1u} << 61;
  uint64_t angles[kMaxPairs];
  for (int64_t t = 0; t < tokens; ++t, p += step) {
    double *cos = rows.cos(t), *sin = rows.sin(t);
    for (int64_t k = 0; k < job.pairs; ++k) {
      const int64_t position = position_at(p + job.axis_of_pair[k] * job.axis_stride, job.position_bytes);
      const auto word = [&](int i) {
        const uint32_t *limb = job.turns + i * rows.pairs + k;
        return uint64_t{limb[0]} << 32 | limb[rows.pairs];
      };
      angles[k] = uint64_t(position) * word(0) + uint64_t(Wide{position} * Wide{word(2)} >> 64);
    }
    for (int64_t k = 0; k < job.pairs; ++k) {
      cos_sin(angles[k], eighth, cos[k], sin[k]);
      cos[k] *= job.gain;
      sin[k] *= job.gain;
    }
  }
}

// A given row, at any addresses.
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
template <class C>
inline void fill_rows(const Job &job, const int64_t *at, int64_t tokens, Rows<C> &rows) {
  const int inner = job.dims - 1;
  const char *position = job.positions, *cos = job.cos, *sin = job.sin;
  for (int d = 0; d < job.dims; ++d) {
    position += at[d] * job.position_stride[d];
    cos += at[d] * job.cos_stride[d];
    sin += at[d] * job.sin_stride[d];
  }
  const int64_t step = job.position_stride[inner];
  const bool same = position != nullptr && step == 0;
  rows.pairs = padded(job.pairs);
  rows.step = same ? 0 : 2 * rows.pairs;
  if (position != nullptr)
    return fill_from_positions(job, position, step, same ? 1 : tokens, rows);
  const int64_t cos_step = job.cos_stride[inner], sin_step = job.sin_stride[inner];
  for (int64_t t = 0; t < tokens; ++t)
    copy_row(job, cos + t * cos_step, sin + t * sin_step, rows.cos(t), rows.sin(t));
  if (!job.stream) return;
  rows.next_cos = cos + tokens * cos_step;
  rows.next_sin = sin + tokens * sin_step;
  rows.next_cos_step = cos_step;
  rows.next_sin_step = sin_step;
}

} // namespace

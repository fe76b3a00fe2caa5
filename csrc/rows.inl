// Cosines and sines of a tile of tokens, from positions or as given. Included by sweep.inl, so that each
// instruction set compiles its own.
//
// A frequency is a fixed-point number of turns per position. Its product with a position, in integers
// that overflow at a whole turn, is the exact fraction of a turn. The nearest quarter is taken off; cosine
// and sine of the rest, at most an eighth, are polynomials, which the quarter exchanges and negates.
//
// `Register` is what an instruction set computes `width` float32 cosines with, in vectors of the compiler's:
//   F, U, I                  floats, unsigned and signed integers of 32 bits
//   multiply_high(a, b)      upper halves of the products of a and the integers at b; may read one more
//   fuse(a, b, c)            a * b + c, rounded once where `kFused`

namespace {

// The rows of a tile of tokens, each padded to whole registers. They fit the nearest cache.
template <class C> struct Rows {
  static constexpr int64_t kBytes = 32 * 1024;
  alignas(64) C storage[kBytes / sizeof(C)];
  int64_t pairs, step; // from cosines to sines; from token to token, 0 where all have one position
  C *cos(int64_t t) { return storage + t * step; }
  C *sin(int64_t t) { return cos(t) + pairs; }
};

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

// Of whole units of 2**-32 turns, and of 2**-64.
inline void cos_sin(Register::U turns, Register::F &cos, Register::F &sin) {
  using F = Register::F;
  using U = Register::U;
  using I = Register::I;
  // the upper two bits shifted out: what is left is the signed rest
  const F rest = __builtin_convertvector((I)(turns << 2), F) * 0x1p-31f;
  F even, odd;
  cos_sin_of_rest<float>(rest, even, odd);
  const U quarter = turns + 0x20000000u, next = turns + 0x60000000u; // the nearest, in the upper two bits
  const I exchanged = (I)(quarter << 1) < 0;
  cos = (F)((U)(exchanged ? odd : even) ^ (next & 0x80000000u));
  sin = (F)((U)(exchanged ? even : odd) ^ (quarter & 0x80000000u));
}
inline void cos_sin(uint64_t turns, double &cos, double &sin) {
  double even, odd;
  cos_sin_of_rest<double>(double(int64_t(turns << 2)) * 0x1p-63, even, odd);
  const uint64_t quarter = (turns + (uint64_t{1} << 61)) >> 62;
  cos = quarter & 1 ? odd : even;
  sin = quarter & 1 ? even : odd;
  cos = (quarter + 1) & 2 ? -cos : cos;
  sin = quarter & 2 ? -sin : sin;
}

// Cosines and sines of the pairs at a position of that size.
inline void fill_row(const Job &job, uint64_t size, float gain, float sin_gain, float *cos, float *sin) {
  using U = Register::U;
  constexpr int width = Register::width;
  const int64_t apart = padded(job.pairs);
  const bool scaled = gain != 1.0f || sin_gain != 1.0f;
  for (int64_t k = 0; k < job.pairs; k += width) {
    const uint32_t *f = job.turns + k;
    U turns;
    if (size >> 31 == 0) { // what the third limb adds is less than a unit
      std::memcpy(&turns, f, sizeof turns);
      turns = turns * uint32_t(size) + Register::multiply_high(uint32_t(size), f + apart);
    } else {
      alignas(64) uint32_t upper[width];
      for (int i = 0; i < width; ++i) {
        const uint64_t word = uint64_t{f[i]} << 32 | f[apart + i], third = f[2 * apart + i];
        const uint64_t carried = (size & 0xffffffffu) * third >> 32;
        upper[i] = uint32_t((size * word + (size >> 32) * third + carried) >> 32);
      }
      std::memcpy(&turns, upper, sizeof turns);
    }
    Register::F c, s;
    cos_sin(turns, c, s);
    if (scaled) {
      c *= gain;
      s *= sin_gain;
    }
    std::memcpy(cos + k, &c, sizeof c);
    std::memcpy(sin + k, &s, sizeof s);
  }
}
inline void fill_row(const Job &job, uint64_t size, double gain, double sin_gain, double *cos, double *sin) {
  __extension__ using Wide = unsigned __int128;
  const int64_t apart = padded(job.pairs);
  for (int64_t k = 0; k < job.pairs; ++k) {
    const uint32_t *f = job.turns + k;
    const uint64_t upper = uint64_t{f[0]} << 32 | f[apart];
    const uint64_t lower = uint64_t{f[2 * apart]} << 32 | f[3 * apart];
    cos_sin(size * upper + uint64_t(Wide{size} * lower >> 64), cos[k], sin[k]);
    cos[k] *= gain;
    sin[k] *= sin_gain;
  }
}

// The row of a token whose positions, one for each axis, are at `p`.
template <class C> inline void fill_row_at(const Job &job, const char *p, C *cos, C *sin) {
  for (int axis = 0; axis < job.axes; ++axis, p += job.axis_stride) {
    const int64_t position = position_at(p, job.position_bytes);
    // R(-p) is the inverse of R(p). The size of -2**63 is no int64
    const uint64_t size = position < 0 ? -uint64_t(position) : uint64_t(position);
    const C gain = C(job.gain), sin_gain = (position < 0) != job.inverse ? -gain : gain;
    if (axis == 0) {
      fill_row(job, size, gain, sin_gain, cos, sin);
      continue;
    }
    alignas(64) C other_cos[kMaxPairs], other_sin[kMaxPairs];
    fill_row(job, size, gain, sin_gain, other_cos, other_sin);
    for (int64_t k = 0; k < job.pairs; ++k) {
      const bool follows = job.axis_of_pair[k] == axis;
      cos[k] = follows ? other_cos[k] : cos[k];
      sin[k] = follows ? other_sin[k] : sin[k];
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
  for (int64_t t = 0; t < (same ? 1 : tokens); ++t) {
    if (given) copy_row(job, cos, sin, rows.cos(t), rows.sin(t));
    else fill_row_at(job, position, rows.cos(t), rows.sin(t));
    position += job.position_stride[inner];
    cos += job.cos_stride[inner];
    sin += job.sin_stride[inner];
  }
}

} // namespace

// Cosines and sines of a tile of tokens, from the digit tables or as given: a row is the cosines of a
// token, then its sines. Included by sweep.inl, so that each instruction set compiles its own.

namespace {

// The rows of a tile of tokens: in `storage`, which fits the nearest cache, or in the tables.
template <class C> struct Rows {
  static constexpr int64_t kBytes = 32 * 1024;
  alignas(64) C storage[kBytes / sizeof(C)];
  alignas(64) C scratch[2 * kMaxPairs];
  const C *cos[kMaxTile], *sin[kMaxTile];
};

template <class C>
inline void multiply(const C *__restrict a, const C *__restrict b, C *__restrict out, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    const C re = a[k] * b[k] - a[n + k] * b[n + k], im = a[k] * b[n + k] + a[n + k] * b[k];
    out[k] = re;
    out[n + k] = im;
  }
}

// The row of one position on one axis: the product of its digits' rows, in `out` or `scratch`. Where
// only one digit is not zero it is the row of the table itself, and nothing is copied.
template <class C>
inline const C *digit_row(const Job &job, int64_t position, C *out, C *scratch) {
  const C *tables = static_cast<const C *>(job.tables);
  const int64_t n = job.pairs, row = 2 * n;
  uint64_t size = position < 0 ? uint64_t(-position) : uint64_t(position);
  const C *row_at = tables + int64_t(size & (kRows - 1)) * row;
  for (int digit = 1; digit < kDigits; ++digit) {
    const int64_t v = int64_t((size >> (kDigitBits * digit)) & (kRows - 1));
    if (v == 0) continue; // the identity: most positions have two digits
    C *to = row_at == out ? scratch : out;
    multiply<C>(row_at, tables + (digit * kRows + v) * row, to, n);
    row_at = to;
  }
  const bool flip = (position < 0) != job.inverse;
  if (!flip && job.gain == 1.0) return row_at;
  const C gain = C(job.gain), signed_gain = flip ? -gain : gain;
  for (int64_t k = 0; k < n; ++k) out[k] = row_at[k] * gain;
  for (int64_t k = n; k < row; ++k) out[k] = row_at[k] * signed_gain;
  return out;
}

template <class C>
inline void fill_row(const Job &job, const int64_t *at, Rows<C> &rows, int64_t t, C *out) {
  const int64_t n = job.pairs;
  if (job.positions == nullptr) {
    const char *cos = job.cos, *sin = job.sin;
    for (int d = 0; d < job.dims; ++d) {
      cos += at[d] * job.cos_stride[d];
      sin += at[d] * job.sin_stride[d];
    }
    const C gain = C(job.gain), signed_gain = job.inverse ? -gain : gain;
    const C nan = std::numeric_limits<C>::quiet_NaN(); // with an empty lower half: `round_to_bf16`
    for (int64_t k = 0; k < n; ++k) {
      C c, s; // given cosines and sines may be at any address
      std::memcpy(&c, cos + k * int64_t{sizeof(C)}, sizeof(C));
      std::memcpy(&s, sin + k * int64_t{sizeof(C)}, sizeof(C));
      out[k] = c == c ? c * gain : nan;
      out[n + k] = s == s ? s * signed_gain : nan;
    }
    rows.cos[t] = out;
    rows.sin[t] = out + n;
    return;
  }
  const char *p = job.positions;
  for (int d = 0; d < job.dims; ++d) p += at[d] * job.position_stride[d];
  const C *row_at = digit_row<C>(job, position_at(p, job.position_bytes), out, rows.scratch);
  if (job.axes > 1) {
    if (row_at != out) std::memcpy(out, row_at, 2 * n * sizeof(C));
    C other[2 * kMaxPairs], other_scratch[2 * kMaxPairs];
    for (int axis = 1; axis < job.axes; ++axis) {
      const int64_t position = position_at(p + axis * job.axis_stride, job.position_bytes);
      const C *of_axis = digit_row<C>(job, position, other, other_scratch);
      for (int64_t k = 0; k < n; ++k) {
        const bool follows = job.axis_of_pair[k] == axis;
        out[k] = follows ? of_axis[k] : out[k];
        out[n + k] = follows ? of_axis[n + k] : out[n + k];
      }
    }
    row_at = out;
  } else if (row_at == rows.scratch) {
    std::memcpy(out, row_at, 2 * n * sizeof(C));
    row_at = out;
  }
  rows.cos[t] = row_at;
  rows.sin[t] = row_at + n;
}

} // namespace

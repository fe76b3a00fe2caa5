// Checks of DLPack tensors before their memory is read: strides, broadcasting, overlap, range.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "dlpack.h"
#include "rotate.h"

namespace phasor {

constexpr int kMaxRank = 32;

inline char *start_of(const DLTensor &t) { return static_cast<char *>(t.data) + t.byte_offset; }
inline int64_t size_of(const DLTensor &t) { return t.dtype.bits / 8; }
inline int64_t stride_of(const DLTensor &t, int d) { return t.strides[d] * size_of(t); }

inline bool dtype_of(const DLTensor &t, Dtype *out) {
  const int code = t.dtype.code, bits = t.dtype.bits;
  if (code == kDLFloat && bits == 32) *out = Dtype::f32;
  else if (code == kDLFloat && bits == 64) *out = Dtype::f64;
  else if (code == kDLFloat && bits == 16) *out = Dtype::f16;
  else if (code == kDLBfloat && bits == 16) *out = Dtype::bf16;
  else return false;
  return true;
}

// Whether the token dimensions of `t`, all but its last `inner` ones, broadcast to those of `x`.
inline bool fits(const DLTensor &t, int inner, const DLTensor &x) {
  const int token_dims = t.ndim - inner, lead = x.ndim - 2;
  if (token_dims < 0 || token_dims > lead) return false;
  for (int d = 0; d < token_dims; ++d)
    if (t.shape[d] != 1 && t.shape[d] != x.shape[lead - token_dims + d]) return false;
  return true;
}

inline bool same_tokens(const DLTensor &a, const DLTensor &b) {
  return a.ndim == b.ndim && std::equal(a.shape, a.shape + a.ndim - 2, b.shape);
}

// Whether a tensor with elements has memory: torch has tensors of zeros without memory.
inline bool has_memory(const DLTensor &t) {
  return t.data != nullptr || std::find(t.shape, t.shape + t.ndim, 0) != t.shape + t.ndim;
}

inline bool is_integer(const DLTensor &t) {
  return t.dtype.code == kDLInt && (t.dtype.bits == 32 || t.dtype.bits == 64);
}

// Strides of `t` over the token dimensions `lead`, broadcast from the right; its `inner` last
// dimensions come after them.
inline void broadcast(const DLTensor &t, int inner, int lead, int64_t *strides) {
  const int token_dims = t.ndim - inner;
  for (int d = 0; d < lead; ++d) {
    const int dim = d - (lead - token_dims);
    strides[d] = dim < 0 || t.shape[dim] == 1 ? 0 : stride_of(t, dim);
  }
}

// Whether two elements of a written tensor could share memory. Conservative: false for dense slices,
// true for some irregular strides that share nothing.
inline bool overlaps_itself(const DLTensor &t) {
  struct Dimension {
    int64_t step, length;
  } dims[kMaxRank];
  int n = 0;
  for (int d = 0; d < t.ndim; ++d) {
    if (t.shape[d] == 0) return false;
    if (t.shape[d] > 1) dims[n++] = {std::abs(t.strides[d]), t.shape[d]};
  }
  std::sort(dims, dims + n, [](const Dimension &a, const Dimension &b) { return a.step < b.step; });
  int64_t reach = 1;
  for (int i = 0; i < n; ++i) {
    if (dims[i].step < reach) return true;
    reach += dims[i].step * (dims[i].length - 1);
  }
  return false;
}

struct Span {
  int64_t low, high;
};

inline Span span_of(const DLTensor &t) {
  int64_t low = 0, high = 0;
  for (int d = 0; d < t.ndim; ++d) {
    if (t.shape[d] == 0) return {0, 0};
    const int64_t far = stride_of(t, d) * (t.shape[d] - 1);
    (far < 0 ? low : high) += far;
  }
  const int64_t at = reinterpret_cast<int64_t>(start_of(t));
  return {at + low, at + high + size_of(t)};
}

// Whether the extents of two tensors meet.
inline bool touch(const DLTensor &a, const DLTensor &b) {
  const Span sa = span_of(a), sb = span_of(b);
  return sa.low != sa.high && sb.low != sb.high && sa.low < sb.high && sb.low < sa.high;
}

// Whether two written tensors could share an element. Slices of one projection lie side by side
// in every token, at the same token strides.
inline bool overlap(const DLTensor &a, const DLTensor &b) {
  if (!touch(a, b)) return false;
  if (a.ndim != b.ndim) return true;
  int64_t token = 0;
  for (int d = 0; d < a.ndim - 2; ++d) {
    if (a.shape[d] == 1) continue;
    const int64_t step = stride_of(a, d);
    if (step != stride_of(b, d) || step <= 0) return true;
    token = token == 0 ? step : std::min(token, step);
  }
  if (token == 0) return true;
  for (int d = 0; d < a.ndim - 2; ++d)
    if (a.shape[d] > 1 && stride_of(a, d) % token) return true;
  auto inside = [](const DLTensor &t) {
    int64_t reach = size_of(t);
    for (int d = t.ndim - 2; d < t.ndim; ++d) {
      if (stride_of(t, d) < 0) return int64_t{-1};
      reach += stride_of(t, d) * (t.shape[d] - 1);
    }
    return reach;
  };
  const int64_t ra = inside(a), rb = inside(b);
  if (ra < 0 || rb < 0) return true;
  int64_t apart = (reinterpret_cast<int64_t>(start_of(b)) -
                   reinterpret_cast<int64_t>(start_of(a))) % token;
  if (apart < 0) apart += token;
  return apart < ra || apart + rb > token;
}

// Merge neighbouring token dimensions where each operand's outer stride is the inner stride times the
// inner length, and drop dimensions of length 1.
inline int merge(int dims, int64_t *shape, int64_t *const *strides, int operands) {
  int merged = 0;
  for (int d = 0; d < dims; ++d) {
    if (shape[d] == 1) continue;
    bool even = merged > 0;
    for (int i = 0; i < operands && even; ++i)
      even = strides[i][merged - 1] == strides[i][d] * shape[d];
    if (even) shape[merged - 1] *= shape[d];
    else shape[merged++] = shape[d];
    for (int i = 0; i < operands; ++i) strides[i][merged - 1] = strides[i][d];
  }
  if (merged > 0) return merged;
  shape[0] = 1;
  for (int i = 0; i < operands; ++i) strides[i][0] = 0;
  return 1;
}

} // namespace phasor

// Random numbers of every dtype, and strided tensors in heap blocks that end with their last byte.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "rotate.h"

using namespace phasor;

namespace {

uint64_t state = 1;
uint64_t draw() { // xorshift
  state ^= state << 13;
  state ^= state >> 7;
  return state ^= state << 17;
}
int64_t below(int64_t n) { return int64_t(draw() >> 1) % n; }
bool coin() { return draw() >> 63; }

int64_t size_of(Dtype t) { return t == Dtype::f64 ? 8 : t == Dtype::f32 ? 4 : 2; }

// How the bits of a dtype read: exponent and fraction widths, and the exponent's bias.
struct Format {
  int exponent, fraction, bias;
};
Format format_of(Dtype t) {
  if (t == Dtype::f64) return {11, 52, 1023};
  if (t == Dtype::f32) return {8, 23, 127};
  if (t == Dtype::bf16) return {8, 7, 127};
  return {5, 10, 15};
}

double decode(Dtype t, const char *p) {
  const Format f = format_of(t);
  uint64_t bits = 0;
  std::memcpy(&bits, p, size_t(size_of(t))); // both processors are little-endian
  const int exponent = int(bits >> f.fraction) & ((1 << f.exponent) - 1);
  const double fraction = std::ldexp(double(bits & ((uint64_t{1} << f.fraction) - 1)), -f.fraction);
  const double sign = bits >> (f.fraction + f.exponent) ? -1 : 1;
  if (exponent == (1 << f.exponent) - 1) return NAN;
  return sign * (exponent ? std::ldexp(1 + fraction, exponent - f.bias)
                          : std::ldexp(fraction, 1 - f.bias));
}

// A number between 1/16 and 8 of either sign; now and then zero, subnormal or barely normal.
void encode_any(Dtype t, char *p) {
  const Format f = format_of(t);
  uint64_t bits = draw() & ((uint64_t{1} << f.fraction) - 1);
  if (below(64) == 0) bits = 0;
  bits |= uint64_t(below(16) == 0 ? below(2) : f.bias - 4 + below(7)) << f.fraction;
  bits |= uint64_t(coin()) << (f.fraction + f.exponent);
  std::memcpy(p, &bits, size_t(size_of(t)));
}

constexpr std::align_val_t kLine{64};
struct Free {
  void operator()(char *p) const { ::operator delete(p, kLine); }
};

// A heap block that holds strided elements, and knows which of its bytes are theirs.
struct Block {
  std::unique_ptr<char, Free> memory;
  std::vector<char> before;
  std::vector<bool> own;
  int64_t lead; // bytes in front of the first element
  char *start() const { return memory.get() + lead; }
  char at(size_t byte) const { return memory.get()[byte]; }
};

// Shape and strides in bytes of [tokens..., heads, head_dim].
struct Shape {
  std::vector<int64_t> n, step;
};

template <class F> void each(const Shape &s, F visit) {
  std::vector<int64_t> at(s.n.size(), 0);
  for (int64_t n : s.n)
    if (n == 0) return;
  for (;;) {
    int64_t offset = 0;
    for (size_t d = 0; d < at.size(); ++d) offset += at[d] * s.step[d];
    visit(at, offset);
    size_t d = at.size();
    while (d > 0 && ++at[d - 1] == s.n[d - 1]) at[--d] = 0;
    if (d == 0) return;
  }
}

Block block_of(const Shape &s, int64_t size, int64_t lead, char fill) {
  int64_t length = size;
  for (size_t d = 0; d < s.n.size(); ++d) length += s.n[d] ? s.step[d] * (s.n[d] - 1) : 0;
  Block b;
  b.lead = lead;
  const size_t bytes = size_t(lead + length);
  b.memory.reset(static_cast<char *>(::operator new(bytes, kLine)));
  std::memset(b.memory.get(), fill, bytes);
  b.own.assign(bytes, false);
  each(s, [&](const auto &, int64_t at) {
    for (int64_t i = 0; i < size; ++i) b.own[size_t(lead + at + i)] = true;
  });
  return b;
}

// Strides for a shape, its dimensions in any order in memory, with gaps of a few units here and there.
Shape laid_out(const std::vector<int64_t> &n, int64_t size, int64_t unit, bool packed) {
  Shape s{n, std::vector<int64_t>(n.size())};
  const size_t last = n.size() - 1;
  std::vector<size_t> order;
  for (size_t d = 0; d < last; ++d) order.push_back(d);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[size_t(below(int64_t(i)))]);
  s.step[last] = packed ? size : size * (2 + below(2));
  int64_t reach = s.step[last] * n[last];
  for (size_t d : order) {
    if (below(3) == 0) reach += unit * below(7);
    s.step[d] = reach;
    reach *= std::max<int64_t>(n[d], 1);
  }
  return s;
}

[[noreturn]] void fail(const std::string &what, const std::string &where) {
  std::printf("FAIL: %s: %s\n", what.c_str(), where.c_str());
  std::exit(1);
}

} // namespace

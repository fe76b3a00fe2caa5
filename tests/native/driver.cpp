// Runs the sweeps of csrc/ without Python, for tools that watch memory and for other processors.
//
// Every tensor lies in a heap block that ends with its last byte, so that a tool sees what is read
// or written beyond; what lies between its elements must come back as it was. Results are compared
// with plain loops in double precision over angles from products of 128 bits.
//
//   driver TIMES    TIMES layouts of every kind, on each instruction set of the processor
#include "blocks.h"

namespace {

constexpr double kPi = 3.14159265358979323846;
const char *const kDtypes[] = {"float32", "float64", "bfloat16", "float16"};

__extension__ using Wide = unsigned __int128;

// Turns per position, in units of 2**-128, and the axis of every pair.
struct Angles {
  std::vector<Wide> turns;
  double of(int64_t position, int64_t pair) const {
    const Wide product = Wide(position) * turns[size_t(pair)]; // without whole turns
    return double(int64_t(product >> 64)) * 0x1p-64 * 2 * kPi;
  }
};

// The same as the sweeps read them.
struct Limbs {
  std::unique_ptr<char, Free> memory;
  explicit Limbs(const Angles &angles) {
    const int64_t pairs = int64_t(angles.turns.size()), apart = padded(pairs);
    memory.reset(static_cast<char *>(::operator new(size_t(4 * kLimbs * apart), kLine)));
    std::memset(memory.get(), 0, size_t(4 * kLimbs * apart));
    for (int limb = 0; limb < kLimbs; ++limb)
      for (int64_t k = 0; k < pairs; ++k) {
        const uint32_t value = uint32_t(angles.turns[size_t(k)] >> (96 - 32 * limb));
        std::memcpy(memory.get() + 4 * (limb * apart + k), &value, 4);
      }
  }
  const uint32_t *start() const { return reinterpret_cast<const uint32_t *>(memory.get()); }
};

// Any position, often where limbs end.
int64_t a_position() {
  const int64_t least = std::numeric_limits<int64_t>::min();
  const int64_t edges[] = {0, 1, -1, least, least + 1, -(least + 1), int64_t{1} << 31, -(int64_t{1} << 31),
                           (int64_t{1} << 31) - 1, int64_t{1} << 32, -(int64_t{5} << 32)};
  if (below(4) == 0) return edges[below(sizeof edges / sizeof *edges)];
  return int64_t(draw()) >> below(63);
}

// Positions of so many tokens: any, or equally distant for a while, as those of sequences are.
std::vector<int64_t> positions_of(int64_t tokens) {
  std::vector<int64_t> places;
  while (int64_t(places.size()) < tokens) {
    const int64_t by = coin() ? 1 : below(2000) - 1000;
    uint64_t p = uint64_t(a_position());
    for (int64_t left = coin() ? 1 : below(90); left >= 0 && int64_t(places.size()) < tokens; --left, p += uint64_t(by))
      places.push_back(int64_t(p));
  }
  return places;
}

struct Path {
  const char *name;
  Run run;
  bool here;
};
const Path kPaths[] = {
#if defined(__x86_64__)
    {"avx512bf16", run_avx512bf16,
     __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")},
    {"avx512", run_avx512,
     __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")},
    {"avx2", run_avx2,
     __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c")},
#elif defined(__aarch64__)
    {"neon", run_neon, true},
#endif
    {"portable", run_portable, true},
};

// How far an output may be off: two products, a sum, a row and a gain are four half-units of the
// two terms; the row itself is off by `row`; 16-bit results are rounded once more. Near zero all
// numbers are equally far apart.
double bound(Dtype t, double value, double terms, double sizes, double row) {
  double limit = 2 * (t == Dtype::f64 ? 0x1p-52 : 0x1p-23) * terms + row * sizes;
  limit += t == Dtype::f64 ? 0x1p-1073 : 0x1p-148;
  if (t == Dtype::bf16) limit += 0x1p-8 * (std::fabs(value) + limit) + 0x1p-133;
  if (t == Dtype::f16) limit += 0x1p-11 * (std::fabs(value) + limit) + 0x1p-24;
  return limit;
}

// One job of random layout; returns how many tensors were compared.
int compare(const Path &path, Dtype dtype, bool half_in, bool half_out, const Angles &angles,
            const Limbs &limbs) {
  const int64_t size = size_of(dtype), pairs = int64_t(angles.turns.size());
  Job job{};
  job.dtype = dtype;
  job.operands = coin() ? 2 : 1;
  job.dims = int(1 + below(3));
  job.pairs = pairs;
  job.half_in = half_in;
  job.half_out = half_out;
  job.in_place = coin();
  job.prefetch = coin();
  job.stream = !job.in_place && coin();
  job.inverse = coin();
  job.gain = coin() ? 1.0 : 1.25;
  // streaming stores are for rows that begin where cache lines do
  const bool lines = job.stream && coin() && pairs * size % 64 == 0;
  const int64_t unit = lines ? 64 : size;
  job.start = coin() ? 0 : below(20) * unit / size;
  job.head_dim = job.start + 2 * pairs + (coin() ? 0 : below(9) * unit / size);
  std::vector<int64_t> tokens;
  job.tokens = 1;
  const bool many = below(8) == 0; // more than the rows of one tile
  for (int d = 0; d < job.dims; ++d) {
    tokens.push_back(1 + below(many ? (d == job.dims - 1 ? 150 : 2) : 4));
    job.shape[d] = tokens.back();
    job.tokens *= tokens.back();
  }
  const bool packed = lines || below(4) != 0;
  const int64_t shift = lines || coin() ? 0 : 1 + below(7);
  const std::string where = std::string(path.name) + " " + kDtypes[int(dtype)] + " " +
                            std::to_string(pairs) + " pairs" + (half_in ? " half" : " woven") +
                            (half_out ? " to half" : " to woven") +
                            (job.in_place ? " in place" : "") + (packed ? "" : " spread");

  std::vector<Shape> in_shapes, out_shapes;
  std::vector<Block> ins, outs;
  for (int i = 0; i < job.operands; ++i) {
    Operand &x = job.x[i];
    x.heads = i == 1 && below(10) == 0 ? 0 : 1 + below(many ? 2 : below(6) == 0 ? 12 : 4);
    std::vector<int64_t> n = tokens;
    n.push_back(x.heads);
    n.push_back(job.head_dim);
    in_shapes.push_back(laid_out(n, size, unit, packed));
    out_shapes.push_back(job.in_place ? in_shapes.back() : laid_out(n, size, unit, packed));
    ins.push_back(block_of(in_shapes[size_t(i)], size, shift, 0x55));
    each(in_shapes[size_t(i)], [&](const auto &, int64_t at) {
      encode_any(dtype, ins[size_t(i)].start() + at);
    });
    Block &in = ins.back();
    in.before.assign(in.memory.get(), in.memory.get() + in.own.size());
    if (!job.in_place) outs.push_back(block_of(out_shapes[size_t(i)], size, shift, 0x7f));
  }
  for (int i = 0; i < job.operands; ++i) {
    Operand &x = job.x[i];
    const Shape &si = in_shapes[size_t(i)], &so = out_shapes[size_t(i)];
    x.in = ins[size_t(i)].start();
    x.out = job.in_place ? ins[size_t(i)].start() : outs[size_t(i)].start();
    x.item_in = si.step.back();
    x.item_out = so.step.back();
    x.head_in = si.step[tokens.size()];
    x.head_out = so.step[tokens.size()];
    for (int d = 0; d < job.dims; ++d) {
      x.token_in[d] = si.step[size_t(d)];
      x.token_out[d] = so.step[size_t(d)];
    }
  }

  // angles of every token: positions, or rows made of them
  job.axes = below(3) == 0 ? 3 : 1;
  const bool rows = below(3) == 0;
  const bool wide = coin(), still = below(5) == 0;
  job.position_bytes = wide ? 8 : 4;
  const bool sections = coin(); // of the pairs, or axes in turn
  std::vector<int32_t> axis_of_pair(size_t(padded(pairs)));
  for (int64_t k = 0; k < pairs; ++k)
    axis_of_pair[size_t(k)] = int32_t(sections ? job.axes * k / pairs : below(job.axes));
  const int64_t apart = wide ? 8 : 4, placed = still ? 1 : job.tokens;
  std::vector<int64_t> places(size_t(placed * job.axes));
  for (int64_t axis = 0; axis < job.axes; ++axis) {
    const std::vector<int64_t> of_axis = positions_of(placed);
    for (int64_t t = 0; t < placed; ++t)
      places[size_t(t * job.axes + axis)] = wide ? of_axis[size_t(t)] : int32_t(of_axis[size_t(t)]);
  }
  std::unique_ptr<char[]> positions(new char[size_t(placed * job.axes * apart)]);
  for (int64_t i = 0; i < placed * job.axes; ++i) {
    const int32_t narrow = int32_t(places[size_t(i)]);
    if (wide) std::memcpy(positions.get() + i * 8, &places[size_t(i)], 8);
    else std::memcpy(positions.get() + i * 4, &narrow, 4);
  }
  std::vector<int64_t> token_step(size_t(job.dims), still ? 0 : 1);
  for (int d = job.dims - 2; d >= 0; --d)
    token_step[size_t(d)] = token_step[size_t(d) + 1] * job.shape[d + 1];
  auto angle_of = [&](int64_t token, int64_t k) {
    const int64_t at = still ? 0 : token;
    return angles.of(places[size_t(at * job.axes + axis_of_pair[size_t(k)])], k);
  };
  const int64_t real = dtype == Dtype::f64 ? 8 : 4;
  std::unique_ptr<char[]> cos(new char[size_t(placed * pairs * real)]);
  std::unique_ptr<char[]> sin(new char[size_t(placed * pairs * real)]);
  if (rows) {
    for (int64_t t = 0; t < placed; ++t)
      for (int64_t k = 0; k < pairs; ++k) {
        const double c = std::cos(angle_of(t, k)), s = std::sin(angle_of(t, k));
        const float cf = float(c), sf = float(s);
        const int64_t at = (t * pairs + k) * real;
        std::memcpy(cos.get() + at, real == 8 ? static_cast<const void *>(&c) : &cf, size_t(real));
        std::memcpy(sin.get() + at, real == 8 ? static_cast<const void *>(&s) : &sf, size_t(real));
      }
    job.cos = cos.get();
    job.sin = sin.get();
  } else {
    job.positions = positions.get();
    job.turns = limbs.start();
    job.axis_of_pair = axis_of_pair.data();
    job.axis_stride = apart;
  }
  for (int d = 0; d < job.dims; ++d) {
    if (rows) job.cos_stride[d] = job.sin_stride[d] = token_step[size_t(d)] * pairs * real;
    else job.position_stride[d] = token_step[size_t(d)] * job.axes * apart;
  }

  // as threads would share the work
  const int64_t parts = 1 + below(3);
  for (int64_t t = 0; t < parts; ++t)
    path.run(job, job.tokens * t / parts, job.tokens * (t + 1) / parts);

  const double row_error = dtype == Dtype::f64 ? 1e-15 + 4 * 0x1p-53 : 1.25e-7; // and the angle in double
  for (int i = 0; i < job.operands; ++i) {
    const Block &in = ins[size_t(i)], &out = job.in_place ? in : outs[size_t(i)];
    const Shape &si = in_shapes[size_t(i)], &so = out_shapes[size_t(i)];
    for (size_t b = 0; b < in.own.size(); ++b)
      if ((!job.in_place || !in.own[b]) && in.at(b) != in.before[b])
        fail("the input changed, or bytes beside it", where);
    for (size_t b = 0; !job.in_place && b < out.own.size(); ++b)
      if (!out.own[b] && out.at(b) != 0x7f) fail("bytes beside the output changed", where);
    Shape heads{si.n, si.step};
    heads.n.pop_back();
    heads.step.pop_back();
    each(heads, [&](const std::vector<int64_t> &at, int64_t from) {
      int64_t to = 0, token = 0;
      for (size_t d = 0; d < at.size(); ++d) to += at[d] * so.step[d];
      for (int d = 0; d < job.dims; ++d) token = token * job.shape[d] + at[size_t(d)];
      const char *given = in.before.data() + in.lead + from;
      const char *made = out.start() + to;
      auto x = [&](int64_t j) { return decode(dtype, given + j * si.step.back()); };
      auto y = [&](int64_t j) { return decode(dtype, made + j * so.step.back()); };
      for (int64_t j = 0; j < job.head_dim; ++j)
        if ((j < job.start || j >= job.start + 2 * pairs) && !(x(j) == y(j)))
          fail("a coordinate outside the slice changed", where);
      for (int64_t k = 0; k < pairs; ++k) {
        const double angle = angle_of(token, k) * (job.inverse ? -1 : 1);
        const double c = job.gain * std::cos(angle), s = job.gain * std::sin(angle);
        const double x0 = x(job.start + (half_in ? k : 2 * k));
        const double x1 = x(job.start + (half_in ? pairs + k : 2 * k + 1));
        const double y0 = x0 * c - x1 * s, y1 = x0 * s + x1 * c;
        const double off0 = std::fabs(y(job.start + (half_out ? k : 2 * k)) - y0);
        const double off1 = std::fabs(y(job.start + (half_out ? pairs + k : 2 * k + 1)) - y1);
        const double sizes = job.gain * (std::fabs(x0) + std::fabs(x1));
        const double one = std::fabs(x0 * c) + std::fabs(x1 * s);
        const double two = std::fabs(x0 * s) + std::fabs(x1 * c);
        if (!(off0 <= bound(dtype, y0, one, sizes, row_error)) ||
            !(off1 <= bound(dtype, y1, two, sizes, row_error)))
          fail("pair " + std::to_string(k) + " is off by " + std::to_string(off0) + ", " +
                   std::to_string(off1), where);
      }
    });
  }
  return job.operands;
}

} // namespace

int main(int argc, char **argv) {
  // widths that fill registers, that do so and leave a tail, and that are all tail
  const int64_t widths[] = {1, 2, 3, 5, 8, 12, 16, 17, 31, 32, 48, 64, 80, 128};
  const int times = argc == 2 ? std::atoi(argv[1]) : 0;
  if (times < 1) fail("usage", "driver TIMES");
  int64_t compared[sizeof kPaths / sizeof *kPaths] = {};
  for (int64_t pairs : widths) {
    Angles angles;
    for (int64_t k = 0; k < pairs; ++k) angles.turns.push_back(Wide{draw()} << 64 | draw());
    const Limbs limbs(angles);
    for (const Path &path : kPaths)
      for (int kind = 0; path.here && kind < 16 * times; ++kind)
        compared[&path - kPaths] +=
            compare(path, Dtype(kind & 3), kind & 4, kind & 8, angles, limbs);
  }
  for (const Path &path : kPaths)
    std::printf("%s: %lld tensors compared\n", path.name,
                static_cast<long long>(compared[&path - kPaths]));
}

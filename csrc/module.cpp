// The Python module `phasor._native`: reads tensors through DLPack, checks everything, then sweeps.
//
// No torch header is used and only Python's stable ABI is: one build serves every Python from 3.11
// and every torch that offers the DLPack exchange interface.
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <algorithm>
#include <cstring>

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__unix__)
#include <unistd.h>
#endif

#include "dlpack.h"
#include "rotate.h"

namespace phasor {
namespace {

// What a Rope says about every call, packed by `plan` into a bytes object.
struct Plan {
  int64_t head_dim, start, pairs, axes;
  int64_t half_in, half_out;
};

struct Path {
  const char *name;
  Run run;
  bool here;
};

bool has_avx512() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

bool has_avx2() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

// Best first.
const Path kPaths[] = {
#if defined(__x86_64__)
    {"avx512", run_avx512, has_avx512()},
    {"avx2", run_avx2, has_avx2()},
#elif defined(__aarch64__)
    {"neon", run_neon, true},
#endif
    {"portable", run_portable, true},
};

const DLPackExchangeAPI *dlpack = nullptr;
PyObject *tensor_error = nullptr, *position_error = nullptr;

int64_t last_level_cache() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long size = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (size > 0) return size;
#endif
  return int64_t{32} << 20;
}

bool view(PyObject *object, DLTensor *out) {
  return dlpack->dltensor_from_py_object_no_sync(object, out) == 0;
}

char *start_of(const DLTensor &t) { return static_cast<char *>(t.data) + t.byte_offset; }
int64_t size_of(const DLTensor &t) { return t.dtype.bits / 8; }
int64_t stride_of(const DLTensor &t, int d) { return t.strides[d] * size_of(t); }

bool dtype_of(const DLTensor &t, Dtype *out) {
  const int code = t.dtype.code, bits = t.dtype.bits;
  if (code == kDLFloat && bits == 32) *out = Dtype::f32;
  else if (code == kDLFloat && bits == 64) *out = Dtype::f64;
  else if (code == kDLFloat && bits == 16) *out = Dtype::f16;
  else if (code == kDLBfloat && bits == 16) *out = Dtype::bf16;
  else return false;
  return true;
}

// Strides of `t` over the token dimensions `lead`, broadcast from the right; `inner` of its own
// dimensions come after them.
void broadcast(const DLTensor &t, int inner, int lead, int64_t *strides) {
  const int own = t.ndim - inner;
  for (int d = 0; d < lead; ++d) {
    const int mine = d - (lead - own);
    strides[d] = mine < 0 || t.shape[mine] == 1 ? 0 : stride_of(t, mine);
  }
}

// Whether two elements of a written tensor could be one: conservative, as dense slices are not.
bool overlaps_itself(const DLTensor &t) {
  int64_t steps[32], counts[32];
  int n = 0;
  for (int d = 0; d < t.ndim && n < 32; ++d) {
    if (t.shape[d] == 0) return false;
    if (t.shape[d] > 1) {
      steps[n] = t.strides[d] < 0 ? -t.strides[d] : t.strides[d];
      counts[n++] = t.shape[d];
    }
  }
  int order[32];
  for (int i = 0; i < n; ++i) order[i] = i;
  std::sort(order, order + n, [&](int a, int b) { return steps[a] < steps[b]; });
  int64_t reach = 1;
  for (int i = 0; i < n; ++i) {
    if (steps[order[i]] < reach) return true;
    reach += steps[order[i]] * (counts[order[i]] - 1);
  }
  return false;
}

struct Span {
  int64_t low, high;
};

Span span_of(const DLTensor &t) {
  int64_t low = 0, high = 0;
  for (int d = 0; d < t.ndim; ++d) {
    if (t.shape[d] == 0) return {0, 0};
    const int64_t far = stride_of(t, d) * (t.shape[d] - 1);
    (far < 0 ? low : high) += far;
  }
  const int64_t at = reinterpret_cast<int64_t>(start_of(t));
  return {at + low, at + high + size_of(t)};
}

// Whether two written tensors could share an element. Slices of one projection lie side by side
// in every token, at the same token strides.
bool overlap(const DLTensor &a, const DLTensor &b) {
  const Span sa = span_of(a), sb = span_of(b);
  if (sa.low == sa.high || sb.low == sb.high || sa.high <= sb.low || sb.high <= sa.low)
    return false;
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

// Merge neighbouring token dimensions that every walk crosses evenly, and drop those of length 1.
int merge(int dims, int64_t *shape, int64_t *const *strides, int walks) {
  int kept = 0;
  for (int d = 0; d < dims; ++d) {
    if (shape[d] == 1) continue;
    bool even = kept > 0;
    for (int i = 0; i < walks && even; ++i)
      even = strides[i][kept - 1] == strides[i][d] * shape[d];
    if (even) shape[kept - 1] *= shape[d];
    else shape[kept++] = shape[d];
    for (int i = 0; i < walks; ++i) strides[i][kept - 1] = strides[i][d];
  }
  if (kept > 0) return kept;
  shape[0] = 1;
  for (int i = 0; i < walks; ++i) strides[i][0] = 0;
  return 1;
}

// The first position without a digit row, or false.
bool find_outside(const DLTensor &t, int64_t *found, int64_t *index) {
  int64_t count = 1;
  for (int d = 0; d < t.ndim; ++d) count *= t.shape[d];
  const int64_t limit = int64_t{1} << (kDigitBits * kDigits);
  for (int64_t i = 0; i < count; ++i) {
    int64_t offset = 0, left = i;
    for (int d = t.ndim - 1; d >= 0; --d) {
      offset += left % t.shape[d] * stride_of(t, d);
      left /= t.shape[d];
    }
    int64_t p;
    if (size_of(t) == 8) {
      std::memcpy(&p, start_of(t) + offset, 8);
    } else {
      int32_t narrow;
      std::memcpy(&narrow, start_of(t) + offset, 4);
      p = narrow;
    }
    if (p <= -limit || p >= limit) {
      *found = p;
      *index = i;
      return true;
    }
  }
  return false;
}

void perform(const Job &job, Run run, int64_t elements) {
#if defined(_OPENMP)
  const int64_t worth = job.dtype == Dtype::f32 || job.dtype == Dtype::f64 ? 40000 : 80000;
  const int most = elements < worth ? 1 : omp_get_max_threads();
  if (most > 1 && job.tokens > 1 && !omp_in_parallel()) {
    PyThreadState *state = PyEval_SaveThread();
#pragma omp parallel num_threads(most)
    {
      const int64_t t = omp_get_thread_num(), n = omp_get_num_threads();
      run(job, job.tokens * t / n, job.tokens * (t + 1) / n);
    }
    PyEval_RestoreThread(state);
    return;
  }
#else
  (void)elements;
#endif
  run(job, 0, job.tokens);
}

// rotate(plan, tables, axis_of_pair, angles0, angles1, inverse, gain, path, x0, y0[, x1, y1])
PyObject *rotate(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (count != 10 && count != 12) {
    PyErr_SetString(PyExc_TypeError, "rotate takes 10 or 12 arguments");
    return nullptr;
  }
  char *packed;
  Py_ssize_t length;
  if (PyBytes_AsStringAndSize(args[0], &packed, &length) < 0) return nullptr;
  Plan plan;
  if (length != sizeof plan) {
    PyErr_SetString(PyExc_ValueError, "plan must come from phasor._native.plan");
    return nullptr;
  }
  std::memcpy(&plan, packed, sizeof plan);
  Job job{};
  job.head_dim = plan.head_dim;
  job.start = plan.start;
  job.pairs = plan.pairs;
  job.axes = int(plan.axes);
  job.inverse = PyObject_IsTrue(args[5]);
  job.half_in = job.inverse ? plan.half_out : plan.half_in;
  job.half_out = job.inverse ? plan.half_in : plan.half_out;
  job.gain = PyFloat_AsDouble(args[6]);
  const long path = PyLong_AsLong(args[7]);
  if (PyErr_Occurred()) return nullptr;
  job.operands = count == 10 ? 1 : 2;

  DLTensor x[2], y[2], a0, a1, tables, axes;
  int64_t elements = 0, bytes = 0;
  for (int i = 0; i < job.operands; ++i) {
    if (!view(args[8 + 2 * i], &x[i]) || !view(args[9 + 2 * i], &y[i])) return nullptr;
    if (!dtype_of(x[i], &job.dtype)) {
      PyErr_SetString(tensor_error, "x must be float64, float32, bfloat16 or float16");
      return nullptr;
    }
  }
  job.in_place = args[8] == args[9]; // empty tensors all start at null
  const int lead = x[0].ndim - 2;
  int64_t token_shape[32], in[2][32], out[2][32], first[32], second[32];
  int64_t *strides[6];
  int walks = 0;
  job.tokens = 1;
  for (int d = 0; d < lead; ++d) job.tokens *= token_shape[d] = x[0].shape[d];
  for (int i = 0; i < job.operands; ++i) {
    Operand &o = job.x[i];
    o.in = start_of(x[i]);
    o.out = start_of(y[i]);
    o.heads = x[i].shape[lead];
    o.head_in = stride_of(x[i], lead);
    o.head_out = stride_of(y[i], lead);
    o.item_in = stride_of(x[i], lead + 1);
    o.item_out = stride_of(y[i], lead + 1);
    for (int d = 0; d < lead; ++d) {
      in[i][d] = stride_of(x[i], d);
      out[i][d] = stride_of(y[i], d);
    }
    strides[walks++] = in[i];
    strides[walks++] = out[i];
    elements += job.tokens * o.heads * job.head_dim;
    bytes += job.tokens * o.heads * job.head_dim * size_of(x[i]);
    if (job.in_place && overlaps_itself(x[i])) {
      PyErr_SetString(tensor_error,
                      "x must not share memory with itself to be written in place; use "
                      "x.contiguous() or the verb without the underscore");
      return nullptr;
    }
  }
  if (job.in_place && job.operands == 2 && overlap(x[0], x[1])) {
    PyErr_SetString(tensor_error, "q and k must not share memory to be written in place; rotate "
                                  "copies, or use the verb without the underscore");
    return nullptr;
  }
  const bool from_positions = args[4] == Py_None;
  if (!view(args[3], &a0)) return nullptr;
  if (from_positions) {
    if (!view(args[1], &tables)) return nullptr;
    int64_t found, index;
    if (find_outside(a0, &found, &index)) {
      PyErr_Format(position_error,
                   "positions must lie within 2**40 either way for backend='cpu', got %lld at "
                   "index %lld; rotate_by takes exact rows of cos and sin",
                   static_cast<long long>(found), static_cast<long long>(index));
      return nullptr;
    }
    job.positions = start_of(a0);
    job.position_bytes = int(size_of(a0));
    job.tables = start_of(tables);
    if (job.axes > 1) {
      if (!view(args[2], &axes)) return nullptr;
      job.axis_of_pair = reinterpret_cast<const int64_t *>(start_of(axes));
      job.axis_stride = stride_of(a0, a0.ndim - 1);
    }
    broadcast(a0, job.axes > 1 ? 1 : 0, lead, first);
  } else {
    if (!view(args[4], &a1)) return nullptr;
    job.cos = start_of(a0);
    job.sin = start_of(a1);
    broadcast(a0, 1, lead, first);
    broadcast(a1, 1, lead, second);
    strides[walks++] = second;
  }
  strides[walks++] = first;
  if (elements == 0) Py_RETURN_NONE;

  job.dims = merge(lead, token_shape, strides, walks);
  if (job.dims > kMaxDims) {
    PyErr_Format(tensor_error, "x must have at most %d token dimensions that do not merge, got %d",
                 kMaxDims, job.dims);
    return nullptr;
  }
  for (int d = 0; d < job.dims; ++d) {
    job.shape[d] = token_shape[d];
    for (int i = 0; i < job.operands; ++i) {
      job.x[i].token_in[d] = in[i][d];
      job.x[i].token_out[d] = out[i][d];
    }
    (from_positions ? job.position_stride : job.cos_stride)[d] = first[d];
    if (!from_positions) job.sin_stride[d] = second[d];
  }
  static const int64_t cache = last_level_cache();
  job.prefetch = bytes > (int64_t{2} << 20);
  job.stream = !job.in_place && bytes > cache;
  perform(job, kPaths[path].run, elements);
  Py_RETURN_NONE;
}

PyObject *plan(PyObject *, PyObject *args) {
  Plan p;
  long long head_dim, start, pairs, axes;
  int half_in, half_out;
  if (!PyArg_ParseTuple(args, "LLLLpp", &head_dim, &start, &pairs, &axes, &half_in, &half_out))
    return nullptr;
  if (pairs > kMaxPairs) {
    PyErr_Format(tensor_error, "backend='cpu' turns at most %d pairs, got %lld; use 'eager'",
                 kMaxPairs, pairs);
    return nullptr;
  }
  p = {head_dim, start, pairs, axes, half_in, half_out};
  return PyBytes_FromStringAndSize(reinterpret_cast<const char *>(&p), sizeof p);
}

// paths() -> names this machine has, best first; an index into them is what `rotate` takes
PyObject *paths(PyObject *, PyObject *) {
  PyObject *names = PyList_New(0);
  for (const Path &p : kPaths) {
    if (names == nullptr) return nullptr;
    PyObject *pair = Py_BuildValue("(sO)", p.name, p.here ? Py_True : Py_False);
    if (pair == nullptr || PyList_Append(names, pair) < 0) {
      Py_XDECREF(pair);
      Py_DECREF(names);
      return nullptr;
    }
    Py_DECREF(pair);
  }
  return names;
}

// connect(capsule, TensorError, PositionError): how tensors are read and what is raised
PyObject *connect(PyObject *, PyObject *args) {
  PyObject *capsule;
  if (!PyArg_ParseTuple(args, "OOO", &capsule, &tensor_error, &position_error)) return nullptr;
  Py_INCREF(tensor_error);
  Py_INCREF(position_error);
  const auto *found = static_cast<const DLPackExchangeAPI *>(
      PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (found == nullptr) return nullptr;
  while (found != nullptr && found->header.version.major != 1)
    found = reinterpret_cast<const DLPackExchangeAPI *>(found->header.prev_api);
  if (found == nullptr || found->dltensor_from_py_object_no_sync == nullptr) {
    PyErr_SetString(PyExc_ImportError, "this torch offers no DLPack 1 exchange of plain views");
    return nullptr;
  }
  dlpack = found;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"rotate", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(rotate)), METH_FASTCALL,
     nullptr},
    {"plan", plan, METH_VARARGS, nullptr},
    {"paths", paths, METH_NOARGS, nullptr},
    {"connect", connect, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "phasor._native", nullptr, -1, methods,
                      nullptr, nullptr, nullptr, nullptr};

} // namespace
} // namespace phasor

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&phasor::module); }

// The Python module `phasor._native`: reads tensors through DLPack, checks everything, then sweeps.
//
// No torch header is used and only Python's stable ABI is: one build serves every Python from 3.11
// and every torch that offers the DLPack exchange interface.
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__unix__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "dlpack.h"
#include "paths.h"
#include "rotate.h"
#include "tensors.h"

namespace phasor {
namespace {

// What a Rope says about every call, packed by `plan` into a bytes object.
struct Plan {
  int64_t head_dim, start, pairs, axes;
  int64_t half_in, half_out;
};

const DLPackExchangeAPI *dlpack = nullptr;
PyObject *tensor_error = nullptr, *position_error = nullptr;

// A virtual machine may report the cache of a whole host, of which its processors see one part.
int64_t last_level_cache() {
  int64_t size = int64_t{32} << 20;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long reported = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (reported > 0) size = std::min<int64_t>(size, reported);
#endif
  return size;
}

constexpr int64_t kNearCaches = int64_t{2} << 20; // what the caches next to the cores hold

bool view(PyObject *object, DLTensor *out) {
  return dlpack->dltensor_from_py_object_no_sync(object, out) == 0;
}

// How many parts to cut the heads into before the tokens, so that a part of [batch, heads, seq, dim]
// memory is one stretch of it: the one that torch's own operators, cutting memory evenly, left in this
// core's cache.
int head_parts(const Job &job, int threads) {
  const int inner = job.dims - 1;
  const Operand &x = job.x[0];
  const bool heads_apart = std::abs(x.head_in) > std::abs(x.token_in[inner]);
  if (!heads_apart || job.tokens / job.shape[inner] >= threads) return 1;
  int64_t parts = threads;
  for (int i = 0; i < job.operands; ++i) parts = std::gcd(parts, job.x[i].heads);
  return int(parts);
}

// One of `parts` equal parts of the heads of a job.
Job heads_of(const Job &job, int64_t part, int64_t parts) {
  Job some = job;
  for (int i = 0; i < job.operands; ++i) {
    Operand &x = some.x[i];
    x.heads /= parts;
    x.in += part * x.heads * x.head_in;
    x.out += part * x.heads * x.head_out;
  }
  return some;
}

void perform(const Job &job, Run run, int64_t elements) {
#if defined(_OPENMP)
  const int64_t worth = job.dtype == Dtype::f32 || job.dtype == Dtype::f64 ? 40000 : 80000;
  const int most = elements < worth ? 1 : omp_get_max_threads();
  if (most > 1 && job.tokens > 1 && !omp_in_parallel()) {
    PyThreadState *state = PyEval_SaveThread();
#pragma omp parallel num_threads(most)
    {
      const int threads = omp_get_num_threads(), thread = omp_get_thread_num();
      const int64_t parts = head_parts(job, threads);
      const int64_t each = threads / parts, t = thread % each;
      run(heads_of(job, thread / each, parts), job.tokens * t / each, job.tokens * (t + 1) / each);
    }
    PyEval_RestoreThread(state);
    return;
  }
#else
  (void)elements;
#endif
  run(job, 0, job.tokens);
}

// A new tensor's memory is mapped page by page as it is written, which costs more than writing it.
void ask_for_huge_pages(const DLTensor &t) {
#if defined(__linux__)
  constexpr int64_t kHuge = int64_t{2} << 20;
  const Span span = span_of(t);
  const int64_t low = (span.low + kHuge - 1) / kHuge * kHuge, high = span.high / kHuge * kHuge;
  if (high - low >= 2 * kHuge) madvise(reinterpret_cast<void *>(low), size_t(high - low), MADV_HUGEPAGE);
#else
  (void)t;
#endif
}

// What the caller gets for arguments that do not fit: an error, or False where it would rather try
// something else. Nothing has been written by then.
PyObject *refuse(bool raises, PyObject *type, const char *message) {
  if (!raises) Py_RETURN_FALSE;
  PyErr_SetString(type, message);
  return nullptr;
}

// The same for a tensor that DLPack does not show, such as one without memory.
PyObject *unread(bool raises) {
  if (raises) return nullptr;
  PyErr_Clear();
  Py_RETURN_FALSE;
}

// rotate(plan, tables, axis_of_pair, angles0, angles1, inverse, gain, path, raises, x0, y0[, x1, y1])
//
// Angles are positions and None, with tables; or cosines and sines, without. An output that is its
// input is written in place. True, or what `refuse` makes of arguments that do not fit.
PyObject *rotate(PyObject *, PyObject *const *args, Py_ssize_t count) {
  if (count != 11 && count != 13) {
    PyErr_SetString(PyExc_TypeError, "rotate takes 11 or 13 arguments");
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
  const bool raises = PyObject_IsTrue(args[8]);
  if (PyErr_Occurred()) return nullptr;
  job.operands = count == 11 ? 1 : 2;
  job.in_place = args[9] == args[10]; // not by address: empty tensors all start at null

  DLTensor x[2], y[2], a0, a1{}, tables{}, axes{};
  for (int i = 0; i < job.operands; ++i) {
    if (!view(args[9 + 2 * i], &x[i]) || !view(args[10 + 2 * i], &y[i])) return unread(raises);
    Dtype dtype;
    const bool sound = x[i].device.device_type == kDLCPU && y[i].device.device_type == kDLCPU &&
                       x[i].ndim >= 3 && x[i].ndim <= kMaxRank && dtype_of(x[i], &dtype) &&
                       has_memory(x[i]) && x[i].shape[x[i].ndim - 1] == job.head_dim &&
                       x[i].ndim == y[i].ndim &&
                       std::equal(x[i].shape, x[i].shape + x[i].ndim, y[i].shape);
    if (!sound || (i == 1 && (dtype != job.dtype || !same_tokens(x[0], x[1]))))
      return refuse(raises, tensor_error,
                    "x must be floating tensors [..., seq, heads, head_dim] of one dtype on the CPU");
    job.dtype = dtype;
    if (job.in_place && overlaps_itself(x[i]))
      return refuse(raises, tensor_error,
                    "x must not share memory with itself to be written in place; use "
                    "x.contiguous() or the verb without the underscore");
  }
  if (job.in_place && job.operands == 2 && overlap(x[0], x[1]))
    return refuse(raises, tensor_error,
                  "q and k must not share memory to be written in place; rotate copies, or use "
                  "the verb without the underscore");

  const bool from_positions = args[4] == Py_None;
  const int inner = from_positions && job.axes == 1 ? 0 : 1;
  if (!view(args[3], &a0) || (!from_positions && !view(args[4], &a1))) return unread(raises);
  if (from_positions) {
    if (!view(args[1], &tables) || (job.axes > 1 && !view(args[2], &axes)))
      return unread(raises);
    const bool sound = a0.device.device_type == kDLCPU && is_integer(a0) && fits(a0, inner, x[0]) &&
                       (inner == 0 || a0.shape[a0.ndim - 1] == job.axes);
    if (!sound)
      return refuse(raises, position_error,
                    "positions must be int32 or int64 on the CPU and broadcast to the tokens of x");
    int64_t found, index;
    if (find_outside(a0, &found, &index)) {
      if (!raises) Py_RETURN_FALSE;
      PyErr_Format(position_error,
                   "positions must lie within 2**40 either way, got %lld at index %lld; rotate_by "
                   "takes exact rows of cos and sin",
                   static_cast<long long>(found), static_cast<long long>(index));
      return nullptr;
    }
  } else if (!fits(a0, 1, x[0]) || !fits(a1, 1, x[0])) {
    return refuse(raises, tensor_error, "cos and sin must broadcast to the tokens of x");
  }
  for (int i = 0; i < job.operands && job.in_place && !from_positions; ++i)
    if (touch(a0, x[i]) || touch(a1, x[i]))
      return refuse(raises, tensor_error,
                    "cos and sin must not share memory with x to be written in place; pass clones");

  const int lead = x[0].ndim - 2;
  int64_t shape[kMaxRank], in[2][kMaxRank], out[2][kMaxRank], first[kMaxRank], second[kMaxRank];
  int64_t *strides[6];
  int walks = 0;
  job.tokens = 1;
  for (int d = 0; d < lead; ++d) job.tokens *= shape[d] = x[0].shape[d];
  int64_t elements = 0;
  for (int i = 0; i < job.operands; ++i) {
    job.x[i] = {start_of(x[i]),
                start_of(y[i]),
                x[i].shape[lead],
                stride_of(x[i], lead),
                stride_of(y[i], lead),
                stride_of(x[i], lead + 1),
                stride_of(y[i], lead + 1),
                {},
                {}};
    for (int d = 0; d < lead; ++d) {
      in[i][d] = stride_of(x[i], d);
      out[i][d] = stride_of(y[i], d);
    }
    strides[walks++] = in[i];
    strides[walks++] = out[i];
    elements += job.tokens * job.x[i].heads * job.head_dim;
  }
  if (elements == 0) Py_RETURN_TRUE;
  broadcast(a0, inner, lead, first);
  strides[walks++] = first;
  if (from_positions) {
    job.positions = start_of(a0);
    job.position_bytes = int(size_of(a0));
    job.tables = start_of(tables);
    if (job.axes > 1) {
      job.axis_of_pair = reinterpret_cast<const int64_t *>(start_of(axes));
      job.axis_stride = stride_of(a0, a0.ndim - 1);
    }
  } else {
    job.cos = start_of(a0);
    job.sin = start_of(a1);
    broadcast(a1, 1, lead, second);
    strides[walks++] = second;
  }
  job.dims = merge(lead, shape, strides, walks);
  if (job.dims > kMaxDims)
    return refuse(raises, tensor_error,
                  "x must have at most 6 token dimensions that do not merge into one another");
  for (int d = 0; d < job.dims; ++d) {
    job.shape[d] = shape[d];
    for (int i = 0; i < job.operands; ++i) {
      job.x[i].token_in[d] = in[i][d];
      job.x[i].token_out[d] = out[i][d];
    }
    (from_positions ? job.position_stride : job.cos_stride)[d] = first[d];
    if (!from_positions) job.sin_stride[d] = second[d];
  }
  static const int64_t cache = last_level_cache();
  const int64_t bytes = elements * size_of(x[0]);
  job.prefetch = bytes > kNearCaches;
  if (!job.in_place)
    for (int i = 0; i < job.operands; ++i) ask_for_huge_pages(y[i]);
  job.stream = !job.in_place && bytes > cache;
  perform(job, kPaths[path].run, elements);
  Py_RETURN_TRUE;
}

PyObject *plan(PyObject *, PyObject *args) {
  Plan p;
  long long head_dim, start, pairs, axes;
  int half_in, half_out;
  if (!PyArg_ParseTuple(args, "LLLLpp", &head_dim, &start, &pairs, &axes, &half_in, &half_out))
    return nullptr;
  if (start < 0 || pairs < 0 || pairs > (head_dim - start) / 2)
    return PyErr_Format(tensor_error, "%lld pairs from coordinate %lld on do not fit a head of %lld",
                        pairs, start, head_dim);
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

// alone(x, y): None, or the error of `rotate` in place where an element would be written twice
PyObject *alone(PyObject *, PyObject *args) {
  PyObject *one, *other;
  DLTensor x, y;
  if (!PyArg_ParseTuple(args, "OO", &one, &other)) return nullptr;
  if (!view(one, &x) || !view(other, &y)) return nullptr;
  if (overlaps_itself(x) || overlaps_itself(y) || overlap(x, y))
    return refuse(true, tensor_error,
                  "q and k must not share memory, with themselves or each other, to be written in "
                  "place; rotate copies, or use the verb without the underscore");
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"alone", alone, METH_VARARGS, nullptr},
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

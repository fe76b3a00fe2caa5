// The Python module `phasor._native`: reads tensors through DLPack, checks everything, then rotates.
//
// No torch header is used and only Python's stable ABI is: one build serves every Python from 3.11
// and every torch that offers the DLPack exchange interface.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "dlpack.h"
#include "paths.h"
#include "perform.h"
#include "rotate.h"
#include "tensors.h"

namespace phasor {
namespace {

// The data that all calls for a Rope share. `plan` packs it into a bytes object, followed by the turns of
// the pairs and their axes if cosines and sines are not given.
struct Plan {
  int64_t head_dim, start, pairs, axes;
  int64_t half_in, half_out;
};

const DLPackExchangeAPI *dlpack = nullptr;
PyObject *tensor_error = nullptr, *position_error = nullptr;
PyObject *get_num_threads = nullptr;

bool view(PyObject *object, DLTensor *out) {
  return dlpack->dltensor_from_py_object_no_sync(object, out) == 0;
}

// A call of `rotate` while its arguments are read. Each step below returns false if it ends the call,
// before anything is written: `answer` is then null with an error set, or Python's False if the caller
// would rather try something else than raise an error.
struct Call {
  PyObject *const *args;
  bool raises;
  bool from_positions;
  int inner; // trailing dimensions of the angles that are not those of tokens
  Job job;
  DLTensor x[2], y[2], first, second;
  int64_t shape[kMaxRank], x_strides[kMaxRank], y_strides[kMaxRank]; // of `read_rows`
  int64_t elements;
  PyObject *answer;

  bool refuse(PyObject *type, const char *message) {
    if (raises) PyErr_SetString(type, message);
    else answer = Py_NewRef(Py_False);
    return false;
  }

  // The same after an error of Python: DLPack cannot export some tensors, such as those without memory.
  bool refuse_unreadable() {
    if (raises) return false;
    PyErr_Clear();
    answer = Py_NewRef(Py_False);
    return false;
  }
};

// The item of a list or tuple, borrowed; null with an error set where there is none.
PyObject *item(PyObject *sequence, Py_ssize_t i) {
  return PyTuple_Check(sequence) ? PyTuple_GetItem(sequence, i) : PyList_GetItem(sequence, i);
}

bool read_options(Call &call, Py_ssize_t count) {
  if (count != 9) {
    PyErr_SetString(PyExc_TypeError, "rotate takes 9 arguments");
    return false;
  }
  const Py_ssize_t operands = PySequence_Size(call.args[8]);
  if (operands != 1 && operands != 2) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "rotate takes one tensor or two");
    return false;
  }
  char *packed;
  Py_ssize_t length;
  if (PyBytes_AsStringAndSize(call.args[0], &packed, &length) < 0) return false;
  Plan plan;
  if (length < Py_ssize_t{sizeof plan}) {
    PyErr_SetString(PyExc_ValueError, "plan must come from phasor._native.plan");
    return false;
  }
  std::memcpy(&plan, packed, sizeof plan);
  Job &job = call.job;
  job.head_dim = plan.head_dim;
  job.start = plan.start;
  job.pairs = plan.pairs;
  job.axes = int(plan.axes);
  job.turns = reinterpret_cast<const uint32_t *>(packed + sizeof plan);
  job.axis_of_pair = reinterpret_cast<const int32_t *>(job.turns + kLimbs * padded(job.pairs));
  call.raises = PyObject_IsTrue(call.args[6]);
  if (!PyBool_Check(call.args[3]) || !(PyFloat_CheckExact(call.args[4]) || PyLong_CheckExact(call.args[4])))
    return call.refuse(PyExc_TypeError, "inverse must be a bool and gain a number");
  job.inverse = call.args[3] == Py_True;
  job.half_in = job.inverse ? plan.half_out : plan.half_in;
  job.half_out = job.inverse ? plan.half_in : plan.half_out;
  job.gain = PyFloat_AsDouble(call.args[4]);
  if (PyErr_Occurred()) return call.refuse_unreadable();
  if (!std::isfinite(job.gain)) return call.refuse(PyExc_ValueError, "gain must be finite");
  job.operands = int(operands);
  job.in_place = call.args[7] == call.args[8]; // not by address: empty tensors all start at null
  if (job.head_dim > 2 * kMaxPairs)
    return call.refuse(tensor_error, "x must have heads at most 4096 wide; use backend='eager'");
  return true;
}

bool read_tensors(Call &call) {
  Job &job = call.job;
  for (int i = 0; i < job.operands; ++i) {
    DLTensor &x = call.x[i], &y = call.y[i];
    PyObject *in = item(call.args[7], i), *out = item(call.args[8], i);
    if (in == nullptr || out == nullptr) return false;
    if (!view(in, &x)) return call.refuse_unreadable();
    if (out == in) y = x;
    else if (!view(out, &y)) return call.refuse_unreadable();
    Dtype dtype;
    const bool sound = x.device.device_type == kDLCPU && y.device.device_type == kDLCPU &&
                       x.ndim >= 3 && x.ndim <= kMaxRank && dtype_of(x, &dtype) &&
                       has_memory(x) && x.shape[x.ndim - 1] == job.head_dim &&
                       x.ndim == y.ndim && std::equal(x.shape, x.shape + x.ndim, y.shape);
    if (!sound || (i == 1 && (dtype != job.dtype || !same_tokens(call.x[0], x)))) {
      char message[128];
      std::snprintf(message, sizeof message, "x must be floating tensors [..., seq, heads, %lld] of one dtype on the CPU",
                    static_cast<long long>(job.head_dim));
      return call.refuse(tensor_error, message);
    }
    job.dtype = dtype;
    if (job.in_place && overlaps_itself(x))
      return call.refuse(tensor_error,
                         "x must not share memory with itself to be written in place; use "
                         "x.contiguous() or the function without the underscore");
  }
  if (job.in_place && job.operands == 2 && overlap(call.x[0], call.x[1]))
    return call.refuse(tensor_error,
                       "q and k must not share memory to be written in place; rotate copies, or "
                       "use the function without the underscore");
  return true;
}

// The vectors (1, 0) of so many pairs in halves: their rotations are the cosines and the sines.
template <typename T> char *unit_vectors(int64_t pairs) {
  static const auto ones_and_zeros = [] {
    std::array<T, 2 * kMaxPairs> values{};
    std::fill_n(values.begin(), kMaxPairs, T{1});
    return values;
  }();
  return reinterpret_cast<char *>(const_cast<T *>(ones_and_zeros.data() + kMaxPairs - pairs));
}

// An output [..., seq, 2, pairs] for cosines and sines, in one piece: the rotated heads
// [..., seq, 1, 2 * pairs] of unit vectors.
bool read_rows(Call &call) {
  Job &job = call.job;
  DLTensor &x = call.x[0], &y = call.y[0];
  PyObject *rows = item(call.args[8], 0);
  if (rows == nullptr) return false;
  if (!view(rows, &y)) return call.refuse_unreadable();
  job.head_dim = 2 * job.pairs;
  job.start = 0;
  job.half_in = job.half_out = true;
  const int lead = y.ndim - 2;
  const bool sound = job.operands == 1 && y.device.device_type == kDLCPU && lead >= 0 && y.ndim <= kMaxRank &&
                     dtype_of(y, &job.dtype) && size_of(y) >= 4 && has_memory(y) && y.shape[lead] == 2 &&
                     y.shape[lead + 1] == job.pairs;
  int64_t stride = 1; // in a tensor of one piece
  bool dense = true;
  for (int d = y.ndim - 1; sound && d >= 0; --d) {
    dense = dense && (y.strides[d] == stride || y.shape[d] <= 1);
    stride *= std::max<int64_t>(y.shape[d], 1);
    call.shape[d] = y.shape[d];
    call.x_strides[d] = 0;
    call.y_strides[d] = y.strides[d];
  }
  if (!sound || !dense)
    return call.refuse(tensor_error, "rows must be [..., seq, 2, pairs] of float32 or float64 in one piece of the "
                                     "CPU's memory");
  call.shape[lead] = 1;
  call.shape[lead + 1] = job.head_dim;
  call.x_strides[lead + 1] = call.y_strides[lead + 1] = 1;
  y.shape = call.shape;
  y.strides = call.y_strides;
  x = y;
  x.strides = call.x_strides;
  x.data = job.dtype == Dtype::f64 ? unit_vectors<double>(job.pairs) : unit_vectors<float>(job.pairs);
  x.byte_offset = 0;
  return true;
}

// Whether cosines or sines have the job's dtype, and a token's are one piece.
bool is_row(const DLTensor &t, const Job &job) {
  Dtype dtype;
  const bool sound = t.device.device_type == kDLCPU && dtype_of(t, &dtype) && has_memory(t) &&
                     dtype == (job.dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32) && t.ndim > 0 &&
                     t.shape[t.ndim - 1] == job.pairs;
  // the strides of an empty tensor mean nothing
  const bool empty = std::find(t.shape, t.shape + t.ndim, 0) != t.shape + t.ndim;
  return sound && (empty || job.pairs == 1 || t.strides[t.ndim - 1] == 1);
}

bool read_angles(Call &call) {
  const Job &job = call.job;
  DLTensor &first = call.first, &second = call.second;
  call.from_positions = call.args[2] == Py_None;
  call.inner = call.from_positions && job.axes == 1 ? 0 : 1;
  if (!view(call.args[1], &first)) return call.refuse_unreadable();
  if (!call.from_positions) {
    if (!view(call.args[2], &second)) return call.refuse_unreadable();
    for (const DLTensor *row : {&first, &second})
      if (!is_row(*row, job) || !fits(*row, 1, call.x[0]))
        return call.refuse(tensor_error, "cos and sin must be rows of float32 (float64 for float64 x) in the "
                                         "CPU's memory, and broadcast to the tokens of x");
    for (int i = 0; i < job.operands && job.in_place; ++i)
      if (touch(first, call.x[i]) || touch(second, call.x[i]))
        return call.refuse(tensor_error, "cos and sin must not share memory with x to be written "
                                         "in place; pass clones");
    return true;
  }
  const bool sound = first.device.device_type == kDLCPU && is_integer(first) &&
                     fits(first, call.inner, call.x[0]) &&
                     (call.inner == 0 || first.shape[first.ndim - 1] == job.axes);
  if (!sound)
    return call.refuse(position_error, "positions must be int32 or int64 on the CPU and broadcast "
                                       "to the tokens of x");
  return true;
}

// Fill in addresses and strides, with as few token dimensions as the strides allow.
bool lay_out(Call &call) {
  Job &job = call.job;
  const DLTensor &first_x = call.x[0];
  const int lead = first_x.ndim - 2;
  int64_t shape[kMaxRank], in[2][kMaxRank], out[2][kMaxRank], first[kMaxRank], second[kMaxRank];
  int64_t *strides[6];
  int count = 0;
  job.tokens = 1;
  for (int d = 0; d < lead; ++d) job.tokens *= shape[d] = first_x.shape[d];
  for (int i = 0; i < job.operands; ++i) {
    const DLTensor &x = call.x[i], &y = call.y[i];
    job.x[i] = {start_of(x),
                start_of(y),
                x.shape[lead],
                stride_of(x, lead),
                stride_of(y, lead),
                stride_of(x, lead + 1),
                stride_of(y, lead + 1),
                {},
                {}};
    for (int d = 0; d < lead; ++d) {
      in[i][d] = stride_of(x, d);
      out[i][d] = stride_of(y, d);
    }
    strides[count++] = in[i];
    strides[count++] = out[i];
    call.elements += job.tokens * job.x[i].heads * job.head_dim;
  }
  if (call.elements == 0) return true;
  broadcast(call.first, call.inner, lead, first);
  strides[count++] = first;
  if (call.from_positions) {
    job.positions = start_of(call.first);
    job.position_bytes = int(size_of(call.first));
    if (job.axes > 1) job.axis_stride = stride_of(call.first, call.first.ndim - 1);
  } else {
    job.cos = start_of(call.first);
    job.sin = start_of(call.second);
    broadcast(call.second, 1, lead, second);
    strides[count++] = second;
  }
  job.dims = merge(lead, shape, strides, count);
  if (job.dims > kMaxDims)
    return call.refuse(tensor_error, "x must have at most 6 token dimensions that do not merge "
                                     "into one another");
  for (int d = 0; d < job.dims; ++d) {
    job.shape[d] = shape[d];
    for (int i = 0; i < job.operands; ++i) {
      job.x[i].token_in[d] = in[i][d];
      job.x[i].token_out[d] = out[i][d];
    }
    (call.from_positions ? job.position_stride : job.cos_stride)[d] = first[d];
    if (!call.from_positions) job.sin_stride[d] = second[d];
  }
  return true;
}

// How many threads torch would use here; -1 with an error set if that fails. OpenMP's own number would
// differ in a thread where torch has not yet applied `torch.set_num_threads`.
long threads_of_torch() {
  PyObject *number = PyObject_CallNoArgs(get_num_threads);
  if (number == nullptr) return -1;
  const long threads = PyLong_AsLong(number);
  Py_DECREF(number);
  return threads;
}

// rotate(plan, angles0, angles1, inverse, gain, path, raises, xs, ys)
//
// Angles are positions and None, for a plan with turns; or cosines and sines. `xs` and `ys` are lists or
// tuples of one tensor or two. If they are the same object, its tensors are written in place. If `xs` is
// None, the only output takes the cosines and the sines themselves, [..., seq, 2, pairs]. Returns True, or
// the answer of `Call` to arguments that do not fit.
PyObject *rotate(PyObject *, PyObject *const *args, Py_ssize_t count) {
  Call call{};
  call.args = args;
  if (!read_options(call, count)) return call.answer;
  if (!(args[7] == Py_None ? read_rows(call) : read_tensors(call))) return call.answer;
  if (!read_angles(call) || !lay_out(call)) return call.answer;
  long path = PyLong_AsLong(args[5]);
  if (path == -1 && PyErr_Occurred()) return nullptr;
  if (call.elements == 0) Py_RETURN_TRUE;
  Job &job = call.job;
  while (job.pairs < kPaths[path].fewest_pairs) ++path;
  static const int64_t cache = last_level_cache();
  const int64_t bytes = call.elements * size_of(call.x[0]);
  job.prefetch = bytes > kNearCaches;
  if (!job.in_place)
    for (int i = 0; i < job.operands; ++i) ask_for_huge_pages(call.y[i]);
  job.stream = !job.in_place && bytes > cache;
  if (is_long(job, call.elements)) {
    const long threads = threads_of_torch();
    if (threads == -1) return nullptr;
    PyThreadState *state = PyEval_SaveThread();
    perform(job, kPaths[path].run, int(threads));
    PyEval_RestoreThread(state);
  } else {
    perform(job, kPaths[path].run, 1);
  }
  Py_RETURN_TRUE;
}

// plan(head_dim, start, pairs, half_in, half_out[, axes, turn_limbs, axis_of_pair])
//
// With uint32 [pairs, 6] limbs, of which the last four are the fraction, and int32 [pairs] axes.
PyObject *plan(PyObject *, PyObject *args) {
  long long head_dim, start, pairs, axes = 1;
  int half_in, half_out;
  const char *turn_limbs = nullptr, *axis_of_pair = nullptr;
  Py_ssize_t limb_bytes = 0, axis_bytes = 0;
  if (!PyArg_ParseTuple(args, "LLLpp|Ly#y#", &head_dim, &start, &pairs, &half_in, &half_out, &axes, &turn_limbs,
                        &limb_bytes, &axis_of_pair, &axis_bytes))
    return nullptr;
  if (start < 0 || pairs < 0 || pairs > (head_dim - start) / 2)
    return PyErr_Format(tensor_error, "%lld pairs from coordinate %lld on do not fit a head of %lld",
                        pairs, start, head_dim);
  const Plan p{head_dim, start, pairs, axes, half_in, half_out};
  if (turn_limbs != nullptr && (limb_bytes != 24 * pairs || axis_bytes != 4 * pairs))
    return PyErr_Format(PyExc_ValueError, "turn_limbs must be uint32 [%lld, 6], axis_of_pair int32 [%lld]", pairs,
                        pairs);
  const int64_t apart = turn_limbs == nullptr ? 0 : padded(pairs);
  PyObject *packed = PyBytes_FromStringAndSize(nullptr, sizeof p + 4 * (kLimbs + 1) * apart);
  if (packed == nullptr) return nullptr;
  char *bytes = PyBytes_AsString(packed);
  std::memset(bytes, 0, size_t(PyBytes_Size(packed)));
  std::memcpy(bytes, &p, sizeof p);
  bytes += sizeof p;
  for (int64_t i = 0; i < kLimbs * apart; ++i)
    if (i % apart < pairs) std::memcpy(bytes + 4 * i, turn_limbs + 24 * (i % apart) + 4 * (i / apart + 2), 4);
  if (apart > 0) std::memcpy(bytes + 4 * kLimbs * apart, axis_of_pair, size_t(axis_bytes));
  return packed;
}

// paths() -> whether this machine has each path, by name, best first; `rotate` takes the path's index
PyObject *paths(PyObject *, PyObject *) {
  PyObject *names = PyDict_New();
  for (const Path &p : kPaths)
    if (names != nullptr && PyDict_SetItemString(names, p.name, p.here ? Py_True : Py_False) < 0)
      Py_CLEAR(names);
  return names;
}

// connect(capsule, TensorError, PositionError, get_num_threads): torch's DLPack functions, the errors
// to raise, and torch.get_num_threads
PyObject *connect(PyObject *, PyObject *args) {
  PyObject *capsule;
  if (!PyArg_ParseTuple(args, "OOOO", &capsule, &tensor_error, &position_error, &get_num_threads))
    return nullptr;
  for (PyObject *kept : {tensor_error, position_error, get_num_threads}) Py_INCREF(kept);
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

// apart(x, y): whether one call of `rotate` may write both. False for some that share no memory too
PyObject *apart(PyObject *, PyObject *args) {
  PyObject *x_object, *y_object;
  DLTensor x, y;
  if (!PyArg_ParseTuple(args, "OO", &x_object, &y_object)) return nullptr;
  if (!view(x_object, &x) || !view(y_object, &y)) return nullptr;
  return PyBool_FromLong(!overlap(x, y));
}

PyMethodDef methods[] = {
    {"apart", apart, METH_VARARGS, nullptr},
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

PyMODINIT_FUNC PyInit__native() {
  PyObject *created = PyModule_Create(&phasor::module);
#ifdef Py_GIL_DISABLED
  // a call keeps everything on its own stack; `connect` sets the global values once
  if (created != nullptr) PyUnstable_Module_SetGIL(created, Py_MOD_GIL_NOT_USED);
#endif
  return created;
}

// The part of the DLPack 1 interface that is used: the layout of its structures, from the DLPack
// specification.
#pragma once
#include <cstdint>

extern "C" {
typedef struct {
  uint32_t major, minor;
} DLPackVersion;
typedef struct {
  int32_t device_type, device_id;
} DLDevice;
typedef struct {
  uint8_t code, bits;
  uint16_t lanes;
} DLDataType;
enum { kDLInt = 0, kDLFloat = 2, kDLBfloat = 4, kDLCPU = 1 };
typedef struct {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} DLTensor;
typedef struct DLPackExchangeAPIHeader {
  DLPackVersion version;
  struct DLPackExchangeAPIHeader *prev_api;
} DLPackExchangeAPIHeader;
typedef struct {
  DLPackExchangeAPIHeader header;
  void *managed_tensor_allocator, *managed_tensor_from_py_object, *managed_tensor_to_py_object;
  int (*dltensor_from_py_object_no_sync)(void *object, DLTensor *out);
  void *current_work_stream;
} DLPackExchangeAPI;
}

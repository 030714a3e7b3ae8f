// The C structures of DLPack 1.x that this module exchanges with torch, and of its C exchange API (DLPack 1.3), which
// torch publishes as the capsule `torch.Tensor.__dlpack_c_exchange_api__`. Only layouts: nothing is linked.
#pragma once

#include <cstdint>

namespace rlinf::comm::dlpack {

struct Version {
  uint32_t major;
  uint32_t minor;
};
constexpr Version kVersion{1, 0};
constexpr uint32_t kMajor = 1;  // the layouts below hold for this major version

struct Device {
  int32_t type;
  int32_t id;
};
constexpr int32_t kCpu = 1;

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
constexpr uint8_t kFloat = 2;
constexpr uint8_t kComplex = 5;
constexpr uint8_t kBool = 6;

struct Tensor {
  void* data;
  Device device;
  int32_t num_dims;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: row-major
  uint64_t byte_offset;
};

struct ManagedTensor {
  Version version;
  void* context;
  void (*deleter)(ManagedTensor* self);
  uint64_t flags;
  Tensor tensor;
};

// Functions return 0, or -1 with a Python error set. The GIL is held.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void* allocate;
  int (*managed_tensor_from_object)(void* object, ManagedTensor** out);
  int (*managed_tensor_to_object)(ManagedTensor* tensor, void** out_object);  // takes the tensor on success
  int (*tensor_from_object)(void* object, Tensor* out);                       // borrows; may be null
  void* current_stream;
};
constexpr const char* kExchangeApiCapsule = "dlpack_exchange_api";

}  // namespace rlinf::comm::dlpack

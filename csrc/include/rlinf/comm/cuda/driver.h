// The CUDA driver's functions for memory that several processes share, found in libcuda.so.1 at run time. A thin layer:
// which handle to use, when to open and close is decided in src/rlinf_comm/ipc. Works in builds without CUDA; types and values from the CUDA driver API's reference
// (cuda.h 13.0).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace rlinf::comm::cuda {

using DevicePointer = unsigned long long;

struct OpaqueHandle {  // CUipcMemHandle
  unsigned char bytes[64];
};

struct MemoryLocation {
  int type;  // 1: device
  int id;
};

struct AllocationProperties {
  int type;  // 1: pinned, the only one
  int handle_types;
  MemoryLocation location;
  void* win32_meta_data;
  unsigned char compression;
  unsigned char rdma_capable;
  unsigned short usage;
  unsigned char reserved[4];
};
static_assert(sizeof(AllocationProperties) == 32, "CUmemAllocationProp");

struct MemoryAccess {
  MemoryLocation location;
  int flags;  // 3: read and write
};

// A physical allocation of cuMemCreate, mapped.
struct Mapping {
  unsigned long long handle = 0;
  DevicePointer pointer = 0;
  uint64_t num_bytes = 0;
};

// Calls throw SystemError with the driver's name of the error. They use the device's primary context, which torch and
// CuPy use as well, and leave the thread's current context as it was.
class Driver {
 public:
  // UserError when there is no driver, no device, or one without these functions.
  static std::shared_ptr<Driver> load(const std::string& path);
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  DevicePointer allocate(int device, uint64_t num_bytes);
  void free(int device, DevicePointer pointer);
  // (first address, bytes) of the allocation that a pointer lies in.
  std::pair<DevicePointer, uint64_t> allocation_of(int device, DevicePointer pointer);
  OpaqueHandle export_legacy(int device, DevicePointer pointer);  // of the pointer's whole allocation
  DevicePointer open_legacy(int device, const OpaqueHandle& handle);
  void close_legacy(int device, DevicePointer pointer);

  Mapping create_mapping(int device, uint64_t num_bytes);  // rounds num_bytes up
  int export_descriptor(const Mapping& mapping);           // the caller closes it
  Mapping import_descriptor(int device, int fd, uint64_t num_bytes);
  void release_mapping(int device, const Mapping& mapping);

  void read(int device, DevicePointer source, void* target, uint64_t num_bytes);
  void write(int device, DevicePointer target, const void* source, uint64_t num_bytes);

 private:
  struct Functions;
  class Current;

  explicit Driver(std::shared_ptr<const Functions> functions);
  void check(int result, const char* call) const;
  void* primary_context(int device);
  Mapping map(int device, unsigned long long handle, uint64_t num_bytes);

  std::shared_ptr<const Functions> cu_;
  std::mutex mutex_;
  std::map<int, void*> contexts_;  // retained until the process ends: others' tensors live in them
};

}  // namespace rlinf::comm::cuda

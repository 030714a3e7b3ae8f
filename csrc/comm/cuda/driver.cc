#include "rlinf/comm/cuda/driver.h"

#include <dlfcn.h>

#include <cerrno>

#include "rlinf/comm/check.h"

namespace rlinf::comm::cuda {

namespace {

constexpr int kSuccess = 0;
constexpr int kLocationDevice = 1;
constexpr int kPinned = 1;
constexpr int kReadWrite = 3;
constexpr unsigned int kLazyPeerAccess = 1;
constexpr int kFileDescriptor = 1;  // of the kinds of shareable handles

}  // namespace

struct Driver::Functions {
  using Handle = unsigned long long;
  int (*Init)(unsigned int);
  int (*GetErrorName)(int, const char**);
  int (*DeviceGet)(int*, int);
  int (*DevicePrimaryCtxRetain)(void**, int);
  int (*CtxPushCurrent_v2)(void*);
  int (*CtxPopCurrent_v2)(void**);
  int (*MemAlloc_v2)(DevicePointer*, size_t);
  int (*MemFree_v2)(DevicePointer);
  int (*MemGetAddressRange_v2)(DevicePointer*, size_t*, DevicePointer);
  int (*IpcGetMemHandle)(OpaqueHandle*, DevicePointer);
  int (*IpcOpenMemHandle_v2)(DevicePointer*, OpaqueHandle, unsigned int);
  int (*IpcCloseMemHandle)(DevicePointer);
  int (*MemGetAllocationGranularity)(size_t*, const AllocationProperties*, int);
  int (*MemCreate)(Handle*, size_t, const AllocationProperties*, unsigned long long);
  int (*MemRelease)(Handle);
  int (*MemAddressReserve)(DevicePointer*, size_t, size_t, DevicePointer, unsigned long long);
  int (*MemAddressFree)(DevicePointer, size_t);
  int (*MemMap)(DevicePointer, size_t, size_t, Handle, unsigned long long);
  int (*MemUnmap)(DevicePointer, size_t);
  int (*MemSetAccess)(DevicePointer, size_t, const MemoryAccess*, size_t);
  int (*MemExportToShareableHandle)(void*, Handle, int, unsigned long long);
  int (*MemImportFromShareableHandle)(Handle*, void*, int);
  int (*MemcpyHtoD_v2)(DevicePointer, const void*, size_t);
  int (*MemcpyDtoH_v2)(void*, DevicePointer, size_t);
};

#define RLINF_CU(call) check(cu_->call, "cu" #call)

std::shared_ptr<Driver> Driver::load(const std::string& path) {
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays open: its threads do
  RLINF_CHECK_USER(library != nullptr, "no CUDA driver: ", ::dlerror());
  auto functions = std::make_shared<Functions>();
#define RLINF_FIND(name)                                                                       \
  functions->name = reinterpret_cast<decltype(functions->name)>(::dlsym(library, "cu" #name)); \
  RLINF_CHECK_USER(functions->name != nullptr, "the CUDA driver ", path,                       \
                   " has no cu" #name "; update it (12.0 or later)")
  RLINF_FIND(Init);
  RLINF_FIND(GetErrorName);
  RLINF_FIND(DeviceGet);
  RLINF_FIND(DevicePrimaryCtxRetain);
  RLINF_FIND(CtxPushCurrent_v2);
  RLINF_FIND(CtxPopCurrent_v2);
  RLINF_FIND(MemAlloc_v2);
  RLINF_FIND(MemFree_v2);
  RLINF_FIND(MemGetAddressRange_v2);
  RLINF_FIND(IpcGetMemHandle);
  RLINF_FIND(IpcOpenMemHandle_v2);
  RLINF_FIND(IpcCloseMemHandle);
  RLINF_FIND(MemGetAllocationGranularity);
  RLINF_FIND(MemCreate);
  RLINF_FIND(MemRelease);
  RLINF_FIND(MemAddressReserve);
  RLINF_FIND(MemAddressFree);
  RLINF_FIND(MemMap);
  RLINF_FIND(MemUnmap);
  RLINF_FIND(MemSetAccess);
  RLINF_FIND(MemExportToShareableHandle);
  RLINF_FIND(MemImportFromShareableHandle);
  RLINF_FIND(MemcpyHtoD_v2);
  RLINF_FIND(MemcpyDtoH_v2);
#undef RLINF_FIND
  const int result = functions->Init(0);
  RLINF_CHECK_USER(result == kSuccess, "the CUDA driver finds no device it can use (cuInit: error ", result, ")");
  return std::shared_ptr<Driver>(new Driver(functions));
}

Driver::Driver(std::shared_ptr<const Functions> functions) : cu_(std::move(functions)) {}

void Driver::check(int result, const char* call) const {
  if (result == kSuccess) {
    return;
  }
  const char* name = nullptr;
  static_cast<void>(cu_->GetErrorName(result, &name));
  const std::string text(call);
  throw SystemError(
      join_text(text.substr(0, text.find('(')), ": CUDA error ", result, " (", name == nullptr ? "unknown" : name, ")"),
      EIO);
}

void* Driver::primary_context(int device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  void*& context = contexts_[device];
  if (context == nullptr) {
    int handle = 0;
    RLINF_CU(DeviceGet(&handle, device));
    RLINF_CU(DevicePrimaryCtxRetain(&context, handle));
  }
  return context;
}

// The device's context is the thread's current one in this scope.
class Driver::Current {
 public:
  Current(Driver* driver, int device) : cu_(*driver->cu_) {
    driver->check(cu_.CtxPushCurrent_v2(driver->primary_context(device)), "cuCtxPushCurrent_v2");
  }
  ~Current() {
    void* popped = nullptr;
    RLINF_CHECK_NOTHROW(cu_.CtxPopCurrent_v2(&popped) == kSuccess, "cuCtxPopCurrent failed");
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Functions& cu_;
};

DevicePointer Driver::allocate(int device, uint64_t num_bytes) {
  const Current current(this, device);
  DevicePointer pointer = 0;
  RLINF_CU(MemAlloc_v2(&pointer, num_bytes));
  return pointer;
}

void Driver::free(int device, DevicePointer pointer) {
  const Current current(this, device);
  RLINF_CU(MemFree_v2(pointer));
}

std::pair<DevicePointer, uint64_t> Driver::allocation_of(int device, DevicePointer pointer) {
  const Current current(this, device);
  DevicePointer base = 0;
  size_t num_bytes = 0;
  RLINF_CU(MemGetAddressRange_v2(&base, &num_bytes, pointer));
  return {base, num_bytes};
}

OpaqueHandle Driver::export_legacy(int device, DevicePointer pointer) {
  const Current current(this, device);
  OpaqueHandle handle{};
  RLINF_CU(IpcGetMemHandle(&handle, pointer));
  return handle;
}

DevicePointer Driver::open_legacy(int device, const OpaqueHandle& handle) {
  const Current current(this, device);
  DevicePointer pointer = 0;
  RLINF_CU(IpcOpenMemHandle_v2(&pointer, handle, kLazyPeerAccess));
  return pointer;
}

void Driver::close_legacy(int device, DevicePointer pointer) {
  const Current current(this, device);
  RLINF_CU(IpcCloseMemHandle(pointer));
}

Mapping Driver::create_mapping(int device, uint64_t num_bytes) {
  const Current current(this, device);
  AllocationProperties properties{};
  properties.type = kPinned;
  properties.handle_types = kFileDescriptor;
  RLINF_CU(DeviceGet(&properties.location.id, device));
  properties.location.type = kLocationDevice;
  size_t granularity = 0;
  RLINF_CU(MemGetAllocationGranularity(&granularity, &properties, 0));
  const uint64_t rounded = (num_bytes + granularity - 1) / granularity * granularity;
  unsigned long long handle = 0;
  RLINF_CU(MemCreate(&handle, rounded, &properties, 0));
  return map(device, handle, rounded);
}

// Takes the handle: it is released where mapping it fails.
Mapping Driver::map(int device, unsigned long long handle, uint64_t num_bytes) {
  Mapping mapping{handle, 0, num_bytes};
  bool is_mapped = false;
  try {
    RLINF_CU(MemAddressReserve(&mapping.pointer, num_bytes, 0, 0, 0));
    RLINF_CU(MemMap(mapping.pointer, num_bytes, 0, handle, 0));
    is_mapped = true;
    MemoryAccess access{{kLocationDevice, 0}, kReadWrite};
    RLINF_CU(DeviceGet(&access.location.id, device));
    RLINF_CU(MemSetAccess(mapping.pointer, num_bytes, &access, 1));
  } catch (const SystemError&) {
    RLINF_CHECK_NOTHROW(!is_mapped || cu_->MemUnmap(mapping.pointer, num_bytes) == kSuccess, "cuMemUnmap failed");
    RLINF_CHECK_NOTHROW(mapping.pointer == 0 || cu_->MemAddressFree(mapping.pointer, num_bytes) == kSuccess,
                        "cuMemAddressFree failed");
    RLINF_CHECK_NOTHROW(cu_->MemRelease(handle) == kSuccess, "cuMemRelease failed");
    throw;
  }
  return mapping;
}

int Driver::export_descriptor(const Mapping& mapping) {
  int fd = -1;
  RLINF_CU(MemExportToShareableHandle(&fd, mapping.handle, kFileDescriptor, 0));
  return fd;
}

Mapping Driver::import_descriptor(int device, int fd, uint64_t num_bytes) {
  const Current current(this, device);
  unsigned long long handle = 0;
  void* as_pointer = reinterpret_cast<void*>(static_cast<intptr_t>(fd));  // the driver's convention
  RLINF_CU(MemImportFromShareableHandle(&handle, as_pointer, kFileDescriptor));
  return map(device, handle, num_bytes);
}

void Driver::release_mapping(int device, const Mapping& mapping) {
  const Current current(this, device);
  RLINF_CU(MemUnmap(mapping.pointer, mapping.num_bytes));
  RLINF_CU(MemAddressFree(mapping.pointer, mapping.num_bytes));
  RLINF_CU(MemRelease(mapping.handle));
}

void Driver::read(int device, DevicePointer source, void* target, uint64_t num_bytes) {
  const Current current(this, device);
  RLINF_CU(MemcpyDtoH_v2(target, source, num_bytes));
}

void Driver::write(int device, DevicePointer target, const void* source, uint64_t num_bytes) {
  const Current current(this, device);
  RLINF_CU(MemcpyHtoD_v2(target, source, num_bytes));
}

#undef RLINF_CU

}  // namespace rlinf::comm::cuda

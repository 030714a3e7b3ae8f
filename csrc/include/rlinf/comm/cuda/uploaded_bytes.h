// Bytes in device memory that are copied there on the stream of the kernel that reads them.
//
// The copy's source is page-locked and stays until the bytes are freed. A copy from pageable memory on another stream
// may still be on its way through the driver's staging buffer when a kernel starts, and would have to be waited for.
#pragma once

#include <cstdint>
#include <cstring>
#include <mutex>

namespace rlinf::comm::cuda {

// `Api` stands for the CUDA runtime on one device: Stream, Event, and allocate, allocate_locked, make_event,
// copy_to_device, record, wait, which throw, and free, free_locked, destroy, which do not. Freeing device memory waits
// for the device, so no kernel loses its bytes.
template <typename Api>
class UploadedBytes {
 public:
  using Stream = typename Api::Stream;

  UploadedBytes(const void* bytes, uint64_t num_bytes, Api api) : num_bytes_(num_bytes), api_(api) {
    try {
      locked_ = api_.allocate_locked(allocated_bytes());
      pointer_ = api_.allocate(allocated_bytes());
      copied_ = api_.make_event();
      has_event_ = true;
    } catch (...) {
      release();
      throw;
    }
    std::memcpy(locked_, bytes, num_bytes);
  }
  ~UploadedBytes() { release(); }
  UploadedBytes(const UploadedBytes&) = delete;
  UploadedBytes& operator=(const UploadedBytes&) = delete;

  // The bytes, for work that is put on `stream` after this call.
  void* on(Stream stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_uploading_) {
      api_.wait(stream, copied_);
    } else {
      api_.copy_to_device(pointer_, locked_, num_bytes_, stream);
      api_.record(copied_, stream);
      is_uploading_ = true;
    }
    return pointer_;
  }
  uint64_t num_bytes() const { return num_bytes_; }

 private:
  uint64_t allocated_bytes() const { return num_bytes_ == 0 ? 1 : num_bytes_; }
  void release() {
    if (pointer_ != nullptr) {
      api_.free(pointer_);
    }
    if (locked_ != nullptr) {
      api_.free_locked(locked_);
    }
    if (has_event_) {
      api_.destroy(copied_);
    }
  }

  uint64_t num_bytes_;
  Api api_;
  void* locked_ = nullptr;
  void* pointer_ = nullptr;
  typename Api::Event copied_{};
  bool has_event_ = false;
  bool is_uploading_ = false;
  std::mutex mutex_;
};

}  // namespace rlinf::comm::cuda

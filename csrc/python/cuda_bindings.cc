// The CUDA side of rlinf_comm._C: lowering and its CPU model in every build, the device in builds with CUDA.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "bindings.h"
#include "gil.h"
#include "rlinf/comm/check.h"
#include "rlinf/comm/cuda/copy_lowering.h"
#include "rlinf/comm/cuda/digest_lowering.h"
#include "rlinf/comm/cuda/digested_copy_lowering.h"
#ifdef RLINF_WITH_CUDA
#include "rlinf/comm/cuda/batched_copy.h"
#include "rlinf/comm/cuda/device_digest.h"
#include "rlinf/comm/cuda/uploaded_bytes.h"
#endif

namespace rlinf::comm {

namespace {

using cuda::CopyTile;
using cuda::DigestAxis;
using cuda::DigestedCopyTile;
using cuda::DigestTile;

template <typename T>
using ConvertedColumn = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <typename Tile>
py::bytes bytes_of(const std::vector<Tile>& tiles) {
  return py::bytes(reinterpret_cast<const char*>(tiles.data()), tiles.size() * sizeof(Tile));
}

template <typename Tile>
std::vector<Tile> tiles_from(const py::bytes& bytes) {
  const auto view = static_cast<std::string_view>(bytes);
  RLINF_CHECK_INTERNAL(view.size() % sizeof(Tile) == 0, view.size(), " bytes are no tiles");
  std::vector<Tile> tiles(view.size() / sizeof(Tile));
  if (!tiles.empty()) {
    std::memcpy(tiles.data(), view.data(), view.size());
  }
  return tiles;
}

uint64_t address_at(const ConvertedColumn<int64_t>& pointers, int32_t buffer, int64_t offset, const char* side,
                    py::ssize_t row) {
  RLINF_CHECK_USER(buffer >= 0 && buffer < pointers.size(), "copy ", row, ": ", side, "_buffer=", buffer, ", but ",
                   pointers.size(), " ", side, "_pointers are given");
  return static_cast<uint64_t>(pointers.data()[buffer] + offset);
}

// The columns of a copy table (rlinf_comm.copies.CopyTable), then the base addresses.
struct CopyColumns {
  ConvertedColumn<int32_t> src_buffer, dst_buffer;
  ConvertedColumn<int64_t> src_offset, dst_offset, lengths, src_strides, dst_strides;
  ConvertedColumn<uint8_t> src_dtype, dst_dtype;
  ConvertedColumn<int64_t> src_pointers, dst_pointers;

  cuda::StridedCopy row(py::ssize_t row) const {
    const py::ssize_t num_dims = lengths.shape(1);
    cuda::StridedCopy copy;
    copy.source = address_at(src_pointers, src_buffer.data()[row], src_offset.data()[row], "src", row);
    copy.destination = address_at(dst_pointers, dst_buffer.data()[row], dst_offset.data()[row], "dst", row);
    copy.source_dtype = src_dtype.data()[row];
    copy.destination_dtype = dst_dtype.data()[row];
    for (py::ssize_t d = row * num_dims; d < (row + 1) * num_dims; ++d) {
      copy.dimensions.push_back({lengths.data()[d], src_strides.data()[d], dst_strides.data()[d]});
    }
    return copy;
  }
};

py::bytes lower_copies(const ConvertedColumn<int32_t>& src_buffer, const ConvertedColumn<int32_t>& dst_buffer,
                       const ConvertedColumn<int64_t>& src_offset, const ConvertedColumn<int64_t>& dst_offset,
                       const ConvertedColumn<int64_t>& lengths, const ConvertedColumn<int64_t>& src_strides,
                       const ConvertedColumn<int64_t>& dst_strides, const ConvertedColumn<uint8_t>& src_dtype,
                       const ConvertedColumn<uint8_t>& dst_dtype, const ConvertedColumn<int64_t>& src_pointers,
                       const ConvertedColumn<int64_t>& dst_pointers) {
  RLINF_CHECK_INTERNAL(lengths.ndim() == 2 && lengths.shape(0) == src_buffer.size(), "");
  const CopyColumns columns{src_buffer,  dst_buffer, src_offset, dst_offset,   lengths,     src_strides,
                            dst_strides, src_dtype,  dst_dtype,  src_pointers, dst_pointers};
  std::vector<CopyTile> tiles;
  {
    const WithoutGil no_gil;
    for (py::ssize_t row = 0; row < src_buffer.size(); ++row) {
      lower_copy(columns.row(row), tiles);
    }
  }
  return bytes_of(tiles);
}

// The same, with the columns of the digest table beside it; returns (tiles that copy and digest, tiles that copy, tiles
// that digest).
py::tuple lower_digested_copies(
    const ConvertedColumn<int32_t>& src_buffer, const ConvertedColumn<int32_t>& dst_buffer,
    const ConvertedColumn<int64_t>& src_offset, const ConvertedColumn<int64_t>& dst_offset,
    const ConvertedColumn<int64_t>& lengths, const ConvertedColumn<int64_t>& src_strides,
    const ConvertedColumn<int64_t>& dst_strides, const ConvertedColumn<uint8_t>& src_dtype,
    const ConvertedColumn<uint8_t>& dst_dtype, const ConvertedColumn<int64_t>& src_pointers,
    const ConvertedColumn<int64_t>& dst_pointers, const ConvertedColumn<int64_t>& first_index,
    const ConvertedColumn<int64_t>& index_strides, const ConvertedColumn<int32_t>& digest) {
  RLINF_CHECK_INTERNAL(lengths.ndim() == 2 && lengths.shape(0) == src_buffer.size(), "");
  RLINF_CHECK_INTERNAL(index_strides.size() == lengths.size() && digest.size() == src_buffer.size(), "");
  const CopyColumns columns{src_buffer,  dst_buffer, src_offset, dst_offset,   lengths,     src_strides,
                            dst_strides, src_dtype,  dst_dtype,  src_pointers, dst_pointers};
  const py::ssize_t num_dims = lengths.shape(1);
  cuda::DigestedCopyTiles tiles;
  {
    const WithoutGil no_gil;
    constexpr int64_t kRunBytes = int64_t{1} << 30;  // tiles of digests alone are few here
    for (py::ssize_t row = 0; row < src_buffer.size(); ++row) {
      const int64_t* const strides = index_strides.data() + row * num_dims;
      lower_digested_copy({columns.row(row), {strides, strides + num_dims},
                           static_cast<uint64_t>(first_index.data()[row]), static_cast<uint32_t>(digest.data()[row])},
                          cuda::run_words_of(kRunBytes), tiles);
    }
  }
  return py::make_tuple(bytes_of(tiles.together), bytes_of(tiles.copies), bytes_of(tiles.digests));
}

py::bytes lower_digests(const std::vector<std::tuple<uint64_t, uint64_t, uint64_t, std::vector<int64_t>,
                                                     std::vector<int64_t>, std::vector<int64_t>, uint32_t>>& boxes) {
  std::vector<DigestTile> tiles;
  int64_t num_bytes = 0;
  for (const auto& box : boxes) {
    int64_t box_bytes = static_cast<int64_t>(std::get<1>(box));
    for (const int64_t length : std::get<3>(box)) {
      box_bytes *= length;
    }
    num_bytes += box_bytes;
  }
  const int64_t run_words = cuda::run_words_of(num_bytes);
  for (const auto& [address, element_bytes, first_index, shape, memory_strides, index_strides, piece] : boxes) {
    RLINF_CHECK_INTERNAL(shape.size() == memory_strides.size() && shape.size() == index_strides.size(), "");
    std::vector<DigestAxis> axes;
    for (size_t i = 0; i < shape.size(); ++i) {
      axes.push_back(DigestAxis{shape[i], memory_strides[i], index_strides[i]});
    }
    cuda::lower_digest(address, element_bytes, first_index, std::move(axes), piece, run_words, tiles);
  }
  return bytes_of(tiles);
}

std::vector<std::pair<uint64_t, uint64_t>> pairs_of(const std::vector<Digest>& sums) {
  std::vector<std::pair<uint64_t, uint64_t>> pairs;
  for (const Digest& sum : sums) {
    pairs.emplace_back(sum.low, sum.high);
  }
  return pairs;
}

#ifdef RLINF_WITH_CUDA

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    RLINF_CHECK_CUDA(cudaGetDevice(&before_));
    RLINF_CHECK_CUDA(cudaSetDevice(device));
  }
  ~DeviceGuard() { RLINF_CHECK_NOTHROW(cudaSetDevice(before_) == cudaSuccess, "cudaSetDevice failed"); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
};

// The CUDA runtime on one device, for UploadedBytes.
struct Runtime {
  using Stream = cudaStream_t;
  using Event = cudaEvent_t;

  int device;

  void* allocate(uint64_t num_bytes) const {
    const DeviceGuard guard(device);
    void* pointer = nullptr;
    RLINF_CHECK_CUDA(cudaMalloc(&pointer, num_bytes));
    return pointer;
  }
  void* allocate_locked(uint64_t num_bytes) const {
    const DeviceGuard guard(device);
    void* pointer = nullptr;
    RLINF_CHECK_CUDA(cudaMallocHost(&pointer, num_bytes));
    return pointer;
  }
  Event make_event() const {
    const DeviceGuard guard(device);
    Event event = nullptr;
    RLINF_CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  }
  void copy_to_device(void* target, const void* source, uint64_t num_bytes, Stream stream) const {
    const DeviceGuard guard(device);
    RLINF_CHECK_CUDA(cudaMemcpyAsync(target, source, num_bytes, cudaMemcpyHostToDevice, stream));
  }
  void record(Event event, Stream stream) const {
    const DeviceGuard guard(device);
    RLINF_CHECK_CUDA(cudaEventRecord(event, stream));
  }
  void wait(Stream stream, Event event) const {
    const DeviceGuard guard(device);
    RLINF_CHECK_CUDA(cudaStreamWaitEvent(stream, event, 0));
  }
  void free(void* pointer) const { RLINF_CHECK_NOTHROW(cudaFree(pointer) == cudaSuccess, "cudaFree failed"); }
  void free_locked(void* pointer) const {
    RLINF_CHECK_NOTHROW(cudaFreeHost(pointer) == cudaSuccess, "cudaFreeHost failed");
  }
  void destroy(Event event) const {
    RLINF_CHECK_NOTHROW(cudaEventDestroy(event) == cudaSuccess, "cudaEventDestroy failed");
  }
};

class DeviceBytes : public cuda::UploadedBytes<Runtime> {
 public:
  DeviceBytes(const void* bytes, uint64_t num_bytes, int device)
      : UploadedBytes(bytes, num_bytes, Runtime{device}), device_(device) {}
  int device() const { return device_; }

 private:
  int device_;
};

cudaStream_t stream_from(uint64_t stream) {
  return reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(stream));
}

// Sums on a device, allocated once and zeroed for each run.
class DeviceSums {
 public:
  DeviceSums(uint64_t num_sums, int device) : num_sums_(num_sums), device_(device) {
    const DeviceGuard guard(device);
    RLINF_CHECK_CUDA(cudaMalloc(&pointer_, std::max<uint64_t>(num_sums, 1) * sizeof(Digest)));
  }
  ~DeviceSums() { RLINF_CHECK_NOTHROW(cudaFree(pointer_) == cudaSuccess, "cudaFree failed"); }
  DeviceSums(const DeviceSums&) = delete;
  DeviceSums& operator=(const DeviceSums&) = delete;

  int device() const { return device_; }
  Digest* zeroed(cudaStream_t stream) const {
    RLINF_CHECK_CUDA(cudaMemsetAsync(pointer_, 0, num_sums_ * sizeof(Digest), stream));
    return static_cast<Digest*>(pointer_);
  }
  // Waits for the stream.
  std::vector<Digest> values(cudaStream_t stream) const {
    std::vector<Digest> sums(num_sums_);
    RLINF_CHECK_CUDA(
        cudaMemcpyAsync(sums.data(), pointer_, num_sums_ * sizeof(Digest), cudaMemcpyDeviceToHost, stream));
    RLINF_CHECK_CUDA(cudaStreamSynchronize(stream));
    return sums;
  }

 private:
  uint64_t num_sums_;
  int device_;
  void* pointer_ = nullptr;
};

template <typename Tile>
const Tile* tiles_on(DeviceBytes& tiles, cudaStream_t stream) {
  return static_cast<const Tile*>(tiles.on(stream));
}

template <typename Tile>
uint64_t num_tiles_of(const DeviceBytes& tiles) {
  return tiles.num_bytes() / sizeof(Tile);
}

std::vector<Digest> digest_on_device(DeviceBytes& tiles, const DeviceSums& sums, int max_ctas, cudaStream_t stream) {
  const DeviceGuard guard(sums.device());
  cuda::device_digest(tiles_on<DigestTile>(tiles, stream), num_tiles_of<DigestTile>(tiles), sums.zeroed(stream),
                      max_ctas, stream);
  return sums.values(stream);
}

std::vector<Digest> copy_and_digest_on_device(DeviceBytes& together, DeviceBytes& copies, DeviceBytes& digests,
                                              const DeviceSums& sums, int max_ctas, cudaStream_t stream) {
  const DeviceGuard guard(sums.device());
  Digest* const device_sums = sums.zeroed(stream);
  cuda::digested_copy(tiles_on<DigestedCopyTile>(together, stream), num_tiles_of<DigestedCopyTile>(together),
                      device_sums, max_ctas, stream);
  cuda::batched_copy(tiles_on<CopyTile>(copies, stream), num_tiles_of<CopyTile>(copies), max_ctas, stream);
  cuda::device_digest(tiles_on<DigestTile>(digests, stream), num_tiles_of<DigestTile>(digests), device_sums, max_ctas,
                      stream);
  return sums.values(stream);
}

void bind_device(py::module_& module) {
  py::class_<DeviceBytes>(module, "DeviceBytes")
      .def(py::init([](const py::bytes& bytes, int device) {
             const auto view = static_cast<std::string_view>(bytes);
             const WithoutGil no_gil;
             return std::make_unique<DeviceBytes>(view.data(), view.size(), device);
           }),
           py::arg("bytes"), py::arg("device"))
      .def_property_readonly("num_bytes", &DeviceBytes::num_bytes);
  module.def(
      "run_copy_tiles",
      [](DeviceBytes& tiles, int max_ctas, uint64_t stream) {
        const DeviceGuard guard(tiles.device());
        cuda::batched_copy(static_cast<const CopyTile*>(tiles.on(stream_from(stream))),
                           tiles.num_bytes() / sizeof(CopyTile), max_ctas, stream_from(stream));
      },
      py::arg("tiles"), py::arg("max_ctas"), py::arg("stream"), py::call_guard<WithoutGil>());
  py::class_<DeviceSums>(module, "DeviceSums")
      .def(py::init<uint64_t, int>(), py::arg("num_sums"), py::arg("device"), py::call_guard<WithoutGil>());
  module.def(
      "run_digest_tiles",
      [](DeviceBytes& tiles, const DeviceSums& device_sums, int max_ctas, uint64_t stream) {
        std::vector<Digest> sums;
        {
          const WithoutGil no_gil;
          sums = digest_on_device(tiles, device_sums, max_ctas, stream_from(stream));
        }
        return pairs_of(sums);
      },
      py::arg("tiles"), py::arg("sums"), py::arg("max_ctas"), py::arg("stream"));
  module.def(
      "run_digested_copy_tiles",
      [](DeviceBytes& together, DeviceBytes& copies, DeviceBytes& digests, const DeviceSums& device_sums, int max_ctas,
         uint64_t stream) {
        std::vector<Digest> sums;
        {
          const WithoutGil no_gil;
          sums = copy_and_digest_on_device(together, copies, digests, device_sums, max_ctas, stream_from(stream));
        }
        return pairs_of(sums);
      },
      py::arg("together"), py::arg("copies"), py::arg("digests"), py::arg("sums"), py::arg("max_ctas"),
      py::arg("stream"));
}

#endif

}  // namespace

void bind_cuda(py::module_& module) {
  module.def("lower_copies", &lower_copies, py::arg("src_buffer"), py::arg("dst_buffer"), py::arg("src_offset"),
             py::arg("dst_offset"), py::arg("lengths"), py::arg("src_strides"), py::arg("dst_strides"),
             py::arg("src_dtype"), py::arg("dst_dtype"), py::arg("src_pointers"), py::arg("dst_pointers"));
  module.def(
      "run_copy_tiles_on_cpu",
      [](const py::bytes& bytes) {
        const auto tiles = tiles_from<CopyTile>(bytes);
        const WithoutGil no_gil;
        cuda::run_tiles_on_cpu(tiles.data(), tiles.size());
      },
      py::arg("tiles"));
  module.def("lower_digests", &lower_digests, py::arg("boxes"));
  module.def(
      "digest_tiles_on_cpu",
      [](const py::bytes& bytes, uint64_t num_sums) {
        const auto tiles = tiles_from<DigestTile>(bytes);
        std::vector<Digest> sums(num_sums);
        {
          const WithoutGil no_gil;
          cuda::digest_tiles_on_cpu(tiles.data(), tiles.size(), sums.data(), num_sums);
        }
        return pairs_of(sums);
      },
      py::arg("tiles"), py::arg("num_sums"));
  module.def("lower_digested_copies", &lower_digested_copies, py::arg("src_buffer"), py::arg("dst_buffer"),
             py::arg("src_offset"), py::arg("dst_offset"), py::arg("lengths"), py::arg("src_strides"),
             py::arg("dst_strides"), py::arg("src_dtype"), py::arg("dst_dtype"), py::arg("src_pointers"),
             py::arg("dst_pointers"), py::arg("first_index"), py::arg("index_strides"), py::arg("digest"));
  module.def(
      "run_digested_copy_tiles_on_cpu",
      [](const py::bytes& together, const py::bytes& copies, const py::bytes& digests, uint64_t num_sums) {
        const cuda::DigestedCopyTiles tiles{tiles_from<DigestedCopyTile>(together), tiles_from<CopyTile>(copies),
                                            tiles_from<DigestTile>(digests)};
        std::vector<Digest> sums(num_sums);
        {
          const WithoutGil no_gil;
          cuda::run_digested_copies_on_cpu(tiles, sums.data(), num_sums);
        }
        return pairs_of(sums);
      },
      py::arg("together"), py::arg("copies"), py::arg("digests"), py::arg("num_sums"));
#ifdef RLINF_WITH_CUDA
  bind_device(module);
#endif
}

}  // namespace rlinf::comm

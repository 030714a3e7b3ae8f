// rlinf_comm._C: converts between Python and the C++ core, releases the GIL around everything that copies or waits, and
// looks at signals between slices of a wait. Nothing else belongs here.
#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "rlinf/comm/box_copy.h"
#include "rlinf/comm/channel.h"
#include "rlinf/comm/check.h"
#include "rlinf/comm/digest.h"
#include "rlinf/comm/memory_copy.h"
#include "rlinf/comm/segment.h"
#include "rlinf/comm/shared_words.h"
#ifdef RLINF_WITH_CUDA
#include "rlinf/comm/cuda/batched_copy.h"
#endif

namespace py = pybind11;

namespace rlinf::comm {

void bind_cuda(py::module_& module);  // bind_cuda.cc

namespace {

// Memory of some Python object (a tensor), seen through the buffer protocol. Keeps the object alive.
struct BorrowedBytes {
  py::object owner;
  std::byte* pointer;
  uint64_t num_bytes;
};

// The tensors of a taken item, seen through the buffer protocol: either in place, where the block is freed when the
// last view is gone, or copied out of a block that was freed at once.
class TakenBytes {
 public:
  TakenBytes(std::shared_ptr<Channel> channel, const TakenItem& item)
      : channel_(std::move(channel)), block_(item.block), pid_(::getpid()) {
    const ByteView& last = item.buffers.back();
    begin_ = static_cast<const std::byte*>(item.buffers.front().pointer);
    num_bytes_ = static_cast<uint64_t>(static_cast<const std::byte*>(last.pointer) - begin_) + last.num_bytes;
    for (const ByteView& buffer : item.buffers) {
      starts_.push_back(static_cast<uint64_t>(static_cast<const std::byte*>(buffer.pointer) - begin_));
    }
    if (!item.may_stay) {
      copy_out();
    }
  }
  ~TakenBytes() {
    if (channel_ && pid_ == ::getpid()) {  // a forked child sees its parent's views, but the block is not its to free
      release();
    }
  }
  TakenBytes(const TakenBytes&) = delete;
  TakenBytes& operator=(const TakenBytes&) = delete;

  py::buffer_info buffer() {
    // Writable: the bytes are the consumer's alone.
    return {const_cast<std::byte*>(begin_), 1, "B", 1, {static_cast<py::ssize_t>(num_bytes_)}, {py::ssize_t{1}}};
  }
  const std::vector<uint64_t>& starts() const { return starts_; }

 private:
  void copy_out() {
    {
      py::gil_scoped_release no_gil;
      void* memory = ::operator new(std::max<uint64_t>(num_bytes_, 1), std::align_val_t{kBlockAlignment});
      private_.reset(static_cast<std::byte*>(memory));
      copy_bytes(memory, begin_, num_bytes_);
      begin_ = private_.get();
    }
    release();
    channel_.reset();
  }
  void release() {
    try {
      channel_->release(block_);
    } catch (const std::exception& error) {
      RLINF_CHECK_NOTHROW(false, error.what());
    }
  }
  struct AlignedDelete {
    void operator()(std::byte* memory) const { ::operator delete(memory, std::align_val_t{kBlockAlignment}); }
  };

  std::shared_ptr<Channel> channel_;  // null once the block is free
  BlockRef block_;
  pid_t pid_;
  std::unique_ptr<std::byte, AlignedDelete> private_;
  const std::byte* begin_ = nullptr;
  uint64_t num_bytes_ = 0;
  std::vector<uint64_t> starts_;  // of each buffer
};

// Py_buffer with a destructor.
class ReadableBuffer {
 public:
  explicit ReadableBuffer(py::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) {
      throw py::error_already_set();
    }
  }
  ~ReadableBuffer() { PyBuffer_Release(&view_); }
  ReadableBuffer(const ReadableBuffer&) = delete;
  ReadableBuffer& operator=(const ReadableBuffer&) = delete;
  ByteView view() const { return ByteView{view_.buf, static_cast<uint64_t>(view_.len)}; }

 private:
  Py_buffer view_{};
};

int64_t deadline_from(const py::object& timeout_s) {
  if (timeout_s.is_none()) {
    return kNever;
  }
  const double seconds = timeout_s.cast<double>();
  RLINF_CHECK_USER(seconds >= 0, "timeout_s=", seconds, " must not be negative; None waits without a limit");
  constexpr double kLongestS = 1e9;  // 30 years; keeps the sum within 64 bits
  return seconds > kLongestS ? kNever : monotonic_ns() + static_cast<int64_t>(seconds * 1e9);
}

// Repeats `attempt` until it is no longer pending. Lets Ctrl-C through between the slices.
template <typename Attempt>
Outcome wait_for(Attempt attempt) {
  while (true) {
    Outcome outcome;
    {
      py::gil_scoped_release no_gil;
      outcome = attempt();
    }
    if (outcome != Outcome::kPending) {
      return outcome;
    }
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
  }
}

Outcome put(Channel& channel, const py::object& head, const py::sequence& buffers, int64_t key, double weight,
            int64_t policy_version, const py::object& timeout_s) {
  const ReadableBuffer head_buffer(head);
  std::vector<std::unique_ptr<ReadableBuffer>> held;
  std::vector<ByteView> views;
  held.reserve(py::len(buffers));
  views.reserve(py::len(buffers));
  for (const auto& buffer : buffers) {
    held.push_back(std::make_unique<ReadableBuffer>(buffer));
    views.push_back(held.back()->view());
  }
  const uint64_t num_bytes = Channel::item_bytes(head_buffer.view().num_bytes, views);
  WaitState wait;
  wait.deadline_ns = deadline_from(timeout_s);
  BlockRef block;
  return wait_for([&] {
    const Outcome outcome = channel.reserve(num_bytes, wait, &block);
    if (outcome == Outcome::kDone) {
      channel.fill(block, head_buffer.view(), views);
      channel.commit(block, ItemLabels{key, weight, policy_version});
    }
    return outcome;
  });
}

// (head, buffers, key, weight, policy_version, sequence, num_bytes)
py::tuple describe(const std::shared_ptr<Channel>& channel, const TakenItem& item) {
  py::bytes head(reinterpret_cast<const char*>(item.head), item.head_bytes);
  py::tuple buffers(item.buffers.size());
  if (item.buffers.empty()) {
    channel->release(item.block);
  } else {
    auto taken = std::make_unique<TakenBytes>(channel, item);
    const TakenBytes* raw = taken.get();
    const py::object owner = py::cast(std::move(taken));
    const auto whole = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(owner.ptr()));
    if (!whole) {
      throw py::error_already_set();
    }
    for (size_t i = 0; i < item.buffers.size(); ++i) {
      const uint64_t start = raw->starts()[i];
      const uint64_t stop = start + item.buffers[i].num_bytes;
      buffers[i] = whole[py::slice(static_cast<py::ssize_t>(start), static_cast<py::ssize_t>(stop), 1)];
    }
  }
  return py::make_tuple(std::move(head), std::move(buffers), item.labels.key, item.labels.weight,
                        item.labels.policy_version, item.sequence, item.num_bytes);
}

py::tuple take(const std::shared_ptr<Channel>& channel, uint64_t max_items, uint64_t min_items,
               const py::object& max_weight, const py::object& keys, const py::object& timeout_s) {
  TakeRequest request;
  request.max_items = max_items;
  request.min_items = min_items;
  request.max_weight = max_weight.is_none() ? HUGE_VAL : max_weight.cast<double>();
  request.any_key = keys.is_none();
  if (!request.any_key) {
    request.keys = keys.cast<std::vector<int64_t>>();
    std::sort(request.keys.begin(), request.keys.end());
  }
  WaitState wait;
  wait.deadline_ns = deadline_from(timeout_s);
  std::vector<TakenItem> items;
  const Outcome outcome = wait_for([&] { return channel->take(request, wait, &items); });
  py::list described;
  for (const TakenItem& item : items) {
    described.append(describe(channel, item));
  }
  return py::make_tuple(outcome, described);
}

py::dict counts(Channel& channel) {
  ChannelCounts counts;
  {
    py::gil_scoped_release no_gil;
    counts = channel.counts();
  }
  py::dict result;
  result["num_items"] = counts.num_items;
  result["num_bytes"] = counts.num_bytes;
  result["num_held_items"] = counts.num_held_items;
  result["num_held_bytes"] = counts.num_held_bytes;
  result["capacity_items"] = counts.capacity_items;
  result["capacity_bytes"] = counts.capacity_bytes;
  result["num_put"] = counts.num_put;
  result["num_taken"] = counts.num_taken;
  result["num_blocked_puts"] = counts.num_blocked_puts;
  result["blocked_put_s"] = static_cast<double>(counts.blocked_put_ns) * 1e-9;
  result["blocked_take_s"] = static_cast<double>(counts.blocked_take_ns) * 1e-9;
  result["num_producers"] = counts.num_producers;
  result["num_closed"] = counts.num_closed;
  result["aborted"] = counts.aborted;
  return result;
}

py::tuple address_tuple(const SegmentAddress& address) {
  return py::make_tuple(address.creator.pid, address.creator.start_ticks, address.fd, address.nonce);
}

SegmentAddress address_from(const py::tuple& fields) {
  RLINF_CHECK_INTERNAL(fields.size() == 4, "an address has 4 fields");
  return SegmentAddress{
      {fields[0].cast<int32_t>(), fields[1].cast<uint64_t>()}, fields[2].cast<int32_t>(), fields[3].cast<uint64_t>()};
}

std::byte* pointer_from(uint64_t address) {
  return reinterpret_cast<std::byte*>(static_cast<uintptr_t>(address));
}

void copy_box_py(uint64_t destination, uint64_t source, uint64_t element_bytes, const std::vector<int64_t>& shape,
                 const std::vector<int64_t>& destination_strides, const std::vector<int64_t>& source_strides) {
  RLINF_CHECK_INTERNAL(shape.size() == destination_strides.size() && shape.size() == source_strides.size(), "");
  std::vector<CopyAxis> axes;
  for (size_t i = 0; i < shape.size(); ++i) {
    axes.push_back(CopyAxis{shape[i], source_strides[i], destination_strides[i]});
  }
  py::gil_scoped_release no_gil;
  copy_box(pointer_from(destination), pointer_from(source), element_bytes, std::move(axes));
}

py::tuple digest_box_py(uint64_t elements, uint64_t element_bytes, uint64_t first_index,
                        const std::vector<int64_t>& shape, const std::vector<int64_t>& memory_strides,
                        const std::vector<int64_t>& index_strides) {
  RLINF_CHECK_INTERNAL(shape.size() == memory_strides.size() && shape.size() == index_strides.size(), "");
  std::vector<DigestAxis> axes;
  for (size_t i = 0; i < shape.size(); ++i) {
    axes.push_back(DigestAxis{shape[i], memory_strides[i], index_strides[i]});
  }
  Digest digest;
  {
    py::gil_scoped_release no_gil;
    digest = digest_box(pointer_from(elements), element_bytes, first_index, std::move(axes));
  }
  return py::make_tuple(digest.low, digest.high);
}

bool has_cuda_kernels() {
#ifdef RLINF_WITH_CUDA
  return true;
#else
  return false;
#endif
}

int num_cuda_devices() {
#ifdef RLINF_WITH_CUDA
  return cuda::num_devices();
#else
  return 0;
#endif
}

void bind_channel(py::module_& module) {
  py::native_enum<Outcome>(module, "Outcome", "enum.IntEnum")
      .value("DONE", Outcome::kDone)
      .value("PENDING", Outcome::kPending)
      .value("CLOSED", Outcome::kClosed)
      .value("ABORTED", Outcome::kAborted)
      .value("TIMED_OUT", Outcome::kTimedOut)
      .value("STALLED", Outcome::kStalled)
      .finalize();

  py::class_<BorrowedBytes>(module, "BorrowedBytes", py::buffer_protocol())
      .def(py::init([](py::object owner, uint64_t pointer, uint64_t num_bytes) {
             return BorrowedBytes{std::move(owner), pointer_from(pointer), num_bytes};
           }),
           py::arg("owner"), py::arg("pointer"), py::arg("num_bytes"))
      .def_buffer([](BorrowedBytes& bytes) -> py::buffer_info {
        return {bytes.pointer, 1, "B", 1, {static_cast<py::ssize_t>(bytes.num_bytes)}, {py::ssize_t{1}}};
      });

  py::class_<TakenBytes>(module, "TakenBytes", py::buffer_protocol()).def_buffer(&TakenBytes::buffer);

  py::class_<Channel, std::shared_ptr<Channel>>(module, "Channel")
      .def_static("create", &Channel::create, py::arg("name"), py::arg("capacity_items"), py::arg("capacity_bytes"),
                  py::arg("num_producers"))
      .def_static(
          "open", [](const py::tuple& address) { return Channel::open(address_from(address)); }, py::arg("address"))
      .def("address", [](const Channel& channel) { return address_tuple(channel.address()); })
      .def("put", &put, py::arg("head"), py::arg("buffers"), py::arg("key"), py::arg("weight"),
           py::arg("policy_version"), py::arg("timeout_s"))
      .def("take", &take, py::arg("max_items"), py::arg("min_items"), py::arg("max_weight"), py::arg("keys"),
           py::arg("timeout_s"))
      .def("close_producer", &Channel::close_producer, py::call_guard<py::gil_scoped_release>())
      .def("reopen", &Channel::reopen, py::arg("num_producers"), py::call_guard<py::gil_scoped_release>())
      .def("abort", &Channel::abort, py::arg("reason"), py::call_guard<py::gil_scoped_release>())
      .def("abort_reason", [](Channel& channel) { return py::bytes(channel.abort_reason()); })
      .def("counts", &counts)
      .def("_lock_and_leave", &Channel::lock_and_leave)
      .def("_reserve_and_leave", [](Channel& channel, uint64_t num_bytes) {
        WaitState wait;
        BlockRef block;
        return channel.reserve(num_bytes, wait, &block);
      });
}

void bind_segment(py::module_& module) {
  py::class_<Segment, std::shared_ptr<Segment>>(module, "Segment", py::buffer_protocol())
      .def_static("create", &Segment::create, py::arg("name"), py::arg("num_bytes"))
      .def_static(
          "open", [](const py::tuple& address) { return Segment::open(address_from(address)); }, py::arg("address"))
      .def("address", [](const Segment& segment) { return address_tuple(segment.address()); })
      .def_property_readonly("num_bytes", &Segment::num_bytes)
      .def_property_readonly("pointer",
                             [](const Segment& segment) { return reinterpret_cast<uintptr_t>(segment.bytes()); })
      .def_buffer([](Segment& segment) -> py::buffer_info {
        return {segment.bytes(), 1, "B", 1, {static_cast<py::ssize_t>(segment.num_bytes())}, {py::ssize_t{1}}};
      });

  py::class_<SharedWords>(module, "SharedWords")
      .def(py::init<std::shared_ptr<Segment>, uint64_t>(), py::arg("segment"), py::arg("num_words"))
      .def_static("bytes_needed", &SharedWords::bytes_needed, py::arg("num_words"))
      .def("load", &SharedWords::load, py::arg("index"))
      .def("store", &SharedWords::store, py::arg("index"), py::arg("value"))
      .def("notify_all", &SharedWords::notify_all)
      .def("sequence", &SharedWords::sequence)
      .def(
          "wait",
          [](SharedWords& words, uint32_t seen, double timeout_s) {
            const int64_t deadline_ns = deadline_from(py::float_(std::max(timeout_s, 0.0)));
            py::gil_scoped_release no_gil;
            words.wait(seen, deadline_ns);
          },
          py::arg("seen"), py::arg("timeout_s"));

  module.def(
      "current_process",
      [] {
        const ProcessId process = current_process();
        return py::make_tuple(process.pid, process.start_ticks);
      },
      "(pid, start time in clock ticks since boot) of the calling process");
  module.def(
      "is_alive", [](int32_t pid, uint64_t start_ticks) { return is_alive(ProcessId{pid, start_ticks}); },
      py::arg("pid"), py::arg("start_ticks"));
}

}  // namespace

}  // namespace rlinf::comm

PYBIND11_MODULE(_C, module) {
  using namespace rlinf::comm;
  module.doc() = "Native core of rlinf_comm. Private: use the Python modules.";
  module.attr("__version__") = RLINF_VERSION;
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) {
        std::rethrow_exception(pointer);
      }
    } catch (const SystemError& error) {
      errno = error.error_number();
      PyErr_SetObject(PyExc_OSError, py::make_tuple(error.error_number(), error.what()).ptr());
    }
    // UserError is an invalid_argument, which pybind11 makes a ValueError; InternalError becomes a RuntimeError.
  });
  bind_channel(module);
  bind_segment(module);
  module.def("copy_box", &copy_box_py, py::arg("destination"), py::arg("source"), py::arg("element_bytes"),
             py::arg("shape"), py::arg("destination_strides"), py::arg("source_strides"));
  module.def("digest_box", &digest_box_py, py::arg("elements"), py::arg("element_bytes"), py::arg("first_index"),
             py::arg("shape"), py::arg("memory_strides"), py::arg("index_strides"));
  module.def("has_cuda_kernels", &has_cuda_kernels);
  module.def("num_cuda_devices", &num_cuda_devices);
  bind_cuda(module);
}

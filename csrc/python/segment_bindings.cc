// Segments and shared words for Python.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <memory>

#include "bindings.h"
#include "rlinf/comm/check.h"
#include "rlinf/comm/memory_copy.h"
#include "rlinf/comm/process_id.h"
#include "rlinf/comm/shared_words.h"
#include "rlinf/comm/sync.h"

namespace rlinf::comm {

py::tuple address_tuple(const SegmentAddress& address) {
  return py::make_tuple(address.creator.pid, address.creator.start_ticks, address.fd, address.nonce);
}

SegmentAddress address_from(const py::tuple& fields) {
  RLINF_CHECK_INTERNAL(fields.size() == 4, "an address has 4 fields");
  return SegmentAddress{
      {fields[0].cast<int32_t>(), fields[1].cast<uint64_t>()}, fields[2].cast<int32_t>(), fields[3].cast<uint64_t>()};
}

int64_t deadline_from(const py::object& timeout_s) {
  if (timeout_s.is_none()) {
    return kNever;
  }
  const double seconds = timeout_s.cast<double>();
  RLINF_CHECK_USER(seconds >= 0, "timeout_s=", seconds, " must not be negative; None waits without a limit");
  constexpr double kLongestS = 1e9;  // 30 years; keeps the sum within 64 bits
  return seconds > kLongestS ? kNever : monotonic_ns() + static_cast<int64_t>(seconds * 1e9);
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
            WithoutGil no_gil;
            words.wait(seen, deadline_ns);
          },
          py::arg("seen"), py::arg("timeout_s"));

  module.def(
      "copy_bytes",
      [](uintptr_t destination, uintptr_t source, uint64_t num_bytes, const py::object& stores) {
        const Stores kind = stores_named(stores);
        const WithoutGil no_gil;
        copy_bytes(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source), num_bytes, kind);
      },
      py::arg("destination"), py::arg("source"), py::arg("num_bytes"), py::arg("stores") = py::none());
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

}  // namespace rlinf::comm

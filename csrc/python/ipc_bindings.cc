// The CUDA driver and descriptors of other processes, for rlinf_comm.ipc. In every build.
#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <cstring>

#include "bindings.h"
#include "gil.h"
#include "rlinf/comm/check.h"
#include "rlinf/comm/cuda/driver.h"
#include "rlinf/comm/process_id.h"
#include "rlinf/comm/segment_server.h"

namespace rlinf::comm {

namespace {

using cuda::Driver;
using cuda::Mapping;
using cuda::OpaqueHandle;
using NoGil = py::call_guard<WithoutGil>;

py::bytes bytes_of(const OpaqueHandle& handle) {
  return py::bytes(reinterpret_cast<const char*>(handle.bytes), sizeof(handle.bytes));
}

OpaqueHandle handle_from(const py::bytes& bytes) {
  const auto view = static_cast<std::string_view>(bytes);
  RLINF_CHECK_USER(view.size() == sizeof(OpaqueHandle), "a handle has ", sizeof(OpaqueHandle), " bytes, not ",
                   view.size());
  OpaqueHandle handle;
  std::memcpy(&handle, view.data(), sizeof(handle));
  return handle;
}

py::tuple tuple_of(const Mapping& mapping) {
  return py::make_tuple(mapping.handle, mapping.pointer, mapping.num_bytes);
}

Mapping mapping_from(const std::tuple<unsigned long long, unsigned long long, uint64_t>& fields) {
  return Mapping{std::get<0>(fields), std::get<1>(fields), std::get<2>(fields)};
}

py::tuple serve_descriptor(int fd) {
  const uint64_t nonce = serve_segment(fd);
  return address_tuple(SegmentAddress{current_process(), fd, nonce});
}

int receive_descriptor(const SegmentAddress& address) {
  int fd = -1;
  const SegmentAnswer answer = request_segment(address.creator, address.fd, address.nonce, &fd);
  const char* reason = answer == SegmentAnswer::kGone      ? "is gone, or in another network namespace"
                       : answer == SegmentAnswer::kForeign ? "runs as another user"
                       : answer == SegmentAnswer::kNoAnswer
                           ? "does not answer: it is stopped, or has no descriptors left"
                           : "has closed it";
  RLINF_CHECK_USER(answer == SegmentAnswer::kFound, "process ", address.creator.pid, ", which serves descriptor ",
                   address.fd, ", ", reason);
  return fd;
}

void bind_memory(py::class_<Driver, std::shared_ptr<Driver>>& driver) {
  driver.def("allocate", &Driver::allocate, NoGil())
      .def("free", &Driver::free, NoGil())
      .def("allocation_of", &Driver::allocation_of, NoGil())
      .def("export_legacy",
           [](Driver& self, int device, uint64_t pointer) { return bytes_of(self.export_legacy(device, pointer)); })
      .def("open_legacy", [](Driver& self, int device,
                             const py::bytes& bytes) { return self.open_legacy(device, handle_from(bytes)); })
      .def("close_legacy", &Driver::close_legacy, NoGil())
      .def("create_mapping",
           [](Driver& self, int device, uint64_t num_bytes) { return tuple_of(self.create_mapping(device, num_bytes)); })
      .def("export_descriptor",
           [](Driver& self, const std::tuple<unsigned long long, unsigned long long, uint64_t>& mapping) {
             return self.export_descriptor(mapping_from(mapping));
           })
      .def("import_descriptor",
           [](Driver& self, int device, int fd, uint64_t num_bytes) {
             return tuple_of(self.import_descriptor(device, fd, num_bytes));
           })
      .def("release_mapping",
           [](Driver& self, int device, const std::tuple<unsigned long long, unsigned long long, uint64_t>& mapping) {
             self.release_mapping(device, mapping_from(mapping));
           })
      .def("read",
           [](Driver& self, int device, uint64_t source, uint64_t num_bytes) {
             std::string bytes(num_bytes, '\0');
             {
               const WithoutGil no_gil;
               self.read(device, source, bytes.data(), num_bytes);
             }
             return py::bytes(bytes);
           })
      .def("write", [](Driver& self, int device, uint64_t target, const py::bytes& bytes) {
        const auto view = static_cast<std::string_view>(bytes);
        const WithoutGil no_gil;
        self.write(device, target, view.data(), view.size());
      });
}

}  // namespace

void bind_ipc(py::module_& module) {
  py::class_<Driver, std::shared_ptr<Driver>> driver(module, "CudaDriver");
  driver.def_static("load", &Driver::load, py::arg("path") = "libcuda.so.1", NoGil());
  bind_memory(driver);
  module.def("serve_descriptor", &serve_descriptor, py::arg("fd"),
             "The address by which peers of the same user get it.");
  module.def("stop_serving_descriptor", &stop_serving_segment, py::arg("fd"));
  module.def(
      "receive_descriptor",
      [](const py::tuple& fields) {
        const SegmentAddress address = address_from(fields);
        const WithoutGil no_gil;
        return receive_descriptor(address);
      },
      py::arg("address"), "A new descriptor of the caller's.");
}

}  // namespace rlinf::comm

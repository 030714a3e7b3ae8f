// What changed between two versions of a buffer, for Python.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "bindings.h"
#include "gil.h"
#include "rlinf/comm/delta.h"

namespace rlinf::comm {

namespace {

std::byte* at(uint64_t pointer) {
  return reinterpret_cast<std::byte*>(static_cast<uintptr_t>(pointer));
}

// (bytes of the delta, 0 when it would not be smaller; elements that changed)
py::tuple encode(uint64_t current, uint64_t snapshot, uint64_t num_bytes, uint32_t element_bytes, uint64_t out,
                 bool is_scalar) {
  DeltaSize size{};
  {
    WithoutGil no_gil;
    size = encode_delta(at(current), at(snapshot), num_bytes, element_bytes, at(out),
                        is_scalar ? InstructionSet::kScalar : best_instruction_set());
  }
  return py::make_tuple(size.num_bytes, size.num_changed);
}

// Why the delta is refused, or None.
py::object apply(uint64_t buffer, uint64_t num_bytes, uint64_t delta, uint64_t delta_bytes) {
  const char* fault = nullptr;
  {
    WithoutGil no_gil;
    fault = apply_delta(at(buffer), num_bytes, at(delta), delta_bytes);
  }
  return fault == nullptr ? py::object(py::none()) : py::object(py::str(fault));
}

}  // namespace

void bind_delta(py::module_& module) {
  module.def("encode_delta", &encode, py::arg("current"), py::arg("snapshot"), py::arg("num_bytes"),
             py::arg("element_bytes"), py::arg("out"), py::arg("is_scalar") = false);
  module.def("apply_delta", &apply, py::arg("buffer"), py::arg("num_bytes"), py::arg("delta"), py::arg("delta_bytes"));
}

}  // namespace rlinf::comm

// rlinf_comm._C: converts between Python and the C++ core, releases the GIL around everything that copies or waits, and
// looks at signals between slices of a wait. Nothing else belongs here.
#include "bindings.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <cstdint>
#include <vector>

#include "codec.h"
#include "rlinf/comm/box_copy.h"
#include "rlinf/comm/check.h"
#include "rlinf/comm/digest.h"
#ifdef RLINF_WITH_CUDA
#include "rlinf/comm/cuda/batched_copy.h"
#endif

namespace py = pybind11;

namespace rlinf::comm {

namespace {

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
  bind_codec(module);
  bind_channel(module);
  bind_segment(module);
  module.def("copy_box", &copy_box_py, py::arg("destination"), py::arg("source"), py::arg("element_bytes"),
             py::arg("shape"), py::arg("destination_strides"), py::arg("source_strides"));
  module.def("digest_box", &digest_box_py, py::arg("elements"), py::arg("element_bytes"), py::arg("first_index"),
             py::arg("shape"), py::arg("memory_strides"), py::arg("index_strides"));
  module.def("has_cuda_kernels", &has_cuda_kernels);
  module.def("num_cuda_devices", &num_cuda_devices);
}

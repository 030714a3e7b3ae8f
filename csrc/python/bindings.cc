// rlinf_comm._C: converts between Python and the C++ core, releases the GIL around everything that copies or waits, and
// looks at signals between slices of a wait. Nothing else belongs here.
#include "bindings.h"

#include <pybind11/pybind11.h>

#include <cerrno>

#include "codec.h"
#include "rlinf/comm/check.h"
#ifdef RLINF_WITH_CUDA
#include "rlinf/comm/cuda/batched_copy.h"
#endif

namespace py = pybind11;

namespace rlinf::comm {

namespace {

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
  bind_copies(module);
  bind_cuda(module);
  bind_pool(module);
  bind_ipc(module);
  bind_delta(module);
  bind_digest(module);
  module.def("has_cuda_kernels", &has_cuda_kernels);
  module.def("num_cuda_devices", &num_cuda_devices);
}

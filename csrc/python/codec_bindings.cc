// The codec for Python: values as (header, buffers), where every buffer is an object of its own.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "codec.h"

namespace rlinf::comm {

namespace {

// Objects with the buffer protocol; locked from the first use of each until its last tensor is gone.
class PythonBuffers : public BufferSource {
 public:
  explicit PythonBuffers(py::sequence objects) : objects_(std::move(objects)), views_(py::len(objects_)) {}

  OwnedBytes bytes(uint64_t index) override {
    const py::object& view = locked(index);
    const Py_buffer* buffer = PyMemoryView_GET_BUFFER(view.ptr());
    return {hold_object(view), static_cast<std::byte*>(buffer->buf), static_cast<uint64_t>(buffer->len)};
  }
  py::object exporter(uint64_t index) override { return locked(index); }

 private:
  const py::object& locked(uint64_t index) {
    if (index >= views_.size()) {
      throw py::index_error("buffer " + std::to_string(index) + " of " + std::to_string(views_.size()));
    }
    py::object& view = views_[index];
    if (!view) {
      view = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(py::object(objects_[index]).ptr()));
      if (!view) {
        throw py::error_already_set();
      }
      if (!PyBuffer_IsContiguous(PyMemoryView_GET_BUFFER(view.ptr()), 'C')) {
        throw py::value_error("a buffer that is not contiguous");
      }
    }
    return view;
  }

  py::sequence objects_;
  std::vector<py::object> views_;
};

// (header, buffers)
py::tuple encode(Codec& codec, const py::object& value) {
  EncodedValue encoded;
  codec.encode(value, &encoded);
  py::tuple buffers(encoded.buffers.size());
  for (size_t i = 0; i < encoded.buffers.size(); ++i) {
    auto* pointer = static_cast<std::byte*>(const_cast<void*>(encoded.buffers[i].pointer));
    const py::object bytes =
        py::cast(BorrowedBytes{{hold_object(encoded.owners[i]), pointer, encoded.buffers[i].num_bytes}});
    buffers[i] = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(bytes.ptr()));
  }
  return py::make_tuple(py::bytes(encoded.header), std::move(buffers));
}

py::object decode(Codec& codec, const py::object& header, const py::sequence& buffers) {
  Py_buffer view{};
  if (PyObject_GetBuffer(header.ptr(), &view, PyBUF_C_CONTIGUOUS) != 0) {
    throw py::error_already_set();
  }
  const std::shared_ptr<Py_buffer> release(&view, &PyBuffer_Release);
  PythonBuffers source(buffers);
  return codec.decode({static_cast<const char*>(view.buf), static_cast<size_t>(view.len)}, source, "");
}

}  // namespace

void bind_codec(py::module_& module) {
  py::class_<BorrowedBytes>(module, "BorrowedBytes", py::buffer_protocol())
      .def_buffer([](BorrowedBytes& borrowed) -> py::buffer_info {
        // Writable: the bytes are the holder's alone.
        const OwnedBytes& bytes = borrowed.bytes;
        return {bytes.pointer, 1, "B", 1, {static_cast<py::ssize_t>(bytes.num_bytes)}, {py::ssize_t{1}}};
      });

  module.attr("MAX_DEPTH") = kMaxDepth;
  py::class_<Codec>(module, "Codec")
      .def(py::init([](const py::kwargs& hooks) {
        const auto hook = [&](const char* name) { return py::object(hooks[name]); };
        return std::make_unique<Codec>(CodecHooks{
            hook("refused"), hook("describe_class"), hook("describe_tensor"), hook("describe_array"),
            hook("find_class"), hook("lift"), hook("build_tensor"), hook("ndarray"), hook("find_dtype"),
            hook("torch_bridge"), hook("decode_error"), hook("describe_view"), hook("build_view"), hook("peer_lost")});
      }))
      .def("forget_classes", &Codec::forget_classes)
      .def("encode", &encode, py::arg("value"))
      .def("decode", &decode, py::arg("header"), py::arg("buffers"));
}

}  // namespace rlinf::comm

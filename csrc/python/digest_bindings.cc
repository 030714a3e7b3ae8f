// The digest of a row of bytes for Python: what guards values on their way (digest.h has the mathematics).
#include <pybind11/pybind11.h>

#include <cstring>
#include <memory>
#include <vector>

#include "bindings.h"
#include "rlinf/comm/digest.h"

namespace rlinf::comm {

namespace {

// Below, handing the GIL on costs more than the digest.
constexpr int64_t kMinBytesWithoutGil = 32 << 10;

// Holds the memory of a bytes-like object.
class Piece {
 public:
  explicit Piece(const py::handle& object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) {
      throw py::error_already_set();
    }
  }
  ~Piece() { PyBuffer_Release(&view_); }
  Piece(const Piece&) = delete;
  Piece& operator=(const Piece&) = delete;
  const std::byte* pointer() const { return static_cast<const std::byte*>(view_.buf); }
  int64_t num_bytes() const { return view_.len; }

 private:
  Py_buffer view_{};
};

// Of the pieces as if they were joined, 16 bytes.
py::bytes bytes_digest(const py::sequence& pieces) {
  std::vector<std::unique_ptr<Piece>> views;
  int64_t num_bytes = 0;
  for (const py::handle piece : pieces) {
    views.push_back(std::make_unique<Piece>(piece));
    num_bytes += views.back()->num_bytes();
  }
  DigestSum sum = 0;
  const auto add_up = [&] {
    DigestAdder adder(1, best_instruction_set());
    uint64_t index = 0;
    for (const auto& view : views) {
      adder.add_run(view->pointer(), index, view->num_bytes());
      index += static_cast<uint64_t>(view->num_bytes());
    }
    sum = adder.sum();
  };
  if (num_bytes < kMinBytesWithoutGil) {
    add_up();
  } else {
    const WithoutGil no_gil;
    add_up();
  }
  char digest[sizeof(sum)];
  std::memcpy(digest, &sum, sizeof(sum));
  return {digest, sizeof(sum)};
}

}  // namespace

void bind_digest(py::module_& module) {
  module.def("bytes_digest", &bytes_digest, py::arg("pieces"),
             "16 bytes: the digest of contiguous bytes-like objects, as if they were joined.");
}

}  // namespace rlinf::comm

// torch tensors as (dtype, shape, bytes) and back through torch's DLPack C exchange API: no Python call, no link to
// torch. Whatever it does not cover (a torch without that API, unusual dtypes, views that must be materialized first)
// is left to Python, rlinf_comm/_arrays.py.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "dlpack.h"

namespace rlinf::comm {

namespace py = pybind11;

// Bytes that something keeps alive.
struct OwnedBytes {
  std::shared_ptr<void> owner;
  std::byte* pointer = nullptr;
  uint64_t num_bytes = 0;
};

// OwnedBytes for Python, through the buffer protocol.
struct BorrowedBytes {
  OwnedBytes bytes;
};

// Keeps a Python object alive; may be dropped by any thread, with or without the GIL.
std::shared_ptr<void> hold_object(py::object object);

// The product of `shape` and `item_bytes`. ValueError unless it is `num_bytes`.
void check_num_bytes(const std::vector<int64_t>& shape, uint64_t item_bytes, uint64_t num_bytes);

// In elements.
std::vector<int64_t> strides_of_row_major(const std::vector<int64_t>& shape);

// Bytes from the first to the last element of a strided tensor; 0 when it has none. False when they do not fit 64 bits.
bool strided_bytes(const int64_t* shape, const int64_t* strides, size_t num_dims, uint64_t item_bytes,
                   uint64_t* num_bytes);

struct TensorView {
  const std::string* dtype;
  uint64_t item_bytes;
  const int64_t* shape;
  const int64_t* strides;  // in elements; null: row-major
  int32_t num_dims;
  const void* pointer;
  uint64_t num_bytes;  // of its elements
  bool is_row_major;
};

class TensorBridge {
 public:
  // `api`: the capsule, or None. `probes`: (dtype's name, one-element tensor) for each dtype that may cross; a dtype
  // that torch does not carry through DLPack unchanged is left to Python.
  void learn(const py::object& api, const py::iterable& probes);

  // A view of a CPU tensor without gradient graph; false: ask Python.
  bool read(PyObject* tensor, TensorView* view) const;
  // A tensor over `bytes`; null when Python has to build it. ValueError when the shape does not fit the bytes.
  py::object build(std::string_view dtype, const std::vector<int64_t>& shape, const OwnedBytes& bytes) const;
  // The same, with strides.
  py::object build_strided(std::string_view dtype, const std::vector<int64_t>& shape,
                           const std::vector<int64_t>& strides, const OwnedBytes& bytes) const;

 private:
  struct Dtype {
    std::string name;
    dlpack::DataType type;
    bool may_have_flags;  // a gradient, or a pending conjugation or negation
  };
  const Dtype* find(const dlpack::DataType& type) const;
  bool has_flags(PyObject* tensor, const Dtype& dtype) const;
  py::object wrap(const Dtype& dtype, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                  const OwnedBytes& bytes) const;

  const dlpack::ExchangeApi* api_ = nullptr;
  std::vector<std::unique_ptr<Dtype>> dtypes_;
  std::unordered_map<std::string_view, const Dtype*> by_name_;
  py::object is_neg_, is_conj_, requires_grad_;
};

}  // namespace rlinf::comm

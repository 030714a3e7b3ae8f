#include "tensors.h"

#include <algorithm>
#include <new>

namespace rlinf::comm {

namespace {

// A tensor that torch holds, in one allocation with its shape and strides.
struct Lent {
  dlpack::ManagedTensor managed;
  std::shared_ptr<void> owner;
  std::vector<int64_t> shape_and_strides;
};

void give_back(dlpack::ManagedTensor* managed) {
  delete static_cast<Lent*>(managed->context);
}

bool is_row_major(const dlpack::Tensor& tensor, uint64_t num_elements) {
  if (tensor.strides == nullptr || num_elements < 2) {
    return true;
  }
  int64_t expected = 1;
  for (int32_t dim = tensor.num_dims - 1; dim >= 0; --dim) {
    if (tensor.shape[dim] != 1) {
      if (tensor.strides[dim] != expected) {
        return false;
      }
      expected *= tensor.shape[dim];
    }
  }
  return true;
}

bool is_true(const py::object& result) {
  if (!result) {
    throw py::error_already_set();
  }
  return result.ptr() == Py_True;
}

}  // namespace

std::shared_ptr<void> hold_object(py::object object) {
  return std::shared_ptr<void>(object.release().ptr(), [](void* held) {
    if (!Py_IsInitialized()) {
      return;  // the process is ending, and its objects with it
    }
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(static_cast<PyObject*>(held));
    PyGILState_Release(state);
  });
}

void check_num_bytes(const std::vector<int64_t>& shape, uint64_t item_bytes, uint64_t num_bytes) {
  // Lengths of 0 count as 1 at first, so that no stride overflows either.
  int64_t total = static_cast<int64_t>(item_bytes);
  bool fits = true;
  bool is_empty = false;
  for (const int64_t length : shape) {
    fits = fits && length >= 0 && !__builtin_mul_overflow(total, std::max<int64_t>(length, 1), &total);
    is_empty = is_empty || length == 0;
  }
  if (!fits || (is_empty ? 0 : static_cast<uint64_t>(total)) != num_bytes) {
    throw py::value_error("the shape of a tensor does not fit its " + std::to_string(num_bytes) + " bytes");
  }
}

std::vector<int64_t> strides_of_row_major(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t dim = shape.size(); dim-- > 0;) {
    strides[dim] = stride;
    stride *= std::max<int64_t>(shape[dim], 1);
  }
  return strides;
}

bool strided_bytes(const int64_t* shape, const int64_t* strides, size_t num_dims, uint64_t item_bytes,
                   uint64_t* num_bytes) {
  uint64_t last = 0;  // element
  bool is_empty = false;
  for (size_t dim = 0; dim < num_dims; ++dim) {
    uint64_t reach = 0;
    if (shape[dim] < 0 || strides[dim] < 0 ||
        __builtin_mul_overflow(static_cast<uint64_t>(std::max<int64_t>(shape[dim] - 1, 0)),
                               static_cast<uint64_t>(strides[dim]), &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      return false;
    }
    is_empty = is_empty || shape[dim] == 0;
  }
  *num_bytes = 0;
  return is_empty ||
         (!__builtin_add_overflow(last, uint64_t{1}, &last) && !__builtin_mul_overflow(last, item_bytes, num_bytes));
}

void TensorBridge::learn(const py::object& api, const py::iterable& probes) {
  if (api.is_none()) {
    return;
  }
  const auto* found =
      static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(api.ptr(), dlpack::kExchangeApiCapsule));
  if (found == nullptr) {
    throw py::error_already_set();
  }
  if (found->version.major != dlpack::kMajor || found->tensor_from_object == nullptr) {
    return;
  }
  api_ = found;
  for (const py::handle probe : probes) {
    const auto pair = probe.cast<py::tuple>();
    dlpack::Tensor tensor{};
    if (api_->tensor_from_object(pair[1].ptr(), &tensor) != 0) {
      PyErr_Clear();
      continue;
    }
    if (tensor.dtype.lanes != 1 || tensor.dtype.bits % 8 != 0) {
      continue;
    }
    if (is_neg_.ptr() == nullptr) {
      const py::handle type = py::type::handle_of(pair[1]);
      is_neg_ = type.attr("is_neg");
      is_conj_ = type.attr("is_conj");
      requires_grad_ = py::str("requires_grad");
    }
    const uint8_t code = tensor.dtype.code;
    const bool is_integer = code < dlpack::kFloat || code == dlpack::kBool;
    auto dtype = std::make_unique<Dtype>(Dtype{pair[0].cast<std::string>(), tensor.dtype, !is_integer});
    alignas(16) static std::byte zeros[16] = {};
    const py::object back = wrap(*dtype, {1}, {1}, OwnedBytes{nullptr, zeros, tensor.dtype.bits / 8u});
    if (back && back.attr("dtype").is(pair[1].attr("dtype"))) {
      by_name_.emplace(dtype->name, dtype.get());
      dtypes_.push_back(std::move(dtype));
    }
  }
}

const TensorBridge::Dtype* TensorBridge::find(const dlpack::DataType& type) const {
  for (const auto& dtype : dtypes_) {
    if (dtype->type.code == type.code && dtype->type.bits == type.bits && type.lanes == 1) {
      return dtype.get();
    }
  }
  return nullptr;
}

bool TensorBridge::has_flags(PyObject* tensor, const Dtype& dtype) const {
  const auto attribute = py::reinterpret_steal<py::object>(PyObject_GetAttr(tensor, requires_grad_.ptr()));
  if (is_true(attribute)) {
    return true;
  }
  const auto negated = py::reinterpret_steal<py::object>(PyObject_CallOneArg(is_neg_.ptr(), tensor));
  if (is_true(negated)) {
    return true;
  }
  if (dtype.type.code != dlpack::kComplex) {
    return false;
  }
  return is_true(py::reinterpret_steal<py::object>(PyObject_CallOneArg(is_conj_.ptr(), tensor)));
}

bool TensorBridge::read(PyObject* object, TensorView* view) const {
  if (api_ == nullptr) {
    return false;
  }
  dlpack::Tensor tensor{};
  if (api_->tensor_from_object(object, &tensor) != 0) {
    PyErr_Clear();  // sparse, quantized, ...: Python finds the words
    return false;
  }
  const Dtype* dtype = find(tensor.dtype);
  if (tensor.device.type != dlpack::kCpu || dtype == nullptr || (dtype->may_have_flags && has_flags(object, *dtype))) {
    return false;
  }
  uint64_t num_elements = 1;
  for (int32_t dim = 0; dim < tensor.num_dims; ++dim) {
    num_elements *= static_cast<uint64_t>(tensor.shape[dim]);
  }
  const uint64_t item_bytes = dtype->type.bits / 8u;
  *view = TensorView{&dtype->name,
                     item_bytes,
                     tensor.shape,
                     tensor.strides,
                     tensor.num_dims,
                     static_cast<const std::byte*>(tensor.data) + tensor.byte_offset,
                     num_elements * item_bytes,
                     is_row_major(tensor, num_elements)};
  return true;
}

py::object TensorBridge::build(std::string_view name, const std::vector<int64_t>& shape,
                               const OwnedBytes& bytes) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) {
    return py::object();
  }
  check_num_bytes(shape, found->second->type.bits / 8u, bytes.num_bytes);
  py::object tensor = wrap(*found->second, shape, strides_of_row_major(shape), bytes);
  if (!tensor) {
    throw py::error_already_set();
  }
  return tensor;
}

py::object TensorBridge::build_strided(std::string_view name, const std::vector<int64_t>& shape,
                                       const std::vector<int64_t>& strides, const OwnedBytes& bytes) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) {
    return py::object();
  }
  uint64_t num_bytes = 0;
  if (!strided_bytes(shape.data(), strides.data(), shape.size(), found->second->type.bits / 8u, &num_bytes) ||
      num_bytes > bytes.num_bytes) {
    throw py::value_error("the shape and strides of a tensor do not fit its " + std::to_string(bytes.num_bytes) +
                          " bytes");
  }
  py::object tensor = wrap(*found->second, shape, strides, bytes);
  if (!tensor) {
    throw py::error_already_set();
  }
  return tensor;
}

// Null, with a Python error set, when torch refuses.
py::object TensorBridge::wrap(const Dtype& dtype, const std::vector<int64_t>& shape,
                              const std::vector<int64_t>& strides, const OwnedBytes& bytes) const {
  auto lent = std::make_unique<Lent>();
  lent->owner = bytes.owner;
  const size_t num_dims = shape.size();
  lent->shape_and_strides.resize(2 * num_dims);
  std::copy(shape.begin(), shape.end(), lent->shape_and_strides.begin());
  std::copy(strides.begin(), strides.end(), lent->shape_and_strides.begin() + static_cast<std::ptrdiff_t>(num_dims));
  lent->managed.version = dlpack::kVersion;
  lent->managed.context = lent.get();
  lent->managed.deleter = give_back;
  lent->managed.flags = 0;
  lent->managed.tensor = dlpack::Tensor{bytes.pointer,
                                        {dlpack::kCpu, 0},
                                        static_cast<int32_t>(num_dims),
                                        dtype.type,
                                        lent->shape_and_strides.data(),
                                        lent->shape_and_strides.data() + num_dims,
                                        0};
  void* object = nullptr;
  // On failure torch may or may not have called the deleter; rather leak than free twice.
  if (api_->managed_tensor_to_object(&lent.release()->managed, &object) != 0) {
    return py::object();
  }
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
}

}  // namespace rlinf::comm

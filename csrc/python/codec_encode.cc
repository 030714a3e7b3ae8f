// The encoding half of the codec: one function for each kind of value.
#include <climits>

#include "codec.h"

namespace rlinf::comm {

namespace {

// What numpy publishes as `array.__array_struct__` (its array interface, version 3).
struct ArrayInterface {
  int version;  // 2, always
  int num_dims;
  char kind;
  int item_bytes;
  int flags;
  Py_intptr_t* shape;
  Py_intptr_t* strides;
  void* data;
  PyObject* description;
};
constexpr int kContiguous = 0x1;
constexpr int kNativeOrder = 0x200;

std::string_view utf8(PyObject* text) {
  Py_ssize_t length = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(text, &length);
  if (bytes == nullptr) {
    throw py::error_already_set();
  }
  return {bytes, static_cast<size_t>(length)};
}

class Encoder {
 public:
  Encoder(Codec& codec, std::string* tree, EncodedValue* encoded) : codec_(codec), encoded_(*encoded), out_(tree) {}

  void value(PyObject* value);
  // The listed classes, before the tree.
  void write_classes(MsgpackWriter* out, std::string* header) const {
    out->array(classes_.size());
    for (const Codec::Lowering* lowering : classes_) {
      header->append(lowering->entry);
    }
  }

 private:
  [[noreturn]] void refuse(const std::string& reason) const {
    PyErr_SetString(codec_.hooks().refused.ptr(), reason.c_str());
    throw py::error_already_set();
  }
  void tag(Tag tag) { out_.integer(static_cast<int>(tag)); }
  void integer(PyObject* value, bool may_be_big);
  void list(PyObject* value);
  void tuple(PyObject* value);
  void dict(PyObject* value);
  void object(PyObject* value);
  void record(PyObject* value, const Codec::Lowering& lowering);
  void rare(PyObject* value, const Codec::Lowering& lowering);
  void tensor(PyObject* value);
  void array(PyObject* value);
  bool plain_array(PyObject* value);
  void described(Tag tag, PyObject* value, const py::object& describe);
  template <typename Length>
  void bytes_of(Tag tag_of_kind, const Length* shape, int num_dims, std::string_view dtype, ByteView bytes,
                py::object owner);
  uint64_t class_index(const Codec::Lowering& lowering);

  Codec& codec_;
  EncodedValue& encoded_;
  MsgpackWriter out_;
  // Stands for a container that is being written.
  class Nesting {
   public:
    explicit Nesting(Encoder& encoder) : depth_(encoder.depth_) {
      if (depth_ == kMaxDepth) {
        PyErr_SetString(PyExc_RecursionError, "a value that is nested too deeply");
        throw py::error_already_set();
      }
      ++depth_;
    }
    ~Nesting() { --depth_; }
    Nesting(const Nesting&) = delete;
    Nesting& operator=(const Nesting&) = delete;

   private:
    size_t& depth_;
  };

  std::vector<const Codec::Lowering*> classes_;
  size_t depth_ = 0;
};

void Encoder::value(PyObject* value) {
  PyTypeObject* const type = Py_TYPE(value);
  if (type == &PyUnicode_Type) {
    out_.text(utf8(value));
  } else if (type == &PyLong_Type) {
    integer(value, true);
  } else if (type == &PyFloat_Type) {
    out_.real(PyFloat_AS_DOUBLE(value));
  } else if (value == Py_None) {
    out_.nil();
  } else if (type == &PyBool_Type) {
    out_.boolean(value == Py_True);
  } else if (type == &PyBytes_Type) {
    out_.binary({PyBytes_AS_STRING(value), static_cast<size_t>(PyBytes_GET_SIZE(value))});
  } else if (type == &PyList_Type) {
    list(value);
  } else if (type == &PyTuple_Type) {
    tuple(value);
  } else if (type == &PyDict_Type) {
    dict(value);
  } else {
    object(value);
  }
}

void Encoder::integer(PyObject* value, bool may_be_big) {
  int overflow = 0;
  const long long small = PyLong_AsLongLongAndOverflow(value, &overflow);
  if (overflow == 0) {
    out_.integer(small);
    return;
  }
  if (overflow > 0) {
    const unsigned long long natural = PyLong_AsUnsignedLongLong(value);
    if (!PyErr_Occurred()) {
      out_.natural(natural);
      return;
    }
    PyErr_Clear();
  }
  if (!may_be_big) {
    refuse("a dict with the key " + py::repr(value).cast<std::string>() + "; keys must be str, or int of 64 bits");
  }
  const py::object digits = steal(PyNumber_ToBase(value, 16));
  out_.array(2);
  tag(Tag::kBigInt);
  out_.text(utf8(digits.ptr()));
}

void Encoder::list(PyObject* value) {
  const Nesting nesting(*this);
  const Py_ssize_t size = PyList_GET_SIZE(value);
  out_.array(static_cast<uint64_t>(size) + 1);
  tag(Tag::kList);
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (PyList_GET_SIZE(value) != size) {
      refuse("a list that changed while it was encoded");
    }
    const auto item = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(value, i));
    this->value(item.ptr());
  }
}

void Encoder::tuple(PyObject* value) {
  const Nesting nesting(*this);
  const Py_ssize_t size = PyTuple_GET_SIZE(value);
  out_.array(static_cast<uint64_t>(size) + 1);
  tag(Tag::kTuple);
  for (Py_ssize_t i = 0; i < size; ++i) {
    this->value(PyTuple_GET_ITEM(value, i));
  }
}

void Encoder::dict(PyObject* value) {
  const Nesting nesting(*this);
  const Py_ssize_t size = PyDict_GET_SIZE(value);
  out_.map(static_cast<uint64_t>(size));
  Py_ssize_t position = 0;
  Py_ssize_t num_items = 0;
  PyObject *key = nullptr, *item = nullptr;
  while (PyDict_Next(value, &position, &key, &item)) {
    const auto held_key = py::reinterpret_borrow<py::object>(key);
    const auto held_item = py::reinterpret_borrow<py::object>(item);
    if (PyUnicode_CheckExact(key)) {
      out_.text(utf8(key));
    } else if (PyLong_CheckExact(key)) {
      integer(key, false);
    } else {
      refuse("a dict with the key " + py::repr(key).cast<std::string>() + "; keys must be str, or int of 64 bits");
    }
    this->value(held_item.ptr());
    ++num_items;
    if (PyDict_GET_SIZE(value) != size || num_items > size) {
      refuse("a dict that changed while it was encoded");
    }
  }
  if (num_items != size) {
    refuse("a dict that changed while it was encoded");
  }
}

void Encoder::object(PyObject* value) {
  const Codec::Lowering& lowering = codec_.lowering_of(Py_TYPE(value));
  switch (static_cast<Tag>(lowering.tag)) {
    case Tag::kDataclass:
    case Tag::kStruct:
      return record(value, lowering);
    case Tag::kTensor:
      return tensor(value);
    case Tag::kNdarray:
      return array(value);
    default:
      return rare(value, lowering);
  }
}

uint64_t Encoder::class_index(const Codec::Lowering& lowering) {
  for (size_t i = 0; i < classes_.size(); ++i) {
    if (classes_[i] == &lowering) {
      return i;
    }
  }
  classes_.push_back(&lowering);
  return classes_.size() - 1;
}

void Encoder::record(PyObject* value, const Codec::Lowering& lowering) {
  const Nesting nesting(*this);
  out_.array(lowering.fields.size() + 2);
  out_.integer(lowering.tag);
  out_.natural(class_index(lowering));
  for (const py::object& name : lowering.fields) {
    const auto field = py::reinterpret_steal<py::object>(PyObject_GetAttr(value, name.ptr()));
    if (!field) {
      py::error_already_set error;
      if (!error.matches(PyExc_AttributeError)) {
        throw error;
      }
      refuse("a " + lowering.cls.attr("__qualname__").cast<std::string>() + " with a field that was never set (" +
             py::str(error.value()).cast<std::string>() + ")");
    }
    this->value(field.ptr());
  }
}

// [tag, class index if it lists one, values...]
void Encoder::rare(PyObject* value, const Codec::Lowering& lowering) {
  const Nesting nesting(*this);
  const py::object lowered = steal(PyObject_CallOneArg(lowering.lower.ptr(), value));
  if (!PyTuple_Check(lowered.ptr()) || PyTuple_GET_SIZE(lowered.ptr()) < 1) {
    throw py::type_error("lower() must return (tag, values...)");
  }
  const Py_ssize_t size = PyTuple_GET_SIZE(lowered.ptr());
  out_.array(static_cast<uint64_t>(size) + !lowering.entry.empty());
  this->value(PyTuple_GET_ITEM(lowered.ptr(), 0));
  if (!lowering.entry.empty()) {
    out_.natural(class_index(lowering));
  }
  for (Py_ssize_t i = 1; i < size; ++i) {
    this->value(PyTuple_GET_ITEM(lowered.ptr(), i));
  }
}

// [tag, index of the buffer, dtype, lengths...]
template <typename Length>
void Encoder::bytes_of(Tag tag_of_kind, const Length* shape, int num_dims, std::string_view dtype, ByteView bytes,
                       py::object owner) {
  out_.array(static_cast<uint64_t>(num_dims) + 3);
  tag(tag_of_kind);
  out_.natural(encoded_.buffers.size());
  out_.text(dtype);
  for (int dim = 0; dim < num_dims; ++dim) {
    out_.integer(static_cast<int64_t>(shape[dim]));
  }
  encoded_.buffers.push_back(bytes);
  encoded_.owners.push_back(std::move(owner));
}

void Encoder::tensor(PyObject* value) {
  TensorView view{};
  const bool is_known = codec_.tensors().read(value, &view);
  if (encoded_.by_reference && write_pooled(codec_, value, is_known ? &view : nullptr, &out_, &encoded_)) {
    return;
  }
  if (!is_known || !view.is_row_major) {
    return described(Tag::kTensor, value, codec_.hooks().describe_tensor);
  }
  bytes_of(Tag::kTensor, view.shape, view.num_dims, *view.dtype, {view.pointer, view.num_bytes},
           py::reinterpret_borrow<py::object>(value));
}

void Encoder::array(PyObject* value) {
  if (!plain_array(value)) {
    described(Tag::kNdarray, value, codec_.hooks().describe_array);
  }
}

// False for arrays that need a copy, and for dtypes that their kind and size do not name.
bool Encoder::plain_array(PyObject* value) {
  static PyObject* const name = PyUnicode_InternFromString("__array_struct__");  // never freed: Python ends before it
  const py::object capsule = steal(PyObject_GetAttr(value, name));
  const auto* array = static_cast<const ArrayInterface*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (array == nullptr) {
    throw py::error_already_set();
  }
  constexpr int kPlain = kContiguous | kNativeOrder;
  if ((array->flags & kPlain) != kPlain || std::strchr("biufc", array->kind) == nullptr) {
    return false;
  }
  uint64_t num_bytes = static_cast<uint64_t>(array->item_bytes);
  for (int dim = 0; dim < array->num_dims; ++dim) {
    num_bytes *= static_cast<uint64_t>(array->shape[dim]);
  }
  std::string dtype(1, array->item_bytes == 1 ? '|' : PY_LITTLE_ENDIAN ? '<' : '>');
  dtype += array->kind;
  dtype += std::to_string(array->item_bytes);
  bytes_of(Tag::kNdarray, array->shape, array->num_dims, dtype, {array->data, num_bytes},
           py::reinterpret_borrow<py::object>(value));
  return true;
}

void Encoder::described(Tag tag_of_kind, PyObject* value, const py::object& describe) {
  const auto description = describe(py::handle(value)).cast<py::tuple>();
  const auto pointer = description[1].cast<uintptr_t>();
  const auto num_bytes = description[2].cast<uint64_t>();
  std::vector<int64_t> shape;
  for (const py::handle length : py::handle(value).attr("shape")) {
    shape.push_back(length.cast<int64_t>());
  }
  bytes_of(tag_of_kind, shape.data(), static_cast<int>(shape.size()), description[3].cast<std::string>(),
           {reinterpret_cast<const void*>(pointer), num_bytes}, description[0]);
}

}  // namespace

void Codec::encode(py::handle value, EncodedValue* encoded) {
  std::string tree;
  tree.reserve(256);
  Encoder encoder(*this, &tree, encoded);
  encoder.value(value.ptr());
  encoded->header.reserve(tree.size() + 64);
  MsgpackWriter out(&encoded->header);
  out.array(2);
  encoder.write_classes(&out, &encoded->header);
  for (PooledTensor& one : encoded->pooled) {
    one.ticket_at += encoded->header.size();
  }
  encoded->header.append(tree);
}

const Codec::Lowering& Codec::lowering_of(PyTypeObject* type) {
  const auto known = lowerings_.find(type);
  if (known != lowerings_.end()) {
    return *known->second;
  }
  auto cls = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type));
  const auto description = hooks_.describe_class(cls).cast<py::tuple>();
  auto lowering = std::make_unique<Lowering>();
  lowering->tag = description[0].cast<int>();
  lowering->cls = std::move(cls);
  if (!description[1].is_none()) {
    MsgpackWriter out(&lowering->entry);
    const auto texts = description[1].cast<std::vector<std::string>>();
    out.array(texts.size());
    for (const std::string& text : texts) {
      out.text(text);
    }
  }
  if (!description[2].is_none()) {
    for (const py::handle name : description[2]) {
      PyObject* interned = name.inc_ref().ptr();
      PyUnicode_InternInPlace(&interned);
      lowering->fields.push_back(py::reinterpret_steal<py::object>(interned));
    }
  }
  lowering->lower = description[3];
  return *lowerings_.try_emplace(type, std::move(lowering)).first->second;  // another thread may have been faster
}

const TensorBridge& Codec::tensors() {
  if (!tensors_known_) {
    const auto bridge = hooks_.torch_bridge().cast<py::tuple>();
    TensorBridge learned;
    learned.learn(bridge[0], bridge[1]);
    if (!tensors_known_) {  // by another thread, meanwhile
      tensors_ = std::move(learned);
      tensors_known_ = true;
    }
  }
  return tensors_;
}

}  // namespace rlinf::comm

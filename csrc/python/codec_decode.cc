// The decoding half of the codec. The header may come from anybody: it is walked over once before memory is taken, and
// only classes that this process has registered are built.
#include "codec.h"

namespace rlinf::comm {

namespace {

using Kind = MsgpackReader::Kind;

class Decoder {
 public:
  Decoder(Codec& codec, std::string_view header, BufferSource& buffers)
      : codec_(codec), reader_(header), buffers_(buffers) {}

  py::object whole();

 private:
  void read_classes();
  py::object value();
  py::object text(std::string_view bytes) const {
    return steal(PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), nullptr));
  }
  py::object map(uint64_t size);
  py::object tagged(uint64_t size);
  py::object list(uint64_t size);
  py::object tuple(uint64_t size);
  py::object big_int(uint64_t size);
  py::object record(Tag tag, uint64_t size);
  py::object tensor(uint64_t size);
  py::object array(uint64_t size);
  py::object rare(int tag, uint64_t size);
  const Codec::Lifting& class_at(uint64_t index) const;
  void read_shape(uint64_t num_dims);

  Codec& codec_;
  MsgpackReader reader_;
  BufferSource& buffers_;
  std::vector<std::shared_ptr<const Codec::Lifting>> classes_;
  std::vector<int64_t> shape_;
};

// [[class, ...], root]
py::object Decoder::whole() {
  if (reader_.array_size() != 2) {
    throw MalformedError("not [classes, root]");
  }
  read_classes();
  return value();
}

void Decoder::read_classes() {
  const uint64_t num_classes = reader_.array_size();
  classes_.reserve(num_classes);
  for (uint64_t i = 0; i < num_classes; ++i) {
    const char* const start = reader_.cursor();
    const uint64_t num_texts = reader_.array_size();
    for (uint64_t j = 0; j < num_texts; ++j) {
      reader_.text();
    }
    classes_.push_back(codec_.lifting_of({start, static_cast<size_t>(reader_.cursor() - start)}));
  }
}

py::object Decoder::value() {
  const MsgpackReader::Token token = reader_.next();
  switch (token.kind) {
    case Kind::kNil:
      return py::none();
    case Kind::kBool:
      return py::bool_(token.boolean);
    case Kind::kInteger:
      return steal(PyLong_FromLongLong(token.integer));
    case Kind::kNatural:
      return steal(PyLong_FromUnsignedLongLong(token.natural));
    case Kind::kReal:
      return steal(PyFloat_FromDouble(token.real));
    case Kind::kText:
      return text(token.bytes);
    case Kind::kBinary:
      return steal(PyBytes_FromStringAndSize(token.bytes.data(), static_cast<Py_ssize_t>(token.bytes.size())));
    case Kind::kMap:
      return map(token.size);
    case Kind::kArray:
      return tagged(token.size);
  }
  throw MalformedError("an element of no kind");
}

py::object Decoder::map(uint64_t size) {
  py::object result = steal(PyDict_New());
  for (uint64_t i = 0; i < size; ++i) {
    const MsgpackReader::Token token = reader_.next();
    py::object key;
    if (token.kind == Kind::kText) {
      key = text(token.bytes);
    } else if (token.kind == Kind::kInteger) {
      key = steal(PyLong_FromLongLong(token.integer));
    } else if (token.kind == Kind::kNatural) {
      key = steal(PyLong_FromUnsignedLongLong(token.natural));
    } else {
      throw MalformedError("a key that is neither text nor an integer");
    }
    const py::object item = value();
    if (PyDict_SetItem(result.ptr(), key.ptr(), item.ptr()) != 0) {
      throw py::error_already_set();
    }
  }
  return result;
}

py::object Decoder::tagged(uint64_t size) {
  if (size == 0) {
    throw MalformedError("an array without a tag");
  }
  const uint64_t tag = reader_.count();
  const uint64_t num_left = size - 1;
  switch (static_cast<Tag>(tag)) {
    case Tag::kList:
      return list(num_left);
    case Tag::kTuple:
      return tuple(num_left);
    case Tag::kBigInt:
      return big_int(num_left);
    case Tag::kDataclass:
    case Tag::kStruct:
      return record(static_cast<Tag>(tag), num_left);
    case Tag::kTensor:
      return tensor(num_left);
    case Tag::kNdarray:
      return array(num_left);
    case Tag::kPooledTensor:
      if (!buffers_.may_name_pools()) {
        throw MalformedError("a tensor in a pool, which crosses channels alone");
      }
      return read_pooled(codec_, &reader_, num_left);
    default:
      return rare(static_cast<int>(tag), num_left);
  }
}

py::object Decoder::list(uint64_t size) {
  py::object result = steal(PyList_New(static_cast<Py_ssize_t>(size)));
  for (uint64_t i = 0; i < size; ++i) {
    PyList_SET_ITEM(result.ptr(), static_cast<Py_ssize_t>(i), value().release().ptr());
  }
  return result;
}

py::object Decoder::tuple(uint64_t size) {
  py::object result = steal(PyTuple_New(static_cast<Py_ssize_t>(size)));
  for (uint64_t i = 0; i < size; ++i) {
    PyTuple_SET_ITEM(result.ptr(), static_cast<Py_ssize_t>(i), value().release().ptr());
  }
  return result;
}

py::object Decoder::big_int(uint64_t size) {
  if (size != 1) {
    throw MalformedError("an integer in several parts");
  }
  return steal(PyLong_FromUnicodeObject(text(reader_.text()).ptr(), 16));
}

const Codec::Lifting& Decoder::class_at(uint64_t index) const {
  if (index >= classes_.size()) {
    throw MalformedError("class " + std::to_string(index) + " of " + std::to_string(classes_.size()));
  }
  return *classes_[index];
}

py::object Decoder::record(Tag tag, uint64_t size) {
  if (size == 0) {
    throw MalformedError("a record without a class");
  }
  const Codec::Lifting& lifting = class_at(reader_.count());
  if (lifting.tag != static_cast<int>(tag) || lifting.fields.size() != size - 1) {
    throw MalformedError(py::repr(lifting.cls).cast<std::string>() +
                         " is not the kind of class that the sender encoded");
  }
  if (lifting.build.is_none()) {
    // As object.__setattr__ does it, field by field: __init__ does not run.
    auto* const cls = reinterpret_cast<PyTypeObject*>(lifting.cls.ptr());
    py::object result = steal(cls->tp_new(cls, py::tuple().ptr(), nullptr));
    for (const py::object& name : lifting.fields) {
      const py::object field = value();
      if (PyObject_GenericSetAttr(result.ptr(), name.ptr(), field.ptr()) != 0) {
        throw py::error_already_set();
      }
    }
    return result;
  }
  return lifting.build(list(size - 1));
}

void Decoder::read_shape(uint64_t num_dims) {
  shape_.clear();
  for (uint64_t i = 0; i < num_dims; ++i) {
    shape_.push_back(static_cast<int64_t>(reader_.count()));
  }
}

py::object Decoder::tensor(uint64_t size) {
  if (size < 2) {
    throw MalformedError("a tensor without a buffer or a dtype");
  }
  const uint64_t index = reader_.count();
  const std::string_view dtype = reader_.text();
  read_shape(size - 2);
  py::object tensor = codec_.tensors().build(dtype, shape_, buffers_.bytes(index));
  if (!tensor) {
    tensor = codec_.hooks().build_tensor(buffers_.exporter(index), text(dtype), py::cast(shape_));
  }
  return tensor;
}

py::object Decoder::array(uint64_t size) {
  if (size < 2) {
    throw MalformedError("an array without a buffer or a dtype");
  }
  const uint64_t index = reader_.count();
  const py::object dtype = codec_.numpy_dtype(reader_.text());
  read_shape(size - 2);
  const uint64_t num_bytes = buffers_.bytes(index).num_bytes;
  check_num_bytes(shape_, dtype.attr("itemsize").cast<uint64_t>(), num_bytes);
  py::tuple shape(shape_.size());
  for (size_t i = 0; i < shape_.size(); ++i) {
    shape[i] = shape_[i];
  }
  if (num_bytes == 0) {
    return codec_.hooks().ndarray(shape, dtype);
  }
  return codec_.hooks().ndarray(shape, dtype, buffers_.exporter(index));
}

py::object Decoder::rare(int tag, uint64_t size) {
  py::object cls = py::none();
  uint64_t num_values = size;
  if (tag == static_cast<int>(Tag::kEnum) || tag == static_cast<int>(Tag::kFlag)) {
    if (size == 0) {
      throw MalformedError("a value without a class");
    }
    cls = class_at(reader_.count()).cls;
    --num_values;
  }
  return codec_.hooks().lift(tag, cls, list(num_values));
}

}  // namespace

py::object Codec::decode(std::string_view header, BufferSource& buffers, std::string_view place) {
  const auto failure = [&](py::handle error) {
    const py::object decode_error = hooks_.decode_error(error, std::string(place));
    PyErr_SetObject(py::type::handle_of(decode_error).ptr(), decode_error.ptr());
    return py::error_already_set();
  };
  try {
    check_msgpack(header);
    return Decoder(*this, header, buffers).whole();
  } catch (py::error_already_set& error) {
    if (error.matches(PyExc_KeyboardInterrupt)) {
      throw;  // Ctrl-C
    }
    throw failure(error.value());
  } catch (const py::builtin_exception& error) {
    error.set_error();
    throw failure(py::error_already_set().value());
  } catch (const std::exception& error) {
    throw failure(py::handle(PyExc_ValueError)(error.what()));
  }
}

std::shared_ptr<const Codec::Lifting> Codec::lifting_of(std::string_view entry) {
  const auto known = liftings_.find(std::string(entry));
  if (known != liftings_.end()) {
    return known->second;
  }
  MsgpackReader reader(entry);
  const uint64_t num_texts = reader.array_size();
  if (num_texts == 0) {
    throw MalformedError("a class without a name");
  }
  const auto name = std::string(reader.text());
  py::list fields;
  for (uint64_t i = 1; i < num_texts; ++i) {
    const std::string_view field = reader.text();
    PyObject* interned =
        steal(PyUnicode_DecodeUTF8(field.data(), static_cast<Py_ssize_t>(field.size()), nullptr)).release().ptr();
    PyUnicode_InternInPlace(&interned);
    fields.append(py::reinterpret_steal<py::object>(interned));
  }
  const auto found = hooks_.find_class(name, fields).cast<py::tuple>();
  auto lifting = std::make_unique<Lifting>();
  lifting->tag = found[0].cast<int>();
  lifting->cls = found[1];
  for (const py::handle field : fields) {
    lifting->fields.push_back(py::reinterpret_borrow<py::object>(field));
  }
  lifting->build = found[2];
  constexpr size_t kMaxKnown = 4096;  // one class can be spelled in several ways, by whoever sends it
  if (liftings_.size() >= kMaxKnown) {
    liftings_.clear();
  }
  return liftings_.try_emplace(std::string(entry), std::move(lifting)).first->second;
}

py::object Codec::numpy_dtype(std::string_view name) {
  const auto known = numpy_dtypes_.find(std::string(name));
  if (known != numpy_dtypes_.end()) {
    return known->second;
  }
  constexpr size_t kMaxKnown = 256;  // the names come from outside
  const py::object dtype = hooks_.find_dtype(std::string(name));
  if (numpy_dtypes_.size() < kMaxKnown) {
    numpy_dtypes_.emplace(name, dtype);
  }
  return dtype;
}

}  // namespace rlinf::comm

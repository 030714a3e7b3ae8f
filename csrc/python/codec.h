// Values to bytes and back: the walk over a value, and over the header that describes it. rlinf_comm/codec.py tells
// what crosses and what the wire form is; rare kinds of values (Enums, paths, views that need a copy) are described by
// Python through the hooks.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "msgpack.h"
#include "pooled_tensors.h"
#include "rlinf/comm/channel.h"
#include "tensors.h"

namespace rlinf::comm {

// Takes over a new reference; throws the Python error where there is none.
inline py::object steal(PyObject* object) {
  if (object == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(object);
}

// First element of each array in a header. Mirrored by rlinf_comm/_lowering.py.
enum class Tag : int {
  kList = 1,
  kTuple = 3,
  kBigInt = 4,
  kDataclass = 5,
  kStruct = 6,
  kEnum = 7,
  kFlag = 8,
  kTensor = 10,
  kNdarray = 11,
  kPooledTensor = 13,
  // All others: [tag, values...], understood by the Python hooks alone.
};

// Containers (lists, tuples, dicts, records) inside each other in one value. The header adds an array around the value,
// and one for a tensor or a large integer inside the innermost container.
constexpr size_t kMaxDepth = kMaxMsgpackDepth - 2;

// A value in two parts, header and buffers; the owners keep the buffers alive.
struct EncodedValue {
  std::string header;
  std::vector<ByteView> buffers;
  std::vector<py::object> owners;
  // For a channel: tensors in pools stand in the header as references, and not among the buffers.
  bool by_reference = false;
  std::vector<PooledTensor> pooled;
};

// The Python half. Each hook is called for the first value of a class, or for values that are rare.
struct CodecHooks {
  py::object refused;          // the exception for what cannot cross
  py::object describe_class;   // class -> (tag, [name, fields...] or None, fields or None, lower or None)
  py::object describe_tensor;  // tensor -> (owner, pointer, num_bytes, dtype)
  py::object describe_array;   // the same
  py::object find_class;       // (name, fields) -> (tag, class, build or None)
  py::object lift;             // (tag, class or None, values) -> value
  py::object build_tensor;     // (exporter, dtype, shape) -> tensor
  py::object ndarray;          // numpy.ndarray
  py::object find_dtype;       // text -> numpy.dtype
  py::object torch_bridge;     // () -> (exchange API capsule or None, probes)
  py::object decode_error;     // (exception, place) -> exception
  py::object describe_view;    // tensor -> (pointer, dtype, bytes of an element, shape, strides), or None
  py::object build_view;       // (exporter, dtype, shape, strides) -> tensor
  py::object peer_lost;        // the exception for memory that is gone
};

// The buffers of an encoded value on their way back.
class BufferSource {
 public:
  virtual ~BufferSource() = default;
  // IndexError when there are not so many.
  virtual OwnedBytes bytes(uint64_t index) = 0;
  // An object with the buffer protocol, over the same bytes.
  virtual py::object exporter(uint64_t index) = 0;
  // Whether the value came from a process of this machine and user, whose pools may be opened.
  virtual bool may_name_pools() const { return false; }
};

class Codec {
 public:
  explicit Codec(CodecHooks hooks) : hooks_(std::move(hooks)) {}

  // Throws the `refused` exception, without the place of the offending part.
  void encode(py::handle value, EncodedValue* encoded);
  // `place` is named by the error for bytes that are no encoded value.
  py::object decode(std::string_view header, BufferSource& buffers, std::string_view place);

  // How to encode a class.
  struct Lowering {
    int tag;
    py::object cls;                  // kept alive: the table is keyed by its address
    std::string entry;               // [name, fields...] in MessagePack; empty: the class is not listed
    std::vector<py::object> fields;  // names
    py::object lower;                // value -> (tag, values...), for a rare class
  };
  // How to build a class.
  struct Lifting {
    int tag;
    py::object cls;
    std::vector<py::object> fields;
    py::object build;  // values -> object; None: a dataclass whose fields are set one by one
  };

  const Lowering& lowering_of(PyTypeObject* type);
  std::shared_ptr<const Lifting> lifting_of(std::string_view entry);
  // After a name has been given to another class.
  void forget_classes() { liftings_.clear(); }
  py::object numpy_dtype(std::string_view name);
  const TensorBridge& tensors();
  const CodecHooks& hooks() const { return hooks_; }

 private:
  CodecHooks hooks_;
  std::unordered_map<PyTypeObject*, std::unique_ptr<Lowering>> lowerings_;
  std::unordered_map<std::string, std::shared_ptr<const Lifting>> liftings_;  // by entry, as it stands in a header
  std::unordered_map<std::string, py::object> numpy_dtypes_;
  TensorBridge tensors_;
  bool tensors_known_ = false;
};

}  // namespace rlinf::comm

#include "pooled_tensors.h"

#include "codec.h"
#include "gil.h"
#include "rlinf/comm/check.h"

namespace rlinf::comm {

namespace {

constexpr uint64_t kNumFixedElements = 9;

// Of a tensor that the bridge cannot read, in words that are kept here.
struct DescribedView {
  std::string dtype;
  std::vector<int64_t> shape, strides;
  TensorView view;
};

bool describe(Codec& codec, PyObject* tensor, DescribedView* described) {
  const py::object answer = codec.hooks().describe_view(py::handle(tensor));
  if (answer.is_none()) {
    return false;
  }
  const auto fields = answer.cast<py::tuple>();
  described->dtype = fields[1].cast<std::string>();
  described->shape = fields[3].cast<std::vector<int64_t>>();
  described->strides = fields[4].cast<std::vector<int64_t>>();
  described->view = TensorView{&described->dtype,
                               fields[2].cast<uint64_t>(),
                               described->shape.data(),
                               described->strides.data(),
                               static_cast<int32_t>(described->shape.size()),
                               reinterpret_cast<const void*>(fields[0].cast<uintptr_t>()),
                               0,
                               false};
  return true;
}

void write(const PoolBlock& block, uint64_t byte_offset, const TensorView& view,
           const std::vector<int64_t>& row_major_strides, MsgpackWriter* out) {
  const SegmentAddress& address = block.pool().address();
  out->integer(address.creator.pid);
  out->natural(address.creator.start_ticks);
  out->integer(address.fd);
  out->natural(address.nonce);
  out->text(block.pool().name());
  out->natural(byte_offset);
  out->text(*view.dtype);
  out->integer(view.num_dims);
  for (int32_t dim = 0; dim < view.num_dims; ++dim) {
    out->integer(view.shape[dim]);
  }
  const int64_t* const strides = view.strides != nullptr ? view.strides : row_major_strides.data();
  for (int32_t dim = 0; dim < view.num_dims; ++dim) {
    out->integer(strides[dim]);
  }
}

// Mirrors write().
struct Reference {
  uint64_t ticket;
  SegmentAddress pool;
  std::string_view pool_name;
  uint64_t byte_offset;
  std::string_view dtype;
  std::vector<int64_t> shape, strides;
};

Reference read_reference(MsgpackReader* reader, uint64_t size) {
  if (size < kNumFixedElements - 1) {
    throw MalformedError("a pooled tensor without its address");
  }
  Reference reference;
  reference.ticket = reader->natural();
  reference.pool.creator.pid = static_cast<int32_t>(reader->count());
  reference.pool.creator.start_ticks = reader->natural();
  reference.pool.fd = static_cast<int32_t>(reader->count());
  reference.pool.nonce = reader->natural();
  reference.pool_name = reader->text();
  reference.byte_offset = reader->natural();
  reference.dtype = reader->text();
  const uint64_t num_dims = reader->count();
  if (num_dims > size || size != kNumFixedElements + 2 * num_dims) {
    throw MalformedError("a pooled tensor of " + std::to_string(num_dims) + " dimensions in " + std::to_string(size) +
                         " elements");
  }
  for (std::vector<int64_t>* numbers : {&reference.shape, &reference.strides}) {
    for (uint64_t dim = 0; dim < num_dims; ++dim) {
      numbers->push_back(static_cast<int64_t>(reader->count()));
    }
  }
  return reference;
}

std::shared_ptr<PoolBlock> receive(Codec& codec, const Reference& reference) {
  try {
    PoolRegistry& registry = PoolRegistry::instance();
    const std::shared_ptr<Pool> pool = [&] {
      const WithoutGil no_gil;  // the creator may have to be asked
      return registry.open(reference.pool);
    }();
    return registry.receive(pool, reference.ticket);
  } catch (const BlockLost& error) {
    PyErr_SetString(codec.hooks().peer_lost.ptr(), error.what());
  } catch (const UserError& error) {
    const std::string text = join_text("a tensor in the pool '", reference.pool_name, "': ", error.what());
    PyErr_SetString(codec.hooks().peer_lost.ptr(), text.c_str());
  }
  throw py::error_already_set();
}

}  // namespace

bool write_pooled(Codec& codec, PyObject* tensor, const TensorView* view, MsgpackWriter* out, EncodedValue* encoded) {
  PoolRegistry& registry = PoolRegistry::instance();
  if (registry.is_empty()) {
    return false;
  }
  DescribedView described;
  if (view == nullptr) {
    if (!describe(codec, tensor, &described)) {
      return false;
    }
    view = &described.view;
  }
  std::shared_ptr<PoolBlock> block = registry.find(view->pointer);
  if (!block) {
    return false;
  }
  std::vector<int64_t> row_major_strides;
  if (view->strides == nullptr) {
    row_major_strides = strides_of_row_major({view->shape, view->shape + view->num_dims});
  }
  const auto byte_offset = static_cast<uint64_t>(static_cast<const std::byte*>(view->pointer) - block->bytes());
  uint64_t num_bytes = 0;
  if (!strided_bytes(view->shape, view->strides != nullptr ? view->strides : row_major_strides.data(),
                     static_cast<size_t>(view->num_dims), view->item_bytes, &num_bytes) ||
      num_bytes == 0 || num_bytes > block->num_bytes() - byte_offset) {
    return false;
  }
  out->array(1 + kNumFixedElements + 2 * static_cast<uint64_t>(view->num_dims));
  out->integer(static_cast<int>(Tag::kPooledTensor));
  const size_t ticket_at = out->size();
  out->wide(0);
  write(*block, byte_offset, *view, row_major_strides, out);
  encoded->pooled.push_back({std::move(block), ticket_at});
  encoded->owners.push_back(py::reinterpret_borrow<py::object>(tensor));
  return true;
}

void send_pooled(const std::shared_ptr<Channel>& channel, const BlockRef& item, EncodedValue* encoded) {
  if (encoded->pooled.empty()) {
    return;
  }
  std::vector<uint64_t> tickets;
  try {
    PoolRegistry::instance().remember(channel);
    tickets.reserve(encoded->pooled.size());
    for (const PooledTensor& one : encoded->pooled) {
      tickets.push_back(one.block->send({channel->address(), item}));
      MsgpackWriter::fill_wide(&encoded->header[one.ticket_at], tickets.back());
    }
  } catch (...) {
    for (size_t i = 0; i < tickets.size(); ++i) {
      encoded->pooled[i].block->pool().release(tickets[i]);
    }
    channel->release(item);
    throw;
  }
}

py::object read_pooled(Codec& codec, MsgpackReader* reader, uint64_t size) {
  const Reference reference = read_reference(reader, size);
  const std::shared_ptr<PoolBlock> block = receive(codec, reference);
  if (reference.byte_offset > block->num_bytes()) {
    throw MalformedError("a tensor outside of its block");
  }
  const OwnedBytes rest{block, block->bytes() + reference.byte_offset, block->num_bytes() - reference.byte_offset};
  py::object tensor = codec.tensors().build_strided(reference.dtype, reference.shape, reference.strides, rest);
  if (!tensor) {
    tensor =
        codec.hooks().build_view(py::cast(BorrowedBytes{rest}), py::str(reference.dtype.data(), reference.dtype.size()),
                                 py::cast(reference.shape), py::cast(reference.strides));
  }
  return tensor;
}

}  // namespace rlinf::comm

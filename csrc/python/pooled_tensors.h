// Tensors in pools, on their way through a channel as references: [tag, ticket, address of the pool, its name, byte
// offset in the block, dtype, number of dimensions, lengths..., strides...].
//
// The hold for the way, and with it the ticket, is made when the channel has given room for the item: what fails before
// (a timeout, a closed channel, a cancelled task) leaves nothing to undo.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>

#include "msgpack.h"
#include "rlinf/comm/pool_registry.h"
#include "tensors.h"

namespace rlinf::comm {

class Codec;
struct EncodedValue;

struct PooledTensor {
  std::shared_ptr<PoolBlock> block;
  size_t ticket_at;  // where its ticket stands in the header
};

// Writes a reference. False for a tensor that is in no pool, or cannot be described by shape and strides alone.
// `view`: what the bridge knows of it; null: asks Python.
bool write_pooled(Codec& codec, PyObject* tensor, const TensorView* view, MsgpackWriter* out, EncodedValue* encoded);

// Makes the holds for an item whose block of the channel is reserved, and fills in the tickets. When it throws, there
// are none, and the block has been given back.
void send_pooled(const std::shared_ptr<Channel>& channel, const BlockRef& item, EncodedValue* encoded);

// The tensor of a reference, whose tag has been read and `size` elements are left.
pybind11::object read_pooled(Codec& codec, MsgpackReader* reader, uint64_t size);

}  // namespace rlinf::comm

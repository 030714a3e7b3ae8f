// Channels for Python: a put encodes straight into shared memory, a take decodes straight out of it.
#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "bindings.h"
#include "codec.h"
#include "rlinf/comm/channel.h"
#include "rlinf/comm/check.h"
#include "rlinf/comm/memory_copy.h"

namespace rlinf::comm {

namespace {

// A copy of at least so many bytes lets other threads run meanwhile; the exchange of the GIL costs about as much as
// copying a fifth of them.
constexpr uint64_t kGilFreeBytes = 64 << 10;

// A taken block that stays in place until the last of its tensors is gone.
class TakenBlock {
 public:
  TakenBlock(std::shared_ptr<Channel> channel, const BlockRef& block)
      : channel_(std::move(channel)), block_(block), pid_(::getpid()) {}
  ~TakenBlock() {
    if (pid_ != ::getpid()) {
      return;  // a forked child sees its parent's views, but the block is not its to free
    }
    try {
      channel_->release(block_);
    } catch (const std::exception& error) {
      RLINF_CHECK_NOTHROW(false, error.what());
    }
  }
  TakenBlock(const TakenBlock&) = delete;
  TakenBlock& operator=(const TakenBlock&) = delete;

 private:
  std::shared_ptr<Channel> channel_;
  BlockRef block_;
  pid_t pid_;
};

// Blocks that are not needed any more once the items are decoded. One lock for all of them.
class BlocksToRelease {
 public:
  explicit BlocksToRelease(Channel& channel) : channel_(channel) {}
  ~BlocksToRelease() {
    if (blocks_.empty()) {
      return;
    }
    try {
      channel_.release(blocks_);
    } catch (const std::exception& error) {
      RLINF_CHECK_NOTHROW(false, error.what());
    }
  }
  BlocksToRelease(const BlocksToRelease&) = delete;
  BlocksToRelease& operator=(const BlocksToRelease&) = delete;
  void add(const BlockRef& block) { blocks_.push_back(block); }

 private:
  Channel& channel_;
  std::vector<BlockRef> blocks_;
};

std::shared_ptr<void> allocate_aligned(uint64_t num_bytes) {
  constexpr std::align_val_t kAlignment{kBlockAlignment};
  return std::shared_ptr<void>(::operator new(std::max<uint64_t>(num_bytes, 1), kAlignment),
                               [](void* memory) { ::operator delete(memory, kAlignment); });
}

// The tensors of a taken item: in place, or copied out of a block that is about to be freed.
class TakenBuffers : public BufferSource {
 public:
  TakenBuffers(const std::shared_ptr<Channel>& channel, TakenItem& item, BlocksToRelease* to_release)
      : buffers_(std::move(item.buffers)) {
    if (!buffers_.empty() && item.may_stay) {
      owner_ = std::make_shared<TakenBlock>(channel, item.block);
      return;
    }
    to_release->add(item.block);
    if (!buffers_.empty()) {
      copy_out();
    }
  }

  OwnedBytes bytes(uint64_t index) override {
    if (index >= buffers_.size()) {
      throw py::index_error("buffer " + std::to_string(index) + " of " + std::to_string(buffers_.size()));
    }
    auto* pointer = static_cast<std::byte*>(const_cast<void*>(buffers_[index].pointer));
    return {owner_, pointer, buffers_[index].num_bytes};
  }
  py::object exporter(uint64_t index) override { return py::cast(BorrowedBytes{bytes(index)}); }
  bool may_name_pools() const override { return true; }

 private:
  void copy_out() {
    const auto* begin = static_cast<const std::byte*>(buffers_.front().pointer);
    const auto* end = static_cast<const std::byte*>(buffers_.back().pointer) + buffers_.back().num_bytes;
    const auto num_bytes = static_cast<uint64_t>(end - begin);
    owner_ = allocate_aligned(num_bytes);
    auto* const copy = static_cast<std::byte*>(owner_.get());
    if (num_bytes < kGilFreeBytes) {
      copy_bytes(copy, begin, num_bytes);
    } else {
      const WithoutGil no_gil;
      copy_bytes(copy, begin, num_bytes);
    }
    for (ByteView& buffer : buffers_) {
      buffer.pointer = copy + (static_cast<const std::byte*>(buffer.pointer) - begin);
    }
  }

  std::vector<ByteView> buffers_;
  std::shared_ptr<void> owner_;
};

ItemKey key_from(py::handle key) {
  if (PyIndex_Check(key.ptr())) {
    const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(key.ptr()));
    int overflow = 1;
    const int64_t value = number ? PyLong_AsLongLongAndOverflow(number.ptr(), &overflow) : 0;
    if (overflow == 0) {
      return ItemKey{value, {}};
    }
  } else if (PyUnicode_Check(key.ptr())) {
    Py_ssize_t num_bytes = 0;
    const char* const text = PyUnicode_AsUTF8AndSize(key.ptr(), &num_bytes);
    if (text != nullptr && num_bytes > 0) {
      return ItemKey::from_text({text, static_cast<size_t>(num_bytes)});
    }
  }
  PyErr_Clear();
  throw py::value_error("key=" + py::repr(key).cast<std::string>() +
                        "; a number of 64 bits with its sign, or a text that is not empty");
}

py::object key_object(const ItemKey& key) {
  return key.text.empty() ? py::object(py::int_(key.number)) : py::object(py::str(key.text));
}

// A value on its way into a channel.
class PendingPut {
 public:
  PendingPut(std::shared_ptr<Channel> channel, Codec& codec, const py::object& value, const py::object& key,
             double weight, int64_t policy_version, const py::object& timeout_s)
      : channel_(std::move(channel)), labels_{key_from(key), weight, policy_version} {
    encoded_.by_reference = true;
    codec.encode(value, &encoded_);
    num_bytes_ = Channel::item_bytes(encoded_.header.size(), encoded_.buffers, labels_.key);
    wait_.deadline_ns = deadline_from(timeout_s);
  }

  int run() {
    return static_cast<int>(wait_for([&] { return attempt(); }));
  }
  int attempt_without_waiting() {
    wait_.slice_ns = 0;
    const WithoutGil no_gil;
    return static_cast<int>(attempt());
  }

 private:
  Outcome attempt() {
    BlockRef block;
    const Outcome outcome = channel_->reserve(num_bytes_, wait_, &block, labels_.key);
    if (outcome == Outcome::kDone) {
      send_pooled(channel_, block, &encoded_);
      channel_->fill(block, {encoded_.header.data(), encoded_.header.size()}, encoded_.buffers, labels_.key);
      channel_->commit(block, labels_);
    }
    return outcome;
  }

  std::shared_ptr<Channel> channel_;
  ItemLabels labels_;
  EncodedValue encoded_;
  uint64_t num_bytes_ = 0;
  WaitState wait_;
};

// A rlinf_comm.channel.Item; as its __init__, which is frozen and five times as slow.
py::object make_item(const py::object& item_class, const py::object& value, const TakenItem& item) {
  static const std::array<PyObject*, 6> names = [] {
    std::array<PyObject*, 6> texts{};
    constexpr const char* kFields[] = {"value", "key", "weight", "policy_version", "sequence", "nbytes"};
    std::transform(std::begin(kFields), std::end(kFields), texts.begin(), PyUnicode_InternFromString);
    return texts;
  }();
  const std::array<py::object, 6> fields = {value,
                                            key_object(item.labels.key),
                                            py::float_(item.labels.weight),
                                            py::int_(item.labels.policy_version),
                                            py::int_(item.sequence),
                                            py::int_(item.num_bytes)};
  auto* const cls = reinterpret_cast<PyTypeObject*>(item_class.ptr());
  auto made = py::reinterpret_steal<py::object>(cls->tp_new(cls, py::tuple().ptr(), nullptr));
  for (size_t i = 0; made && i < names.size(); ++i) {
    if (PyObject_GenericSetAttr(made.ptr(), names[i], fields[i].ptr()) != 0) {
      made = py::object();
    }
  }
  if (!made) {
    throw py::error_already_set();
  }
  return made;
}

// The items as a list; or, when there are none, why, as an int.
py::object take(const std::shared_ptr<Channel>& channel, Codec& codec, const py::object& item_class, uint64_t max_items,
                uint64_t min_items, double min_weight, const py::object& max_weight, const py::object& keys,
                const py::object& timeout_s) {
  TakeRequest request;
  request.max_items = max_items;
  request.min_items = min_items;
  request.min_weight = min_weight;
  request.max_weight = max_weight.is_none() ? HUGE_VAL : max_weight.cast<double>();
  request.any_key = keys.is_none();
  if (!request.any_key) {
    for (const py::handle key : keys) {
      request.keys.push_back(key_from(key));
    }
  }
  WaitState wait;
  wait.deadline_ns = deadline_from(timeout_s);
  std::vector<TakenItem> items;
  const Outcome outcome = wait_for([&] { return channel->take(request, wait, &items); });
  if (outcome != Outcome::kDone) {
    return py::int_(static_cast<int>(outcome));
  }
  BlocksToRelease to_release(*channel);
  std::vector<TakenBuffers> buffers;  // of all items first: also what follows an item that does not decode is freed
  buffers.reserve(items.size());
  for (TakenItem& item : items) {
    buffers.emplace_back(channel, item, &to_release);
  }
  py::list result(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const TakenItem& item = items[i];
    const std::string_view head(reinterpret_cast<const char*>(item.head), item.head_bytes);
    const py::object value = codec.decode(head, buffers[i], "item " + std::to_string(item.sequence));
    result[i] = make_item(item_class, value, item);
  }
  return std::move(result);
}

py::dict counts(Channel& channel) {
  ChannelCounts counts;
  {
    WithoutGil no_gil;
    counts = channel.counts();
  }
  py::dict result;
  result["num_items"] = counts.num_items;
  result["num_bytes"] = counts.num_bytes;
  result["num_held_items"] = counts.num_held_items;
  result["num_held_bytes"] = counts.num_held_bytes;
  result["capacity_items"] = counts.capacity_items;
  result["capacity_bytes"] = counts.capacity_bytes;
  result["num_put"] = counts.num_put;
  result["num_taken"] = counts.num_taken;
  result["num_blocked_puts"] = counts.num_blocked_puts;
  result["blocked_put_s"] = static_cast<double>(counts.blocked_put_ns) * 1e-9;
  result["blocked_take_s"] = static_cast<double>(counts.blocked_take_ns) * 1e-9;
  result["num_producers"] = counts.num_producers;
  result["num_closed"] = counts.num_closed;
  result["num_keys"] = counts.num_keys;
  result["aborted"] = counts.aborted;
  return result;
}

}  // namespace

void bind_channel(py::module_& module) {
  py::native_enum<Outcome>(module, "Outcome", "enum.IntEnum")
      .value("DONE", Outcome::kDone)
      .value("PENDING", Outcome::kPending)
      .value("CLOSED", Outcome::kClosed)
      .value("ABORTED", Outcome::kAborted)
      .value("TIMED_OUT", Outcome::kTimedOut)
      .value("STALLED", Outcome::kStalled)
      .value("PEER_LOST", Outcome::kPeerLost)
      .finalize();

  py::class_<Channel, std::shared_ptr<Channel>> channel_class(module, "Channel");
  py::class_<PendingPut>(module, "PendingPut")
      .def(py::init<std::shared_ptr<Channel>, Codec&, const py::object&, const py::object&, double, int64_t,
                    const py::object&>(),
           py::arg("channel"), py::arg("codec"), py::arg("value"), py::arg("key"), py::arg("weight"),
           py::arg("policy_version"), py::arg("timeout_s"))
      .def("attempt", &PendingPut::attempt_without_waiting);
  channel_class
      .def_static("create", &Channel::create, py::arg("name"), py::arg("capacity_items"), py::arg("capacity_bytes"),
                  py::arg("num_producers"), py::arg("raises_on_loss"), py::arg("num_keys"))
      .def_static(
          "open", [](const py::tuple& address) { return Channel::open(address_from(address)); }, py::arg("address"))
      .def("prefault", &Channel::prefault, py::call_guard<WithoutGil>())
      .def("address", [](const Channel& channel) { return address_tuple(channel.address()); })
      .def(
          "put",
          [](std::shared_ptr<Channel> channel, Codec& codec, const py::object& value, const py::object& key,
             double weight, int64_t policy_version, const py::object& timeout_s) {
            return PendingPut(std::move(channel), codec, value, key, weight, policy_version, timeout_s).run();
          },
          py::arg("codec"), py::arg("value"), py::arg("key"), py::arg("weight"), py::arg("policy_version"),
          py::arg("timeout_s"))
      .def("take", &take, py::arg("codec"), py::arg("item_class"), py::arg("max_items"), py::arg("min_items"),
           py::arg("min_weight"), py::arg("max_weight"), py::arg("keys"), py::arg("timeout_s"))
      .def("event_sequence",
           [](const Channel& channel, int waiting) { return channel.event_sequence(static_cast<Waiting>(waiting)); })
      .def(
          "wait_for_event",
          [](Channel& channel, int waiting, uint32_t seen) {
            channel.wait_for_event(static_cast<Waiting>(waiting), seen);
          },
          py::arg("waiting"), py::arg("seen"), py::call_guard<WithoutGil>())
      .def("close_producer", &Channel::close_producer, py::call_guard<WithoutGil>())
      .def("reopen", &Channel::reopen, py::arg("num_producers"), py::call_guard<WithoutGil>())
      .def("abort", &Channel::abort, py::arg("reason"), py::call_guard<WithoutGil>())
      .def("abort_reason", [](Channel& channel) { return py::bytes(channel.abort_reason()); })
      .def("counts", &counts)
      .def("waiting_keys",
           [](Channel& channel) {  // [(key, items)]
             py::list result;
             for (const auto& [key, use] : channel.waiting_keys()) {
               result.append(py::make_tuple(key_object(key), use.num_items));
             }
             return result;
           })
      .def("leave", &Channel::leave, py::call_guard<WithoutGil>())
      .def("drop_lost_users", &Channel::drop_lost_users, py::call_guard<WithoutGil>())
      .def("lost_users",
           [](Channel& channel) {  // [(pid, whether it was a producer)]
             std::vector<std::pair<int32_t, bool>> result;
             const WithoutGil no_gil;
             for (const LostUser& user : channel.lost_users()) {
               result.emplace_back(user.pid, user.last_role == UserRole::kProducer);
             }
             return result;
           })
      .def_static("leave_all", &Channel::leave_all, py::call_guard<WithoutGil>())
      .def_static("stay_in_all", &Channel::stay_in_all)
      .def("_lock_and_leave", &Channel::lock_and_leave)
      .def("_reserve_and_leave", [](Channel& channel, uint64_t num_bytes) {
        WaitState wait;
        BlockRef block;
        return channel.reserve(num_bytes, wait, &block);
      });
}

}  // namespace rlinf::comm

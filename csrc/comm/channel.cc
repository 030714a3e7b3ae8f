// The life of a channel: create, open, close, reopen, abort, counts.
#include "rlinf/comm/channel.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "channel_header.h"
#include "rlinf/comm/check.h"

namespace rlinf::comm {

namespace {

// Queue and taken blocks hold up to capacity_bytes each; as much again keeps a hole open for the largest item between
// them. These are addresses: a page costs memory once an item has reached it.
uint64_t arena_bytes_for(uint64_t capacity_items, uint64_t capacity_bytes) {
  const uint64_t overhead_bytes =
      2 * sizeof(BlockHeader) + kBlockAlignment;  // header, and a remainder too small to use
  return 4 * align_up(capacity_bytes) + (capacity_items + 1) * overhead_bytes;
}

}  // namespace

Channel::Channel(std::shared_ptr<Segment> segment)
    : segment_(std::move(segment)),
      header_(reinterpret_cast<ChannelHeader*>(segment_->bytes())),
      arena_(segment_->bytes() + kArenaOffset, header_->arena_bytes, &header_->arena_heads) {
  enter_registry();
}

std::shared_ptr<Channel> Channel::create(const std::string& name, uint64_t capacity_items, uint64_t capacity_bytes,
                                         uint64_t num_producers, bool raises_on_loss, uint64_t num_keys) {
  RLINF_CHECK_USER(capacity_items > 0 && capacity_bytes > 0 && num_producers > 0, "channel '", name,
                   "': capacity_items=", capacity_items, ", capacity_bytes=", capacity_bytes,
                   ", num_producers=", num_producers, "; each must be at least 1");
  RLINF_CHECK_USER(num_keys > 0 && num_keys <= capacity_items, "channel '", name, "': num_keys=", num_keys,
                   " with capacity_items=", capacity_items, "; each key needs room for an item");
  const uint64_t arena_bytes = arena_bytes_for(capacity_items, capacity_bytes);
  auto segment = Segment::create(name, kArenaOffset + arena_bytes);
  auto* header = reinterpret_cast<ChannelHeader*>(segment->bytes());  // zeroed by the system
  header->mutex.init();
  header->capacity_items = capacity_items;
  header->capacity_bytes = capacity_bytes;
  header->arena_bytes = arena_bytes;
  header->num_keys = num_keys;
  header->raises_on_loss = raises_on_loss;
  header->first_ready = kNil;
  header->last_ready = kNil;
  header->num_producers = num_producers;
  std::shared_ptr<Channel> channel(new Channel(std::move(segment)));
  channel->arena_.format();
  return channel;
}

std::shared_ptr<Channel> Channel::open(const SegmentAddress& address) {
  return std::shared_ptr<Channel>(new Channel(Segment::open(address)));
}

void Channel::prefault() {
  segment_->prefault(kArenaOffset + header_->capacity_bytes);
}

bool Channel::is_closed() const {
  return header_->num_closed >= header_->num_producers;
}

bool Channel::has(const BlockRef& ref) {
  if (ref.offset > header_->arena_bytes - sizeof(BlockHeader) || ref.offset % kBlockAlignment != 0) {
    return false;
  }
  Lock lock(*this);
  // Where a freed block stood there may be the inside of another one by now, which then had to look just like it.
  const BlockHeader& block = arena_.at(ref.offset);
  return block.generation == ref.generation && block.state.load(std::memory_order_relaxed) != BlockState::kFree;
}

uint32_t Channel::event_sequence(Waiting waiting) const {
  return event(waiting).sequence();
}

void Channel::wait_for_event(Waiting waiting, uint32_t seen) {
  event(waiting).wait(seen, kNever);
}

EventWord& Channel::event(Waiting waiting) const {
  return waiting == Waiting::kForItem ? header_->items_event : header_->space_event;
}

void Channel::close_producer() {
  {
    Lock lock(*this);
    RLINF_CHECK_USER(!is_closed() || header_->aborted, "close() by one producer too many: all ", header_->num_producers,
                     " have closed already");
    header_->num_closed += 1;
    note_close();
  }
  header_->items_event.notify_all();
  header_->space_event.notify_all();
}

void Channel::reopen(uint64_t num_producers) {
  RLINF_CHECK_USER(num_producers > 0, "num_producers=0; at least 1");
  Lock lock(*this);
  RLINF_CHECK_USER(header_->num_ready == 0 && header_->num_reserved == 0, "reopen() with ", header_->num_ready,
                   " items (", header_->ready_bytes, " bytes) still to be taken and ", header_->num_reserved,
                   " being put");
  const bool unused = header_->num_closed == 0 && header_->num_put == header_->num_put_at_open;
  RLINF_CHECK_USER(is_closed() || unused, "reopen() while ", header_->num_producers - header_->num_closed, " of ",
                   header_->num_producers, " producers have not closed");
  header_->num_closed = 0;
  header_->num_producers = num_producers;
  header_->num_put_at_open = header_->num_put;
}

void Channel::abort(const std::string& reason) {
  {
    Lock lock(*this);
    if (header_->aborted) {
      return;  // the first reason is the cause, later ones follow from it
    }
    const uint64_t length = std::min<uint64_t>(reason.size(), kMaxReasonBytes);
    std::memcpy(header_->abort_reason, reason.data(), length);
    header_->abort_reason[length] = '\0';
    header_->aborted = 1;
  }
  header_->items_event.notify_all();
  header_->space_event.notify_all();
}

std::string Channel::abort_reason() {
  Lock lock(*this);
  return header_->abort_reason;
}

ChannelCounts Channel::counts() {
  Lock lock(*this);
  ChannelCounts counts{};
  counts.num_items = header_->num_ready;
  counts.num_bytes = header_->ready_bytes;
  counts.num_held_items = header_->num_taken_held + header_->num_reserved;
  counts.num_held_bytes = header_->taken_held_bytes + header_->reserved_bytes;
  counts.capacity_items = header_->capacity_items;
  counts.capacity_bytes = header_->capacity_bytes;
  counts.num_put = header_->num_put;
  counts.num_taken = header_->num_taken;
  counts.num_blocked_puts = header_->num_blocked_puts;
  counts.blocked_put_ns = header_->blocked_put_ns;
  counts.blocked_take_ns = header_->blocked_take_ns;
  counts.num_producers = header_->num_producers;
  counts.num_closed = header_->num_closed;
  counts.num_keys = header_->num_keys;
  counts.aborted = header_->aborted != 0;
  return counts;
}

std::vector<std::pair<ItemKey, KeyUse>> Channel::waiting_keys() {
  std::vector<std::pair<ItemKey, KeyUse>> keys;
  std::map<std::pair<int64_t, std::string_view>, size_t> places;
  Lock lock(*this);
  for (uint64_t offset = header_->first_ready; offset != kNil; offset = arena_.at(offset).next) {
    const BlockHeader& block = arena_.at(offset);
    const std::string_view text = key_text(offset);
    const auto place = places.try_emplace({block.key, text}, keys.size()).first->second;
    if (place == keys.size()) {
      keys.push_back({ItemKey{block.key, std::string(text)}, KeyUse{}});
    }
    keys[place].second.num_items += 1;
    keys[place].second.num_bytes += block.payload_bytes;
  }
  return keys;
}

void Channel::lock_and_leave() {
  Lock lock(*this);
  lock.keep_forever();
}

}  // namespace rlinf::comm

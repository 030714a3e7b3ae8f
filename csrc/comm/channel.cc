#include "rlinf/comm/channel.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "rlinf/comm/check.h"
#include "rlinf/comm/memory_copy.h"

namespace rlinf::comm {

namespace {

constexpr uint64_t kMaxReasonBytes = 1000;
// A blocked producer renews its mark every slice; an older mark is of one that went away.
constexpr int64_t kBlockedMarkNs = 3 * kWaitSliceNs;
// Another consumer gets this long to make room before a take that can never be satisfied says so.
constexpr int64_t kStallNs = 1'000'000'000;

}  // namespace

// At the start of the segment. All of it is guarded by `mutex`, except for the events and what create() fixes.
struct ChannelHeader {
  RobustMutex mutex;
  alignas(64) EventWord items_event;  // an item came, a producer closed, the channel was aborted
  alignas(64) EventWord space_event;  // room came, or the channel was closed or aborted

  // Fixed by create().
  alignas(64) uint64_t capacity_items;
  uint64_t capacity_bytes;
  uint64_t arena_bytes;

  // Derived from the arena's blocks; see Channel::repair().
  ArenaHeads arena_heads;
  uint64_t first_ready;
  uint64_t last_ready;
  uint64_t num_ready;
  uint64_t ready_bytes;
  uint64_t num_reserved;
  uint64_t reserved_bytes;
  uint64_t num_taken_held;
  uint64_t taken_held_bytes;

  uint64_t num_put;  // the next item's sequence number
  uint64_t num_taken;
  uint64_t num_blocked_puts;
  int64_t blocked_put_ns;
  int64_t blocked_take_ns;
  uint64_t num_producers;
  uint64_t num_closed;
  uint64_t num_put_at_open;   // num_put when the channel was created or last reopened
  int64_t put_blocked_at_ns;  // when a producer last found no room; 0 after one found room
  uint32_t aborted;
  char abort_reason[kMaxReasonBytes + 1];
};

namespace {

constexpr uint64_t kArenaOffset = align_up(sizeof(ChannelHeader), 4096);

// Queue and taken blocks hold up to capacity_bytes each; as much again keeps a hole open for the largest item between
// them. These are addresses: a page costs memory once an item has reached it.
uint64_t arena_bytes_for(uint64_t capacity_items, uint64_t capacity_bytes) {
  const uint64_t overhead_bytes =
      2 * sizeof(BlockHeader) + kBlockAlignment;  // header, and a remainder too small to use
  return 4 * align_up(capacity_bytes) + (capacity_items + 1) * overhead_bytes;
}

void note_wait(WaitState& wait, int64_t now_ns) {
  if (wait.next_reclaim_ns == 0) {
    wait.next_reclaim_ns = now_ns + kWaitSliceNs;
  }
}

int64_t slice_end(const WaitState& wait, int64_t start_ns) {
  return std::min(start_ns + wait.slice_ns, wait.deadline_ns);
}

}  // namespace

// Holds the channel's mutex, and repairs what a process that died with it left behind.
class Channel::Lock {
 public:
  explicit Lock(Channel& channel) : channel_(channel) { acquire(); }
  ~Lock() {
    if (held_) {
      channel_.header_->mutex.unlock();
    }
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  // Waits for `event` without the mutex. The caller has seen, under the mutex, that its condition is false.
  void wait(EventWord& event, int64_t deadline_ns) {
    const uint32_t seen = event.sequence();
    channel_.header_->mutex.unlock();
    held_ = false;
    event.wait(seen, deadline_ns);
    acquire();
  }
  void keep_forever() { held_ = false; }

 private:
  void acquire() {
    const bool owner_died = channel_.header_->mutex.lock();
    held_ = true;
    if (owner_died) {
      try {
        channel_.repair();
      } catch (...) {
        channel_.header_->mutex.unlock();  // beyond repair: every later lock() fails instead of waiting for ever
        held_ = false;
        throw;
      }
      channel_.header_->mutex.mark_consistent();
    }
  }

  Channel& channel_;
  bool held_ = false;
};

Channel::Channel(std::shared_ptr<Segment> segment)
    : segment_(std::move(segment)),
      header_(reinterpret_cast<ChannelHeader*>(segment_->bytes())),
      arena_(segment_->bytes() + kArenaOffset, header_->arena_bytes, &header_->arena_heads) {}

std::shared_ptr<Channel> Channel::create(const std::string& name, uint64_t capacity_items, uint64_t capacity_bytes,
                                         uint64_t num_producers) {
  RLINF_CHECK_USER(capacity_items > 0 && capacity_bytes > 0 && num_producers > 0, "channel '", name,
                   "': capacity_items=", capacity_items, ", capacity_bytes=", capacity_bytes,
                   ", num_producers=", num_producers, "; each must be at least 1");
  const uint64_t arena_bytes = arena_bytes_for(capacity_items, capacity_bytes);
  auto segment = Segment::create(name, kArenaOffset + arena_bytes);
  auto* header = reinterpret_cast<ChannelHeader*>(segment->bytes());  // zeroed by the system
  header->mutex.init();
  header->capacity_items = capacity_items;
  header->capacity_bytes = capacity_bytes;
  header->arena_bytes = arena_bytes;
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

uint64_t Channel::item_bytes(uint64_t head_bytes, const std::vector<ByteView>& buffers) {
  uint64_t total = align_up(buffers.size() * sizeof(uint64_t) + head_bytes);
  for (const ByteView& buffer : buffers) {
    total += align_up(buffer.num_bytes);
  }
  return total;
}

bool Channel::is_closed() const {
  return header_->num_closed >= header_->num_producers;
}

// --- the queue ------------------------------------------------------------------------------------------------------

void Channel::append_ready(uint64_t offset) {
  BlockHeader& block = arena_.at(offset);
  block.next = kNil;
  block.previous = header_->last_ready;
  if (header_->last_ready == kNil) {
    header_->first_ready = offset;
  } else {
    arena_.at(header_->last_ready).next = offset;
  }
  header_->last_ready = offset;
  header_->num_ready += 1;
  header_->ready_bytes += block.payload_bytes;
}

void Channel::unlink_ready(uint64_t offset) {
  const BlockHeader& block = arena_.at(offset);
  if (block.previous == kNil) {
    header_->first_ready = block.next;
  } else {
    arena_.at(block.previous).next = block.next;
  }
  if (block.next == kNil) {
    header_->last_ready = block.previous;
  } else {
    arena_.at(block.next).previous = block.previous;
  }
  header_->num_ready -= 1;
  header_->ready_bytes -= block.payload_bytes;
}

// Frees a reserved or taken block.
void Channel::free_block(uint64_t offset) {
  const BlockHeader& block = arena_.at(offset);
  if (block.state.load(std::memory_order_relaxed) == BlockState::kReserved) {
    header_->num_reserved -= 1;
    header_->reserved_bytes -= block.payload_bytes;
  } else {
    header_->num_taken_held -= 1;
    header_->taken_held_bytes -= block.payload_bytes;
  }
  arena_.free(offset);
}

// A process died with the mutex: states and sizes of the blocks are right at every instant, so all else follows from
// them.
void Channel::repair() {
  arena_.rebuild();
  header_->first_ready = kNil;
  header_->last_ready = kNil;
  header_->num_ready = header_->ready_bytes = 0;
  header_->num_reserved = header_->reserved_bytes = 0;
  header_->num_taken_held = header_->taken_held_bytes = 0;
  std::vector<uint64_t> ready;
  for (uint64_t offset = 0; offset != kNil; offset = arena_.after(offset)) {
    const BlockHeader& block = arena_.at(offset);
    switch (block.state.load(std::memory_order_relaxed)) {
      case BlockState::kReady:
        ready.push_back(offset);
        break;
      case BlockState::kReserved:
        header_->num_reserved += 1;
        header_->reserved_bytes += block.payload_bytes;
        break;
      case BlockState::kTaken:
        header_->num_taken_held += 1;
        header_->taken_held_bytes += block.payload_bytes;
        break;
      case BlockState::kFree:
        break;
    }
  }
  std::sort(ready.begin(), ready.end(),
            [this](uint64_t a, uint64_t b) { return arena_.at(a).sequence < arena_.at(b).sequence; });
  for (const uint64_t offset : ready) {
    append_ready(offset);
    header_->num_put = std::max(header_->num_put, arena_.at(offset).sequence + 1);
  }
  reclaim_from_dead();
  header_->items_event.notify_all();
  header_->space_event.notify_all();
}

// Blocks that a dead process was copying into or looking at. Its views died with it.
void Channel::reclaim_from_dead() {
  std::vector<std::pair<ProcessId, bool>> known = {{current_process(), true}};
  std::vector<uint64_t> lost;
  for (uint64_t offset = 0; offset != kNil; offset = arena_.after(offset)) {
    const BlockHeader& block = arena_.at(offset);
    const BlockState state = block.state.load(std::memory_order_relaxed);
    if (state != BlockState::kReserved && state != BlockState::kTaken) {
      continue;
    }
    auto entry = std::find_if(known.begin(), known.end(), [&](const auto& one) { return one.first == block.holder; });
    if (entry == known.end()) {
      known.emplace_back(block.holder, is_alive(block.holder));
      entry = known.end() - 1;
    }
    if (!entry->second) {
      lost.push_back(offset);
    }
  }
  // From the end: freeing a block swallows a free right neighbour, which has had its turn by then.
  for (auto offset = lost.rbegin(); offset != lost.rend(); ++offset) {
    free_block(*offset);
  }
}

// --- put ------------------------------------------------------------------------------------------------------------

bool Channel::is_time_to_reclaim(WaitState& wait) {
  if (wait.next_reclaim_ns == 0) {
    return false;
  }
  const int64_t now_ns = monotonic_ns();
  if (now_ns < wait.next_reclaim_ns) {
    return false;
  }
  wait.next_reclaim_ns = now_ns + kWaitSliceNs;
  return true;
}

Outcome Channel::reserve(uint64_t num_bytes, WaitState& wait, BlockRef* block) {
  RLINF_CHECK_USER(num_bytes <= header_->capacity_bytes, "one item of ", num_bytes,
                   " bytes does not fit capacity_bytes=", header_->capacity_bytes,
                   "; create the channel with more, or put smaller items");
  int64_t start_ns = 0;  // of the wait; the clock is not read before there is one
  Lock lock(*this);
  if (is_time_to_reclaim(wait)) {
    reclaim_from_dead();
  }
  auto finish = [&](Outcome outcome) {
    if (start_ns != 0) {
      header_->blocked_put_ns += monotonic_ns() - start_ns;
    }
    return outcome;
  };
  while (true) {
    if (header_->aborted) {
      return finish(Outcome::kAborted);
    }
    if (is_closed()) {
      return finish(Outcome::kClosed);
    }
    if (header_->num_ready + header_->num_reserved < header_->capacity_items &&
        header_->ready_bytes + header_->reserved_bytes + num_bytes <= header_->capacity_bytes) {
      const uint64_t offset = arena_.allocate(num_bytes, current_process());
      if (offset != kNil) {
        arena_.at(offset).payload_bytes = num_bytes;
        header_->num_reserved += 1;
        header_->reserved_bytes += num_bytes;
        header_->put_blocked_at_ns = 0;
        *block = BlockRef{offset, arena_.at(offset).generation};
        return finish(Outcome::kDone);
      }
    }
    const int64_t now_ns = monotonic_ns();
    if (start_ns == 0) {
      start_ns = now_ns;
    }
    note_wait(wait, now_ns);
    if (!wait.counted) {
      wait.counted = true;
      header_->num_blocked_puts += 1;
    }
    header_->put_blocked_at_ns = now_ns;
    const int64_t slice_end_ns = slice_end(wait, start_ns);
    if (now_ns >= slice_end_ns) {
      return finish(now_ns >= wait.deadline_ns ? Outcome::kTimedOut : Outcome::kPending);
    }
    lock.wait(header_->space_event, slice_end_ns);
  }
}

void Channel::fill(const BlockRef& block, const ByteView& head, const std::vector<ByteView>& buffers) {
  BlockHeader& header = arena_.at(block.offset);
  header.num_buffers = static_cast<uint32_t>(buffers.size());
  header.head_bytes = head.num_bytes;
  std::byte* cursor = arena_.payload(block.offset);
  std::byte* const start = cursor;
  for (const ByteView& buffer : buffers) {
    std::memcpy(cursor, &buffer.num_bytes, sizeof(uint64_t));
    cursor += sizeof(uint64_t);
  }
  copy_bytes(cursor, head.pointer, head.num_bytes);
  cursor = start + align_up(static_cast<uint64_t>(cursor - start) + head.num_bytes);
  for (const ByteView& buffer : buffers) {
    copy_bytes(cursor, buffer.pointer, buffer.num_bytes);
    cursor += align_up(buffer.num_bytes);
  }
}

void Channel::commit(const BlockRef& ref, const ItemLabels& labels) {
  {
    Lock lock(*this);
    BlockHeader& block = arena_.at(ref.offset);
    RLINF_CHECK_INTERNAL(
        block.generation == ref.generation && block.state.load(std::memory_order_relaxed) == BlockState::kReserved,
        "commit of a block that is not reserved");
    header_->num_reserved -= 1;
    header_->reserved_bytes -= block.payload_bytes;
    block.key = labels.key;
    block.weight = labels.weight;
    block.policy_version = labels.policy_version;
    block.sequence = header_->num_put++;
    block.state.store(BlockState::kReady, std::memory_order_release);
    append_ready(ref.offset);
  }
  header_->items_event.notify_all();
}

// --- take -----------------------------------------------------------------------------------------------------------

// Gathers the items that a take would hand out now. True when no further item could be added to them.
bool Channel::collect(const TakeRequest& request, std::vector<uint64_t>* offsets) const {
  double weight = 0.0;
  for (uint64_t offset = header_->first_ready; offset != kNil; offset = arena_.at(offset).next) {
    const BlockHeader& block = arena_.at(offset);
    if (!request.any_key && !std::binary_search(request.keys.begin(), request.keys.end(), block.key)) {
      continue;
    }
    weight += block.weight;
    if (!offsets->empty() && weight > request.max_weight) {
      return true;
    }
    offsets->push_back(offset);
    if (offsets->size() == request.max_items) {
      return true;
    }
  }
  return false;
}

TakenItem Channel::hand_out(uint64_t offset, const ProcessId& holder) {
  unlink_ready(offset);
  BlockHeader& block = arena_.at(offset);
  const uint64_t held_bytes = header_->taken_held_bytes + header_->num_taken_held * sizeof(BlockHeader);
  const bool may_stay =
      block.payload_bytes >= kMinStayBytes && held_bytes + block.payload_bytes <= header_->capacity_bytes;
  block.holder = holder;
  block.state.store(BlockState::kTaken, std::memory_order_release);
  header_->num_taken_held += 1;
  header_->taken_held_bytes += block.payload_bytes;
  header_->num_taken += 1;

  TakenItem item;
  item.block = BlockRef{offset, block.generation};
  item.may_stay = may_stay;
  item.labels = ItemLabels{block.key, block.weight, block.policy_version};
  item.sequence = block.sequence;
  item.head_bytes = block.head_bytes;
  item.num_bytes = block.head_bytes;
  std::byte* const start = arena_.payload(offset);
  const uint64_t table_bytes = block.num_buffers * sizeof(uint64_t);
  item.head = start + table_bytes;
  item.buffers.resize(block.num_buffers);
  std::byte* cursor = start + align_up(table_bytes + block.head_bytes);
  for (uint32_t i = 0; i < block.num_buffers; ++i) {
    uint64_t num_bytes = 0;
    std::memcpy(&num_bytes, start + i * sizeof(uint64_t), sizeof(uint64_t));
    item.buffers[i] = ByteView{cursor, num_bytes};
    item.num_bytes += num_bytes;
    cursor += align_up(num_bytes);
  }
  return item;
}

// True when, for a while, the queue was full of items for this very take, which in turn waits for more than fits.
bool Channel::is_stalled(uint64_t num_matching, WaitState& wait, int64_t now_ns) const {
  const bool producer_waits = now_ns - header_->put_blocked_at_ns < kBlockedMarkNs;
  const bool only_ours = num_matching > 0 && num_matching == header_->num_ready && header_->num_reserved == 0;
  if (!producer_waits || !only_ours) {
    wait.stalled_since_ns = 0;
    return false;
  }
  if (wait.stalled_since_ns == 0) {
    wait.stalled_since_ns = now_ns;
  }
  return now_ns - wait.stalled_since_ns > kStallNs;
}

Outcome Channel::take(const TakeRequest& request, WaitState& wait, std::vector<TakenItem>* items) {
  const uint64_t min_items = std::min(request.min_items, request.max_items);
  std::vector<uint64_t> offsets;
  int64_t start_ns = 0;  // of the wait; the clock is not read before there is one
  Outcome outcome = Outcome::kDone;
  {
    Lock lock(*this);
    if (is_closed() && header_->num_reserved > 0 && is_time_to_reclaim(wait)) {
      reclaim_from_dead();
    }
    while (true) {
      if (header_->aborted) {
        outcome = Outcome::kAborted;
        break;
      }
      offsets.clear();
      const bool is_full = collect(request, &offsets);
      if (is_full || offsets.size() >= min_items || (is_closed() && header_->num_reserved == 0)) {
        items->reserve(offsets.size());
        const ProcessId holder = current_process();
        for (const uint64_t offset : offsets) {
          items->push_back(hand_out(offset, holder));
        }
        break;
      }
      const int64_t now_ns = monotonic_ns();
      if (start_ns == 0) {
        start_ns = now_ns;
      }
      note_wait(wait, now_ns);
      if (is_stalled(offsets.size(), wait, now_ns)) {
        outcome = Outcome::kStalled;
        break;
      }
      const int64_t slice_end_ns = slice_end(wait, start_ns);
      if (now_ns >= slice_end_ns) {
        outcome = now_ns >= wait.deadline_ns ? Outcome::kTimedOut : Outcome::kPending;
        break;
      }
      lock.wait(header_->items_event, slice_end_ns);
    }
    if (start_ns != 0) {
      header_->blocked_take_ns += monotonic_ns() - start_ns;
    }
  }
  if (!items->empty()) {
    header_->space_event.notify_all();
  }
  return outcome;
}

void Channel::release_locked(const BlockRef& ref) {
  const BlockHeader& block = arena_.at(ref.offset);
  const BlockState state = block.state.load(std::memory_order_relaxed);
  if (block.generation == ref.generation && (state == BlockState::kTaken || state == BlockState::kReserved)) {
    free_block(ref.offset);
  }
}

void Channel::release(const BlockRef& block) {
  {
    Lock lock(*this);
    release_locked(block);
  }
  header_->space_event.notify_all();
}

void Channel::release(const std::vector<BlockRef>& blocks) {
  {
    Lock lock(*this);
    for (const BlockRef& block : blocks) {
      release_locked(block);
    }
  }
  header_->space_event.notify_all();
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

void Channel::reclaim() {
  {
    Lock lock(*this);
    reclaim_from_dead();
  }
  header_->space_event.notify_all();
}

// --- life of the channel --------------------------------------------------------------------------------------------

void Channel::close_producer() {
  {
    Lock lock(*this);
    RLINF_CHECK_USER(!is_closed() || header_->aborted, "close() by one producer too many: all ", header_->num_producers,
                     " have closed already");
    header_->num_closed += 1;
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
  counts.aborted = header_->aborted != 0;
  return counts;
}

void Channel::lock_and_leave() {
  Lock lock(*this);
  lock.keep_forever();
}

}  // namespace rlinf::comm

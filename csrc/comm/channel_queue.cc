// Put, take and release.
#include <algorithm>
#include <cstring>

#include "channel_header.h"
#include "rlinf/comm/check.h"
#include "rlinf/comm/memory_copy.h"

namespace rlinf::comm {

namespace {

// A blocked producer renews its mark every slice; an older mark is of one that went away.
constexpr int64_t kBlockedMarkNs = 3 * kWaitSliceNs;
// Another consumer gets this long to make room before a take that can never be satisfied says so.
constexpr int64_t kStallNs = 1'000'000'000;

void note_wait(WaitState& wait, int64_t now_ns) {
  if (wait.next_reclaim_ns == 0) {
    wait.next_reclaim_ns = now_ns + kWaitSliceNs;
  }
}

int64_t slice_end(const WaitState& wait, int64_t start_ns) {
  return std::min(start_ns + wait.slice_ns, wait.deadline_ns);
}

}  // namespace

// --- put ------------------------------------------------------------------------------------------------------------

ItemKey ItemKey::from_text(std::string text) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a: the same in every process
  for (const char byte : text) {
    hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3;
  }
  return ItemKey{static_cast<int64_t>(hash), std::move(text)};
}

uint64_t Channel::item_bytes(uint64_t head_bytes, const std::vector<ByteView>& buffers, const ItemKey& key) {
  uint64_t total = align_up(buffers.size() * sizeof(uint64_t) + head_bytes + key.text.size());
  for (const ByteView& buffer : buffers) {
    total += align_up(buffer.num_bytes);
  }
  return total;
}

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

// Over blocks instead of counters: a process that dies leaves nothing to repair. Texts count by the number they give.
KeyUse Channel::use_of(int64_t key) const {
  KeyUse use;
  for (uint64_t offset = 0; offset != kNil; offset = arena_.after(offset)) {
    const BlockHeader& block = arena_.at(offset);
    const BlockState state = block.state.load(std::memory_order_relaxed);
    if ((state == BlockState::kReady || state == BlockState::kReserved) && block.key == key) {
      use.num_items += 1;
      use.num_bytes += block.payload_bytes;
    }
  }
  return use;
}

bool Channel::has_room(uint64_t num_bytes, const ItemKey& key) const {
  const uint64_t num_items = header_->num_ready + header_->num_reserved;
  const uint64_t used_bytes = header_->ready_bytes + header_->reserved_bytes;
  if (num_items >= header_->capacity_items || used_bytes + num_bytes > header_->capacity_bytes) {
    return false;
  }
  const uint64_t share_items = header_->capacity_items / header_->num_keys;
  const uint64_t share_bytes = header_->capacity_bytes / header_->num_keys;
  if (num_items < share_items && used_bytes + num_bytes <= share_bytes) {
    return true;  // even if all of it is this key's
  }
  if (header_->num_keys == 1) {
    return false;
  }
  const KeyUse use = use_of(key.number);
  return use.num_items < share_items && use.num_bytes + num_bytes <= share_bytes;
}

Outcome Channel::reserve(uint64_t num_bytes, WaitState& wait, BlockRef* block, const ItemKey& key) {
  RLINF_CHECK_USER(num_bytes <= header_->capacity_bytes / header_->num_keys, "one item of ", num_bytes,
                   " bytes does not fit capacity_bytes=", header_->capacity_bytes,
                   header_->num_keys == 1 ? "" : join_text(" shared by num_keys=", header_->num_keys),
                   "; create the channel with more, or put smaller items");
  int64_t start_ns = 0;  // of the wait; the clock is not read before there is one
  bool is_reclaimed = false;
  Lock lock(*this);
  note_use(UserRole::kProducer);
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
    if (has_room(num_bytes, key)) {
      const uint64_t offset = arena_.allocate(num_bytes, current_process());
      if (offset != kNil) {
        arena_.at(offset).payload_bytes = num_bytes;
        arena_.at(offset).key = key.number;
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
    const bool is_timed_out = now_ns >= wait.deadline_ns;
    if ((is_reclaimed || is_time_to_look(now_ns)) && has_lost_user()) {
      if (is_reclaimed) {
        return finish(Outcome::kPeerLost);
      }
      reclaim_from_dead();  // what the dead held may be room enough
      is_reclaimed = true;
      continue;
    }
    const int64_t slice_end_ns = slice_end(wait, start_ns);
    if (now_ns >= slice_end_ns) {
      return finish(is_timed_out ? Outcome::kTimedOut : Outcome::kPending);
    }
    lock.wait(header_->space_event, slice_end_ns);
  }
}

void Channel::fill(const BlockRef& block, const ByteView& head, const std::vector<ByteView>& buffers,
                   const ItemKey& key) {
  BlockHeader& header = arena_.at(block.offset);
  header.key_bytes = key.text.size();
  header.num_buffers = static_cast<uint32_t>(buffers.size());
  header.head_bytes = head.num_bytes;
  std::byte* cursor = arena_.payload(block.offset);
  std::byte* const start = cursor;
  for (const ByteView& buffer : buffers) {
    std::memcpy(cursor, &buffer.num_bytes, sizeof(uint64_t));
    cursor += sizeof(uint64_t);
  }
  copy_bytes(cursor, head.pointer, head.num_bytes);
  cursor += head.num_bytes;
  copy_bytes(cursor, key.text.data(), key.text.size());
  cursor = start + align_up(static_cast<uint64_t>(cursor - start) + key.text.size());
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
    block.weight = labels.weight;
    block.policy_version = labels.policy_version;
    block.sequence = header_->num_put++;
    block.state.store(BlockState::kReady, std::memory_order_release);
    append_ready(ref.offset);
  }
  header_->items_event.notify_all();
}

// --- take -----------------------------------------------------------------------------------------------------------

std::string_view Channel::key_text(uint64_t offset) const {
  const BlockHeader& block = arena_.at(offset);
  const std::byte* text = arena_.payload(offset) + block.num_buffers * sizeof(uint64_t) + block.head_bytes;
  return {reinterpret_cast<const char*>(text), block.key_bytes};
}

bool Channel::is_wanted(const TakeRequest& request, uint64_t offset) const {
  return request.any_key || std::any_of(request.keys.begin(), request.keys.end(), [&](const ItemKey& key) {
           return key.number == arena_.at(offset).key && key.text == key_text(offset);
         });
}

void Channel::collect(const TakeRequest& request, Gathered* gathered) const {
  *gathered = Gathered{};
  for (uint64_t offset = header_->first_ready; offset != kNil; offset = arena_.at(offset).next) {
    if (!is_wanted(request, offset)) {
      continue;
    }
    const double weight = gathered->weight + arena_.at(offset).weight;
    if (!gathered->offsets.empty() && weight > request.max_weight) {
      gathered->is_full = true;
      return;
    }
    gathered->offsets.push_back(offset);
    gathered->weight = weight;
    // At exactly the weight only items without any could follow: those that are here are taken, none is waited for.
    gathered->is_full = weight >= request.max_weight || gathered->offsets.size() == request.max_items;
    if (gathered->offsets.size() == request.max_items) {
      return;
    }
  }
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
  item.labels = ItemLabels{{block.key, std::string(key_text(offset))}, block.weight, block.policy_version};
  item.sequence = block.sequence;
  item.head_bytes = block.head_bytes;
  item.num_bytes = block.head_bytes;
  std::byte* const start = arena_.payload(offset);
  const uint64_t table_bytes = block.num_buffers * sizeof(uint64_t);
  item.head = start + table_bytes;
  item.buffers.resize(block.num_buffers);
  std::byte* cursor = start + align_up(table_bytes + block.head_bytes + block.key_bytes);
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
  Gathered gathered;
  int64_t start_ns = 0;  // of the wait; the clock is not read before there is one
  Outcome outcome = Outcome::kDone;
  {
    Lock lock(*this);
    note_use(UserRole::kConsumer);
    if (is_closed() && header_->num_reserved > 0 && is_time_to_reclaim(wait)) {
      reclaim_from_dead();
    }
    while (true) {
      if (header_->aborted) {
        outcome = Outcome::kAborted;
        break;
      }
      collect(request, &gathered);
      const bool is_enough = gathered.offsets.size() >= min_items && gathered.weight >= request.min_weight;
      if (gathered.is_full || is_enough || (is_closed() && header_->num_reserved == 0)) {
        items->reserve(gathered.offsets.size());
        const ProcessId holder = current_process();
        for (const uint64_t offset : gathered.offsets) {
          items->push_back(hand_out(offset, holder));
        }
        break;
      }
      const int64_t now_ns = monotonic_ns();
      if (start_ns == 0) {
        start_ns = now_ns;
      }
      note_wait(wait, now_ns);
      if (is_stalled(gathered.offsets.size(), wait, now_ns)) {
        outcome = Outcome::kStalled;
        break;
      }
      const bool is_timed_out = now_ns >= wait.deadline_ns;
      if (is_time_to_look(now_ns) && has_lost_user()) {
        outcome = Outcome::kPeerLost;
        break;
      }
      const int64_t slice_end_ns = slice_end(wait, start_ns);
      if (now_ns >= slice_end_ns) {
        outcome = is_timed_out ? Outcome::kTimedOut : Outcome::kPending;
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

}  // namespace rlinf::comm

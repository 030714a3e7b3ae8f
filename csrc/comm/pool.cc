#include "rlinf/comm/pool.h"

#include <algorithm>
#include <cstring>

#include "pool_memory.h"

namespace rlinf::comm {

Pool::Pool(std::shared_ptr<Segment> segment)
    : segment_(std::move(segment)),
      header_(reinterpret_cast<PoolHeader*>(segment_->bytes())),
      holds_(reinterpret_cast<Hold*>(segment_->bytes() + kHoldsOffset)),
      arena_(segment_->bytes() + header_->arena_offset, header_->arena_bytes, &header_->arena_heads) {}

Pool::~Pool() {
  if (is_created_here()) {
    header_->closed.store(1, std::memory_order_release);
  }
}

std::shared_ptr<Pool> Pool::create(const std::string& name, uint64_t capacity_bytes) {
  RLINF_CHECK_USER(capacity_bytes > 0, "pool '", name, "': capacity_bytes=0; at least 1");
  const uint64_t max_holds = std::clamp(capacity_bytes / kBytesPerHold, kMinHolds, kMaxHolds);
  const uint64_t arena_offset = align_up(kHoldsOffset + max_holds * sizeof(Hold), 4096);
  // Headers and remainders of as many blocks as there can be. These are addresses: a page costs memory once it is used.
  const uint64_t arena_bytes = align_up(capacity_bytes) + max_holds * (2 * sizeof(BlockHeader) + kBlockAlignment);
  auto segment = Segment::create(name, arena_offset + arena_bytes);
  auto* header = reinterpret_cast<PoolHeader*>(segment->bytes());  // zeroed by the system
  header->mutex.init();
  header->magic = kPoolMagic;
  header->capacity_bytes = align_up(capacity_bytes);
  header->arena_offset = arena_offset;
  header->arena_bytes = arena_bytes;
  header->max_holds = max_holds;
  std::memcpy(header->name, name.data(), std::min<uint64_t>(name.size(), kMaxNameBytes));
  header->first_free_hold = kNil;
  std::shared_ptr<Pool> pool(new Pool(std::move(segment)));
  pool->arena_.format();
  return pool;
}

std::shared_ptr<Pool> Pool::open(const SegmentAddress& address) {
  auto segment = Segment::open(address);
  RLINF_CHECK_USER(
      segment->num_bytes() > kHoldsOffset && reinterpret_cast<const PoolHeader*>(segment->bytes())->magic == kPoolMagic,
      "the segment of process ", address.creator.pid, " is no pool");
  return std::shared_ptr<Pool>(new Pool(std::move(segment)));
}

std::string Pool::name() const {
  return header_->name;
}

uint64_t Pool::capacity_bytes() const {
  return header_->capacity_bytes;
}

void Pool::prefault() {
  segment_->prefault(header_->arena_offset + header_->capacity_bytes);
}

bool Pool::contains(const void* pointer) const {
  const auto* byte = static_cast<const std::byte*>(pointer);
  return byte >= segment_->bytes() && byte < segment_->bytes() + segment_->num_bytes();
}

uint64_t Pool::num_in_flight() const {
  return header_->num_in_flight.load(std::memory_order_relaxed);
}

bool Pool::is_closed() const {
  return header_->closed.load(std::memory_order_acquire) != 0;
}

bool Pool::is_created_here() const {
  const ProcessId& creator = address().creator;
  const ProcessId me = current_process();
  return creator.pid == me.pid && creator.start_ticks == me.start_ticks;
}

// --- the life of a block --------------------------------------------------------------------------------------------

bool Pool::try_allocate(uint64_t num_bytes, HeldBlock* held) {
  const uint64_t payload_bytes = align_up(num_bytes);
  if (header_->used_bytes + payload_bytes > header_->capacity_bytes || num_free_holds() <= kSpareHolds) {
    return false;
  }
  const uint64_t offset = arena_.allocate(payload_bytes, current_process());
  if (offset == kNil) {
    return false;
  }
  BlockHeader& block = arena_.at(offset);
  block.sequence = 0;
  block.payload_bytes = payload_bytes;
  header_->num_blocks += 1;
  header_->used_bytes += payload_bytes;
  const uint64_t ticket = publish(offset, current_process(), Consignment{});
  *held = {ticket, offset, block.generation, payload_bytes};
  return true;
}

Outcome Pool::allocate(uint64_t num_bytes, WaitState& wait, const IsThere& is_there, HeldBlock* block) {
  RLINF_CHECK_USER(num_bytes > 0 && num_bytes <= header_->capacity_bytes, "pool '", header_->name, "': ", num_bytes,
                   " bytes do not fit capacity_bytes=", header_->capacity_bytes, "; create a larger pool");
  int64_t start_ns = 0;
  while (true) {
    const uint32_t seen = header_->freed_event.sequence();
    {
      Lock lock(*this);
      if (try_allocate(num_bytes, block)) {
        return Outcome::kDone;
      }
    }
    const int64_t now_ns = monotonic_ns();
    if (start_ns == 0) {
      start_ns = now_ns;
    }
    if (now_ns >= wait.next_reclaim_ns) {
      wait.next_reclaim_ns = now_ns + kWaitSliceNs;
      if (reclaim(is_there) > 0) {
        continue;
      }
    }
    const int64_t slice_end_ns = std::min(start_ns + wait.slice_ns, wait.deadline_ns);
    if (now_ns >= slice_end_ns) {
      return now_ns >= wait.deadline_ns ? Outcome::kTimedOut : Outcome::kPending;
    }
    header_->freed_event.wait(seen, slice_end_ns);
  }
}

uint64_t Pool::send(uint64_t offset, uint64_t generation, const Consignment& consignment) {
  Lock lock(*this);
  const BlockHeader& block = arena_.at(offset);
  // A forked child's tensors are its parent's, who may have given the memory back.
  if (block.state.load(std::memory_order_relaxed) == BlockState::kFree || block.generation != generation) {
    throw BlockLost(join_text("a tensor in the pool '", header_->name,
                              "' whose memory the parent of this process has given back; keep it there"));
  }
  if (num_free_holds() <= kSpareHolds) {
    throw_exhausted();
  }
  return publish(offset, current_process(), consignment);
}

HeldBlock Pool::find(uint64_t ticket) {
  Lock lock(*this);
  return held_block(hold_of(ticket, "a tensor in the"));
}

HeldBlock Pool::receive(uint64_t ticket) {
  Lock lock(*this);
  Hold& hold = hold_of(ticket, "a tensor in the");
  if (num_free_holds() == 0) {
    throw_exhausted();
  }
  HeldBlock held = held_block(hold);
  held.ticket = publish(hold.offset, current_process(), Consignment{});
  drop(hold);
  return held;
}

void Pool::release(uint64_t ticket) {
  uint64_t num_blocks = 0;
  uint64_t num_left = 0;
  {
    Lock lock(*this);
    const uint64_t index = ticket & (kMaxHolds - 1);
    if (ticket == 0 || index >= header_->num_touched ||
        holds_[index].ticket.load(std::memory_order_relaxed) != ticket) {
      return;
    }
    num_blocks = header_->num_blocks;
    drop(holds_[index]);
    num_left = header_->num_blocks;
  }
  if (num_left < num_blocks) {
    header_->freed_event.notify_all();
  }
}

uint64_t Pool::reclaim(const IsThere& is_there) {
  struct Seen {
    uint64_t ticket;
    ProcessId holder;
    Consignment consignment;
  };
  std::vector<Seen> seen;
  {
    Lock lock(*this);
    for (uint64_t index = 0; index < header_->num_touched; ++index) {
      const Hold& hold = holds_[index];
      const uint64_t ticket = hold.ticket.load(std::memory_order_relaxed);
      if (ticket != 0) {
        seen.push_back({ticket, hold.holder, hold.consignment});
      }
    }
  }
  // Questions to the system and to channels take their time; tickets tell afterwards what has changed meanwhile.
  std::vector<std::pair<ProcessId, bool>> known = {{current_process(), true}};
  std::vector<uint64_t> lost;
  for (const Seen& one : seen) {
    if (one.consignment.channel.nonce != 0) {
      if (!is_there(one.consignment, one.holder)) {
        lost.push_back(one.ticket);
      }
      continue;
    }
    auto entry = std::find_if(known.begin(), known.end(), [&](const auto& pair) { return pair.first == one.holder; });
    if (entry == known.end()) {
      known.emplace_back(one.holder, is_alive(one.holder));
      entry = known.end() - 1;
    }
    if (!entry->second) {
      lost.push_back(one.ticket);
    }
  }
  for (const uint64_t ticket : lost) {
    release(ticket);
  }
  return lost.size();
}

void Pool::lock_and_leave() {
  Lock lock(*this);
  lock.keep_forever();
}

}  // namespace rlinf::comm

#include "rlinf/comm/pool.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "rlinf/comm/check.h"

namespace rlinf::comm {

namespace {

constexpr uint64_t kPoolMagic = 0x726c696e66504c31;  // "rlinfPL1"
constexpr uint64_t kMaxNameBytes = 100;
// A ticket is a number that counts up, and the hold's place in the table.
constexpr int kIndexBits = 16;
constexpr uint64_t kMaxHolds = uint64_t{1} << kIndexBits;
constexpr uint64_t kMinHolds = 4096;
constexpr uint64_t kBytesPerHold = 4096;
// A receive needs a second hold for an instant, so the last one is not given away.
constexpr uint64_t kSpareHolds = 1;

}  // namespace

struct Hold {
  std::atomic<uint64_t> ticket;  // 0: not a hold
  uint64_t offset;               // of the block
  ProcessId holder;              // the sender, while it is in flight
  Consignment consignment;       // nonce 0: not in flight
  uint64_t next_free;            // index; derived
};

// At the start of the segment. Guarded by `mutex`, except for the event, the flag and what create() fixes.
struct PoolHeader {
  RobustMutex mutex;
  alignas(64) EventWord freed_event;
  std::atomic<uint32_t> closed;

  // Fixed by create().
  alignas(64) uint64_t magic;
  uint64_t capacity_bytes;
  uint64_t arena_offset;
  uint64_t arena_bytes;
  uint64_t max_holds;
  char name[kMaxNameBytes + 1];

  uint64_t num_tickets;  // given so far
  uint64_t num_touched;  // holds below this index have been in use

  // Derived from the holds and the arena's blocks; see Pool::repair(). A block's number of holds is its `sequence`.
  ArenaHeads arena_heads;
  uint64_t first_free_hold;
  uint64_t num_holds;
  std::atomic<uint64_t> num_in_flight;
  uint64_t num_blocks;
  uint64_t used_bytes;
};

namespace {

constexpr uint64_t kHoldsOffset = align_up(sizeof(PoolHeader), 4096);

bool is_in_flight(const Hold& hold) {
  return hold.consignment.channel.nonce != 0;
}

}  // namespace

class Pool::Lock {
 public:
  explicit Lock(Pool& pool) : pool_(pool) {
    if (pool_.header_->mutex.lock()) {
      try {
        pool_.repair();
      } catch (...) {
        pool_.header_->mutex.unlock();  // beyond repair: every later lock() fails instead of waiting for ever
        throw;
      }
      pool_.header_->mutex.mark_consistent();
    }
  }
  ~Lock() {
    if (held_) {
      pool_.header_->mutex.unlock();
    }
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  void keep_forever() { held_ = false; }

 private:
  Pool& pool_;
  bool held_ = true;
};

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

// --- holds ----------------------------------------------------------------------------------------------------------

uint64_t Pool::num_free_holds() const {
  return header_->max_holds - header_->num_holds;
}

void Pool::throw_exhausted() const {
  throw HoldsExhausted(join_text("pool '", header_->name, "': all ", header_->max_holds,
                                 " holds are in use: tensors that processes look at, and tensors on their way; take "
                                 "the items, drop tensors, or create a larger pool"));
}

// Writes a hold down; the caller has seen that there is room.
uint64_t Pool::publish(uint64_t offset, const ProcessId& holder, const Consignment& consignment) {
  uint64_t index = header_->first_free_hold;
  if (index == kNil) {
    index = header_->num_touched++;
  } else {
    header_->first_free_hold = holds_[index].next_free;
  }
  const uint64_t ticket = ++header_->num_tickets << kIndexBits | index;
  Hold& hold = holds_[index];
  std::atomic_signal_fence(std::memory_order_seq_cst);  // the former hold is gone before its fields change
  hold.offset = offset;
  hold.holder = holder;
  hold.consignment = consignment;
  hold.ticket.store(ticket, std::memory_order_release);
  header_->num_holds += 1;
  header_->num_in_flight.fetch_add(is_in_flight(hold), std::memory_order_relaxed);
  arena_.at(offset).sequence += 1;
  return ticket;
}

// Ends a hold, and the block with its last one.
void Pool::drop(Hold& hold) {
  const uint64_t offset = hold.offset;
  hold.ticket.store(0, std::memory_order_release);
  hold.next_free = header_->first_free_hold;
  header_->first_free_hold = static_cast<uint64_t>(&hold - holds_);
  header_->num_holds -= 1;
  header_->num_in_flight.fetch_sub(is_in_flight(hold), std::memory_order_relaxed);
  BlockHeader& block = arena_.at(offset);
  block.sequence -= 1;
  if (block.sequence == 0) {
    header_->num_blocks -= 1;
    header_->used_bytes -= block.payload_bytes;
    arena_.free(offset);
  }
}

Hold& Pool::hold_of(uint64_t ticket, const char* what) const {
  const uint64_t index = ticket & (kMaxHolds - 1);
  const bool is_valid = ticket != 0 && index < header_->num_touched &&
                        holds_[index].ticket.load(std::memory_order_relaxed) == ticket && is_in_flight(holds_[index]);
  if (!is_valid) {
    throw BlockLost(join_text(what, " pool '", header_->name, "' of process ", address().creator.pid,
                              ": its memory was given back (its channel was dropped, or the item was taken before)"));
  }
  return holds_[index];
}

HeldBlock Pool::held_block(const Hold& hold) const {
  const BlockHeader& block = arena_.at(hold.offset);
  return {hold.ticket.load(std::memory_order_relaxed), hold.offset, block.generation, block.payload_bytes};
}

// A process died with the mutex.
void Pool::repair() {
  arena_.rebuild();
  for (uint64_t offset = 0; offset != kNil; offset = arena_.after(offset)) {
    arena_.at(offset).sequence = 0;
  }
  header_->first_free_hold = kNil;
  header_->num_holds = 0;
  uint64_t num_in_flight = 0;
  for (uint64_t index = header_->num_touched; index-- > 0;) {
    Hold& hold = holds_[index];
    if (hold.ticket.load(std::memory_order_relaxed) == 0) {
      hold.next_free = header_->first_free_hold;
      header_->first_free_hold = index;
      continue;
    }
    header_->num_holds += 1;
    num_in_flight += is_in_flight(hold);
    arena_.at(hold.offset).sequence += 1;
  }
  header_->num_in_flight.store(num_in_flight, std::memory_order_relaxed);
  header_->num_blocks = header_->used_bytes = 0;
  std::vector<uint64_t> unheld;
  for (uint64_t offset = 0; offset != kNil; offset = arena_.after(offset)) {
    const BlockHeader& block = arena_.at(offset);
    if (block.state.load(std::memory_order_relaxed) == BlockState::kFree) {
      continue;
    }
    if (block.sequence == 0) {
      unheld.push_back(offset);
    } else {
      header_->num_blocks += 1;
      header_->used_bytes += block.payload_bytes;
    }
  }
  // From the end: freeing a block swallows a free right neighbour, which has had its turn by then.
  for (auto offset = unheld.rbegin(); offset != unheld.rend(); ++offset) {
    arena_.free(*offset);
  }
  header_->freed_event.notify_all();
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

PoolCounts Pool::counts() {
  Lock lock(*this);
  PoolCounts counts{};
  counts.capacity_bytes = header_->capacity_bytes;
  counts.used_bytes = header_->used_bytes;
  counts.num_blocks = header_->num_blocks;
  counts.num_holds = header_->num_holds;
  counts.max_holds = header_->max_holds;
  for (uint64_t offset = 0; offset != kNil; offset = arena_.after(offset)) {
    const BlockHeader& block = arena_.at(offset);
    if (block.state.load(std::memory_order_relaxed) == BlockState::kFree) {
      const uint64_t hole = block.block_bytes.load(std::memory_order_relaxed) - sizeof(BlockHeader);
      counts.largest_hole_bytes = std::max(counts.largest_hole_bytes, hole);
    }
  }
  counts.largest_hole_bytes = std::min(counts.largest_hole_bytes, counts.capacity_bytes - counts.used_bytes);
  for (uint64_t index = 0; index < header_->num_touched; ++index) {
    const Hold& hold = holds_[index];
    if (hold.ticket.load(std::memory_order_relaxed) == 0) {
      continue;
    }
    auto holder = std::find_if(counts.holders.begin(), counts.holders.end(),
                               [&](const auto& one) { return one.process == hold.holder; });
    if (holder == counts.holders.end()) {
      counts.holders.push_back({hold.holder, 0, 0});
      holder = counts.holders.end() - 1;
    }
    (is_in_flight(hold) ? holder->in_flight_bytes : holder->held_bytes) += arena_.at(hold.offset).payload_bytes;
  }
  return counts;
}

void Pool::lock_and_leave() {
  Lock lock(*this);
  lock.keep_forever();
}

}  // namespace rlinf::comm

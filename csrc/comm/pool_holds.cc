// The table of holds of a pool: its changes, its repair, its summary.
#include <algorithm>

#include "pool_memory.h"

namespace rlinf::comm {

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

PoolCounts Pool::counts() {
  Lock lock(*this);
  PoolCounts counts{};
  counts.capacity_bytes = header_->capacity_bytes;
  counts.used_bytes = header_->used_bytes;
  counts.num_holds = header_->num_holds;
  counts.max_holds = header_->max_holds;
  for (uint64_t offset = 0; offset != kNil; offset = arena_.after(offset)) {
    const BlockHeader& block = arena_.at(offset);
    if (block.state.load(std::memory_order_relaxed) != BlockState::kFree) {
      counts.num_blocks += 1;
      continue;
    }
    const uint64_t hole = block.block_bytes.load(std::memory_order_relaxed) - sizeof(BlockHeader);
    counts.largest_hole_bytes = std::max(counts.largest_hole_bytes, hole);
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

}  // namespace rlinf::comm

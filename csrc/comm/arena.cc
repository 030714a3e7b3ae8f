#include "rlinf/comm/arena.h"

#include "rlinf/comm/check.h"

namespace rlinf::comm {

namespace {

constexpr uint64_t kHeaderBytes = sizeof(BlockHeader);
// A smaller remainder stays with the block it was cut from.
constexpr uint64_t kMinBlockBytes = kHeaderBytes + kBlockAlignment;

}  // namespace

void Arena::format() {
  BlockHeader& block = at(0);
  block.previous_bytes = 0;
  block.generation = 0;
  block.next = kNil;
  block.previous = kNil;
  block.state.store(BlockState::kFree, std::memory_order_relaxed);
  block.block_bytes.store(num_bytes_, std::memory_order_release);
  heads_->first_free = 0;
  heads_->next_generation = 1;
}

uint64_t Arena::after(uint64_t offset) const {
  const uint64_t next = offset + at(offset).block_bytes.load(std::memory_order_relaxed);
  RLINF_CHECK_INTERNAL(next > offset && next <= num_bytes_, "block at ", offset, " of an arena of ", num_bytes_);
  return next == num_bytes_ ? kNil : next;
}

void Arena::link_free(uint64_t offset, uint64_t previous, uint64_t next) {
  at(offset).previous = previous;
  at(offset).next = next;
  if (previous == kNil) {
    heads_->first_free = offset;
  } else {
    at(previous).next = offset;
  }
  if (next != kNil) {
    at(next).previous = offset;
  }
}

void Arena::unlink_free(uint64_t offset) {
  const BlockHeader& block = at(offset);
  if (block.previous == kNil) {
    heads_->first_free = block.next;
  } else {
    at(block.previous).next = block.next;
  }
  if (block.next != kNil) {
    at(block.next).previous = block.previous;
  }
}

uint64_t Arena::allocate(uint64_t payload_bytes, const ProcessId& holder) {
  const uint64_t needed = kHeaderBytes + align_up(payload_bytes);
  uint64_t offset = heads_->first_free;
  while (offset != kNil && at(offset).block_bytes.load(std::memory_order_relaxed) < needed) {
    offset = at(offset).next;
  }
  if (offset == kNil) {
    return kNil;
  }
  BlockHeader& block = at(offset);
  const uint64_t found = block.block_bytes.load(std::memory_order_relaxed);
  const uint64_t previous = block.previous;
  const uint64_t next = block.next;
  if (found - needed >= kMinBlockBytes) {
    // The remainder is complete before the block shrinks, so the chain of sizes is right at every instant.
    const uint64_t rest_offset = offset + needed;
    BlockHeader& rest = at(rest_offset);
    rest.previous_bytes = needed;
    rest.generation = 0;
    rest.state.store(BlockState::kFree, std::memory_order_relaxed);
    rest.block_bytes.store(found - needed, std::memory_order_relaxed);
    block.block_bytes.store(needed, std::memory_order_release);
    const uint64_t beyond = after(rest_offset);
    if (beyond != kNil) {
      at(beyond).previous_bytes = found - needed;
    }
    link_free(rest_offset, previous, next);
  } else {
    unlink_free(offset);
  }
  block.holder = holder;
  block.generation = heads_->next_generation++;
  block.state.store(BlockState::kReserved, std::memory_order_release);
  return offset;
}

void Arena::free(uint64_t offset) {
  at(offset).state.store(BlockState::kFree, std::memory_order_release);

  const uint64_t right = after(offset);
  const bool merge_right = right != kNil && at(right).state.load(std::memory_order_relaxed) == BlockState::kFree;
  const uint64_t left_bytes = at(offset).previous_bytes;
  const uint64_t left = offset - left_bytes;
  const bool merge_left = left_bytes != 0 && at(left).state.load(std::memory_order_relaxed) == BlockState::kFree;

  uint64_t merged = offset;
  uint64_t merged_bytes = at(offset).block_bytes.load(std::memory_order_relaxed);
  if (merge_right) {
    merged_bytes += at(right).block_bytes.load(std::memory_order_relaxed);
  }
  if (merge_left) {
    merged = left;
    merged_bytes += left_bytes;
    if (merge_right) {
      unlink_free(right);
    }
  } else if (merge_right) {
    link_free(offset, at(right).previous, at(right).next);
  } else {
    // Keep the list in address order.
    uint64_t previous = kNil;
    uint64_t next = heads_->first_free;
    while (next != kNil && next < offset) {
      previous = next;
      next = at(next).next;
    }
    link_free(offset, previous, next);
  }
  at(merged).block_bytes.store(merged_bytes, std::memory_order_release);
  const uint64_t beyond = after(merged);
  if (beyond != kNil) {
    at(beyond).previous_bytes = merged_bytes;
  }
}

void Arena::rebuild() {
  heads_->first_free = kNil;
  uint64_t previous = kNil;       // block before in address order
  uint64_t previous_free = kNil;  // last one linked
  uint64_t max_generation = 0;
  for (uint64_t offset = 0; offset != kNil;) {
    const bool is_free = at(offset).state.load(std::memory_order_relaxed) == BlockState::kFree;
    const bool continues = is_free && previous != kNil && previous == previous_free;
    if (continues) {
      at(previous).block_bytes.fetch_add(at(offset).block_bytes.load(std::memory_order_relaxed));
      offset = after(previous);
      continue;
    }
    at(offset).previous_bytes = previous == kNil ? 0 : at(previous).block_bytes.load(std::memory_order_relaxed);
    if (is_free) {
      link_free(offset, previous_free, kNil);
      previous_free = offset;
    } else if (at(offset).generation > max_generation) {
      max_generation = at(offset).generation;
    }
    previous = offset;
    offset = after(offset);
  }
  if (heads_->next_generation <= max_generation) {
    heads_->next_generation = max_generation + 1;
  }
}

}  // namespace rlinf::comm

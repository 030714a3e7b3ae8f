// The queue's links, and how they are restored and blocks taken back after the death of a process.
#include <algorithm>
#include <utility>
#include <vector>

#include "channel_header.h"

namespace rlinf::comm {

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

void Channel::reclaim() {
  {
    Lock lock(*this);
    reclaim_from_dead();
  }
  header_->space_event.notify_all();
}

}  // namespace rlinf::comm

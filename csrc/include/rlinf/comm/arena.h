// Allocator of blocks in a shared arena: first fit over an address-ordered free list, neighbours merged when freed,
// blocks aligned to 64 bytes. First fit reuses low addresses, whose pages are already mapped: writing a fresh page
// costs about ten times a warm one.
//
// Crash consistency: the chain of block sizes and each block's state are the truth, and each changes by one store.
// Lists and counters are derived, and rebuild() restores them after a process died in the middle of a change.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "rlinf/comm/process_id.h"

namespace rlinf::comm {

constexpr uint64_t kBlockAlignment = 64;
constexpr uint64_t kNil = ~uint64_t{0};

constexpr uint64_t align_up(uint64_t value, uint64_t alignment = kBlockAlignment) {
  return (value + alignment - 1) / alignment * alignment;
}

enum class BlockState : uint32_t {
  kFree = 0,
  kReserved = 1,  // a producer is copying into it
  kReady = 2,     // waits in the queue
  kTaken = 3,     // a consumer looks at it
};

// Stands before each block's payload, in shared memory.
struct alignas(kBlockAlignment) BlockHeader {
  std::atomic<uint64_t> block_bytes;  // with this header
  std::atomic<BlockState> state;
  uint32_t num_buffers;
  uint64_t previous_bytes;  // block_bytes of the block before this one; 0 for the first
  uint64_t generation;      // unique per allocation
  uint64_t next;            // offset in the free list or the queue, kNil at the end
  uint64_t previous;
  ProcessId holder;  // who reserved or took it
  uint64_t sequence;
  int64_t key;
  double weight;
  int64_t policy_version;
  uint64_t head_bytes;
  uint64_t payload_bytes;
  uint64_t key_bytes;  // of the key's text, which stands behind the head; 0: the key is the number
};
static_assert(sizeof(BlockHeader) == 128, "the payload must start on a 64-byte boundary");
static_assert(std::atomic<uint64_t>::is_always_lock_free, "a lock inside an atomic would not work across processes");

// The derived part; lives in the channel's shared header.
struct ArenaHeads {
  uint64_t first_free;
  uint64_t next_generation;
};

// Non-owning view of an arena. The caller holds the lock.
class Arena {
 public:
  Arena(std::byte* base, uint64_t num_bytes, ArenaHeads* heads) : base_(base), num_bytes_(num_bytes), heads_(heads) {}

  // Makes one free block of the whole arena.
  void format();
  // Offset of a block with room for `payload_bytes`, reserved by `holder`; kNil when no hole is large enough.
  uint64_t allocate(uint64_t payload_bytes, const ProcessId& holder);
  void free(uint64_t offset);
  // Restores neighbour sizes and the free list from the sizes and states.
  void rebuild();

  BlockHeader& at(uint64_t offset) const { return *reinterpret_cast<BlockHeader*>(base_ + offset); }
  std::byte* payload(uint64_t offset) const { return base_ + offset + sizeof(BlockHeader); }
  // Offset of the next block in address order; kNil after the last.
  uint64_t after(uint64_t offset) const;

 private:
  void link_free(uint64_t offset, uint64_t previous, uint64_t next);
  void unlink_free(uint64_t offset);

  std::byte* base_;
  uint64_t num_bytes_;
  ArenaHeads* heads_;
};

}  // namespace rlinf::comm

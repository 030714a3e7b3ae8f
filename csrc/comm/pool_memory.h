// What a pool's segment holds: header, table of holds, arena. For pool.cc and pool_holds.cc alone.
#pragma once

#include <atomic>

#include "rlinf/comm/pool.h"
#include "rlinf/comm/repairing_lock.h"

namespace rlinf::comm {

constexpr uint64_t kPoolMagic = 0x726c696e66504c31;  // "rlinfPL1"
constexpr uint64_t kMaxNameBytes = 100;
// A ticket is a number that counts up, and the hold's place in the table.
constexpr int kIndexBits = 16;
constexpr uint64_t kMaxHolds = uint64_t{1} << kIndexBits;
constexpr uint64_t kMinHolds = 4096;
constexpr uint64_t kBytesPerHold = 4096;
// A receive needs a second hold for an instant, so the last one is not given away.
constexpr uint64_t kSpareHolds = 1;

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

constexpr uint64_t kHoldsOffset = align_up(sizeof(PoolHeader), 4096);

inline bool is_in_flight(const Hold& hold) {
  return hold.consignment.channel.nonce != 0;
}

// Holds the pool's mutex, and repairs what a process that died with it left behind.
class Pool::Lock : public RepairingLock<Pool> {
 public:
  explicit Lock(Pool& pool) : RepairingLock(pool, pool.header_->mutex) {}
};

}  // namespace rlinf::comm

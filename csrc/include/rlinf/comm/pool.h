// Memory in a shared segment for tensors that cross channels by reference.
//
// A block of the pool lives as long as somebody holds it: a process that looks at it, or an item of a channel that it
// is on its way in. Holds stand in a table in the segment, each with a ticket that is never given twice, so that a late
// or forged reference is told from a valid one.
//
// Crash consistency: a hold exists while its ticket is not zero, and that changes by one store; the chain of blocks is
// the arena's. Everything else (counts, free lists) follows from the two; see repair().
//
// A hold in flight names its channel and item. The taker turns it into one of its own before it gives the channel's
// block back, so an item that is no longer in its channel while its hold is still there was lost, and whoever needs the
// memory may drop the hold: also when the sender is dead. A dead process's other holds are dropped as they are.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "rlinf/comm/channel.h"
#include "rlinf/comm/check.h"

namespace rlinf::comm {

// One hold, and the block that it keeps. Plain value; whoever has it calls release() once.
struct HeldBlock {
  uint64_t ticket = 0;
  uint64_t offset = kNil;
  uint64_t generation = 0;
  uint64_t num_bytes = 0;
};

// Where a block is on its way.
struct Consignment {
  SegmentAddress channel;
  BlockRef item;
};

// Memory that is not, or no longer, what a reference says.
class BlockLost : public UserError {
 public:
  using UserError::UserError;
};

// The table of holds is full.
class HoldsExhausted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct PoolCounts {
  struct Holder {
    ProcessId process;
    uint64_t held_bytes;       // that it looks at
    uint64_t in_flight_bytes;  // that it has sent and nobody has taken
  };
  uint64_t capacity_bytes;
  uint64_t used_bytes;
  uint64_t largest_hole_bytes;
  uint64_t num_blocks;
  uint64_t num_holds;
  uint64_t max_holds;
  std::vector<Holder> holders;
};

struct PoolHeader;
template <typename Owner>
class RepairingLock;
struct Hold;

class Pool {
 public:
  // Whether an item is still in its channel, or being taken out of it. Called without the pool's lock.
  using IsThere = std::function<bool(const Consignment& consignment, const ProcessId& sender)>;

  static std::shared_ptr<Pool> create(const std::string& name, uint64_t capacity_bytes);
  // UserError when the creator is gone or has closed the pool.
  static std::shared_ptr<Pool> open(const SegmentAddress& address);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  const SegmentAddress& address() const { return segment_->address(); }
  std::string name() const;
  void prefault();
  uint64_t capacity_bytes() const;

  // A block for this process. Waits for room as Channel::reserve does; drops what the dead and the lost hold meanwhile.
  Outcome allocate(uint64_t num_bytes, WaitState& wait, const IsThere& is_there, HeldBlock* block);
  // A second hold of a block that this process looks at, for the way; returns its ticket. BlockLost, HoldsExhausted.
  uint64_t send(uint64_t offset, uint64_t generation, const Consignment& consignment);
  // The block that a hold in flight keeps. BlockLost when there is no such hold.
  HeldBlock find(uint64_t ticket);
  // Turns a hold in flight into one of this process. BlockLost when there is no such hold.
  HeldBlock receive(uint64_t ticket);
  // Twice is harmless.
  void release(uint64_t ticket);
  // Drops holds of dead processes and of lost items. Returns how many.
  uint64_t reclaim(const IsThere& is_there);
  PoolCounts counts();

  std::byte* payload(uint64_t offset) const { return arena_.payload(offset); }
  // Whether the memory is the pool's.
  bool contains(const void* pointer) const;
  uint64_t num_in_flight() const;
  // The creator has dropped it, and nobody can open it any more.
  bool is_closed() const;
  bool is_created_here() const;

  // For tests: takes the lock and never gives it back.
  void lock_and_leave();

 private:
  class Lock;
  friend class RepairingLock<Pool>;

  explicit Pool(std::shared_ptr<Segment> segment);

  void repair();
  Hold& hold_of(uint64_t ticket, const char* what) const;
  HeldBlock held_block(const Hold& hold) const;
  uint64_t num_free_holds() const;
  uint64_t publish(uint64_t offset, const ProcessId& holder, const Consignment& consignment);
  void drop(Hold& hold);
  bool try_allocate(uint64_t num_bytes, HeldBlock* block);
  [[noreturn]] void throw_exhausted() const;

  std::shared_ptr<Segment> segment_;
  PoolHeader* header_;
  Hold* holds_;
  Arena arena_;
};

}  // namespace rlinf::comm

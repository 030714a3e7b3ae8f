// What a channel keeps in shared memory, and the lock around it. For the channel's own sources.
#pragma once

#include <atomic>
#include <cstdint>

#include "rlinf/comm/channel.h"
#include "rlinf/comm/repairing_lock.h"

namespace rlinf::comm {

constexpr uint64_t kMaxReasonBytes = 1000;
constexpr uint64_t kMaxUsers = 256;

// A process that puts or takes; see channel_users.cc.
struct ChannelUser {
  std::atomic<uint32_t> is_used;
  UserRole last_role;
  uint64_t num_handles;  // its Channel objects
  ProcessId process;
};

// At the start of the segment. All of it is guarded by `mutex`, except for the events and what create() fixes.
struct ChannelHeader {
  RobustMutex mutex;
  alignas(64) EventWord items_event;  // an item came, a producer closed, the channel was aborted
  alignas(64) EventWord space_event;  // room came, or the channel was closed or aborted

  // Fixed by create().
  alignas(64) uint64_t capacity_items;
  uint64_t capacity_bytes;
  uint64_t arena_bytes;
  uint64_t num_keys;  // that share the capacity in equal parts; 1: whoever comes first
  uint32_t raises_on_loss;

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

  uint64_t num_user_slots;  // that were ever used
  ChannelUser users[kMaxUsers];
};

constexpr uint64_t kArenaOffset = align_up(sizeof(ChannelHeader), 4096);

// Holds the channel's mutex, and repairs what a process that died with it left behind.
class Channel::Lock : public RepairingLock<Channel> {
 public:
  explicit Lock(Channel& channel) : RepairingLock(channel, channel.header_->mutex) {}
};

}  // namespace rlinf::comm

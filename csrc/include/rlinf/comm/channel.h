// A bounded queue of items in shared memory, for any number of producers and consumers in any number of processes.
//
// An item is one block of the arena: lengths, head (its structure), and buffers (its tensors), each aligned to 64
// bytes. put = reserve (blocks while full) -> copy, outside of the lock -> commit (gives the sequence number). take
// hands blocks out without copying; the consumer frees each with release() when it no longer looks at it.
//
// capacity_bytes bounds the queue. Taken blocks do not count: otherwise a consumer that keeps its items could deadlock
// with a producer that waits for free capacity. Instead, a take returns for each item whether it may stay in
// place: once taken blocks hold capacity_bytes, the consumer has to copy the item out and release the block at once.
//
// If num_keys different keys share a channel, each has an equal part of both capacities, so that there is always free
// capacity for a waiting key, however full the others are.
//
// A process is in the channel's table of users from its first put or take until it leaves: by leave(), with its last
// Channel object, or by close_producer() if it takes nothing. If one died without leaving, calls that have to wait
// return kPeerLost until drop_lost_users(). A channel may also be created without a table of users.
//
// No call waits longer than WaitState::slice_ns: a call that could not finish returns Outcome::kPending, and the caller
// repeats it with the same WaitState.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "rlinf/comm/arena.h"
#include "rlinf/comm/segment.h"
#include "rlinf/comm/sync.h"

namespace rlinf::comm {

// Copying a smaller item out is cheaper than keeping track of its block.
constexpr uint64_t kMinStayBytes = 4096;

enum class Outcome : int {
  kDone = 0,
  kPending = 1,   // not yet; look at signals and call again
  kClosed = 2,    // put on a closed channel
  kAborted = 3,   // see abort_reason()
  kTimedOut = 4,  // WaitState::deadline_ns passed
  kStalled = 5,   // take waits for more items than the channel can hold while producers wait for room
  kPeerLost = 6,  // would wait, and a user died without leaving; see lost_users()
};

// The last action of a user. Bits, so that a handle can store all of its actions.
enum class UserRole : uint32_t { kProducer = 1, kConsumer = 2 };

struct LostUser {
  int32_t pid;
  UserRole last_role;
};

struct ByteView {
  const void* pointer;
  uint64_t num_bytes;
};

// A number; or a text, from which `number` is then computed.
struct ItemKey {
  int64_t number = 0;
  std::string text;  // empty: the number alone

  static ItemKey from_text(std::string text);
};

struct ItemLabels {
  ItemKey key;
  double weight = 1.0;
  int64_t policy_version = -1;
};

struct TakeRequest {
  uint64_t max_items = 1;
  uint64_t min_items = 1;
  double min_weight = 0.0;
  double max_weight;  // infinity: no limit
  bool any_key = true;
  std::vector<ItemKey> keys;  // looked at when any_key is false
};

// A block that this process took or reserved. Plain value; whoever holds it calls release() or commit() once.
struct BlockRef {
  uint64_t offset = kNil;
  uint64_t generation = 0;
};

struct TakenItem {
  BlockRef block;
  bool may_stay;  // else copy what is needed and release() soon
  ItemLabels labels;
  uint64_t sequence;
  uint64_t num_bytes;  // head and buffers, without padding
  std::byte* head;
  uint64_t head_bytes;
  std::vector<ByteView> buffers;
};

// Carries one waiting call over its attempts.
struct WaitState {
  int64_t deadline_ns = kNever;
  int64_t slice_ns = kWaitSliceNs;  // how long one attempt waits; 0 does not
  bool counted = false;
  int64_t stalled_since_ns = 0;
  int64_t next_reclaim_ns = 0;  // when to look for dead peers; 0 before the first attempt that has to wait
};

struct ChannelCounts {
  uint64_t num_items;       // wait to be taken
  uint64_t num_bytes;       // that those occupy
  uint64_t num_held_items;  // taken and still looked at, or being copied in
  uint64_t num_held_bytes;
  uint64_t capacity_items;
  uint64_t capacity_bytes;
  uint64_t num_put;
  uint64_t num_taken;
  uint64_t num_blocked_puts;
  int64_t blocked_put_ns;
  int64_t blocked_take_ns;
  uint64_t num_producers;
  uint64_t num_closed;
  uint64_t num_keys;
  bool aborted;
};

// The space that the items of one key use in a queue.
struct KeyUse {
  uint64_t num_items = 0;
  uint64_t num_bytes = 0;
};

enum class Waiting : int { kForItem = 0, kForRoom = 1 };

struct ChannelHeader;
template <typename Owner>
class RepairingLock;

class Channel {
 public:
  static std::shared_ptr<Channel> create(const std::string& name, uint64_t capacity_items, uint64_t capacity_bytes,
                                         uint64_t num_producers, bool raises_on_loss = true, uint64_t num_keys = 1);
  static std::shared_ptr<Channel> open(const SegmentAddress& address);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  const SegmentAddress& address() const { return segment_->address(); }
  // Allocates memory for capacity_bytes of items now instead of with the first items.
  void prefault();

  // Bytes that an item occupies of capacity_bytes.
  static uint64_t item_bytes(uint64_t head_bytes, const std::vector<ByteView>& buffers, const ItemKey& key = {});

  // The block counts for the key's share of the capacity from here on; fill() needs the same key, for its text.
  Outcome reserve(uint64_t num_bytes, WaitState& wait, BlockRef* block, const ItemKey& key = {});
  // Copies the item into a reserved block. No lock is held.
  void fill(const BlockRef& block, const ByteView& head, const std::vector<ByteView>& buffers, const ItemKey& key = {});
  // Weight and version; the key is that of reserve().
  void commit(const BlockRef& block, const ItemLabels& labels);
  Outcome take(const TakeRequest& request, WaitState& wait, std::vector<TakenItem>* items);
  // Releases a block that was taken and read, or reserved and not used. Calling it twice is harmless.
  void release(const BlockRef& block);
  void release(const std::vector<BlockRef>& blocks);
  // Whether the block still has the state in the reference: being put, waiting, or being taken.
  bool has(const BlockRef& block);

  // For callers that attempt with slice_ns = 0 and wait elsewhere: the event's sequence before the attempt, and a wait
  // of up to kWaitSliceNs for it to change.
  uint32_t event_sequence(Waiting waiting) const;
  void wait_for_event(Waiting waiting, uint32_t seen);

  // Frees the blocks that dead processes were writing or reading. A waiting put does this itself.
  void reclaim();

  // Closes one producer. UserError if more are closed than there are.
  void close_producer();
  // UserError unless closed by all producers (or never used), with nothing left in the queue.
  void reopen(uint64_t num_producers);
  void abort(const std::string& reason);
  std::string abort_reason();
  ChannelCounts counts();
  // The keys that wait in the queue, in the order in which they are first met.
  std::vector<std::pair<ItemKey, KeyUse>> waiting_keys();

  // Removes this process from the channel's users until it puts or takes again.
  void leave();
  // Before this process ends: leaves all channels, or stays in all of them, for good.
  static void leave_all();
  static void stay_in_all();
  std::vector<LostUser> lost_users();
  // Removes the users that died, frees their blocks, and returns their pids.
  std::vector<int32_t> drop_lost_users();

  // For tests: takes the lock and never gives it back.
  void lock_and_leave();

 private:
  class Lock;
  friend class RepairingLock<Channel>;

  explicit Channel(std::shared_ptr<Segment> segment);

  bool is_closed() const;
  EventWord& event(Waiting waiting) const;
  static bool is_time_to_reclaim(WaitState& wait);
  void repair();
  void append_ready(uint64_t offset);
  void unlink_ready(uint64_t offset);
  void free_block(uint64_t offset);
  void release_locked(const BlockRef& block);
  void reclaim_from_dead();
  bool is_stalled(uint64_t num_matching, WaitState& wait, int64_t now_ns) const;
  // The items that a take would return now.
  struct Gathered {
    std::vector<uint64_t> offsets;
    double weight = 0.0;
    bool is_full = false;  // no further item could be added
  };
  void collect(const TakeRequest& request, Gathered* gathered) const;
  std::string_view key_text(uint64_t offset) const;
  bool is_wanted(const TakeRequest& request, uint64_t offset) const;
  bool has_room(uint64_t num_bytes, const ItemKey& key) const;
  KeyUse use_of(int64_t key) const;
  TakenItem hand_out(uint64_t offset, const ProcessId& holder);
  void enter_registry();
  void note_use(UserRole role);
  void note_close();
  uint64_t slot_of(const ProcessId& process);
  void leave_locked();
  bool has_lost_user();
  bool is_time_to_look(int64_t now_ns) const;

  // This object in the table of users; guarded by the channel's mutex.
  struct Use {
    int32_t pid = 0;  // 0, or another process's in a forked child: not in the table
    uint32_t roles = 0;
    uint64_t slot = 0;
  };

  std::shared_ptr<Segment> segment_;
  ChannelHeader* header_;
  Arena arena_;
  Use use_;
  int64_t next_look_ns_ = 0;
};

}  // namespace rlinf::comm

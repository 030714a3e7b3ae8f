// The pools that this process has mapped, and the blocks of them that it looks at.
//
// A pool that was opened for a received tensor stays mapped after its last tensor, so that the next one costs no system
// call; not beyond its creator, and no more than a few idle ones. A pool that was created here and dropped stays while
// tensors of it are on their way, so that their takers can still open it.
#pragma once

#include <unistd.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "rlinf/comm/pool.h"

namespace rlinf::comm {

// This process's hold of a block, shared by all its tensors in there.
class PoolBlock {
 public:
  PoolBlock(std::shared_ptr<Pool> pool, const HeldBlock& held)
      : pool_(std::move(pool)), held_(held), pid_(::getpid()) {}
  ~PoolBlock();
  PoolBlock(const PoolBlock&) = delete;
  PoolBlock& operator=(const PoolBlock&) = delete;

  Pool& pool() const { return *pool_; }
  std::byte* bytes() const { return pool_->payload(held_.offset); }
  uint64_t num_bytes() const { return held_.num_bytes; }
  // False in a forked child: the hold is its parent's.
  bool is_own() const { return pid_ == ::getpid(); }
  uint64_t send(const Consignment& consignment) const {
    return pool_->send(held_.offset, held_.generation, consignment);
  }

 private:
  friend class PoolRegistry;
  std::shared_ptr<Pool> pool_;
  HeldBlock held_;
  pid_t pid_;
};

class PoolRegistry {
 public:
  static PoolRegistry& instance();

  std::shared_ptr<Pool> create(const std::string& name, uint64_t capacity_bytes);
  // The pool as it is mapped already, or a new mapping. UserError when it cannot be opened any more.
  std::shared_ptr<Pool> open(const SegmentAddress& address);

  // See Pool::allocate.
  Outcome allocate(const std::shared_ptr<Pool>& pool, uint64_t num_bytes, WaitState& wait,
                   std::shared_ptr<PoolBlock>* block);
  // The block of a hold in flight. BlockLost when there is no such hold.
  std::shared_ptr<PoolBlock> receive(const std::shared_ptr<Pool>& pool, uint64_t ticket);

  // The block of this process in which `pointer` lies; null outside of all pools, which costs one load when there are
  // none.
  std::shared_ptr<PoolBlock> find(const void* pointer) {
    return num_pools_.load(std::memory_order_relaxed) == 0 ? nullptr : find_in_pools(pointer);
  }
  bool is_empty() const { return num_pools_.load(std::memory_order_relaxed) == 0; }

  // A channel that items with pooled tensors go into: what became of them can be asked without opening it.
  void remember(const std::shared_ptr<Channel>& channel);
  uint64_t reclaim(Pool& pool);
  // Unmaps the pools that nobody here needs any more.
  void trim();

 private:
  struct Blocks {
    PoolBlock* block;
    std::weak_ptr<PoolBlock> weak;
  };
  struct Entry {
    std::shared_ptr<Pool> pool;
    std::map<uint64_t, Blocks> blocks;  // by offset
  };
  friend class PoolBlock;

  PoolRegistry();
  Entry* entry_of(const Pool& pool);
  std::shared_ptr<Pool> mapped(const SegmentAddress& address);
  std::shared_ptr<Pool> add(std::shared_ptr<Pool> pool);
  std::shared_ptr<PoolBlock> find_in_pools(const void* pointer);
  std::shared_ptr<PoolBlock> own_block(const Pool& pool, const HeldBlock& held);
  std::shared_ptr<PoolBlock> keep(const std::shared_ptr<Pool>& pool, const HeldBlock& held);
  void forget(const PoolBlock& block);
  Pool::IsThere whereabouts();
  std::shared_ptr<Channel> known_channel(uint64_t nonce);

  std::atomic<uint32_t> num_pools_{0};
  std::mutex mutex_;  // nothing is asked of other processes or of Python with it
  std::vector<Entry> entries_;
  std::map<uint64_t, std::weak_ptr<Channel>> channels_;  // by nonce
  int64_t next_look_ns_ = 0;
};

}  // namespace rlinf::comm

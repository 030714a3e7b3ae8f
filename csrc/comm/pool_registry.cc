#include "rlinf/comm/pool_registry.h"

#include <pthread.h>

#include <algorithm>

#include "rlinf/comm/check.h"
#include "rlinf/comm/segment_server.h"

namespace rlinf::comm {

namespace {

// Opened, and without a tensor here.
constexpr size_t kMaxIdlePools = 8;
// How often idle pools are looked at: whether their creator lives, whether what is on its way was lost.
constexpr int64_t kLookNs = 100'000'000;
constexpr size_t kManyChannels = 64;

}  // namespace

PoolBlock::~PoolBlock() {
  if (!is_own()) {
    return;  // a forked child sees its parent's tensors, but the hold is not its to end
  }
  try {
    PoolRegistry::instance().forget(*this);
    pool_->release(held_.ticket);
    pool_.reset();
    PoolRegistry::instance().trim();
  } catch (const std::exception& error) {
    RLINF_CHECK_NOTHROW(false, error.what());
  }
}

// Never destroyed: tensors outlive everything at the end of a process.
PoolRegistry& PoolRegistry::instance() {
  static auto* const registry = new PoolRegistry;
  return *registry;
}

PoolRegistry::PoolRegistry() {
  // A child must not find the mutex held by a thread that it does not have.
  ::pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] { instance().mutex_.unlock(); });
}

// --- pools ----------------------------------------------------------------------------------------------------------

PoolRegistry::Entry* PoolRegistry::entry_of(const Pool& pool) {
  for (Entry& entry : entries_) {
    if (entry.pool.get() == &pool) {
      return &entry;
    }
  }
  return nullptr;
}

std::shared_ptr<Pool> PoolRegistry::mapped(const SegmentAddress& address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Entry& entry : entries_) {
    const SegmentAddress& one = entry.pool->address();
    if (one.nonce == address.nonce && one.creator.pid == address.creator.pid && one.fd == address.fd) {
      return entry.pool;
    }
  }
  return nullptr;
}

std::shared_ptr<Pool> PoolRegistry::add(std::shared_ptr<Pool> pool) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Entry& entry : entries_) {
    if (entry.pool->address().nonce == pool->address().nonce) {
      return entry.pool;  // another thread was faster
    }
  }
  entries_.push_back({pool, {}});
  num_pools_.store(static_cast<uint32_t>(entries_.size()), std::memory_order_relaxed);
  return pool;
}

std::shared_ptr<Pool> PoolRegistry::create(const std::string& name, uint64_t capacity_bytes) {
  trim();
  return add(Pool::create(name, capacity_bytes));
}

std::shared_ptr<Pool> PoolRegistry::open(const SegmentAddress& address) {
  if (auto pool = mapped(address)) {
    return pool;
  }
  trim();
  return add(Pool::open(address));
}

void PoolRegistry::trim() {
  std::vector<std::shared_ptr<Pool>> to_look_at;
  std::vector<Entry> unused;  // unmapped after the mutex
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t now_ns = monotonic_ns();
    const bool looks = now_ns >= next_look_ns_;
    size_t num_idle = 0;
    for (size_t i = entries_.size(); i-- > 0;) {
      const std::shared_ptr<Pool>& pool = entries_[i].pool;
      if (pool.use_count() > 1) {
        continue;
      }
      const bool is_own = pool->is_created_here();
      if (is_own ? pool->num_in_flight() == 0 : pool->is_closed() || num_idle == kMaxIdlePools) {
        unused.push_back(std::move(entries_[i]));
        entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(i));
        continue;
      }
      num_idle += !is_own;
      if (looks) {
        to_look_at.push_back(pool);
      }
    }
    if (looks) {
      next_look_ns_ = now_ns + kLookNs;
    }
    num_pools_.store(static_cast<uint32_t>(entries_.size()), std::memory_order_relaxed);
  }
  for (std::shared_ptr<Pool>& pool : to_look_at) {
    const bool is_own = pool->is_created_here();
    if (is_own) {
      reclaim(*pool);
    }
    const bool is_needed = is_own ? pool->num_in_flight() > 0 : is_alive(pool->address().creator);
    const std::lock_guard<std::mutex> lock(mutex_);
    Entry* const entry = entry_of(*pool);
    if (!is_needed && entry != nullptr && pool.use_count() == 2) {
      unused.push_back(std::move(*entry));
      entries_.erase(entries_.begin() + (entry - entries_.data()));
      num_pools_.store(static_cast<uint32_t>(entries_.size()), std::memory_order_relaxed);
    }
  }
}

// --- blocks ---------------------------------------------------------------------------------------------------------

std::shared_ptr<PoolBlock> PoolRegistry::find_in_pools(const void* pointer) {
  std::shared_ptr<PoolBlock> block;  // before the lock: its end takes the mutex, should it be the last
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Entry& entry : entries_) {
    if (!entry.pool->contains(pointer)) {
      continue;
    }
    const std::ptrdiff_t from_first = static_cast<const std::byte*>(pointer) - entry.pool->payload(0);
    const auto beyond = entry.blocks.upper_bound(static_cast<uint64_t>(std::max<std::ptrdiff_t>(from_first, 0)));
    if (beyond != entry.blocks.begin()) {
      block = std::prev(beyond)->second.weak.lock();
    }
    return block && pointer >= block->bytes() && pointer < block->bytes() + block->num_bytes() ? block : nullptr;
  }
  return nullptr;
}

std::shared_ptr<PoolBlock> PoolRegistry::own_block(const Pool& pool, const HeldBlock& held) {
  std::shared_ptr<PoolBlock> block;  // before the lock, as above
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry* const entry = entry_of(pool);
  if (entry == nullptr) {
    return nullptr;
  }
  const auto found = entry->blocks.find(held.offset);
  if (found != entry->blocks.end()) {
    block = found->second.weak.lock();
  }
  return block && block->is_own() && block->held_.generation == held.generation ? block : nullptr;
}

std::shared_ptr<PoolBlock> PoolRegistry::keep(const std::shared_ptr<Pool>& pool, const HeldBlock& held) {
  auto block = std::make_shared<PoolBlock>(pool, held);
  std::shared_ptr<PoolBlock> other;  // before the lock, as above
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry* const entry = entry_of(*pool);
  if (entry == nullptr) {
    return block;
  }
  Blocks& known = entry->blocks[held.offset];
  other = known.weak.lock();
  if (other && other->is_own() && other->held_.generation == held.generation) {
    return other;  // another thread has received the same block meanwhile
  }
  known = {block.get(), block};
  return block;
}

void PoolRegistry::forget(const PoolBlock& block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry* const entry = entry_of(*block.pool_);
  if (entry == nullptr) {
    return;
  }
  const auto found = entry->blocks.find(block.held_.offset);
  if (found != entry->blocks.end() && found->second.block == &block) {
    entry->blocks.erase(found);
  }
}

Outcome PoolRegistry::allocate(const std::shared_ptr<Pool>& pool, uint64_t num_bytes, WaitState& wait,
                               std::shared_ptr<PoolBlock>* block) {
  HeldBlock held;
  const Outcome outcome = pool->allocate(num_bytes, wait, whereabouts(), &held);
  if (outcome == Outcome::kDone) {
    *block = keep(pool, held);
  }
  return outcome;
}

std::shared_ptr<PoolBlock> PoolRegistry::receive(const std::shared_ptr<Pool>& pool, uint64_t ticket) {
  if (std::shared_ptr<PoolBlock> block = own_block(*pool, pool->find(ticket))) {
    pool->release(ticket);  // this process holds the block already
    return block;
  }
  return keep(pool, pool->receive(ticket));
}

// --- what became of items -------------------------------------------------------------------------------------------

void PoolRegistry::remember(const std::shared_ptr<Channel>& channel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto inserted = channels_.try_emplace(channel->address().nonce, channel);
  if (!inserted.second) {
    if (inserted.first->second.expired()) {
      inserted.first->second = channel;
    }
    return;
  }
  if (channels_.size() > kManyChannels) {
    for (auto entry = channels_.begin(); entry != channels_.end();) {
      entry = entry->second.expired() ? channels_.erase(entry) : std::next(entry);
    }
  }
}

std::shared_ptr<Channel> PoolRegistry::known_channel(uint64_t nonce) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = channels_.find(nonce);
  return known == channels_.end() ? nullptr : known->second.lock();
}

namespace {

// A channel as this process finds it.
struct Whereabouts {
  bool is_known = false;
  bool is_gone = false;  // nobody can open it any more
  std::shared_ptr<Channel> channel;
};

Whereabouts look_for(std::shared_ptr<Channel> channel, const SegmentAddress& address) {
  try {
    channel = channel ? channel : Channel::open(address);
    channel->reclaim();
    return {true, false, channel};
  } catch (const UserError&) {
    int fd = -1;
    const SegmentAnswer answer = request_segment(address.creator, address.fd, address.nonce, &fd);
    if (fd >= 0) {
      ::close(fd);
    }
    // A creator that is merely stopped settles nothing.
    return {true, answer != SegmentAnswer::kFound && answer != SegmentAnswer::kNoAnswer, nullptr};
  } catch (const std::exception&) {
    return {true, false, nullptr};  // no descriptors left, say
  }
}

}  // namespace

// For one look at a pool: each channel is looked for once, and what its dead consumers have taken counts as lost.
Pool::IsThere PoolRegistry::whereabouts() {
  return [this, seen = std::map<uint64_t, Whereabouts>()](const Consignment& consignment,
                                                          const ProcessId& sender) mutable {
    Whereabouts& found = seen[consignment.channel.nonce];
    if (!found.is_known) {
      found = look_for(known_channel(consignment.channel.nonce), consignment.channel);
    }
    if (found.channel) {
      return found.channel->has(consignment.item);
    }
    // A living sender may have the channel still, and finds out itself.
    return !found.is_gone || !(sender == current_process() || !is_alive(sender));
  };
}

uint64_t PoolRegistry::reclaim(Pool& pool) {
  return pool.reclaim(whereabouts());
}

}  // namespace rlinf::comm

// Who uses a channel, so that the end of a process that did not leave is told to those who wait.
//
// The table is guarded by the channel's mutex. An entry counts when is_used is set, which is its last store on joining
// and its first on leaving; a process that dies in between leaves an entry that is right in either case.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>

#include "channel_header.h"
#include "rlinf/comm/check.h"

namespace rlinf::comm {

namespace {

// The channels of this process, for leave_all().
struct Registry {
  std::mutex mutex;
  std::set<Channel*> channels;
  std::atomic<bool> is_ending{false};  // the process ends: nobody joins or leaves any more
};

Registry& registry() {
  static Registry* const made = [] {
    auto* fresh = new Registry;  // never freed: channels of other threads outlive static destructors
    ::pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                     [] {
                       registry().is_ending = false;
                       registry().mutex.unlock();
                     });
    return fresh;
  }();
  return *made;
}

bool is_dead(const ChannelUser& user) {
  return user.is_used.load(std::memory_order_relaxed) != 0 && !is_alive(user.process);
}

}  // namespace

void Channel::enter_registry() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.channels.insert(this);
}

Channel::~Channel() {
  Registry& all = registry();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.channels.erase(this);
  }
  try {
    if (use_.pid == current_process().pid && !all.is_ending) {
      leave();
    }
  } catch (const std::exception& error) {
    RLINF_CHECK_NOTHROW(false, error.what());
  }
}

// Stands in the way of every put and take, and costs two comparisons once this process is known.
void Channel::note_use(UserRole role) {
  if (!header_->raises_on_loss) {
    return;
  }
  const ProcessId current = current_process();
  if (use_.pid == current.pid && header_->users[use_.slot].last_role == role) {
    return;
  }
  if (registry().is_ending) {
    return;
  }
  if (use_.pid != current.pid) {
    use_ = Use{current.pid, 0, slot_of(current)};
    header_->users[use_.slot].num_handles += 1;
  }
  use_.roles |= static_cast<uint32_t>(role);
  header_->users[use_.slot].last_role = role;
}

// The entry of a process; made when there is none.
uint64_t Channel::slot_of(const ProcessId& process) {
  ChannelUser* const begin = header_->users;
  ChannelUser* const end = begin + header_->num_user_slots;
  ChannelUser* found = std::find_if(
      begin, end, [&](const ChannelUser& user) { return user.is_used.load() != 0 && user.process == process; });
  if (found != end) {
    return static_cast<uint64_t>(found - begin);
  }
  found = std::find_if(begin, end, [](const ChannelUser& user) { return user.is_used.load() == 0; });
  if (found == end && header_->num_user_slots < kMaxUsers) {
    header_->num_user_slots += 1;
  } else if (found == end) {
    found = std::find_if(begin, end, is_dead);  // whoever did not wait so far will not be told of this one
    RLINF_CHECK_USER(
        found != end, "the channel has ", kMaxUsers,
        " processes that use it, as many as it can watch; create it with lost_peers=\"tolerate\" for more");
    found->is_used.store(0, std::memory_order_release);
  }
  found->process = process;
  found->num_handles = 0;
  found->is_used.store(1, std::memory_order_release);
  return static_cast<uint64_t>(found - begin);
}

void Channel::leave_locked() {
  if (use_.pid != current_process().pid) {
    return;
  }
  ChannelUser& user = header_->users[use_.slot];
  use_ = Use{};
  if (!(user.process == current_process())) {
    return;  // taken for dead, and dropped
  }
  if (user.num_handles <= 1) {
    user.is_used.store(0, std::memory_order_release);
  } else {
    user.num_handles -= 1;
  }
}

// Whoever has closed and does not take has done its part.
void Channel::note_close() {
  if (use_.pid != current_process().pid) {
    return;
  }
  use_.roles &= ~static_cast<uint32_t>(UserRole::kProducer);
  if (use_.roles == 0) {
    leave_locked();
  } else {
    header_->users[use_.slot].last_role = UserRole::kConsumer;
  }
}

void Channel::leave() {
  Lock lock(*this);
  leave_locked();
}

void Channel::leave_all() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.is_ending.exchange(true)) {
    return;
  }
  for (Channel* channel : all.channels) {
    try {
      channel->leave();
    } catch (const std::exception& error) {
      RLINF_CHECK_NOTHROW(false, error.what());
    }
  }
}

void Channel::stay_in_all() {
  registry().is_ending = true;
}

bool Channel::has_lost_user() {
  if (!header_->raises_on_loss) {
    return false;
  }
  next_look_ns_ = monotonic_ns() + kWaitSliceNs;
  return std::any_of(header_->users, header_->users + header_->num_user_slots, is_dead);
}

// Also waits that are much shorter than a slice look now and then.
bool Channel::is_time_to_look(int64_t now_ns) const {
  return header_->raises_on_loss && now_ns >= next_look_ns_;
}

std::vector<LostUser> Channel::lost_users() {
  Lock lock(*this);
  std::vector<LostUser> lost;
  for (uint64_t slot = 0; slot < header_->num_user_slots; ++slot) {
    const ChannelUser& user = header_->users[slot];
    if (is_dead(user)) {
      lost.push_back(LostUser{user.process.pid, user.last_role});
    }
  }
  return lost;
}

std::vector<int32_t> Channel::drop_lost_users() {
  std::vector<int32_t> dropped;
  {
    Lock lock(*this);
    for (uint64_t slot = 0; slot < header_->num_user_slots; ++slot) {
      ChannelUser& user = header_->users[slot];
      if (is_dead(user)) {
        dropped.push_back(user.process.pid);
        user.is_used.store(0, std::memory_order_release);
      }
    }
    reclaim_from_dead();
  }
  header_->items_event.notify_all();
  header_->space_event.notify_all();
  return dropped;
}

}  // namespace rlinf::comm

// A process that dies at any instruction leaves a channel in order.
//
// A child runs a scenario (put, take, release) on a channel in shared memory, single-stepped with ptrace. A first run
// finds the instructions that change the shared memory; between them, nothing that survives the child differs. Then,
// for each of those, a new child is killed right after it, and the parent uses the channel: nothing hangs, the items
// from before are all there or were taken by the child, none is torn, and all of the capacity is available again.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "rlinf/comm/channel.h"
#include "rlinf/comm/check.h"
#include "stepped_child.h"

using namespace rlinf::comm;

namespace {

constexpr uint64_t kCapacityItems = 8;
constexpr uint64_t kCapacityBytes = 64 << 10;
constexpr uint64_t kNumBefore = 3;

void put(Channel& channel, uint64_t number, uint64_t num_bytes) {
  const std::vector<uint64_t> words(num_bytes / sizeof(uint64_t), number);
  const std::vector<ByteView> buffers = {{words.data(), words.size() * sizeof(uint64_t)}};
  const ByteView head{"head", 4};
  const ItemKey key{static_cast<int64_t>(number), {}};
  WaitState wait;
  wait.deadline_ns = monotonic_ns() + 20'000'000'000;
  BlockRef block;
  Outcome outcome;
  do {
    outcome = channel.reserve(Channel::item_bytes(head.num_bytes, buffers, key), wait, &block, key);
  } while (outcome == Outcome::kPending);
  RLINF_CHECK_INTERNAL(outcome == Outcome::kDone, "put: outcome ", static_cast<int>(outcome));
  channel.fill(block, head, buffers, key);
  channel.commit(block, ItemLabels{key, 1.0, 0});
}

std::vector<TakenItem> take(Channel& channel, uint64_t max_items) {
  TakeRequest request;
  request.max_items = max_items;
  request.max_weight = std::numeric_limits<double>::infinity();
  WaitState wait;
  wait.deadline_ns = 0;
  std::vector<TakenItem> items;
  channel.take(request, wait, &items);
  return items;
}

void check_item(const TakenItem& item) {
  RLINF_CHECK_INTERNAL(std::memcmp(item.head, "head", 4) == 0 && item.buffers.size() == 1, "torn head");
  const auto* words = static_cast<const uint64_t*>(item.buffers[0].pointer);
  for (uint64_t i = 0; i < item.buffers[0].num_bytes / sizeof(uint64_t); ++i) {
    RLINF_CHECK_INTERNAL(words[i] == static_cast<uint64_t>(item.labels.key.number), "torn item ", item.labels.key.number);
  }
}

// What the child does: split and merge blocks, wrap the queue, hold what it takes for a while.
void run_scenario(Channel& channel) {
  put(channel, 100, 64);
  std::vector<TakenItem> taken = take(channel, 2);
  put(channel, 101, 320);
  for (const TakenItem& item : taken) {
    channel.release(item.block);
  }
  taken = take(channel, 1);
  channel.release(taken[0].block);
  put(channel, 102, 64);
}

void check_afterwards(Channel& channel) {
  std::set<int64_t> seen;
  uint64_t last_sequence = 0;
  for (std::vector<TakenItem> items = take(channel, 4); !items.empty(); items = take(channel, 4)) {
    for (const TakenItem& item : items) {
      check_item(item);
      RLINF_CHECK_INTERNAL(seen.empty() || item.sequence > last_sequence, "order");
      RLINF_CHECK_INTERNAL(seen.insert(item.labels.key.number).second, "item ", item.labels.key.number, " came twice");
      last_sequence = item.sequence;
      channel.release(item.block);
    }
  }
  // The child takes from the front: of the first items a tail is left.
  for (int64_t number = 0; number + 1 < static_cast<int64_t>(kNumBefore); ++number) {
    RLINF_CHECK_INTERNAL(seen.count(number) <= seen.count(number + 1), "item ", number + 1, " is lost");
  }
  channel.reclaim();
  for (int round = 0; round < 2; ++round) {
    for (uint64_t number = 0; number < kCapacityItems; ++number) {
      put(channel, number, kCapacityBytes / kCapacityItems - 64);
    }
    const std::vector<TakenItem> items = take(channel, kCapacityItems);
    RLINF_CHECK_INTERNAL(items.size() == kCapacityItems, items.size());
    for (const TakenItem& item : items) {
      check_item(item);
      channel.release(item.block);
    }
  }
  const ChannelCounts counts = channel.counts();
  RLINF_CHECK_INTERNAL(counts.num_items == 0 && counts.num_bytes == 0, counts.num_items, " items left");
  RLINF_CHECK_INTERNAL(counts.num_held_items == 0 && counts.num_held_bytes == 0, counts.num_held_bytes, " bytes held");
  // It died as a user, or before it had become one; either way its entry is whole.
  RLINF_CHECK_INTERNAL(channel.drop_lost_users().size() <= 1 && channel.lost_users().empty(), "users");
}

std::shared_ptr<Channel> make_channel() {
  auto channel = Channel::create("crash", kCapacityItems, kCapacityBytes, 1);
  for (uint64_t number = 0; number < kNumBefore; ++number) {
    put(*channel, number, 128);
  }
  return channel;
}

bool run_and_kill(Channel& channel, uint64_t num_changes) {
  auto segment = Segment::open(channel.address());
  const uint64_t num_bytes = std::min<uint64_t>(segment->num_bytes(), 32 << 10);  // the scenario stays in there
  return rlinf::comm::run_and_kill({{segment->bytes(), num_bytes}}, num_changes, [&] { run_scenario(channel); });
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t stride = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;  // test every n-th change only
  uint64_t num_deaths = 0;
  bool killed = true;
  for (uint64_t num_changes = 0; killed; num_changes += stride) {
    auto channel = make_channel();
    killed = run_and_kill(*channel, num_changes);
    num_deaths += killed;
    try {
      check_afterwards(*channel);
    } catch (const std::exception& error) {
      std::cerr << "killed after " << num_changes << " changes of the shared memory: " << error.what() << "\n";
      return EXIT_FAILURE;
    }
  }
  std::cout << "crash: ok (" << num_deaths << " deaths)\n";
  return EXIT_SUCCESS;
}

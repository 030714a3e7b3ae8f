// A process that dies at any instruction leaves a channel in order.
//
// A child runs a scenario (put, take, release) on a channel in shared memory. The parent single-steps it with ptrace,
// kills it after n instructions, for n = 0, kStride, 2 kStride ... until the scenario has run to its end, and then uses
// the channel itself: nothing hangs, the items before the scenario are all there or were taken by the child, none is
// torn, and all of the capacity is available again.
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "rlinf/comm/channel.h"
#include "rlinf/comm/check.h"

using namespace rlinf::comm;

namespace {

constexpr int kSkipped = 77;
constexpr uint64_t kCapacityItems = 8;
constexpr uint64_t kCapacityBytes = 64 << 10;
constexpr uint64_t kNumBefore = 3;

void put(Channel& channel, uint64_t number, uint64_t num_bytes) {
  const std::vector<uint64_t> words(num_bytes / sizeof(uint64_t), number);
  const std::vector<ByteView> buffers = {{words.data(), words.size() * sizeof(uint64_t)}};
  const ByteView head{"head", 4};
  WaitState wait;
  wait.deadline_ns = monotonic_ns() + 20'000'000'000;
  BlockRef block;
  Outcome outcome;
  do {
    outcome = channel.reserve(Channel::item_bytes(head.num_bytes, buffers), wait, &block);
  } while (outcome == Outcome::kPending);
  RLINF_CHECK_INTERNAL(outcome == Outcome::kDone, "put: outcome ", static_cast<int>(outcome));
  channel.fill(block, head, buffers);
  channel.commit(block, ItemLabels{static_cast<int64_t>(number), 1.0, 0});
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
    RLINF_CHECK_INTERNAL(words[i] == static_cast<uint64_t>(item.labels.key), "torn item ", item.labels.key);
  }
}

// What the child does: split and merge blocks, wrap the queue, hold what it takes for a while.
void run_scenario(Channel& channel) {
  put(channel, 100, 256);
  std::vector<TakenItem> taken = take(channel, 2);
  put(channel, 101, 4096);
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
      RLINF_CHECK_INTERNAL(seen.insert(item.labels.key).second, "item ", item.labels.key, " came twice");
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
}

// Runs the scenario for `num_steps` instructions. False when it had ended before.
bool run_and_kill(Channel& channel, uint64_t num_steps) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    ::raise(SIGSTOP);
    run_scenario(channel);
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (!WIFSTOPPED(status)) {
    std::cerr << "ptrace is not allowed here; the crash test is skipped\n";
    std::exit(kSkipped);
  }
  for (uint64_t step = 0; step < num_steps; ++step) {
    if (::ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) != 0) {
      std::cerr << "single steps are not possible here; the crash test is skipped\n";
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      std::exit(kSkipped);
    }
    ::waitpid(child, &status, 0);
    if (WIFEXITED(status)) {
      return false;
    }
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  // 1 visits every instruction of some 16,000, which takes an hour.
  const uint64_t stride = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 199;
  uint64_t num_steps = 0;
  uint64_t num_deaths = 0;
  for (bool killed = true; killed; num_steps += stride) {
    auto channel = Channel::create("crash", kCapacityItems, kCapacityBytes, 1);
    for (uint64_t number = 0; number < kNumBefore; ++number) {
      put(*channel, number, 512);
    }
    killed = run_and_kill(*channel, num_steps);
    num_deaths += killed;
    try {
      check_afterwards(*channel);
    } catch (const std::exception& error) {
      std::cerr << "killed after " << num_steps << " instructions: " << error.what() << "\n";
      return EXIT_FAILURE;
    }
  }
  std::cout << "crash: ok (" << num_deaths << " deaths, up to " << num_steps << " instructions)\n";
  return EXIT_SUCCESS;
}

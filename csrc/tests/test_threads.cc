// Producers and consumers in threads of one process, with one mapping of the channel for all and with one for each:
// every item arrives once and whole. Made for a thread sanitizer, too: cmake -DCMAKE_CXX_FLAGS=-fsanitize=thread.
#include <atomic>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <thread>
#include <vector>

#include "rlinf/comm/channel.h"
#include "rlinf/comm/check.h"

using namespace rlinf::comm;

namespace {

constexpr uint64_t kNumProducers = 3;
constexpr uint64_t kNumConsumers = 3;
constexpr uint64_t kNumEach = 3000;

void produce(const std::shared_ptr<Channel>& channel, uint64_t producer) {
  for (uint64_t i = 0; i < kNumEach; ++i) {
    const uint64_t number = producer * kNumEach + i;
    const std::vector<uint64_t> words(1 + (number * 7919) % 1200, number);
    const std::vector<ByteView> buffers = {{words.data(), words.size() * sizeof(uint64_t)}};
    const ByteView head{&number, sizeof(number)};
    const ItemKey key{static_cast<int64_t>(producer), {}};
    WaitState wait;
    BlockRef block;
    Outcome outcome;
    do {
      outcome = channel->reserve(Channel::item_bytes(head.num_bytes, buffers, key), wait, &block, key);
    } while (outcome == Outcome::kPending);
    RLINF_CHECK_INTERNAL(outcome == Outcome::kDone, "put");
    channel->fill(block, head, buffers, key);
    channel->commit(block, ItemLabels{key, 1.0, 0});
  }
  channel->close_producer();
}

void consume(const std::shared_ptr<Channel>& channel, std::vector<std::atomic<int>>* seen) {
  TakeRequest request;
  request.max_items = 3;
  request.max_weight = std::numeric_limits<double>::infinity();
  while (true) {
    WaitState wait;
    std::vector<TakenItem> items;
    Outcome outcome;
    do {
      outcome = channel->take(request, wait, &items);
    } while (outcome == Outcome::kPending);
    if (items.empty()) {
      return;
    }
    for (const TakenItem& item : items) {
      const auto* words = static_cast<const uint64_t*>(item.buffers[0].pointer);
      const uint64_t number = words[0];
      for (uint64_t i = 0; i < item.buffers[0].num_bytes / sizeof(uint64_t); ++i) {
        RLINF_CHECK_INTERNAL(words[i] == number, "torn item ", number);
      }
      RLINF_CHECK_INTERNAL(item.labels.key.number == static_cast<int64_t>(number / kNumEach), "key of item ", number);
      (*seen)[number].fetch_add(1);
      channel->release(item.block);
    }
  }
}

void run(bool one_mapping) {
  auto channel = Channel::create("threads", 16, 40'000, kNumProducers);
  auto view = [&] { return one_mapping ? channel : Channel::open(channel->address()); };
  std::vector<std::atomic<int>> seen(kNumProducers * kNumEach);
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < kNumProducers; ++i) {
    threads.emplace_back(produce, view(), i);
  }
  for (uint64_t i = 0; i < kNumConsumers; ++i) {
    threads.emplace_back(consume, view(), &seen);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (size_t number = 0; number < seen.size(); ++number) {
    RLINF_CHECK_INTERNAL(seen[number] == 1, "item ", number, " came ", seen[number].load(), " times");
  }
  const ChannelCounts counts = channel->counts();
  RLINF_CHECK_INTERNAL(counts.num_items == 0 && counts.num_held_items == 0, "left over");
  RLINF_CHECK_INTERNAL(counts.num_blocked_puts > 0, "never full; the test is too easy");
  std::cout << "threads: ok (" << counts.num_blocked_puts << " blocked puts)\n";
}

}  // namespace

int main() {
  run(/*one_mapping=*/true);
  run(/*one_mapping=*/false);
  return EXIT_SUCCESS;
}

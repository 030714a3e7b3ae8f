// A process that dies at any instruction leaves a pool in order.
//
// A child allocates, sends, receives and releases, single-stepped, and is killed right after each instruction that
// changes the pool or the channel (see stepped_child.h). Then the parent finds its own blocks untouched, gets back what
// the child and lost items held, and can use all of the pool.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <limits>
#include <string>
#include <vector>

#include "rlinf/comm/check.h"
#include "rlinf/comm/pool.h"
#include "stepped_child.h"

using namespace rlinf::comm;

namespace {

constexpr uint64_t kCapacityBytes = 4096;

struct Setting {
  std::shared_ptr<Channel> channel;
  std::shared_ptr<Pool> pool;
  HeldBlock mine;

  Pool::IsThere is_there() const {
    return [this](const Consignment& one, const ProcessId&) { return channel->has(one.item); };
  }
};

HeldBlock allocate(Setting& setting, uint64_t num_bytes) {
  WaitState wait;
  wait.deadline_ns = 0;
  HeldBlock block;
  const Outcome outcome = setting.pool->allocate(num_bytes, wait, setting.is_there(), &block);
  RLINF_CHECK_INTERNAL(outcome == Outcome::kDone, "no room for ", num_bytes, " bytes");
  return block;
}

// As channel_bindings.cc does it.
void send(Setting& setting, const HeldBlock& block) {
  WaitState wait;
  BlockRef item;
  const Outcome outcome = setting.channel->reserve(sizeof(uint64_t), wait, &item);
  RLINF_CHECK_INTERNAL(outcome == Outcome::kDone, "no room in the channel");
  const uint64_t ticket = setting.pool->send(block.offset, block.generation, {setting.channel->address(), item});
  setting.channel->fill(item, {&ticket, sizeof(ticket)}, {});
  setting.channel->commit(item, ItemLabels{});
}

std::vector<HeldBlock> receive(Setting& setting) {
  TakeRequest request;
  request.max_weight = std::numeric_limits<double>::infinity();
  WaitState wait;
  wait.deadline_ns = 0;
  std::vector<TakenItem> items;
  setting.channel->take(request, wait, &items);
  std::vector<HeldBlock> blocks;
  for (const TakenItem& item : items) {
    uint64_t ticket = 0;
    std::memcpy(&ticket, item.head, sizeof(ticket));
    blocks.push_back(setting.pool->receive(ticket));
    setting.channel->release(item.block);
  }
  return blocks;
}

Setting make_setting() {
  Setting setting{Channel::create("crash", 4, 4096, 1), Pool::create("crash", kCapacityBytes), {}};
  setting.mine = allocate(setting, 100);
  std::memset(setting.pool->payload(setting.mine.offset), 7, 100);
  const HeldBlock sent = allocate(setting, 200);
  std::memset(setting.pool->payload(sent.offset), 8, 200);
  send(setting, sent);
  send(setting, setting.mine);
  setting.pool->release(sent.ticket);
  return setting;
}

// What the child does: split and merge blocks, reuse holds, leave one block with two of them.
void run_scenario(Setting& setting) {
  const HeldBlock first = allocate(setting, 300);
  const HeldBlock second = allocate(setting, 64);
  send(setting, first);
  setting.pool->release(first.ticket);
  const std::vector<HeldBlock> taken = receive(setting);  // the parent's
  const HeldBlock third = allocate(setting, 300);
  setting.pool->release(second.ticket);
  setting.pool->release(taken[0].ticket);
  send(setting, third);
}

void check_afterwards(Setting& setting) {
  RLINF_CHECK_INTERNAL(*setting.pool->payload(setting.mine.offset) == std::byte{7}, "a block was overwritten");
  setting.channel->reclaim();
  setting.pool->reclaim(setting.is_there());
  // Whatever the channel still has can be received, once each.
  uint64_t num_received = 0;
  for (std::vector<HeldBlock> blocks = receive(setting); !blocks.empty(); blocks = receive(setting)) {
    const int expected = blocks[0].offset == setting.mine.offset ? 7 : blocks[0].num_bytes == 256 ? 8 : 0;
    RLINF_CHECK_INTERNAL(std::to_integer<int>(*setting.pool->payload(blocks[0].offset)) == expected,
                         "a block was overwritten");
    setting.pool->release(blocks[0].ticket);
    ++num_received;
  }
  RLINF_CHECK_INTERNAL(num_received >= 1 && num_received <= 3, num_received, " items");
  setting.pool->reclaim(setting.is_there());
  PoolCounts counts = setting.pool->counts();
  RLINF_CHECK_INTERNAL(counts.num_holds == 1 && counts.num_blocks == 1 && counts.used_bytes == 128, counts.num_holds,
                       " holds of ", counts.num_blocks, " blocks with ", counts.used_bytes, " bytes");
  setting.pool->release(setting.mine.ticket);
  for (int round = 0; round < 2; ++round) {
    const HeldBlock all = allocate(setting, kCapacityBytes);
    setting.pool->release(all.ticket);
  }
  counts = setting.pool->counts();
  RLINF_CHECK_INTERNAL(counts.num_holds == 0 && counts.num_blocks == 0 && counts.largest_hole_bytes == kCapacityBytes &&
                           counts.holders.empty() && setting.pool->num_in_flight() == 0,
                       counts.num_holds, " holds, hole of ", counts.largest_hole_bytes);
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t stride = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;  // test every n-th change only
  uint64_t num_deaths = 0;
  bool killed = true;
  for (uint64_t num_changes = 0; killed; num_changes += stride) {
    Setting setting = make_setting();
    auto channel_memory = Segment::open(setting.channel->address());
    auto pool_memory = Segment::open(setting.pool->address());
    const std::byte* const arena = setting.pool->payload(0) - sizeof(BlockHeader);
    killed = run_and_kill({{channel_memory->bytes(), std::min<uint64_t>(channel_memory->num_bytes(), 8 << 10)},
                           {pool_memory->bytes(), 8 << 10},  // header and the first holds
                           {arena, 4096}},
                          num_changes, [&] { run_scenario(setting); });
    num_deaths += killed;
    try {
      check_afterwards(setting);
    } catch (const std::exception& error) {
      std::cerr << "killed after " << num_changes << " changes of the shared memory: " << error.what() << "\n";
      return EXIT_FAILURE;
    }
  }
  std::cout << "pool crash: ok (" << num_deaths << " deaths)\n";
  return EXIT_SUCCESS;
}

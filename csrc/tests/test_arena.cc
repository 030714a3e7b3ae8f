// Random allocations and frees against a map of what is in use: blocks never overlap, neighbours are merged, everything
// comes back; and rebuild() restores the same lists from sizes and states alone.
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>
#include <vector>

#include "rlinf/comm/arena.h"
#include "rlinf/comm/check.h"

using namespace rlinf::comm;

namespace {

constexpr uint64_t kArenaBytes = 1 << 20;

struct Fixture {
  Fixture() : memory(kArenaBytes + 64), arena(aligned(), kArenaBytes, &heads) { arena.format(); }
  std::byte* aligned() {
    auto address = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<std::byte*>((address + 63) / 64 * 64);
  }
  std::vector<std::byte> memory;
  ArenaHeads heads{};
  Arena arena;
};

// The chain of blocks fills the arena, no two free ones are neighbours, and the list holds exactly the free ones in
// order.
void check_invariants(Fixture& fixture, size_t num_in_use) {
  uint64_t total = 0;
  uint64_t previous_bytes = 0;
  size_t num_used = 0;
  bool previous_free = false;
  uint64_t expected_free = fixture.heads.first_free;
  for (uint64_t offset = 0; offset != kNil; offset = fixture.arena.after(offset)) {
    const BlockHeader& block = fixture.arena.at(offset);
    RLINF_CHECK_INTERNAL(offset == total && block.previous_bytes == previous_bytes, offset);
    const bool is_free = block.state.load() == BlockState::kFree;
    RLINF_CHECK_INTERNAL(!(is_free && previous_free), "two free neighbours at ", offset);
    if (is_free) {
      RLINF_CHECK_INTERNAL(expected_free == offset, "the free list has ", expected_free, " instead of ", offset);
      expected_free = block.next;
    } else {
      ++num_used;
    }
    previous_free = is_free;
    previous_bytes = block.block_bytes.load();
    total += previous_bytes;
  }
  RLINF_CHECK_INTERNAL(total == kArenaBytes && expected_free == kNil && num_used == num_in_use, num_used);
}

}  // namespace

int main() {
  Fixture fixture;
  std::mt19937_64 random(1);
  const ProcessId holder{1, 2};
  std::map<uint64_t, uint64_t> in_use;  // offset -> generation
  uint64_t num_refused = 0;
  for (int step = 0; step < 20000; ++step) {
    if (random() % 100 < 55) {
      const uint64_t bytes = random() % 4 == 0 ? random() % 60000 : random() % 900;
      const uint64_t offset = fixture.arena.allocate(bytes, holder);
      if (offset == kNil) {
        ++num_refused;
        continue;
      }
      const BlockHeader& block = fixture.arena.at(offset);
      RLINF_CHECK_INTERNAL(block.block_bytes.load() >= sizeof(BlockHeader) + bytes, "too small");
      RLINF_CHECK_INTERNAL(reinterpret_cast<uintptr_t>(fixture.arena.payload(offset)) % 64 == 0, "not aligned");
      for (const auto& [other, generation] : in_use) {
        RLINF_CHECK_INTERNAL(generation != block.generation, "a generation came twice");
        RLINF_CHECK_INTERNAL(other != offset, "handed out twice");
      }
      in_use[offset] = block.generation;
    } else if (!in_use.empty()) {
      auto chosen = std::next(in_use.begin(), static_cast<long>(random() % in_use.size()));
      RLINF_CHECK_INTERNAL(fixture.arena.at(chosen->first).generation == chosen->second, "overwritten");
      fixture.arena.free(chosen->first);
      in_use.erase(chosen);
    }
    if (step % 16 == 0) {
      check_invariants(fixture, in_use.size());
    }
    if (step % 64 == 0) {
      fixture.heads.first_free = 12345;  // derived state, lost
      fixture.arena.rebuild();
      check_invariants(fixture, in_use.size());
    }
  }
  RLINF_CHECK_INTERNAL(num_refused > 0, "the arena was never full; the test is too easy");
  for (const auto& entry : in_use) {
    fixture.arena.free(entry.first);
  }
  check_invariants(fixture, 0);
  RLINF_CHECK_INTERNAL(fixture.arena.allocate(kArenaBytes - sizeof(BlockHeader), holder) == 0, "not in one piece");
  std::cout << "arena: ok (" << num_refused << " refusals)\n";
  return EXIT_SUCCESS;
}

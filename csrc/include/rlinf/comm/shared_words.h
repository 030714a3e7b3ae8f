// A table of 64-bit words in a segment that processes publish to each other, with one event for all of them. Each word
// has one writer at a time, so no lock is needed.
#pragma once

#include <cstdint>
#include <memory>

#include "rlinf/comm/segment.h"
#include "rlinf/comm/sync.h"

namespace rlinf::comm {

class SharedWords {
 public:
  // Lays the table over the first bytes_needed(num_words) bytes of the segment.
  SharedWords(std::shared_ptr<Segment> segment, uint64_t num_words);
  static uint64_t bytes_needed(uint64_t num_words);

  int64_t load(uint64_t index) const;
  // Everything that this thread wrote to the segment before is visible to whoever loads the new value. Loads and stores
  // have one order for all: of two that store a word each and then load the other's, at least one sees the new value.
  void store(uint64_t index, int64_t value);
  void notify_all();
  uint32_t sequence() const;
  // Returns when notify_all() was called since sequence() gave `seen`, at the deadline, or after kWaitSliceNs.
  void wait(uint32_t seen, int64_t deadline_ns);

 private:
  struct Table;
  std::atomic<int64_t>& at(uint64_t index) const;

  std::shared_ptr<Segment> segment_;
  Table* table_;
  uint64_t num_words_;
};

}  // namespace rlinf::comm

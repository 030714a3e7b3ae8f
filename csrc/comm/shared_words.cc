#include "rlinf/comm/shared_words.h"

#include <algorithm>

#include "rlinf/comm/check.h"

namespace rlinf::comm {

struct SharedWords::Table {
  EventWord changed;
  alignas(64) std::atomic<int64_t> words[1];
};

SharedWords::SharedWords(std::shared_ptr<Segment> segment, uint64_t num_words)
    : segment_(std::move(segment)), table_(reinterpret_cast<Table*>(segment_->bytes())), num_words_(num_words) {
  RLINF_CHECK_USER(bytes_needed(num_words) <= segment_->num_bytes(), "a table of ", num_words, " words needs ",
                   bytes_needed(num_words), " bytes, the segment has ", segment_->num_bytes());
}

uint64_t SharedWords::bytes_needed(uint64_t num_words) {
  return offsetof(Table, words) + std::max<uint64_t>(num_words, 1) * sizeof(std::atomic<int64_t>);
}

std::atomic<int64_t>& SharedWords::at(uint64_t index) const {
  RLINF_CHECK_USER(index < num_words_, "word ", index, " of a table of ", num_words_);
  return table_->words[index];
}

int64_t SharedWords::load(uint64_t index) const {
  return at(index).load(std::memory_order_seq_cst);
}

void SharedWords::store(uint64_t index, int64_t value) {
  at(index).store(value, std::memory_order_seq_cst);
}

void SharedWords::notify_all() {
  table_->changed.notify_all();
}

uint32_t SharedWords::sequence() const {
  return table_->changed.sequence();
}

void SharedWords::wait(uint32_t seen, int64_t deadline_ns) {
  table_->changed.wait(seen, std::min(deadline_ns, monotonic_ns() + kWaitSliceNs));
}

}  // namespace rlinf::comm
